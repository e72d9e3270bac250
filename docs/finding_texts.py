"""Write the sections of the rules into the reference pages of findings, and their texts into the package.

    .venv/editable/bin/python docs/finding_texts.py

A section has a summary, **When**, **Recovers** and **What to do**. They are made from the fields of a row, or from a
function's docstring and the remedies that its code names. Only **When** of a function is written by hand, in the page.
"""

from __future__ import annotations

import dis
import inspect
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Final

from lightning_memprof.judge import remedies as do
from lightning_memprof.judge import verdict
from lightning_memprof.judge.bound import nothing_found
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.judge.rule import Rule
from lightning_memprof.judge.verdict import nothing_in_files
from lightning_memprof.units import format_bytes, format_ns, percent

Judge = Callable[..., object]

PAGES: Final = Path(__file__).parent / "reference" / "findings"
OUT: Final = PAGES.parents[2] / "lightning_memprof" / "report" / "printers" / "templates" / "findings.json"
HEADING: Final = re.compile(r"^## `(\w+)`\n", re.MULTILINE)
WHEN: Final = "**When**: "
# What follows the part of a section that is written by hand.
REST: Final = re.compile(r"^\*\*(?:Recovers|What to do)\*\*:", re.MULTILINE)
LINK: Final = re.compile(r"\[([^\]]*)\]\((?:[\w./-]*#)?([\w-]+)(?:\.md)?\)")
# The verb of a docstring's summary: the page has its object.
VERB: Final = re.compile(r"^(?:Find|Note|Return) ")
# A field that is glued to the word, field or call before it may be empty.
ADDITION: Final = re.compile(r"(?<=[\w})])\{\w+\}")
FIELD: Final = re.compile(r"\{(\{)|\}(\})|\{(\w+)[^{}]*\}")


def _balanced(depth: int) -> str:
    return r"\([^()]*\)" if not depth else rf"\((?:[^()]|{_balanced(depth - 1)})*\)"


# Calls, dotted names, names with an underscore, and settings.
CODE: Final = re.compile(
    rf"(?<![\w`.])\.?[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:{_balanced(3)}(?:\.[A-Za-z_]\w*)*)+"
    rf"|(?<![\w`.-])[A-Za-z_][\w.]*=(?:[\w.:]*\w(?:{_balanced(3)})?|\[[^\]]*\])"
    r"|(?<![\w`.])\.?[A-Za-z]\w*(?:\.[A-Za-z_]\w*)+|\b\w*_\w*\b"
)


def marked(text: str) -> str:
    """Return a text with its code in backticks."""
    parts = re.split(r"(`+[^`]+`+|\]\([^)]*\))", text)
    return "".join(part if part.startswith(("`", "](")) else CODE.sub(r"`\g<0>`", part) for part in parts)


def plain(markdown: str) -> list[str]:
    """Return the paragraphs of Markdown as plain text, one line each; a list item is a paragraph."""
    text = LINK.sub(lambda link: link[1] or link[2], markdown.strip())
    paragraphs = re.split(r"\n\s*\n|\n(?=- )", text)
    return [re.sub(r"\s+", " ", re.sub(r"[`*]", "", paragraph)).strip() for paragraph in paragraphs]


