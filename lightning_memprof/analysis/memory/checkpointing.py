"""Repeated blocks of a model, and what activation checkpointing of each would trade: bytes for time."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from lightning_memprof.analysis.memory.activations import Backward

__all__ = ["CheckpointedBlock", "CheckpointedGroup", "checkpointing", "patterns", "repeated_blocks"]

Structure = tuple[tuple[str, int | None], ...]


@dataclass(frozen=True)
class CheckpointedBlock:
    """One block: ``freed_bytes`` would not be kept for backward, ``kept_bytes`` (its input) still would.

    ``recompute_ns`` is the time of its forwards of one step, which would run again; None where it was not measured.
    """

    name: str
    freed_bytes: int
    kept_bytes: int
    recompute_ns: int | None


@dataclass(frozen=True)
class CheckpointedGroup:
    """Blocks of one structure side by side, checkpointed one by one.

    ``repeats`` counts all blocks of the structure, also those that would free nothing and are not in ``blocks``.
    ``freed_bytes``, ``kept_bytes`` and ``recompute_ns`` are sums over ``blocks``. ``back_bytes`` is the most that is
    there again while one of them is recomputed: the peak falls by about ``freed_bytes - back_bytes``.
    """

    name: str
    repeats: int
    blocks: tuple[CheckpointedBlock, ...]
    freed_bytes: int
    kept_bytes: int
    back_bytes: int
    recompute_ns: int | None


def checkpointing(
    peak: Backward, backwards: Sequence[Backward], parameters: Mapping[str, int]
) -> tuple[CheckpointedGroup, ...]:
    """Return what checkpointing each group of repeated blocks would trade, the largest saving first.

    Bytes are those of ``peak``: what a block and its sub-modules saved, less its input, which a checkpoint keeps.
    Times are the median over the steps of ``backwards``, each the sum of a step's forwards. Groups inside of another
    group's blocks are left out, and so are blocks that would free nothing (those that are checkpointed already).
    """
    repeated = repeated_blocks(peak.modules, parameters)
    times = _forward_times(backwards, {name for names in repeated.values() for name in names})
    groups: list[CheckpointedGroup] = []
    taken: list[str] = []
    for label, names in repeated.items():
        if any(names[0].startswith(f"{outer}.") for outer in taken):
            continue
        blocks = tuple(
            CheckpointedBlock(name, freed, module.input_bytes, times.get(name))
            for name in names
            if (module := peak.modules.get(name)) is not None
            and module.input_bytes is not None
            and (freed := module.inclusive_bytes - module.input_bytes) > 0
        )
        if not blocks:
            continue
        taken += names
        costs = [block.recompute_ns for block in blocks]
        groups.append(
            CheckpointedGroup(
                label,
                len(names),
                blocks,
                sum(block.freed_bytes for block in blocks),
                sum(block.kept_bytes for block in blocks),
                max(block.freed_bytes for block in blocks),
                sum(cost for cost in costs if cost is not None) if None not in costs else None,
            )
        )
    return tuple(sorted(groups, key=lambda group: (-group.freed_bytes, group.name)))


def repeated_blocks(names: Iterable[str], parameters: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Return the groups of modules ``x.0``, ``x.1``, ... of one structure, outer ones first, by a name for all of them.

    One structure is: the same names of sub-modules below, each with as many bytes of parameters. A module that has
    neither sub-modules nor parameters is no block: of it nothing is known but its name.

    Args:
        names: paths of modules.
        parameters: bytes of parameters by path, those of sub-modules included; {} where they are unknown.

    """
    paths = set(names) | parameters.keys()
    below: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        parts = path.split(".")
        for depth in range(1, len(parts)):
            below[".".join(parts[:depth])].append(path)
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
    """Return for each path the name that it shares with its likes: ``blocks.3.norm`` is ``blocks.0-5.norm``."""
    paths = list(names)
    labels = {
        name: label.rpartition(".")[2] for label, found in repeated_blocks(paths, parameters).items() for name in found
    }
    shared = {}
    for path in paths:
        parts = path.split(".")
        places = (".".join(parts[: depth + 1]) for depth in range(len(parts)))
        shared[path] = ".".join(labels.get(place, part) for place, part in zip(places, parts, strict=True))
    return shared


def _span(indices: Sequence[int]) -> str:
    """Write the numbers of siblings: ``0-5``, ``0,3,6``."""
    if indices[-1] - indices[0] == len(indices) - 1:
        return f"{indices[0]}-{indices[-1]}"
    shown = ",".join(map(str, indices[:3]))
    return shown if len(indices) <= 3 else f"{shown},…{indices[-1]}"


def _forward_times(backwards: Sequence[Backward], names: AbstractSet[str]) -> dict[str, int]:
    """Return the median over steps of the time in some modules' forwards; a step may have several backwards."""
    by_step: dict[tuple[int, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for backward in backwards:
        for name in names & backward.modules.keys():
            ns = backward.modules[name].forward_ns
            if ns is not None:
                by_step[backward.window, backward.step][name] += ns
    found: dict[str, list[int]] = defaultdict(list)
    for times in by_step.values():
        for name, ns in times.items():
            found[name].append(ns)
    return {name: round(statistics.median(values)) for name, values in found.items()}
