"""Saved activations by module, other live bytes at the end of each step, and estimates of activation checkpointing."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate
from typing import Final

import msgspec
from msgspec.structs import replace

from lightning_memprof.artifacts.series import SavedTensorsRow
from lightning_memprof.read.run.model import Rank, RecordedWindow

SAVED_TENSORS: Final = "saved_tensors"
HELD: Final = ("parameter", "buffer", "gradient", "optimizer_state", "input")
Structure = tuple[tuple[str, int | None], ...]


class ModuleBytes(msgspec.Struct, frozen=True, kw_only=True):
    """One module; fields are None where they were not recorded.

    Attributes:
        name: path of the module.
        own_activation_bytes: saved activations without submodules.
        inclusive_activation_bytes: saved activations with submodules.
        parameter_bytes: with submodules.
        gradient_bytes: with submodules, at the end of the step.
        calls: count of forwards in the step.
        forward_ns: time in its forwards of the step, with submodules.
    """

    name: str
    own_activation_bytes: int
    inclusive_activation_bytes: int
    parameter_bytes: int | None = None
    gradient_bytes: int | None = None
    calls: int
    forward_ns: int | None = None


class Activations(msgspec.Struct, frozen=True, kw_only=True):
    """Saved activations at the start of one backward.

    Attributes:
        window: index of the window.
        step: training step.
        total_bytes: each storage once, without parameters and buffers.
        dtypes: bytes by dtype.
        attribution: reason why no bytes are attributed to modules; None if they are.
        modules: by first call, or largest inclusive bytes first.
        inputs: bytes of the inputs of the modules' forwards, where known.
        parameters: bytes of parameters by module, with modules that were not called; {} if unknown.
        uncounted: count of saved values of unknown size, which are not in the bytes.
    """

    window: int
    step: int
    total_bytes: int
    dtypes: Mapping[str, int] = msgspec.field(default_factory=dict)
    attribution: str | None = None
    modules: tuple[ModuleBytes, ...]
    inputs: Mapping[str, int] = msgspec.field(default_factory=dict)
    parameters: Mapping[str, int] = msgspec.field(default_factory=dict)
    uncounted: int = 0

    @property
    def unattributed_bytes(self) -> int:
        """Bytes saved by no module."""
        return self.total_bytes - sum(module.own_activation_bytes for module in self.modules)


class StepEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one step: live bytes by category of :data:`HELD`, and ``(parameter, gradient)`` bytes by module.

    ``global_step`` is the number of optimizer steps before the step; ``note`` is the reason why it has no backward.
    """

    window: int
    step: int
    global_step: int | None
    held: Mapping[str, int | None]
    modules: Mapping[str, tuple[int, int]]
    note: str | None


class SavedSteps(msgspec.Struct, frozen=True):
    """The recorded steps of one rank; ``ends`` by window and step."""

    backwards: tuple[Activations, ...]
    ends: dict[tuple[int, int], StepEnd]

    def end_of(self, backward: Activations) -> StepEnd | None:
        """Return the end of the step that a backward belongs to."""
        return self.ends.get((backward.window, backward.step))


def read_saved_steps(rank: Rank) -> SavedSteps:
    """Return the recorded steps of a rank; empty if the collector recorded nothing."""
    backwards: list[Activations] = []
    ends: dict[tuple[int, int], StepEnd] = {}
    for window in rank.windows:
        for row in window.read(SavedTensorsRow).recorded:
            if (backward := _backward(window, row)) is not None:
                backwards.append(backward)
            elif (end := _end(window, row)) is not None:
                ends[end.window, end.step] = end
    return SavedSteps(tuple(backwards), ends)


