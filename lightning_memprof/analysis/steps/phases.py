"""The phase of each of Lightning's profiler actions, and the self time of nested actions by phase."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.artifacts.series import PHASES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_memprof.artifacts.series import HookRow

__all__ = ["CALLBACK", "action_name", "class_name", "classify", "exclusive_times", "is_profiler", "timed"]

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


def exclusive_times(rows: Iterable[HookRow], start_ns: int, end_ns: int, stage: str) -> dict[str, int]:
    """Share the time from ``start_ns`` to ``end_ns`` among the phases, in nanoseconds.

    Every instant counts for the innermost action that covers it, so the phases sum to ``end_ns - start_ns`` exactly,
    whatever the rows are: an action that outlives the one around it is cut at that one's end.
    """
    totals = dict.fromkeys(PHASES, 0)
    stack = [(end_ns, "other")]
    cursor = start_ns

    def leave() -> None:
        nonlocal cursor
        end, phase = stack.pop()
        if end > cursor:
            totals[phase] += end - cursor
            cursor = end

    for begin, negative_duration, _, action in sorted(timed(rows)):
        begins = min(max(begin, start_ns), end_ns)
        while len(stack) > 1 and stack[-1][0] <= begins:
            leave()
        around_end, around_phase = stack[-1]
        if begins > cursor:
            totals[around_phase] += begins - cursor
            cursor = begins
        ends = min(begin - negative_duration, around_end)
        stack.append((ends, classify(action, stage) or around_phase))
    while stack:
        leave()
    return totals


def timed(rows: Iterable[HookRow]) -> Iterable[tuple[int, int, int, str]]:
    """Yield ``(start, -duration, depth, action)``: of two that start together the outer one sorts first."""
    for row in rows:
        if row.start_ns is not None and row.duration_ns is not None and row.action is not None:
            yield row.start_ns, -max(row.duration_ns, 0), row.depth or 0, row.action
