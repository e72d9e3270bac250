"""The events of each recorded step in their order, and its time by part and by callback."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.steps.phases import (
    CALLBACK,
    EVALUATION_STEPS,
    FETCH,
    FORWARD,
    OPTIMIZER,
    OWN_WORK,
    Span,
    nested_spans,
    step_span,
)
from lightning_memprof.artifacts.series import HookRow

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lightning_memprof.analysis.run.model import Rank, RecordedWindow

__all__ = ["PARTS", "Event", "EventTotals", "StepEvents", "event_totals", "part_of", "rank_events", "window_events"]

PARTS: Final = (
    "data_wait", "transfer", "forward", "backward", "optimizer", "callbacks", "validation", "checkpoint", "logging",
    "other",
)  # fmt: skip
LOGGER: Final = "[Logger]"
VALIDATION: Final = "run_validation"
TRANSFER: Final = frozenset(
    {
        "batch_to_device",
        "on_before_batch_transfer",
        "transfer_batch_to_device",
        "on_after_batch_transfer",
        "convert_input",
    }
)
BACKWARD: Final = frozenset({"pre_backward", "backward", "post_backward"})
# A file that a strategy or a plug-in writes or removes.
CHECKPOINT: Final = frozenset({"save_checkpoint", "remove_checkpoint"})


@dataclass(frozen=True)
class Event:
    """One event of a step. ``offset_ns`` counts from the step's start; events come in order of start.

    ``self_ns`` is its self time; over the step's events, with the time outside all events, it sums to the step.
    """

    action: str
    part: str
    offset_ns: int
    duration_ns: int
    self_ns: int
    depth: int


@dataclass(frozen=True)
class StepEvents:
    """One recorded step of one rank.

    ``parts_ns`` has all of :data:`PARTS` and sums to ``duration_ns``; ``callbacks_ns`` has the self time of each
    callback by its key and sums to the part of that name.
    """

    rank: int
    window: int
    step: int
    global_step: int | None
    start_ns: int
    duration_ns: int
    parts_ns: Mapping[str, int]
    callbacks_ns: Mapping[str, int]
    events: tuple[Event, ...]


@dataclass(frozen=True)
class EventTotals:
    """One action over several steps: count, and nanoseconds of total and self time, summed and at most."""

    action: str
    part: str
    count: int
    total_ns: int
    self_ns: int
    max_ns: int
    max_self_ns: int


def part_of(action: str, around: str, stage: str) -> str:
    """Return the part that an action belongs to.

    Args:
        action: its name by Lightning, or by ``HookTimings`` after Lightning's pattern.
        around: the part of the action around it.
        stage: of the run. In ``fit`` a validation is one part, less the callbacks' hooks that are not its batches',
            and less checkpoints and logging.

    """
    hook = action.rpartition(".")[2]
    if action.startswith(OWN_WORK):
        return "other"
    if action.startswith(CALLBACK):
        in_validation = stage == "fit" and hook.startswith("on_validation_batch")
        return "validation" if in_validation else "callbacks"
    if action.startswith(LOGGER) or action == "logging":
        return "logging"
    if hook in CHECKPOINT:
        return "checkpoint"
    if around == "validation" or action == VALIDATION or (stage == "fit" and hook in EVALUATION_STEPS):
        return "validation"
    return _phase(action, hook, stage) or around


def _phase(action: str, hook: str, stage: str) -> str | None:
    if hook in FETCH.get(stage, ()):
        return "data_wait"
    if hook in TRANSFER:
        return "transfer"
    if hook == FORWARD.get(stage):
        return "forward"
    if hook in BACKWARD and action.startswith(("[Strategy]", "[Precision]")):
        return "backward"
    return "optimizer" if hook in OPTIMIZER or action.startswith("[Optimizer]") or hook == "lr_scheduler_step" else None


def rank_events(rank: Rank) -> list[StepEvents]:
    """Return the recorded steps of a rank that have hook timings, in order.

    Source: the series ``hooks`` of its windows; each instant of a step counts for the innermost event.
    """
    return [step for window in rank.windows for step in window_events(window, rank.facts.stage)]


def window_events(window: RecordedWindow, stage: str) -> list[StepEvents]:
    """Return the recorded steps of one window as :func:`rank_events`."""
    found = (_step(window, step, rows, stage) for step, rows in sorted(window.read(HookRow).by_step.items()))
    return [step for step in found if step is not None]


def event_totals(steps: Iterable[StepEvents]) -> list[EventTotals]:
    """Return the actions of steps, the longest in total first, each once for every part that it belongs to."""
    groups: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for step in steps:
        for event in step.events:
            groups[event.action, event.part].append(event)
    totals = [
        EventTotals(
            action=action,
            part=part,
            count=len(events),
            total_ns=sum(event.duration_ns for event in events),
            self_ns=sum(event.self_ns for event in events),
            max_ns=max(event.duration_ns for event in events),
            max_self_ns=max(event.self_ns for event in events),
        )
        for (action, part), events in groups.items()
    ]
    return sorted(totals, key=lambda total: (-total.total_ns, total.action, total.part))


def _step(window: RecordedWindow, step: int, rows: Sequence[HookRow], stage: str) -> StepEvents | None:
    place = step_span(rows)
    if place is None:
        return None
    root, *spans = nested_spans(rows, *place, lambda action, around: part_of(action, around, stage))
    parts = dict.fromkeys(PARTS, 0)
    callbacks: dict[str, int] = defaultdict(int)
    for span in (root, *spans):
        parts[span.label] += span.self_ns
        if span.label == "callbacks":
            callbacks[_owner(span)] += span.self_ns
    return StepEvents(
        rank=window.rank,
        window=window.index,
        step=step,
        global_step=next((row.global_step for row in rows if row.depth == -1), None),
        start_ns=root.begin_ns,
        duration_ns=root.end_ns - root.begin_ns,
        parts_ns=parts,
        callbacks_ns=dict(sorted(callbacks.items(), key=lambda entry: (-entry[1], entry[0]))),
        events=tuple(
            Event(
                action=span.action,
                part=span.label,
                offset_ns=span.begin_ns - root.begin_ns,
                duration_ns=span.end_ns - span.begin_ns,
                self_ns=span.self_ns,
                depth=span.depth,
            )
            for span in spans
        ),
    )


def _owner(span: Span) -> str:
    """Return the key of the callback that a span runs in: an action's name without its hook."""
    around: Span | None = span
    while around is not None and not around.action.startswith(CALLBACK):
        around = around.around
    return "" if around is None else around.action.removeprefix(CALLBACK).rpartition(".")[0]
