"""Write the texts with which the report explains each rule, from the pages of the domains.

python docs/finding_texts.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

PAGES = Path(__file__).parent / "reference" / "findings"
OUT = PAGES.parents[2] / "lightning_memprof" / "report" / "printers" / "templates" / "findings.json"
RULE = re.compile(r"^## `(\w+)`\n", re.MULTILINE)
WHEN = "\n### When it fires\n"
NEXT = "\n### "
LINK = re.compile(r"\[([^\]]*)\]\((?:[\w./-]*#)?([\w-]+)(?:\.md)?\)")


def plain(markdown: str) -> list[str]:
    """Return the paragraphs of Markdown as plain text, one line each; a list item is a paragraph."""
    text = LINK.sub(lambda link: link[1] or link[2], markdown.strip())
    paragraphs = re.split(r"\n\s*\n|\n(?=- )", text)
    return [re.sub(r"\s+", " ", re.sub(r"[`*]", "", paragraph)).strip() for paragraph in paragraphs]


def texts() -> dict[str, dict[str, str | list[str]]]:
    """Return, by rule, its page, its meaning and when it fires.

    Raises:
        SystemExit: a rule has no section "When it fires".

    """
    found: dict[str, dict[str, str | list[str]]] = {}
    for page in sorted(PAGES.glob("*.md")):
        _, *parts = RULE.split(page.read_text(encoding="utf-8"))
        for rule, text in zip(parts[::2], parts[1::2], strict=True):
            means, section, rest = text.partition(WHEN)
            if not section:
                raise SystemExit(f"{page.name}: {rule} has no section {WHEN.strip()!r}")
            found[rule] = {"page": page.name, "means": plain(means), "when": plain(rest.partition(NEXT)[0])}
    return found


def main() -> None:
    """Write the file into the package."""
    OUT.write_text(json.dumps(texts(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
