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
    timed,
)
from lightning_memprof.artifacts.series import HookRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

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
    span = next((row for row in rows if row.action == "step" and row.depth == -1), None)
    if span is None or span.start_ns is None or span.duration_ns is None or span.duration_ns < 0:
        return None
    end = span.start_ns + span.duration_ns
    sweep = _Sweep(span.start_ns, end, lambda action, around: part_of(action, around, stage))
    for begin, negative_duration, _, action in sorted(timed(row for row in rows if row is not span)):
        sweep.add(begin, begin - negative_duration, action)
    events, outside_ns = sweep.end()
    parts = dict.fromkeys(PARTS, 0)
    parts["other"] = outside_ns
    callbacks: dict[str, int] = defaultdict(int)
    for owner, event in events:
        parts[event.part] += event.self_ns
        if event.part == "callbacks":
            callbacks[owner] += event.self_ns
    return StepEvents(
        rank=window.rank,
        window=window.index,
        step=step,
        global_step=span.global_step,
        start_ns=span.start_ns,
        duration_ns=span.duration_ns,
        parts_ns=parts,
        callbacks_ns=dict(sorted(callbacks.items(), key=lambda entry: (-entry[1], entry[0]))),
        events=tuple(event for _, event in events),
    )


class _Open:
    """An event that has not ended: its place, and the part and callback that its self time counts for."""

    def __init__(self, action: str, begin: int, end: int, part: str, owner: str) -> None:
        self.action = action
        self.begin = begin
        self.end = end
        self.part = part
        self.owner = owner
        self.self_ns = 0


class _Sweep:
    """Shares the time from ``start`` to ``end`` among events in order of start.

    An event that outlives the one around it, or the step, is cut at that one's end.
    """

    def __init__(self, start: int, end: int, part_of: Callable[[str, str], str]) -> None:
        self._start = start
        self._part_of = part_of
        self._cursor = start
        self._root = _Open("step", start, end, "other", "")
        self._stack = [self._root]
        self._events: list[tuple[_Open, int]] = []

    def add(self, begin: int, end: int, action: str) -> None:
        """Take the next event."""
        begin = min(max(begin, self._start), self._root.end)
        while len(self._stack) > 1 and self._stack[-1].end <= begin:
            self._leave()
        around = self._stack[-1]
        self._spend(begin)
        part = self._part_of(action, around.part)
        # Time inside a callback's hook that belongs to no other part is the callback's.
        owner = _owner(action) if action.startswith(CALLBACK) else around.owner
        event = _Open(action, begin, max(begin, min(end, around.end)), part, owner)
        self._events.append((event, len(self._stack) - 1))
        self._stack.append(event)

    def end(self) -> tuple[list[tuple[str, Event]], int]:
        """Return the events with the callback that each belongs to, and the nanoseconds in none of them."""
        while len(self._stack) > 1:
            self._leave()
        self._spend(self._root.end)
        events = [
            (
                event.owner,
                Event(
                    action=event.action,
                    part=event.part,
                    offset_ns=event.begin - self._start,
                    duration_ns=event.end - event.begin,
                    self_ns=event.self_ns,
                    depth=depth,
                ),
            )
            for event, depth in self._events
        ]
        return events, self._root.self_ns

    def _leave(self) -> None:
        self._spend(self._stack[-1].end)
        self._stack.pop()

    def _spend(self, until: int) -> None:
        if until > self._cursor:
            self._stack[-1].self_ns += until - self._cursor
            self._cursor = until


def _owner(action: str) -> str:
    """Return the key of a callback: an action's name without its hook."""
    return action.removeprefix(CALLBACK).rpartition(".")[0]
