"""What ran in the recorded steps: its table on the page and its part of the document."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.analysis.findings.actions import action_name
from lightning_memprof.analysis.steps.events import PARTS, event_totals
from lightning_memprof.analysis.steps.phases import OWN_WORK
from lightning_memprof.report.memory_tables import Line, notes, table
from lightning_memprof.units import format_bytes, format_ns, percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from lightning_memprof.analysis.steps.events import EventTotals, StepEvents
    from lightning_memprof.report.view import View

__all__ = ["events_document", "events_lines"]

MAX_CALLBACKS: Final = 5
MAX_EVENTS: Final = 5
# Narrower lines than these are broken by whoever draws them.
NARROWEST: Final = 40
# A step has some sixty events: their order is told of the first steps, the sums of all.
MAX_LISTED_STEPS: Final = 20
MAX_TOTALS: Final = 500
# What takes less of a step than this needs no line.
LEAST_SHARE: Final = 0.0005
# They hold nearly all of a step, and what they hold is told by itself.
CONTAINERS: Final = frozenset({"run_training_batch", "run_training_epoch"})


def events_lines(view: View, width: int) -> list[Line]:
    """Return the mean recorded step of the lead rank by part, its callbacks by name, and the longest single events."""
    steps, width = view.events, max(width, NARROWEST)
    mean = _mean(step.duration_ns for step in steps)
    if not mean:
        return []
    count = len(steps)
    rows: list[tuple[str, ...]] = []
    for part in PARTS:
        ns = _mean(step.parts_ns[part] for step in steps)
        if ns >= LEAST_SHARE * mean:
            rows.append(_row(part.replace("_", " "), ns, mean))
        if part == "callbacks":
            rows += _callback_rows(steps, mean)
    own = _mean(sum(event.self_ns for event in step.events if event.action.startswith(OWN_WORK)) for step in steps)
    if own >= LEAST_SHARE * mean:
        rows.append(_row("  our own marks", own, mean))
    words = f"mean of {count} recorded steps" if count > 1 else "the recorded step"
    lines: list[Line] = [(("events   ", "bold"), (f" {words}", "bright_black"))]
    lines += table(("part", "a step", "share"), rows, width)
    lines += notes(
        "each instant counts for the innermost event, and this package's own hooks are callbacks; the table on top has "
        "six phases only, and what is none of them in other or in the callback around it",
        width,
    )
    lines.append(())
    lines += table(
        ("longest events", "a step", "share", "times", "longest"), list(_longest(steps, mean)), width
    )  # fmt: skip
    lines += notes("an event's time is without what lies in it", width)
    return lines + _pause_lines(view, width)


def events_document(view: View) -> dict[str, Any]:
    """Return the events of the lead rank's recorded steps as JSON, times in nanoseconds.

    ``steps`` has every recorded step with its parts, which sum to it, and its callbacks by key, and of the first
    of them the ``events`` in order; ``actions`` the sums over all steps, the longest first; ``garbage`` the pauses of
    Python's garbage collector.
    """
    steps = view.events
    actions = event_totals(steps)
    return {
        "rank": view.lead.rank,
        "mean_ns": _mean(step.duration_ns for step in steps) if steps else None,
        "parts_ns": {part: _mean(step.parts_ns[part] for step in steps) if steps else None for part in PARTS},
        "callbacks_ns": _callbacks(steps),
        "steps": [_step(step, listed=index < MAX_LISTED_STEPS) for index, step in enumerate(steps)],
        "actions": [dataclasses.asdict(action) for action in actions[:MAX_TOTALS]],
        "more_actions": len(actions[MAX_TOTALS:]),
        "garbage": None if view.pauses is None else dataclasses.asdict(view.pauses),
    }


def _step(step: StepEvents, *, listed: bool) -> dict[str, Any]:
    return {
        "window": step.window,
        "step": step.step,
        "global_step": step.global_step,
        "start_ns": step.start_ns,
        "duration_ns": step.duration_ns,
        "parts_ns": dict(step.parts_ns),
        "callbacks_ns": dict(step.callbacks_ns),
        "events": [dataclasses.asdict(event) for event in step.events] if listed else None,
    }


def _pause_lines(view: View, width: int) -> list[Line]:
    pauses = view.pauses
    if pauses is None:
        return []
    times = "once" if pauses.count == 1 else f"{pauses.count} times"
    words = f"Python's garbage collector ran {times}, {format_ns(pauses.total_ns)} in all"
    if pauses.count > 1:
        words += f", at most {format_ns(pauses.max_ns)}"
    if pauses.tensor_bytes:
        kinds = pauses.tensors[:1]
        largest = "".join(f", most {kind.type} {list(kind.shape)} of {kind.dtype}" for kind in kinds)
        words += (
            f"; tensors that only reference cycles kept alive gave back {format_bytes(pauses.tensor_bytes)}{largest}"
        )
    return notes(words, width)


def _callback_rows(steps: Sequence[StepEvents], mean: int) -> Iterator[tuple[str, ...]]:
    found = [(name, ns) for name, ns in _callbacks(steps).items() if ns >= LEAST_SHARE * mean]
    for name, ns in found[:MAX_CALLBACKS]:
        yield _row(f"  {action_name(f'[Callback]{name}.').removesuffix('.')}", ns, mean)
    if rest := found[MAX_CALLBACKS:]:
        yield _row(f"  {len(rest)} more", sum(ns for _, ns in rest), mean)


def _longest(steps: Sequence[StepEvents], mean: int) -> Iterator[tuple[str, ...]]:
    totals = [
        total
        for total in event_totals(steps)
        if total.action not in CONTAINERS and not total.action.startswith(OWN_WORK)
    ]
    for total in sorted(totals, key=lambda total: (-total.self_ns, total.action))[:MAX_EVENTS]:
        a_step = round(total.self_ns / len(steps))
        if a_step >= LEAST_SHARE * mean:
            times = _times(total, len(steps))
            yield (*_row(action_name(total.action), a_step, mean), times, format_ns(total.max_self_ns))


def _times(total: EventTotals, steps: int) -> str:
    a_step = total.count / steps
    return f"{a_step:.0f}" if a_step == round(a_step) else f"{a_step:.1f}"


def _callbacks(steps: Sequence[StepEvents]) -> Mapping[str, int]:
    sums: dict[str, int] = defaultdict(int)
    for step in steps:
        for name, ns in step.callbacks_ns.items():
            sums[name] += ns
    means = {name: round(ns / len(steps)) for name, ns in sums.items()}
    return dict(sorted(means.items(), key=lambda entry: (-entry[1], entry[0])))


def _row(name: str, ns: int, mean: int) -> tuple[str, ...]:
    return name, format_ns(ns), percent(ns / mean)


def _mean(values: Iterable[int]) -> int:
    known = list(values)
    return round(sum(known) / len(known)) if known else 0
