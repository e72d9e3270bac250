"""Writes what the report's page says of each rule, from the rules' own pages.

python docs/finding_texts.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

PAGES = Path(__file__).parent / "findings"
OUT = PAGES.parents[1] / "lightning_memprof" / "report" / "templates" / "findings.json"
WHEN = re.compile(r"^(?:## When\s*$|\*\*When\.\*\*)", re.MULTILINE)
NEXT = re.compile(r"^(?:## |\*\*)", re.MULTILINE)
# What a rule says, in italics, is one run's.
EXAMPLE = re.compile(r"(?<!\*)\*([^*\s][^*]*)\*(?!\*)")
LINK = re.compile(r"\[([^\]]*)\]\(([\w-]+)\.md\)")


def plain(markdown: str) -> list[str]:
    """Return the paragraphs of Markdown as text on one line each; a list's items are paragraphs of their own."""
    text = LINK.sub(lambda found: found[1] or found[2], markdown.strip())
    text = EXAMPLE.sub(r"“\1”", text)
    paragraphs = re.split(r"\n\s*\n|\n(?=- )", text)
    return [
        re.sub(r"\s+", " ", re.sub(r"[`*]", "", paragraph)).strip() for paragraph in paragraphs if paragraph.strip()
    ]


def texts() -> dict[str, dict[str, list[str]]]:
    """Return by rule what it means and when it fires."""
    found = {}
    for page in sorted(PAGES.glob("*.md")):
        if page.stem == "index":
            continue
        body = page.read_text(encoding="utf-8").partition("\n")[2]
        start = WHEN.search(body)
        if start is None:
            raise SystemExit(f"{page.name}: has no `## When` and no `**When.**`; a page says when its rule fires")
        rest = body[start.end() :]
        end = NEXT.search(rest)
        found[page.stem] = {"means": plain(body[: start.start()]), "when": plain(rest[: end.start()] if end else rest)}
    return found


def main() -> None:
    """Write the file that the package holds."""
    OUT.write_text(json.dumps(texts(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
