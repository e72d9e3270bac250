"""What each recorded step did, event by event: where its time went, callbacks by name, and in which order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.analysis.run.load import Problem
from lightning_memprof.analysis.run.rows import series_rows, text, whole
from lightning_memprof.analysis.steps.phases import EVALUATION_STEPS, FETCH, FORWARD, OPTIMIZER, OWN_WORK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from lightning_memprof.analysis.run.load import Rank, Window

__all__ = ["PARTS", "Event", "EventTotals", "StepEvents", "event_totals", "part_of", "rank_events", "window_events"]

PARTS: Final = (
    "data_wait", "transfer", "forward", "backward", "optimizer", "callbacks", "validation", "checkpoint", "logging",
    "other",
)  # fmt: skip
CALLBACK: Final = "[Callback]"
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

    ``self_ns`` is the time in no event inside of it; over a step's events and what lies between them it sums to the
    step.
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

    ``parts_ns`` has every one of :data:`PARTS` and sums to ``duration_ns``; ``callbacks_ns`` has the time of each
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
    """One action over several steps: how often, and nanoseconds in sum and at most, with what is in it and without."""

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
        action: Lightning's name of it, or one that ``HookTimings`` gave by its pattern.
        around: the part of the action that it lies in.
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


def window_events(window: Window, stage: str) -> tuple[list[StepEvents], list[Problem]]:
    """Return the recorded steps of a window that have hook timings, in order, and what is wrong with their file.

    Source: the series ``hooks``; a step's time is shared among its events, each instant counting for the innermost.
    """
    path = window.series.get("hooks")
    if path is None:
        return [], []
    rows, damage = series_rows(path)
    groups: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        step = whole(row, "step")
        if step is not None and row.get("recorded") is not False:
            groups[step].append(row)
    found = [_step(window, step, groups[step], stage) for step in sorted(groups)]
    problems = [Problem(path.name, damage, window.rank)] if damage else []
    return [step for step in found if step is not None], problems


def rank_events(rank: Rank) -> tuple[list[StepEvents], list[Problem]]:
    """Return the recorded steps of all windows of a rank, and what is wrong with their files."""
    stage = text(rank.facts, "stage") or "fit"
    steps: list[StepEvents] = []
    problems: list[Problem] = []
    for window in rank.windows:
        found, damage = window_events(window, stage)
        steps += found
        problems += damage
    return steps, problems


def event_totals(steps: Iterable[StepEvents]) -> list[EventTotals]:
    """Return the actions of steps, the longest in sum first; an action that belongs to several parts is several."""
    sums: dict[tuple[str, str], list[int]] = {}
    for step in steps:
        for event in step.events:
            row = sums.setdefault((event.action, event.part), [0, 0, 0, 0, 0])
            row[0] += 1
            row[1] += event.duration_ns
            row[2] += event.self_ns
            row[3] = max(row[3], event.duration_ns)
            row[4] = max(row[4], event.self_ns)
    totals = [EventTotals(*key, *row) for key, row in sums.items()]
    return sorted(totals, key=lambda total: (-total.total_ns, total.action, total.part))


def _step(window: Window, step: int, rows: Sequence[Mapping[str, Any]], stage: str) -> StepEvents | None:
    span = next((row for row in rows if row.get("action") == "step" and row.get("depth") == -1), None)
    start, duration = whole(span, "start_ns"), whole(span, "duration_ns")
    if span is None or start is None or duration is None or duration < 0:
        return None
    sweep = _Sweep(start, start + duration, lambda action, around: part_of(action, around, stage))
    for begin, negative_duration, _, action in sorted(_timed(row for row in rows if row is not span)):
        sweep.add(begin, begin - negative_duration, action)
    events, outside_ns = sweep.end()
    parts = dict.fromkeys(PARTS, 0)
    parts["other"] = outside_ns
    callbacks: dict[str, int] = defaultdict(int)
    for owner, event in events:
        parts[event.part] += event.self_ns
        if event.part == "callbacks":
            callbacks[owner] += event.self_ns
    shown = dict(sorted(callbacks.items(), key=lambda entry: (-entry[1], entry[0])))
    told = tuple(event for _, event in events)
    return StepEvents(
        window.rank, window.index, step, whole(span, "global_step"), start, duration, parts, shown, told
    )  # fmt: skip


def _timed(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, int, int, str]]:
    """Yield ``(start, -duration, depth, action)``: of two that start together the outer one sorts first."""
    for row in rows:
        begin, duration, action = whole(row, "start_ns"), whole(row, "duration_ns"), text(row, "action")
        if begin is not None and duration is not None and action is not None:
            yield begin, -max(duration, 0), whole(row, "depth") or 0, action


class _Open:
    """An event that has not ended: where it lies, and the part and callback that its own time counts for."""

    def __init__(self, action: str, begin: int, end: int, part: str, owner: str) -> None:
        self.action = action
        self.begin = begin
        self.end = end
        self.part = part
        self.owner = owner
        self.self_ns = 0


class _Sweep:
    """Shares the time from ``start`` to ``end`` among events that come in order of start, whatever they are.

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
        # What a callback's hook holds that is nobody else's is the callback's.
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
                    event.action, event.part, event.begin - self._start, event.end - event.begin, event.self_ns, depth
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
