"""What autograd kept for backward, module by module, and what was held beside it: the ``saved_tensors`` rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightning_memprof.analysis.run.load import Problem
from lightning_memprof.analysis.run.rows import integer, mapping, series_rows, text, whole

if TYPE_CHECKING:
    from lightning_memprof.analysis.run.load import Rank, Window

__all__ = ["HELD", "SAVED_TENSORS", "Backward", "ModuleActivations", "SavedSteps", "StepEnd", "read_saved_steps"]

SAVED_TENSORS: Final = "saved_tensors"
HELD: Final = ("parameter", "buffer", "gradient", "optimizer_state", "input")


class ModuleActivations(NamedTuple):
    """What the forwards of one module left for backward.

    ``own_bytes`` were saved while it was the innermost module, ``inclusive_bytes`` add those of its sub-modules.
    ``forward_ns`` is the time inside of its forwards and ``input_bytes`` what they were given; None where unknown.
    """

    name: str
    own_bytes: int
    inclusive_bytes: int
    calls: int
    forward_ns: int | None
    input_bytes: int | None


@dataclass(frozen=True)
class Backward:
    """The start of one backward.

    ``activation_bytes`` counts each storage once, without those of parameters and buffers; what of it no module owns is
    unattributed. ``attribution`` is why nothing is attributed, None where it is. ``uncounted`` values are kept in a
    form whose bytes are not known.
    """

    window: int
    step: int
    time_ns: int | None
    activation_bytes: int
    dtypes: Mapping[str, int]
    attribution: str | None
    modules: Mapping[str, ModuleActivations]
    uncounted: int = 0


@dataclass(frozen=True)
class StepEnd:
    """The end of one step: bytes by category of :data:`HELD`, and ``(parameter, gradient)`` bytes by module."""

    window: int
    step: int
    held: Mapping[str, int | None]
    modules: Mapping[str, tuple[int, int]]
    note: str | None


@dataclass(frozen=True)
class SavedSteps:
    """The recorded steps of one rank; ``ends`` by window and step."""

    backwards: tuple[Backward, ...]
    ends: Mapping[tuple[int, int], StepEnd]
    problems: tuple[Problem, ...]

    def end_of(self, backward: Backward) -> StepEnd | None:
        """Return the end of the step that a backward belongs to."""
        return self.ends.get((backward.window, backward.step))

    @property
    def last_end(self) -> StepEnd | None:
        """The end of the last recorded step."""
        return list(self.ends.values())[-1] if self.ends else None


def read_saved_steps(rank: Rank) -> SavedSteps:
    """Return what a rank's windows say; empty where the collector recorded nothing."""
    backwards: list[Backward] = []
    ends: dict[tuple[int, int], StepEnd] = {}
    problems: list[Problem] = []
    for window in rank.windows:
        path = window.series.get(SAVED_TENSORS)
        if path is None:
            continue
        rows, damage = series_rows(path)
        if damage:
            problems.append(Problem(path.name, damage, rank.rank))
        for row in rows:
            if row.get("recorded") is False:
                continue
            if (backward := _backward(window, row)) is not None:
                backwards.append(backward)
            elif (end := _end(window, row)) is not None:
                ends[end.window, end.step] = end
    return SavedSteps(tuple(backwards), ends, tuple(problems))


def _backward(window: Window, row: Mapping[str, Any]) -> Backward | None:
    step, total = whole(row, "step"), whole(row, "activation_bytes")
    if step is None or total is None:
        return None
    modules = {}
    for name, cells in (mapping(row, "modules") or {}).items():
        match _integers(cells):
            case [int() as own, int() as inclusive, int() as calls, forward_ns, input_bytes]:
                modules[name] = ModuleActivations(name, own, inclusive, calls, forward_ns, input_bytes)
    return Backward(
        window.index,
        step,
        whole(row, "time_ns"),
        total,
        {name: size for name in mapping(row, "dtypes") or {} if (size := whole(row["dtypes"], name)) is not None},
        text(row, "attribution"),
        modules,
        whole(row, "uncounted") or 0,
    )


def _end(window: Window, row: Mapping[str, Any]) -> StepEnd | None:
    step, held = whole(row, "step"), mapping(row, "held")
    if step is None or held is None:
        return None
    modules = {}
    for name, cells in (mapping(row, "parameters") or {}).items():
        match _integers(cells):
            case [int() as parameters, int() as gradients]:
                modules[name] = (parameters, gradients)
    by_category = {name: whole(held, f"{name}_bytes") for name in HELD}
    return StepEnd(window.index, step, by_category, modules, text(row, "note"))


def _integers(cells: object) -> list[int | None]:
    return [integer(cell) for cell in cells] if isinstance(cells, list) else []
