"""Write the sections of the rules that are rows into the pages of their domains, and the texts of all rules.

    python docs/finding_texts.py

A row's section is made from the row and its remedies; the sections of other rules are written by hand. The texts are
those with which the report explains each rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from lightning_memprof.judge.byte_rule import ByteRule
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.judge.rule import PASSES, Rule
from lightning_memprof.judge.verdict import BYTE_ROWS, ROWS
from lightning_memprof.units import percent

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


def when_of(row: Rule | ByteRule) -> str:
    """Return when a row fires."""
    if isinstance(row, ByteRule):
        return (
            f"From {percent(row.note)} of the peak in `{row.of}`, the line of the byte ledger. The severity follows "
            "from what the first remedy recovers where the memory is nearly full (70% of what the device, the control "
            "group or the machine can hold); elsewhere it is at most `info`, or `warning` for a fault."
        )
    of = " and ".join(f"`{part}`" for part in row.of)
    when = f"From {percent(row.note)} of each step in {of}"
    if not {*row.of} <= {*PASSES}:
        when += f", {percent(2 * row.note)} if it runs only once or twice, and {POLICY.action_ns / 1e6:g} ms per step"
    when += ", if it returns in several steps." if row.repeats else "."
    when += " Each owner is a finding of its own." if row.each else ""
    return when + (f" {row.when}" if row.when else "")


def section(row: Rule | ByteRule) -> str:
    """Return the section of a row."""
    when = when_of(row)
    least, most = (percent(share).removesuffix("%") for share in row.saves)
    what = "these bytes" if isinstance(row, ByteRule) else "this time"
    loses = f"{row.trade_off[:1].lower()}{row.trade_off[1:]}"
    steps = "\n".join(f"- {shown(remedy)} (`{remedy.id}`)" for remedy in (*row.remedies, *row.offers))
    parts = [
        f"## `{row.id}`\n\n{row.about}",
        f"### When it fires\n\n{when}",
        f"### What it recovers\n\n{least}–{most}% of {what}. Trade-off: {loses}",
        f"### What to do\n\n{steps}",
    ]
    return "\n\n".join(parts) + "\n"


def shown(remedy: Remedy) -> str:
    """Return the texts of a remedy with the names of its fields."""
    text = f"{remedy.text} Without a Trainer: {remedy.in_torch}" if remedy.in_torch else remedy.text
    return re.sub(r"\{(\w+)\}", lambda field: field[1].upper(), text).rstrip(".")


def page_with_rows(text: str, rows: Mapping[str, Rule | ByteRule]) -> str:
    """Return a page whose sections of rows are made anew; rows without a section are appended."""
    head, *found = RULE.split(text)
    sections = dict(zip(found[::2], found[1::2], strict=True))
    made = {name: section(row) for name, row in rows.items()}
    whole = {name: made.get(name, f"## `{name}`\n{body}") for name, body in sections.items()} | {
        name: body for name, body in made.items() if name not in sections
    }
    return head + "\n".join(part.rstrip("\n") + "\n" for part in whole.values())


def pages() -> dict[Path, str]:
    """Return the pages of the domains; a row is on the page of the module that has it."""
    found = {page: page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md"))}
    described: list[tuple[str, tuple[Rule | ByteRule, ...]]] = [*ROWS.items(), *BYTE_ROWS.items()]
    for domain, rows in described:
        page = PAGES / f"{domain}.md"
        found[page] = page_with_rows(found[page], {row.id: row for row in rows if row.about})
    return found


def texts() -> dict[str, dict[str, str | list[str]]]:
    """Return, by rule, its page, its meaning and when it fires.

    Raises:
        SystemExit: a rule has no section "When it fires".

    """
    found: dict[str, dict[str, str | list[str]]] = {}
    for page, markdown in pages().items():
        _, *parts = RULE.split(markdown)
        for rule, text in zip(parts[::2], parts[1::2], strict=True):
            means, section, rest = text.partition(WHEN)
            if not section:
                raise SystemExit(f"{page.name}: {rule} has no section {WHEN.strip()!r}")
            found[rule] = {"page": page.name, "means": plain(means), "when": plain(rest.partition(NEXT)[0])}
    return found


def main() -> None:
    """Write the pages, and the texts into the package."""
    for page, markdown in pages().items():
        page.write_text(markdown, encoding="utf-8")
    OUT.write_text(json.dumps(texts(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
