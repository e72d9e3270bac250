"""Lightning's profiler actions: their phase and part, and the events of each recorded step with their self time."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from lightning_memprof.account.parts import Part
from lightning_memprof.artifacts.series import PHASES, ActionTotalRow, HookRow
from lightning_memprof.read.run.model import Rank, RecordedWindow

# The parts that the name of an action tells, and the rest of a step.
ACTION_PARTS: Final = (
    Part.DATA_WAIT, Part.TRANSFER, Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER, Part.CALLBACK, Part.VALIDATION,
    Part.CHECKPOINT, Part.LOGGING, Part.UNTRACKED,
)  # fmt: skip
# Ranges of torch itself, in every program.
RANGES: Final[Mapping[str, Part]] = {
    "Optimizer.step#": Part.OPTIMIZER,
    "Optimizer.zero_grad#": Part.OPTIMIZER,
    "enumerate(DataLoader)": Part.DATA_WAIT,
}
FORWARD: Final = {
    "fit": "training_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}
FETCH: Final = {
    "fit": "train_dataloader_next",
    "validate": "val_next",
    "test": "test_next",
    "predict": "predict_next",
}
OPTIMIZER: Final = frozenset(
    {"optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "clip_gradients", "toggle_optimizer"}
)
EVALUATION_STEPS: Final = frozenset({"validation_step", "test_step", "predict_step"})
CALLBACK: Final = "[Callback]"
# Of a fit: the model and the data module.
MODULES: Final = ("[LightningModule]", "[LightningDataModule]")
# The profiler's own actions at the marks of a step.
OWN_WORK: Final = "[MemProfiler]"
# The profiler's own callbacks: their hooks open and close windows.
_PROFILERS: Final = frozenset({"AttachedCallback", "MemProfilerCallback", "_ProfilerHost"})
LOGGER: Final = "[Logger]"
_LOG: Final = re.compile(r"\[LightningModule\].*\.log\Z")
_METRIC: Final = "[Metric]"
_WAIT: Final = re.compile(r"\[Strategy\].*\.(barrier|broadcast_sigterm)\Z")
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
# Parts of a step that the pulse has in the phase around them.
_PARTS_ONLY: Final = frozenset({"pre_backward", "post_backward", "lr_scheduler_step", VALIDATION})


class Event(msgspec.Struct):
    """One event of a step, or the step itself. ``offset_ns`` counts from the step's start.

    ``self_ns`` is its self time; over the step and its events it sums to the step. ``phase`` is the pulse's, and
    ``callback`` the key of the callback that it runs in, or empty.
    """

    action: str
    part: Part
    phase: str
    callback: str
    offset_ns: int
    duration_ns: int
    self_ns: int
    depth: int

    @property
    def end_ns(self) -> int:
        """Its end, from the step's start."""
        return self.offset_ns + self.duration_ns


class StepEvents(msgspec.Struct, frozen=True):
    """One recorded step; ``events`` by start.

    ``parts_ns`` has all of :data:`ACTION_PARTS` and sums to ``duration_ns``; ``callbacks_ns`` has the self time of each
    callback by its key and sums to that part.
    """

    window: int
    step: int
    global_step: int | None
    start_ns: int
    duration_ns: int
    parts_ns: Mapping[Part, int]
    callbacks_ns: Mapping[str, int]
    events: tuple[Event, ...]


class EventTotals(msgspec.Struct, frozen=True):
    """One action over several steps: count, and nanoseconds of total and self time, summed and at most."""

    action: str
    part: Part
    count: int
    total_ns: int
    self_ns: int
    max_ns: int
    max_self_ns: int


def action_name(action: str) -> str:
    """Return the usual name of an action: ``ModelCheckpoint.on_train_batch_end``.

    A callback's key may contain its parameters and the function that defines its class.
    """
    owner, _, hook = action.rpartition(".")
    if not owner:
        return action
    if owner.startswith(CALLBACK):
        return f"{class_name(owner)}.{hook}"
    return f"{owner.rpartition(']')[2] or owner.strip('[]')}.{hook}"


def class_name(owner: str) -> str:
    """Return the class of ``[Callback]main.<locals>.Slow`` or ``[Callback]ModelCheckpoint{'monitor': 'a.b'}``."""
    return owner.removeprefix(CALLBACK).partition("{")[0].rpartition(".")[2]


def is_profiler(action: str) -> bool:
    """Return whether an action is work of this package."""
    return action.startswith(OWN_WORK) or (
        action.startswith(CALLBACK) and class_name(action.rpartition(".")[0]) in _PROFILERS
    )


def meeting(action: str) -> Part | None:
    """Return the part of the ledger of an action in which ranks may meet, None for others.

    A barrier, and the flag that Lightning's loop sends in each step, are nothing but a wait for other ranks.
    """
    if _LOG.match(action):
        return Part.SELF_LOG
    if _WAIT.match(action):
        return Part.RANK_WAIT
    return Part.METRIC if action.startswith(_METRIC) else None


def classify(action: str, stage: str) -> str | None:
    """Return the phase of an action, or None where it belongs to the action around it.

    A validation inside ``fit`` is ``other``: its steps and its callbacks' batch hooks belong to no training step.
    """
    part = None if action.rpartition(".")[2] in _PARTS_ONLY else part_of(action, None, stage)
    return "other" if part == Part.VALIDATION else part and part.phase


