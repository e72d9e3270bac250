"""What the recorded hooks say about the time in callbacks and between the phases."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.analysis.run.rows import text, whole
from lightning_memprof.analysis.steps.phases import OWN_WORK, classify
from lightning_memprof.analysis.steps.statistics import recorded_actions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from lightning_memprof.analysis.run.load import Rank

__all__ = ["action_name", "between_phases", "is_validation", "slowest_callback"]

CALLBACK: Final = "[Callback]"
# Its hooks open and close the windows: what they take is our cost and not the program's.
OWN: Final = "MemProfilerCallback"
# They hold phases of a step, or callbacks; what lies in them besides is looked at one by one.
CONTAINERS: Final = frozenset({"run_training_batch", "run_validation"})
VALIDATION: Final = ("val_next", "validation_step")


def action_name(action: str) -> str:
    """Return an action as a person knows it: ``ModelCheckpoint.on_train_batch_end``.

    A callback's key may hold its parameters and the function that its class was defined in.
    """
    owner, _, hook = action.rpartition(".")
    if not owner:
        return action
    if owner.startswith(CALLBACK):
        return f"{_class_name(owner)}.{hook}"
    return f"{owner.rpartition(']')[2] or owner.strip('[]')}.{hook}"


def slowest_callback(rank: Rank) -> tuple[str, int] | None:
    """Return the callback's hook that takes the most time of a recorded step and its mean in nanoseconds."""
    steps = recorded_actions(rank)
    stage = text(rank.facts, "stage") or "fit"
    totals: dict[str, int] = defaultdict(int)
    for rows in steps.values():
        for row in rows:
            action = text(row, "action") or ""
            ours = _class_name(action.rpartition(".")[0]) == OWN
            if action.startswith(CALLBACK) and classify(action, stage) == "callbacks" and not ours:
                totals[action] += max(whole(row, "duration_ns") or 0, 0)
    if not totals:
        return None
    action = max(totals, key=lambda name: totals[name])
    return action_name(action), round(totals[action] / len(steps))


def between_phases(rank: Rank) -> dict[int, dict[str, int]]:
    """Return for each recorded step the nanoseconds of every action that lies between the phases.

    An action inside another one counts to that one.
    """
    stage = text(rank.facts, "stage") or "fit"
    return {step: _outermost(rows, stage) for step, rows in recorded_actions(rank).items()}


def is_validation(action: str) -> bool:
    """Say whether an action is part of a validation inside of the fit."""
    hook = action.rpartition(".")[2]
    return hook in VALIDATION or hook.startswith("on_validation")


def _outermost(rows: Iterable[Mapping[str, Any]], stage: str) -> dict[str, int]:
    totals: dict[str, int] = defaultdict(int)
    covered = 0
    for begin, negative_duration, action in sorted(_timed(rows)):
        if begin < covered or action in CONTAINERS or action.startswith(OWN_WORK):
            continue
        covered = begin - negative_duration
        if classify(action, stage) in (None, "other"):
            totals[action] -= negative_duration
    return dict(totals)


def _timed(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, int, str]]:
    for row in rows:
        begin, duration, action = whole(row, "start_ns"), whole(row, "duration_ns"), text(row, "action")
        if begin is not None and duration is not None and action is not None and whole(row, "depth") != -1:
            yield begin, -max(duration, 0), action


def _class_name(owner: str) -> str:
    """Return the class of ``[Callback]main.<locals>.Slow`` or ``[Callback]ModelCheckpoint{'monitor': 'a.b'}``."""
    return owner.removeprefix(CALLBACK).partition("{")[0].rpartition(".")[2]
