"""A comparison of two runs, traces or snapshots: quantities, names that changed, and limits."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from lightning_memprof.account.parts import PHASE_PARTS, Part
from lightning_memprof.compare.comparison import Outcome
from lightning_memprof.compare.model import GROUPS, Comparison, Difference, Measure, NamedChange
from lightning_memprof.compare.significance import CONFIDENCE
from lightning_memprof.judge.device_bound import device_family
from lightning_memprof.read.trace.kernel_names import kernel_name, kernel_names
from lightning_memprof.report.document import (
    Cell,
    Document,
    Line,
    Lines,
    Phrase,
    Section,
    Style,
    Table,
    Words,
    joined,
    phrase,
)
from lightning_memprof.report.sections.labels import PEAKS, called
from lightning_memprof.report.sections.tables import Field, filled
from lightning_memprof.units import quoted

SAME: Final = "no difference above noise"
WHY: Final = (
    f"A change of steps counts at {CONFIDENCE:.0%} confidence (rank test), another if it exceeds the usual difference "
    "of two runs of one program."
)
NEXT: Final = "See what changed in B: lightning-memprof show"
KINDS: Final = {
    "appeared": Cell("only in B", style="warn"),
    "disappeared": Cell("only in A", style="dim"),
    "changed": Cell("changed"),
}
# The figure of a finding is its severity.
SEVERITIES: Final = {1.0: "info", 2.0: "warning", 3.0: "critical"}
# The worst one first.
STATUSES: Final[Mapping[str, Style]] = {"fail": "bad", "inconclusive": "warn", "pass": "good"}  # nosec B105
MAX_NAMES: Final = 8
MAX_NOTES: Final = 6
# A sentence about two sides names these first.
FIRST: Final = (
    "step_ns",
    "mean_step_ns",
    "gpu_window_ns",
    "peak_allocated_bytes",
    "peak_requested_bytes",
    "peak_rss_bytes",
)
MAX_IN_TITLE: Final = 2
MAX_IN_SENTENCE: Final = 4
# The parts of a step, on the host and on the device; one that has half of the change explains it, the host's first.
PARTS: Final = tuple(
    tuple(f"{part}_ns" for part in parts)
    for parts in (
        ("data_wait", "data_loading", "forward", "backward", "optimizer", "callbacks", "other"),
        ("gpu_compute", "gpu_communication_exposed", "gpu_memory_copy", "gpu_idle"),
    )
)
MOSTLY: Final = 0.5
# They change with the step.
WHOLES: Final = frozenset({"mean_step_ns", "gpu_window_ns", "duration_ns"})
_MOST_CONFIDENCE: Final = 0.999
# Further apart, the mean step is named beside the median one.
_APART: Final = 0.05
# A title has two figures and the times behind them beside the name.
_LONGEST_NAME: Final = 34
_NAMED: Final = {
    "step_ns": "step time",
    "peak_rss_bytes": PEAKS["rss"].label,
    "parameter_bytes": "parameters",
    "samples_per_s": "throughput",
    **{f"{phase}_ns": part.label for phase, part in PHASE_PARTS.items()},
    "data_loading_ns": Part.IDLE_DATA.label,
    "gpu_communication_ns": f"GPU {Part.COLLECTIVE.label}",
    "gpu_communication_exposed_ns": f"GPU {Part.COLLECTIVE.label}, exposed",
    "gpu_memory_copy_ns": f"GPU {Part.COPY.label}",
}


def comparison_document(comparison: Comparison, outcomes: Sequence[Outcome] = ()) -> Document:
    """Return all quantities of a comparison, the names that appeared, disappeared or changed, and the limits."""
    a, b = comparison.a.label, comparison.b.label
    is_worse = any(_is_worse(difference) for difference in comparison.differences)
    limits = [_limit(comparison, outcome) for outcome in outcomes]
    groups = _by_group(comparison)
    sections = [
        *([Section("limits", "Limits", parts=[Lines("", limits)], summary=True)] if limits else []),
        Section("quantities", "Quantities", parts=list(_quantities(comparison)), summary=True),
        *(_group(name, changes) for name, changes in groups.items()),
        Section("notes", "Notes", parts=[Lines("", [Line("note", note) for note in _notes(comparison)])]),
    ]
    return Document(
        title=f"{a} · {b}",
        kind="comparison",
        about=f"A: {a} · B: {b}",
        badge="warning" if is_worse else "none" if comparison.is_same else "info",
        verdict=conclusion(comparison, outcomes),
        why=_why(comparison),
        next="" if comparison.is_same else f"{NEXT} {quoted(b)}.",
        sections=sections,
    )


def conclusion(comparison: Comparison, outcomes: Sequence[Outcome] = ()) -> Words:
    """Return the sentence with the result of the limits, the step time and the differences above noise."""
    statuses = {outcome.status for outcome in outcomes}
    head = next((f"{status}: " for status in STATUSES if status in statuses), "")
    step = comparison.difference("step_ns")
    is_timed = step is not None and step.change is not None
    times = phrase("{} -> {}", _value(step.a), _value(step.b)) if step is not None and is_timed else ""
    if comparison.is_same:
        return phrase("{}{}{}{}", head, SAME, ": step time " if is_timed else "", times)
    if (whole := _whole(comparison)) is not None:
        times = phrase("{} -> {}", _value(whole.a), _value(whole.b))
        mostly = _mostly(comparison, whole, _LONGEST_NAME - len(head))
        return phrase("{}{} {} ({}){}", head, _quantity(whole.name), _change(whole), times, mostly)
    differs: Words = f"{head}B differs from A"
    if step is not None and is_timed:
        how = "unclear, too few steps" if step.has_too_few_steps else _noise(step)
        differs = phrase("{}, step time {} ({})", differs, how, times)
    return phrase("{}: {}", differs, joined(", ", _others(comparison)[:MAX_IN_TITLE]))


def _whole(comparison: Comparison) -> Difference | None:
    """Return the change of the step time, without steps that of the device's, None where it is not above noise."""
    step = comparison.difference("step_ns") or comparison.difference("gpu_window_ns")
    return step if step is not None and step.is_above_noise else None