def named(value: object, seen: dict[int, object]) -> Iterator[Remedy]:
    """Yield the remedies that a value is, contains, or names in its code, each once."""
    value = (value.func, *value.args) if isinstance(value, partial) else value
    if id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, Remedy):
        yield value
    elif isinstance(value, (tuple, Mapping)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from named(each, seen)
    elif isinstance(value, Rule):
        for field in value.__struct_fields__:
            yield from named(getattr(value, field), seen)
    elif isinstance(value, FunctionType) and value.__module__.startswith("lightning_memprof.judge"):
        for each in _globals_of(value.__code__, value.__globals__):
            yield from named(each, seen)


def _globals_of(code: CodeType, names: Mapping[str, object]) -> Iterator[object]:
    for instruction, attribute in itertools.pairwise(dis.get_instructions(code)):
        if isinstance(instruction.argval, CodeType):
            yield from _globals_of(instruction.argval, names)
        elif instruction.opname == "LOAD_GLOBAL" and instruction.argval in names:
            found = names[instruction.argval]
            yield getattr(do, attribute.argval) if found is do else found


def _sentence(text: str) -> str:
    return marked(f"{text[:1].upper()}{text[1:]}")


def _text(template: str) -> str:
    text = FIELD.sub(lambda field: field[1] or field[2] or field[3].upper(), ADDITION.sub("", template))
    return marked(text.rstrip("."))


def _item(remedy: Remedy) -> str:
    needs = "".join(f", {need}" for need in sorted(remedy.needs))
    in_torch = f". Without a Trainer: {_text(remedy.in_torch)}" if remedy.in_torch else ""
    return f"- {_text(remedy.text)}{in_torch} (`{remedy.id}`{needs})"


def section(about: str, when: str, recovers: str, remedies: Iterable[Remedy]) -> str:
    """Return a section without its heading; what is empty is left out."""
    shown = (remedy for remedy in remedies if not FIELD.fullmatch(remedy.text))
    steps = "\n".join(map(_item, shown))
    parts = [about, when, recovers and f"**Recovers**: {recovers}", steps and f"**What to do**:\n\n{steps}"]
    return "\n\n".join(filter(None, parts)) + "\n"


def _listed(parts: Iterable[str]) -> str:
    *most, last = (f"`{part}`" for part in parts)
    return f"{', '.join(most)} and {last}" if most else last


def section_of_row(row: Rule, functions: Iterable[Judge]) -> str:
    """Return the section of a row, with the remedies of functions that find the same."""
    least, most = (percent(share) for share in row.saves or (0, 0))
    shares = most if least == most else f"{least.removesuffix('%')}–{most}"
    whole, unit = ("each step", "this time") if row.is_of_time else ("the peak", "these bytes")
    least = f" and {(format_ns if row.is_of_time else format_bytes)(row.least)}" if row.least else ""
    of = f", in {_listed(row.of)}" if row.of else ""
    when = f"At least {percent(row.note)} of {whole}{least}{of}" if row.note < 1 else ""
    when += ", and in several steps." if row.repeats else "." * bool(when)
    when += " Each owner is a finding." if row.each else ""
    when = f"{when} {marked(row.when)}".strip()
    loses = f" Trade-off: {row.trade_off[:1].lower()}{row.trade_off[1:]}" if row.trade_off else ""
    return section(
        marked(row.about),
        WHEN + when,
        f"{shares} of {unit}.{marked(loses)}",
        (remedy for remedy in named((row, *functions), {}) if remedy is not do.VIEW_TRACE),
    )


def section_of_functions(functions: Iterable[Judge], body: str) -> str:
    """Return the section of functions that find the same; ``body`` is the section of the page with its condition."""
    first, *_ = functions = tuple(functions)
    doc = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(first) or "")
    summary, _, recovers = doc.partition("Recovers ")
    about = VERB.sub("", summary.strip())
    seen: dict[int, object] = {}
    remedies = itertools.chain.from_iterable(named(function, seen) for function in functions)
    _, found, by_hand = body.partition(WHEN)
    if not found:
        raise SystemExit(f"{first.__name__}: write its condition, {WHEN!r}, in its section of docs/reference/findings/")
    when = found + REST.split(by_hand)[0].strip()
    return section(_sentence(about), when, _sentence(recovers), remedies)


def rows() -> dict[str, dict[str, Rule]]:
    """Return the rows, by page and id."""
    return {domain: {row.id: row for row in described} for domain, described in verdict.ROWS.items()}


def functions() -> dict[str, list[Judge]]:
    """Return the rules that are functions, by rule."""
    found: dict[str, list[Judge]] = defaultdict(list, nothing_found=[nothing_found, nothing_in_files])
    judges: Iterable[Judge] = (*verdict.RULES, *verdict.STEP_RULES)
    for function in judges:
        found[function.__name__].append(function)
    return found


def page_with_rules(text: str, described: Mapping[str, Rule], judges: Mapping[str, Sequence[Judge]]) -> str:
    """Return a page whose sections are made anew; rows without a section are appended."""
    head, *found = HEADING.split(text)
    bodies = zip(found[::2], found[1::2], strict=True)
    made = {
        rule: section_of_functions(judges[rule], body) if rule in judges.keys() - described.keys() else body
        for rule, body in bodies
    } | {rule: section_of_row(row, judges.get(rule, ())) for rule, row in described.items()}
    return head + "\n".join(f"## `{rule}`\n\n{body.strip()}\n" for rule, body in made.items())


def pages() -> dict[Path, str]:
    """Return the pages of the domains.

    Raises:
        SystemExit: a function has no condition, a rule has no section or two, or a section has no rule.

    """
    described, judges = rows(), functions()
    by_row = {rule for found in described.values() for rule in found}
    found = {
        page: page_with_rules(page.read_text(encoding="utf-8"), described.get(page.stem, {}), judges)
        for page in sorted(PAGES.glob("*.md"))
    }
    sections = Counter(rule for text in found.values() for rule in HEADING.findall(text))
    if wrong := (sections - Counter({*by_row, *judges, verdict.RULE_FAILED})) | (
        Counter({*by_row, *judges}) - sections
    ):
        raise SystemExit(f"one section per rule in docs/reference/findings/: see {', '.join(sorted(wrong))}")
    return found


def texts() -> dict[str, dict[str, str | list[str]]]:
    """Return, by rule, its page, its meaning and when it fires."""
    found: dict[str, dict[str, str | list[str]]] = {}
    for page, markdown in pages().items():
        _, *parts = HEADING.split(markdown)
        for rule, text in zip(parts[::2], parts[1::2], strict=True):
            means, _, rest = text.partition(WHEN)
            found[rule] = {"page": page.name, "means": plain(means), "when": plain(REST.split(rest)[0])}
    return found


def main() -> None:
    """Write the pages, and the texts into the package."""
    for page, markdown in pages().items():
        page.write_text(markdown, encoding="utf-8")
    OUT.write_text(json.dumps(texts(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