def part_of(action: str, around: Part | None, stage: str) -> Part | None:
    """Return the part that an action belongs to, None where neither it nor the action around it tells.

    Args:
        action: its name by Lightning, or by ``HookTimings`` after Lightning's pattern.
        around: the part of the action around it.
        stage: of the run. In ``fit`` a validation is one part, less the callbacks' hooks that are not its batches',
            and less checkpoints and logging.
    """
    hook = action.rpartition(".")[2]
    if action.startswith(OWN_WORK):
        return Part.UNTRACKED
    if action.startswith(CALLBACK):
        in_validation = stage == "fit" and hook.startswith("on_validation_batch")
        return Part.VALIDATION if in_validation else Part.CALLBACK
    if action.startswith(LOGGER) or action == "logging":
        return Part.LOGGING
    if hook in CHECKPOINT:
        return Part.CHECKPOINT
    if around == Part.VALIDATION or action == VALIDATION or (stage == "fit" and hook in EVALUATION_STEPS):
        return Part.VALIDATION
    return _part(action, hook, stage) or around


def _part(action: str, hook: str, stage: str) -> Part | None:
    if hook == FETCH.get(stage):
        return Part.DATA_WAIT
    if hook in TRANSFER:
        return Part.TRANSFER
    if hook == FORWARD.get(stage):
        return Part.FORWARD
    if hook in BACKWARD and action.startswith(("[Strategy]", "[Precision]")):
        return Part.BACKWARD
    is_optimizer = hook in OPTIMIZER or action.startswith("[Optimizer]") or hook == "lr_scheduler_step"
    return Part.OPTIMIZER if is_optimizer else None


K = TypeVar("K")


def step_span(rows: Iterable[HookRow]) -> tuple[int, int] | None:
    """Return start and end of the step that rows are of, None where nothing timed it."""
    row = next((row for row in rows if _is_step(row)), None)
    if row is None or row.start_ns is None or row.duration_ns is None or row.duration_ns < 0:
        return None
    return row.start_ns, row.start_ns + row.duration_ns


def nested_events(rows: Iterable[HookRow], start_ns: int, end_ns: int, stage: str) -> list[Event]:
    """Share the time from ``start_ns`` to ``end_ns`` among the step, which comes first, and its actions by start.

    Every instant counts for the innermost action that covers it, so the self times sum to ``end_ns - start_ns``
    exactly, whatever the rows are: an action that outlives the one around it, or the step, is cut at that one's end.
    """
    whole_ns = end_ns - start_ns
    step = Event(
        action="step",
        part=Part.UNTRACKED,
        phase="other",
        callback="",
        offset_ns=0,
        duration_ns=whole_ns,
        self_ns=whole_ns,
        depth=-1,
    )
    found, stack = [step], [step]
    timed = (
        (row.start_ns - start_ns, -max(row.duration_ns, 0), row.depth or 0, row.action)
        for row in rows
        if row.start_ns is not None and row.duration_ns is not None and row.action is not None and not _is_step(row)
    )
    # Of two that start together the longer one is around the other.
    for start, negative_duration, _, action in sorted(timed):
        begin = min(max(start, 0), whole_ns)
        while len(stack) > 1 and stack[-1].end_ns <= begin:
            stack.pop()
        around = stack[-1]
        ns = max(min(start - negative_duration, around.end_ns) - begin, 0)
        around.self_ns -= ns
        is_callback = action.startswith(CALLBACK)
        event = Event(
            action=action,
            part=part_of(action, around.part, stage) or around.part,
            phase=classify(action, stage) or around.phase,
            callback=action.removeprefix(CALLBACK).rpartition(".")[0] if is_callback else around.callback,
            offset_ns=begin,
            duration_ns=ns,
            self_ns=ns,
            depth=len(stack) - 1,
        )
        found.append(event)
        stack.append(event)
    return found


def exclusive_times(rows: Iterable[HookRow], start_ns: int, end_ns: int, stage: str) -> dict[str, int]:
    """Return the self times of actions by phase, in nanoseconds; they sum to ``end_ns - start_ns``."""
    totals = dict.fromkeys(PHASES, 0)
    for event in nested_events(rows, start_ns, end_ns, stage):
        totals[event.phase] += event.self_ns
    return totals


def _is_step(row: HookRow) -> bool:
    return row.action == "step" and row.depth == -1


def usual_action_ns(rank: Rank, key: Callable[[ActionTotalRow], K | None]) -> Counter[K]:
    """Return the self time of actions in the mean step outside windows, by ``key``; None leaves an action out."""
    found = Counter[K]()
    for row in rank.actions:
        if not row.in_window and row.steps and (name := key(row)) is not None:
            found[name] += (row.total_ns or 0) // row.steps
    return found


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
    groups: dict[tuple[str, Part], list[Event]] = defaultdict(list)
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
    root, *events = nested_events(rows, *place, stage)
    parts = dict.fromkeys(ACTION_PARTS, 0)
    callbacks: dict[str, int] = defaultdict(int)
    for event in (root, *events):
        parts[event.part] += event.self_ns
        if event.part == Part.CALLBACK:
            callbacks[event.callback] += event.self_ns
    return StepEvents(
        window=window.index,
        step=step,
        global_step=next((row.global_step for row in rows if row.depth == -1), None),
        start_ns=place[0],
        duration_ns=root.duration_ns,
        parts_ns=parts,
        callbacks_ns=dict(sorted(callbacks.items(), key=lambda entry: (-entry[1], entry[0]))),
        events=tuple(events),
    )