def _mostly(comparison: Comparison, whole: Difference, longest: int) -> Words:
    """Return what has at least half of a change, of computation the kernels or operators; empty without one.

    The name has at most ``longest`` characters.
    """
    part = _grown(comparison, whole)
    if part is not None and part.name != "gpu_compute_ns":
        return phrase(", mostly {} ({} -> {})", _quantity(part.name), _value(part.a), _value(part.b))
    # On a host with a device, operators wait.
    is_on_host = comparison.a.kind == "traces" and comparison.difference("gpu_busy_ns") is None
    group = "kernels" if part is not None else "operators" if is_on_host else ""
    a, b = (_by_family(side.named.get(group, {})) for side in (comparison.a, comparison.b))
    family = max({**a, **b}, key=lambda name: (b[name] - a[name]) / (whole.change or math.inf), default="")
    if (b[family] - a[family]) / (whole.change or math.inf) >= MOSTLY:
        name = kernel_name(family)
        name = name if len(name) <= longest else f"{name[: longest - 1]}…"
        return phrase(", mostly {} ({} -> {})", name, Cell(a[family], "ns"), Cell(b[family], "ns"))
    return phrase(", mostly {} ({} -> {})", _quantity(part.name), _value(part.a), _value(part.b)) if part else ""


def _by_family(times: Mapping[str, float]) -> Counter[str]:
    """Return ns by the usual name of the work of kernels or operators."""
    found: Counter[str] = Counter()
    for name, ns in times.items():
        found[device_family(name)] += round(ns)
    return found


def _grown(comparison: Comparison, step: Difference) -> Difference | None:
    """Return the part of a step that has at least half of its change, None without one."""
    whole = step.change or math.inf
    for names in PARTS:
        parts = [part for part in comparison.differences if part.name in names and part.is_above_noise]
        largest = max(parts, key=lambda part: (part.change or 0.0) / whole, default=None)
        if largest is not None and (largest.change or 0.0) / whole >= MOSTLY:
            return largest
    return None


def _others(comparison: Comparison) -> list[Words]:
    """Return the changes above noise without those of the step and of the part that explains it, the first first."""
    step = _whole(comparison)
    found = [difference for difference in comparison.differences if difference.is_above_noise]
    if step is not None:
        said = (step, _grown(comparison, step))
        found = [difference for difference in found if difference not in said and not _says_the_same(difference, step)]
    found.sort(key=lambda difference: FIRST.index(difference.name) if difference.name in FIRST else len(FIRST))
    words: list[Words] = [phrase("{} {}", _quantity(each.name), _change(each)) for each in found[:MAX_IN_SENTENCE]]
    if more := len(found) - len(words):
        words.append(f"{more} more {'quantity' if more == 1 else 'quantities'}")
    for group, changes in _by_group(comparison).items():
        words.append(f"{len(changes)} {group if len(changes) > 1 else group.removesuffix('s')}")
    return words


def _why(comparison: Comparison) -> Words:
    """Return what else changed, and when a change counts."""
    further = _others(comparison)[0 if _whole(comparison) is not None else MAX_IN_TITLE :]
    return phrase("Also: {}. {}", joined(", ", further), WHY) if further else WHY


def _says_the_same(difference: Difference, step: Difference) -> bool:
    """Return whether the mean step, or the whole recording, changes by about as much as the median step."""
    apart = abs((difference.relative or 0.0) - (step.relative or 0.0))
    return difference.name in WHOLES and apart < _APART


def _quantity(name: str) -> str:
    """Return a quantity's name in words."""
    named = _NAMED.get(name) or called(name.removesuffix("_ns").removesuffix("_bytes"))
    return named.replace("gpu ", "GPU ", 1)


