"""Memory that one function allocates in each step of a recorded history and that stays live."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from lightning_memprof.account.ledger.growth import MIN_BYTES, Growth
from lightning_memprof.account.snapshot.frames import BACKWARD, CACHE, Phase, Stack, is_training, phase_of
from lightning_memprof.account.snapshot.replay import BlockLife, Replay, holders_of
from lightning_memprof.read.stacks import user_frame

# A leak continues: with a tenth of the peak in a short history, it fills the device within a run.
MIN_SHARE: Final = 0.1
# The first steps of a program allocate what stays: states of the optimizer, workspaces, buffers.
MIN_STEPS: Final = 5
# The median times the number of equal steps is their total; of one large block among small ones it is little.
STEADY: Final = 0.5
# Blocks that are freed later than after a step make a buffer with a limit.
MAX_FREED: Final = 0.1
# What else is live changes little between steps. In a forward pass it grows with the site, in a full buffer it shrinks.
MAX_CHANGE: Final = 0.25
# Not yet in the current step, and perhaps not in a longer one before it.
MAX_MISSED: Final = 2


_PASSES: Final = frozenset({"forward", "backward"})


class _Place(NamedTuple):
    """Where a stack allocates; ``function`` is the user's innermost, None in a stack without Python frames.

    Blocks of backward, gradients for instance, and caches of keys and values stay by design: they may not grow.
    """

    phase: Phase | None
    function: tuple[str, str] | None
    may_grow: bool


class _Step(NamedTuple):
    """Blocks of one step that stay; ``start`` counts the allocations before its first."""

    start: int
    blocks: list[BlockLife]


class _History(NamedTuple):
    """Blocks of the recorded history by allocation, and the places of their stacks."""

    ring: Replay
    trains: bool
    lives: Sequence[BlockLife]
    places: Mapping[int, _Place]

    def stays(self, life: BlockLife) -> bool:
        return life.died == self.ring.events


def piled_growth(ring: Replay) -> Growth | None:
    """Return the function whose blocks pile up most, step by step, until the end of the history; None without one."""
    lives = sorted((life for life in ring.lives if life.born >= 0), key=lambda life: life.born)
    stacks = {number: ring.snapshot.stacks[number] for number in {life.stack for life in lives}}
    main = _main([stacks[life.stack] for life in lives])
    places = {number: _place(stack, main) for number, stack in stacks.items()}
    history = _History(ring=ring, trains=is_training(ring.snapshot), lives=lives, places=places)
    held: Counter[tuple[str, str]] = Counter()
    for life in lives:
        place = history.places[life.stack]
        if place.function is not None and place.may_grow and history.stays(life):
            held[place.function] += life.requested_size
    least = max(MIN_BYTES, MIN_SHARE * ring.peak_requested_bytes)
    found = (_growth(history, function) for function, size in held.most_common() if size >= least)
    return next((growth for growth in found if growth is not None), None)


def _main(stacks: Sequence[Stack]) -> tuple[str, str] | None:
    """Return the outermost function of the program's main thread: threads of backward have others, or none."""
    roots: Counter[tuple[str, str]] = Counter()
    for stack, count in Counter(stacks).items():
        root = _root(stack)
        if root is not None and not any(file in root[0] for file in BACKWARD):
            roots[root] += count
    return roots.most_common(1)[0][0] if roots else None


def _root(stack: Stack) -> tuple[str, str] | None:
    return next(((frame.filename, frame.name) for frame in reversed(stack) if frame.is_python), None)


def _place(stack: Stack, main: tuple[str, str] | None) -> _Place:
    phase = phase_of(stack)
    inner = user_frame(stack) or next((frame for frame in stack if frame.is_python), None)
    is_cache = any(CACHE.search(f"{frame.filename} {frame.name}") for frame in stack)
    return _Place(
        phase=phase,
        function=(inner.filename, inner.name) if inner is not None else None,
        may_grow=phase != "backward" and _root(stack) == main and not is_cache,
    )


def _growth(history: _History, function: tuple[str, str]) -> Growth | None:
    steps = _steps(history, function)
    if len(steps) < MIN_STEPS:
        return None
    gaps = [after.start - before.start for before, after in pairwise(steps)]
    sizes = [sum(life.requested_size for life in step.blocks) for step in steps]
    ends_early = len(history.lives) - steps[-1].start > MAX_MISSED * max(gaps)
    if ends_early or statistics.median(sizes) * len(sizes) < STEADY * sum(sizes):
        return None
    if _is_limited(history, function, steps, sum(sizes)) or not _adds(history, steps, sizes):
        return None
    blocks = [life for step in steps for life in step.blocks]
    at_peak = [life.requested_size for life in blocks if life.born <= history.ring.peak_event]
    lines: Counter[str] = Counter()
    for holder in holders_of(history.ring.snapshot, blocks):
        lines[holder.site] += holder.bytes
    return Growth(
        owner=lines.most_common(1)[0][0],
        per_step=round(statistics.median(sizes)),
        added=sum(sizes),
        steps=len(steps),
        blocks=len(blocks),
        peak_bytes=sum(at_peak),
    )


def _steps(history: _History, function: tuple[str, str]) -> list[_Step]:
    """Return the blocks of a function that stay, by step.

    Blocks of other functions separate steps: those of backward; in a program that does not train, those of forward and
    others outside of it. Two layers of a forward pass have neither between them.
    """
    steps: list[_Step] = []
    seen: set[Phase | None] = set()
    for number, life in enumerate(history.lives):
        place = history.places[life.stack]
        if place.function != function:
            seen.add(place.phase)
        elif place.may_grow and history.stays(life):
            passes = not history.trains and "forward" in seen and bool((seen | {place.phase}) - _PASSES)
            if not steps or passes or "backward" in seen:
                steps.append(_Step(number, []))
            steps[-1].blocks.append(life)
            seen.clear()
    return steps


def _is_limited(history: _History, function: tuple[str, str], steps: Sequence[_Step], grown: int) -> bool:
    """Return whether the function also has blocks that are freed later than after a step."""
    step = statistics.median(after.blocks[0].born - before.blocks[0].born for before, after in pairwise(steps))
    freed = sum(
        life.requested_size
        for life in history.lives
        if history.places[life.stack].function == function and not history.stays(life) and life.died - life.born > step
    )
    return freed > MAX_FREED * grown


def _adds(history: _History, steps: Sequence[_Step], sizes: Sequence[int]) -> bool:
    """Return whether the blocks add to what else is live at the same point of each step.

    With backward between the steps the rest may grow as well: a graph that is kept has blocks of many functions.
    """
    rest, kept = [], 0
    for step, size in zip(steps, sizes, strict=True):
        first = step.blocks[0]
        rest.append(history.ring.live_at(first.born).requested_bytes - first.requested_size - kept)
        kept += size
    half = len(steps) // 2
    change, limit = min(rest[half:]) - min(rest[:half]), MAX_CHANGE * kept / 2
    return change >= -limit and (history.trains or change <= limit)
