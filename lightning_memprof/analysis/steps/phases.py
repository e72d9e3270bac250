"""The phase of each of Lightning's profiler actions, and the self time of nested actions by phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_memprof.artifacts.series import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lightning_memprof.artifacts.series import HookRow

__all__ = [
    "CALLBACK",
    "Span",
    "action_name",
    "class_name",
    "classify",
    "exclusive_times",
    "is_profiler",
    "nested_spans",
    "step_span",
]

FORWARD: Final = {
    "fit": "training_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}
FETCH: Final = {
    "fit": ("train_dataloader_next",),
    "validate": ("val_next",),
    "test": ("test_next",),
    "predict": ("predict_next",),
}
OPTIMIZER: Final = frozenset(
    {"optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "clip_gradients", "toggle_optimizer"}
)
EVALUATION_STEPS: Final = frozenset({"validation_step", "test_step", "predict_step"})
CALLBACK: Final = "[Callback]"
# The profiler's own actions at the marks of a step.
OWN_WORK: Final = "[MemProfiler]"
# The profiler's own callbacks: their hooks open and close windows.
_PROFILERS: Final = frozenset({"AttachedCallback", "MemProfilerCallback"})


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


def classify(action: str, stage: str) -> str | None:
    """Return the phase of an action, or None where it belongs to the action around it.

    A validation inside ``fit`` is ``other``: its steps and its callbacks' batch hooks belong to no training step.
    """
    hook = action.rpartition(".")[2]
    if action.startswith(CALLBACK):
        return "other" if stage == "fit" and hook.startswith("on_validation_batch") else "callbacks"
    if hook == FORWARD.get(stage):
        return "forward"
    if hook in FETCH.get(stage, ()):
        return "data_wait"
    if hook == "backward" and action.startswith(("[Strategy]", "[Precision]")):
        return "backward"
    if hook in OPTIMIZER or action.startswith("[Optimizer]"):
        return "optimizer"
    return "other" if hook in EVALUATION_STEPS or action.startswith(OWN_WORK) else None


@dataclass(slots=True)
class Span:
    """An action inside a step, or the step itself, whose ``around`` is None. ``label`` is its phase or part."""

    action: str
    label: str
    begin_ns: int
    end_ns: int
    depth: int
    around: Span | None
    self_ns: int = 0


def step_span(rows: Iterable[HookRow]) -> tuple[int, int] | None:
    """Return start and end of the step that rows are of, None where nothing timed it."""
    row = next((row for row in rows if _is_step(row)), None)
    if row is None or row.start_ns is None or row.duration_ns is None or row.duration_ns < 0:
        return None
    return row.start_ns, row.start_ns + row.duration_ns


def nested_spans(
    rows: Iterable[HookRow], start_ns: int, end_ns: int, label_of: Callable[[str, str], str]
) -> list[Span]:
    """Share the time from ``start_ns`` to ``end_ns`` among the step, which comes first, and its actions by start.

    Every instant counts for the innermost action that covers it, so the self times sum to ``end_ns - start_ns``
    exactly, whatever the rows are: an action that outlives the one around it, or the step, is cut at that one's end.
    ``label_of`` gets an action and the label of the one around it; the step's is ``other``.
    """
    root = Span(action="step", label="other", begin_ns=start_ns, end_ns=end_ns, depth=-1, around=None)
    found, stack = [root], [root]
    cursor = start_ns

    def spend(until: int) -> None:
        nonlocal cursor
        if until > cursor:
            stack[-1].self_ns += until - cursor
            cursor = until

    def leave() -> None:
        spend(stack[-1].end_ns)
        stack.pop()

    timed = (
        (row.start_ns, -max(row.duration_ns, 0), row.depth or 0, row.action)
        for row in rows
        if row.start_ns is not None and row.duration_ns is not None and row.action is not None and not _is_step(row)
    )
    # Of two that start together the longer one is around the other.
    for start, negative_duration, _, action in sorted(timed):
        begin = min(max(start, start_ns), end_ns)
        while len(stack) > 1 and stack[-1].end_ns <= begin:
            leave()
        spend(begin)
        around = stack[-1]
        span = Span(
            action=action,
            label=label_of(action, around.label),
            begin_ns=begin,
            end_ns=max(begin, min(start - negative_duration, around.end_ns)),
            depth=len(stack) - 1,
            around=around,
        )
        found.append(span)
        stack.append(span)
    while stack:
        leave()
    return found


def exclusive_times(rows: Iterable[HookRow], start_ns: int, end_ns: int, stage: str) -> dict[str, int]:
    """Return the self times of actions by phase, in nanoseconds; they sum to ``end_ns - start_ns``."""
    totals = dict.fromkeys(PHASES, 0)
    for span in nested_spans(rows, start_ns, end_ns, lambda action, around: classify(action, stage) or around):
        totals[span.label] += span.self_ns
    return totals


def _is_step(row: HookRow) -> bool:
    return row.action == "step" and row.depth == -1