def _by_group(comparison: Comparison) -> dict[str, list[NamedChange]]:
    groups: dict[str, list[NamedChange]] = defaultdict(list)
    for changed in comparison.changes:
        groups[changed.group].append(changed)
    return groups


def _is_worse(difference: Difference) -> bool:
    rises = (difference.change or 0) > 0
    return difference.is_above_noise and rises != (difference.unit == "per_s")


def _limit(comparison: Comparison, outcome: Outcome) -> Line:
    words: list[str | Cell] = [f"{outcome.limit.text}: {outcome.title}"]
    found = comparison.difference(outcome.limit.name)
    if found is not None and found.change is not None:
        words += [" (", _value(found.a), " -> ", _value(found.b), ", ", _change(found), ")"]
    return Line(outcome.status, Phrase(tuple(words)), STATUSES[outcome.status])


def _quantities(comparison: Comparison) -> Iterator[Table]:
    return filled(
        Table("quantity-table", "", top=None),
        comparison.differences,
        Field("quantity", "code", lambda found: Cell(found.name, "code", id=f"quantity-{found.name}")),
        Field("A", "number", lambda found: _value(found.a)),
        Field("A spread", "share", lambda found: _spread(found.a)),
        Field("B", "number", lambda found: _value(found.b)),
        Field("B spread", "share", lambda found: _spread(found.b)),
        Field("change", "number", _changed),
        Field("confidence", "text", _confidence, priority=1),
        Field("source", "text", lambda found: Cell(_source(found), style="dim"), priority=2),
        most=None,
    )


def _changed(difference: Difference) -> Cell:
    if difference.problem is not None:
        return Cell("n/a", style="dim")
    if not difference.is_above_noise:
        return Cell(_noise(difference) if difference.change is not None else None, sort=0, style="dim")
    return _change(difference, "bad" if _is_worse(difference) else "good")


def _noise(difference: Difference) -> str:
    if not difference.change:
        return "unchanged"
    return "too few steps" if difference.has_too_few_steps else "within noise"


def _confidence(difference: Difference) -> Cell:
    if difference.rank_test is None or difference.rank_test.confidence is None or not difference.is_above_noise:
        return Cell(None)
    confidence = difference.rank_test.confidence
    return Cell(
        f">{_MOST_CONFIDENCE:.1%}" if confidence > _MOST_CONFIDENCE else f"{math.floor(confidence * 1e3) / 10:g}%"
    )


def _source(difference: Difference) -> str | None:
    return next((side.source for side in (difference.b, difference.a) if side is not None), None)


def _unit(unit: str) -> str:
    return "/s" if unit == "per_s" else unit


def _value(measure: Measure | None) -> Cell:
    return Cell(None if measure is None else measure.value, "count" if measure is None else _unit(measure.unit))


def _spread(measure: Measure | None) -> Cell:
    known = measure is not None and measure.value and measure.samples > 1
    return Cell(measure.noise / abs(measure.value) if measure is not None and known else None, "share")


def _change(difference: Difference, style: Style = "") -> Cell:
    """Return the difference of B from A: relative, or absolute for counts and where A is 0."""
    if difference.unit == "count" or difference.relative is None:
        return Cell(difference.change or 0.0, f"{_unit(difference.unit)} change", style=style)
    return Cell(difference.relative, "share change", style=style)


def _group(name: str, changes: Sequence[NamedChange]) -> Section:
    lead = "warnings that only one side has" if name == "findings" else GROUPS[name][1]
    if name == "kernels":
        shown = kernel_names(changed.name for changed in changes)
        changes = [replace(changed, name=short) for changed, short in zip(changes, shown, strict=True)]
    parts = filled(
        Table(f"{name}-table", "", top=MAX_NAMES),
        changes,
        Field("name", "code", lambda changed: changed.name),
        Field("change", "text", lambda changed: KINDS[changed.kind]),
        Field("A", "number", lambda changed: _figure(changed.a, changed)),
        Field("B", "number", lambda changed: _figure(changed.b, changed)),
        Field("finding", "text", lambda changed: changed.title, priority=1),
        most=None,
    )
    return Section(name, name[:1].upper() + name[1:], lead, list(parts))


def _figure(value: float | None, changed: NamedChange) -> Cell:
    if value is not None and changed.group == "findings" and value in SEVERITIES:
        return Cell(SEVERITIES[value], sort=value)
    return Cell(value, _unit(changed.unit))


def _notes(comparison: Comparison) -> Iterator[str]:
    yield "within noise: no larger than two runs of one program differ; the spread is over steps"
    for difference in comparison.differences:
        if difference.problem is not None and difference.a is not None and difference.b is not None:
            yield f"{difference.name}: {difference.problem}"
    for group, reason in comparison.left_out.items():
        yield f"{group}: {reason}"
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        yield from (f"{name}: {note}" for note in side.notes[:MAX_NOTES])
