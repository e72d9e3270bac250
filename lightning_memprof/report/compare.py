"""A comparison for people, as lines and as Markdown, and for programs, as JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.analysis.compare.model import GROUPS
from lightning_memprof.report.words import clean
from lightning_memprof.units import format_bytes, format_ns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lightning_memprof.analysis.compare.limits import Outcome
    from lightning_memprof.analysis.compare.model import Comparison, Difference, Measure, NamedChange

__all__ = [
    "by_group",
    "comparison_document",
    "comparison_lines",
    "comparison_markdown",
    "comparison_notes",
    "conclusion",
    "heading",
    "shown_change",
    "shown_figure",
    "shown_value",
]

Line = list[tuple[str, str]]

SAME: Final = "no difference above noise"
_LABEL_WIDTH: Final = 9
_NAME_WIDTH: Final = 28
_VALUE_WIDTH: Final = 19
_CHANGE_WIDTH: Final = 8
_WIDTH: Final = 80
# Longer lists hide what matters: the largest are first, and --format json has all.
_MOST_NAMES: Final = 8
_MOST_NOTES: Final = 6
_SIGNS: Final = {"appeared": "+", "disappeared": "-", "changed": " "}
_STYLES: Final = {"appeared": "green", "disappeared": "magenta", "changed": ""}
# A finding has no figure but its severity, which a person calls by its name.
_SEVERITIES: Final = {1.0: "info", 2.0: "warning", 3.0: "critical"}
_FINDINGS: Final = "what the rules find in one side and not in the other"
_MARKS: Final = frozenset("\\`*_{}[]|#~")
_ENTITIES: Final = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
# Those that a sentence about two sides names first.
_FIRST: Final = ("step_ns", "gpu_window_ns", "peak_allocated_bytes", "peak_requested_bytes", "peak_rss_bytes")
_NAMED_IN_SENTENCE: Final = 3


def conclusion(comparison: Comparison) -> str:
    """Say in one sentence what differs by more than noise."""
    if comparison.is_same:
        return SAME
    found = [difference for difference in comparison.differences if difference.is_above_noise]
    found.sort(key=lambda difference: _FIRST.index(difference.name) if difference.name in _FIRST else len(_FIRST))
    parts = [f"{difference.name} {shown_change(difference)}" for difference in found[:_NAMED_IN_SENTENCE]]
    if len(found) > _NAMED_IN_SENTENCE:
        parts.append(f"{len(found) - _NAMED_IN_SENTENCE} more quantities")
    for group, changes in by_group(comparison).items():
        parts.append(f"{len(changes)} {group if len(changes) > 1 else group.removesuffix('s')}")
    return f"B differs from A: {', '.join(parts)}"


def comparison_lines(comparison: Comparison, outcomes: Sequence[Outcome] = ()) -> list[Line]:
    """Return the page for a terminal of 80 columns: pairs of text and style."""
    style = "bold green" if comparison.is_same else "bold yellow"
    lines: list[Line] = [
        *_labelled("A", comparison.a.label),
        *_labelled("B", comparison.b.label),
        *_labelled("verdict", conclusion(comparison), style),
    ]
    for outcome in outcomes:
        lines += _labelled("limit", _outcome(comparison, outcome), "red" if outcome.is_broken else "green")
    head = f"{'':<{_NAME_WIDTH}}{'A':>{_VALUE_WIDTH}}{'B':>{_VALUE_WIDTH}}{'change':>{_CHANGE_WIDTH}}"
    lines += [[], [(head, "bold")]]
    lines += [_difference_line(difference) for difference in comparison.differences]
    for group, changes in by_group(comparison).items():
        lines += [[], [(group, "bold"), (f"  {heading(group)}", "bright_black")]]
        for change in changes[:_MOST_NAMES]:
            figures = f"{shown_figure(change.a, change)} -> {shown_figure(change.b, change)}"
            name = _shortened(clean(change.name), _WIDTH - len(figures) - 5)
            lines.append(
                [(f"{_SIGNS[change.kind]} {name:<{_WIDTH - len(figures) - 4}}  {figures}", _STYLES[change.kind])]
            )
            lines += [[(f"    {part}", "")] for part in textwrap.wrap(clean(change.sentence or ""), _WIDTH - 4)]
        if len(changes) > _MOST_NAMES:
            lines.append([(f"  {len(changes) - _MOST_NAMES} more: --format json", "bright_black")])
    notes = list(comparison_notes(comparison))
    return [*lines, [], *(line for note in notes for line in _labelled("note", note))]


def _labelled(label: str, text: str, style: str = "") -> Iterator[Line]:
    """Yield a text behind its label, on as many lines as it takes."""
    for part in textwrap.wrap(clean(text), _WIDTH - _LABEL_WIDTH, break_on_hyphens=False) or [""]:
        yield [(f"{label:<{_LABEL_WIDTH}}", "bold"), (part, style)]
        label = ""


def _difference_line(difference: Difference) -> Line:
    values = f"{shown_value(difference.a):>{_VALUE_WIDTH}}{shown_value(difference.b):>{_VALUE_WIDTH}}"
    if difference.problem is not None:
        return [(f"{difference.name:<{_NAME_WIDTH}}{values}", "bright_black"), ("     n/a", "bright_black")]
    if not difference.is_above_noise:
        return [(f"{difference.name:<{_NAME_WIDTH}}{values}", ""), (f"{'~':>{_CHANGE_WIDTH}}", "bright_black")]
    rises = (difference.change or 0) > 0
    bad = rises != (difference.unit == "per_s")
    return [
        (f"{difference.name:<{_NAME_WIDTH}}{values}", ""),
        (f"{shown_change(difference):>{_CHANGE_WIDTH}}", "red" if bad else "green"),
    ]


def comparison_markdown(comparison: Comparison, outcomes: Sequence[Outcome] = ()) -> str:
    """Return the page as Markdown, to be a comment on a change."""
    lines = [f"**{conclusion(comparison)}**", ""]
    lines += [f"- {_cell(_outcome(comparison, outcome))}" for outcome in outcomes]
    lines += [""] if outcomes else []
    lines += [
        f"| | A: {_cell(comparison.a.label)} | B: {_cell(comparison.b.label)} | change |",
        "|---|---:|---:|---:|",
    ]
    for difference in comparison.differences:
        change = "n/a" if difference.problem else shown_change(difference) if difference.is_above_noise else "~"
        lines.append(f"| {difference.name} | {shown_value(difference.a)} | {shown_value(difference.b)} | {change} |")
    for group, changes in by_group(comparison).items():
        lines += ["", f"| {group} ({heading(group)}) | A | B |", "|---|---:|---:|"]
        for named in changes[:_MOST_NAMES]:
            name = _cell(f"{_SIGNS[named.kind]} {named.name}".strip())
            lines.append(f"| {name} | {shown_figure(named.a, named)} | {shown_figure(named.b, named)} |")
        if len(changes) > _MOST_NAMES:
            lines.append(f"| {len(changes) - _MOST_NAMES} more | | |")
    notes = [f"- {_cell(note)}" for note in comparison_notes(comparison)]
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


def comparison_document(comparison: Comparison, outcomes: Sequence[Outcome] = ()) -> dict[str, Any]:
    """Return the comparison as values that any JSON encoder takes: bytes, nanoseconds, parts of 1."""
    return {
        "verdict": conclusion(comparison),
        "is_same": comparison.is_same,
        "a": {"label": comparison.a.label, "kind": comparison.a.kind, "notes": list(comparison.a.notes)},
        "b": {"label": comparison.b.label, "kind": comparison.b.kind, "notes": list(comparison.b.notes)},
        "differences": [
            {
                "name": difference.name,
                "unit": difference.unit,
                "a": dataclasses.asdict(difference.a) if difference.a else None,
                "b": dataclasses.asdict(difference.b) if difference.b else None,
                "change": difference.change,
                "relative": difference.relative,
                "needed": difference.needed,
                "is_above_noise": difference.is_above_noise,
                "problem": difference.problem,
            }
            for difference in comparison.differences
        ],
        "changes": [dataclasses.asdict(change) for change in comparison.changes],
        "left_out": dict(comparison.left_out),
        "limits": [
            {"limit": outcome.limit.text, "is_broken": outcome.is_broken, "sentence": outcome.sentence}
            for outcome in outcomes
        ],
    }


def by_group(comparison: Comparison) -> dict[str, list[NamedChange]]:
    """Return what changed by name, by its group."""
    groups: dict[str, list[NamedChange]] = defaultdict(list)
    for change in comparison.changes:
        groups[change.group].append(change)
    return groups


def comparison_notes(comparison: Comparison) -> Iterator[str]:
    """Yield what a reader of the figures has to know."""
    yield "~ is no more than noise; +- is the spread over steps"
    if comparison.changes:
        yield "+ appeared: it is in B alone; - disappeared: it was in A alone; the others are in both"
    for difference in comparison.differences:
        if difference.problem is not None and difference.a is not None and difference.b is not None:
            yield f"{difference.name}: {difference.problem}"
    for group, reason in comparison.left_out.items():
        yield f"{group}: {reason}"
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        yield from (f"{name}: {note}" for note in side.notes[:_MOST_NOTES])


def _outcome(comparison: Comparison, outcome: Outcome) -> str:
    found = comparison.difference(outcome.limit.name)
    figures = ""
    if found is not None and found.change is not None:
        figures = f" ({_plain(found.a)} -> {_plain(found.b)}, {shown_change(found)})"
    return f"{outcome.limit.text} {'BROKEN' if outcome.is_broken else 'kept'}: {outcome.sentence}{figures}"


def shown_value(measure: Measure | None) -> str:
    """Write a quantity of one side with its spread."""
    if measure is None:
        return "-"
    share = measure.noise / abs(measure.value) if measure.value else 0.0
    return f"{_plain(measure)} +-{share * 100:.0f}%" if share >= 0.005 and measure.samples > 1 else _plain(measure)


def _plain(measure: Measure | None) -> str:
    return "-" if measure is None else _write(measure.value, measure.unit)


def heading(group: str) -> str:
    """Say what a group of changes is."""
    return _FINDINGS if group == "findings" else GROUPS[group][1]


def shown_figure(value: float | None, change: NamedChange) -> str:
    """Write one side's figure of something with a name."""
    if value is None:
        return "none"
    if change.group == "findings" and value in _SEVERITIES:
        return _SEVERITIES[value]
    return _write(value, change.unit)


def _write(value: float, unit: str) -> str:
    if unit == "bytes":
        return format_bytes(value)
    if unit == "ns":
        return format_ns(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def shown_change(difference: Difference) -> str:
    """Write by how much B differs from A."""
    relative, change = difference.relative, difference.change or 0.0
    if difference.unit == "count" or relative is None:
        return f"{'+' if change > 0 else '-'}{_write(abs(change), difference.unit)}"
    if abs(relative) >= 10:
        return f"x{1 + relative:.0f}"
    digits = 0 if abs(relative) >= 0.1 else 1
    return f"{relative * 100:+.{digits}f}%"


def _shortened(name: str, width: int) -> str:
    return name if len(name) <= width else f"{name[: width // 2 - 1]}..{name[-(width - width // 2 - 1) :]}"


def _cell(value: str) -> str:
    """Make a text safe inside a table of Markdown: no markup, no HTML, no new column."""
    return "".join(
        _ENTITIES.get(character) or (f"\\{character}" if character in _MARKS else character)
        for character in clean(value)
    )