def _backward(window: RecordedWindow, row: SavedTensorsRow) -> Activations | None:
    if row.step is None or row.activation_bytes is None:
        return None
    modules: list[ModuleBytes] = []
    inputs: dict[str, int] = {}
    for name, cells in row.modules.items():
        match cells:
            case [int() as own, int() as inclusive, int() as calls, forward_ns, input_bytes]:
                modules.append(
                    ModuleBytes(
                        name=name,
                        own_activation_bytes=own,
                        inclusive_activation_bytes=inclusive,
                        calls=calls,
                        forward_ns=forward_ns,
                    )
                )
                inputs |= {} if input_bytes is None else {name: input_bytes}
    return Activations(
        window=window.index,
        step=row.step,
        total_bytes=row.activation_bytes,
        dtypes=row.dtypes,
        attribution=row.attribution,
        modules=tuple(modules),
        inputs=inputs,
        uncounted=row.uncounted or 0,
    )


def _end(window: RecordedWindow, row: SavedTensorsRow) -> StepEnd | None:
    if row.step is None or row.held is None:
        return None
    modules = {}
    for name, cells in row.parameters.items():
        match cells:
            case [int() as parameters, int() as gradients]:
                modules[name] = (parameters, gradients)
    held = {name: row.held.get(f"{name}_bytes") for name in HELD}
    return StepEnd(
        window=window.index,
        step=row.step,
        global_step=row.global_step,
        held=held,
        modules=modules,
        note=row.note,
    )


class CheckpointedBlock(msgspec.Struct, frozen=True, kw_only=True):
    """One block, if it was checkpointed.

    Attributes:
        name: path of the module.
        saved_bytes: saved activations that the checkpoint frees, in bytes.
        still_held_bytes: saved activations that the checkpoint still holds: the input of the block, in bytes.
        recompute_ns: time of its forwards in one step, which run again in backward; None if not measured.
    """

    name: str
    saved_bytes: int
    still_held_bytes: int
    recompute_ns: int | None


class CheckpointedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one structure, each with its own checkpoint.

    Attributes:
        name: one name for all blocks, such as `model.blocks.0-5`.
        repeats: count of blocks of the structure, with those that would save nothing.
        blocks: blocks that would save memory.
        saved_bytes: sum over `blocks`.
        still_held_bytes: sum over `blocks`.
        recompute_peak_bytes: largest memory that the recomputation of one block needs: the peak falls by about
            `saved_bytes - recompute_peak_bytes`.
        recompute_ns: sum over `blocks`, ns per step; None if one of them was not measured.
    """

    name: str
    repeats: int
    blocks: tuple[CheckpointedBlock, ...]
    saved_bytes: int
    still_held_bytes: int
    recompute_peak_bytes: int
    recompute_ns: int | None


def checkpointing(
    peak: Activations, backwards: Sequence[Activations], forward_ns: int | None = None
) -> tuple[CheckpointedGroup, ...]:
    """Return an estimate of activation checkpointing for each group of repeated blocks, the largest saving first.

    Bytes are those of ``peak``: saved activations of a block with its submodules, without its input, which the
    checkpoint holds. Times are medians over the steps of ``backwards``, each the sum of a step's forwards, and of a
    group at most ``forward_ns``, the forward of steps that were not recorded: hooks lengthen it. Groups inside the
    blocks of another group, and blocks that would save nothing (such as checkpointed ones), are omitted.
    """
    modules = {module.name: module for module in peak.modules}
    repeated = repeated_blocks(modules, peak.parameters)
    times = _forward_times(backwards, {name for names in repeated.values() for name in names})
    groups: list[CheckpointedGroup] = []
    taken: list[str] = []
    for label, names in repeated.items():
        if any(names[0].startswith(f"{outer}.") for outer in taken):
            continue
        blocks = [
            CheckpointedBlock(
                name=name,
                saved_bytes=saved,
                still_held_bytes=given,
                recompute_ns=times.get(name),
            )
            for name in names
            if (given := peak.inputs.get(name)) is not None
            and (saved := modules[name].inclusive_activation_bytes - given) > 0
        ]
        if not blocks:
            continue
        taken += names
        costs = [block.recompute_ns for block in blocks if block.recompute_ns is not None]
        whole_ns = sum(costs) if len(costs) == len(blocks) else None
        if whole_ns is not None and forward_ns is not None and whole_ns > forward_ns:
            part, whole_ns = forward_ns / whole_ns, forward_ns
            blocks = [replace(block, recompute_ns=round((block.recompute_ns or 0) * part)) for block in blocks]
        groups.append(
            CheckpointedGroup(
                name=label,
                repeats=len(names),
                blocks=tuple(blocks),
                saved_bytes=sum(block.saved_bytes for block in blocks),
                still_held_bytes=sum(block.still_held_bytes for block in blocks),
                recompute_peak_bytes=max(block.saved_bytes for block in blocks),
                recompute_ns=whole_ns,
            )
        )
    return tuple(sorted(groups, key=lambda group: (-group.saved_bytes, group.name)))


def paths_around(path: str) -> list[str]:
    """Return the paths of the modules around a module, that of the whole model, which is empty, first."""
    return ["", *accumulate(path.split(".")[:-1], "{}.{}".format)] if path else []


def repeated_blocks(names: Iterable[str], parameters: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Return the groups of modules ``x.0``, ``x.1``, ... of one structure, by a common name, outer ones first.

    Modules have one structure if the names of their submodules and the bytes of parameters of each are equal. A module
    with neither submodules nor parameters is not a block.

    Args:
        names: paths of modules.
        parameters: bytes of parameters by path, with submodules; {} if unknown.
    """
    paths = set(names) | parameters.keys()
    below: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        for around in paths_around(path)[1:]:
            below[around].append(path)
    siblings: dict[tuple[str, Structure], list[tuple[int, str]]] = defaultdict(list)
    for path in paths:
        prefix, _, last = path.rpartition(".")
        if prefix and last.isdecimal() and (below[path] or parameters.get(path)):
            inside = ((name[len(path) :], parameters.get(name)) for name in (path, *sorted(below[path])))
            siblings[prefix, tuple(inside)].append((int(last), path))
    groups = [(prefix, sorted(found)) for (prefix, _), found in siblings.items() if len(found) > 1]
    groups.sort(key=lambda group: (group[0].count("."), group[0], group[1]))
    return {
        f"{prefix}.{_span([index for index, _ in found])}": tuple(path for _, path in found) for prefix, found in groups
    }


def patterns(names: Iterable[str], parameters: Mapping[str, int]) -> dict[str, str]:
    """Return for each path its name with repeated blocks joined: ``blocks.0-5.norm`` for ``blocks.3.norm``."""
    paths = list(names)
    labels = {
        name: label.rpartition(".")[2] for label, found in repeated_blocks(paths, parameters).items() for name in found
    }
    shared = {}
    for path in paths:
        places = (*paths_around(path)[1:], path)
        shared[path] = ".".join(labels.get(place, place.rpartition(".")[2]) for place in places)
    return shared


def _span(indices: Sequence[int]) -> str:
    """Return the text of sibling indices: ``0-5``, ``0,3,6``."""
    if indices[-1] - indices[0] == len(indices) - 1:
        return f"{indices[0]}-{indices[-1]}"
    shown = ",".join(map(str, indices[:3]))
    return shown if len(indices) <= 3 else f"{shown},…{indices[-1]}"


def _forward_times(backwards: Sequence[Activations], names: AbstractSet[str]) -> dict[str, int]:
    """Return the time in the forwards of modules, in ns, as the median over steps with one or more backwards."""
    by_step: dict[tuple[int, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for backward in backwards:
        for module in backward.modules:
            if module.name in names and module.forward_ns is not None:
                by_step[backward.window, backward.step][module.name] += module.forward_ns
    found: dict[str, list[int]] = defaultdict(list)
    for times in by_step.values():
        for name, ns in times.items():
            found[name].append(ns)
    return {name: round(statistics.median(values)) for name, values in found.items()}
