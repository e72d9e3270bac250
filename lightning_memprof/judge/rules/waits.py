"""Waits of the host that leave the device without work, and copies that kernels wait for, in an operator trace."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from lightning_memprof.account.ledger.model import TimeLedger, scaled, total
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.model import Copies, Synchronization, TraceReport
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.judge.rule import Detail, InTrace, Rule
from lightning_memprof.judge.traces import (
    CAUSES,
    longest_in,
    remedies,
    shorter_name,
    stretch,
    times,
    waits_ns,
)
from lightning_memprof.units import format_bytes, format_ns

# A gap after a wait: the end of the call, and what the host then does up to the next launch.
AFTER_WAITS: Final = tuple(part for part in CAUSES if part != Part.IDLE_DATA)
ADVICE: Final[Mapping[str, tuple[Remedy, ...]]] = {
    **dict.fromkeys(("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"), (do.KEEP_ON_DEVICE,)),
    **dict.fromkeys(("aten::nonzero", "aten::masked_select", "aten::unique"), (do.FIXED_SIZES,)),
    "aten::to": (do.COPY_FROM_PINNED, do.PIN_MEMORY),
    "aten::copy_": (do.COPY_FROM_PINNED,),
    **dict.fromkeys(("cudaDeviceSynchronize", "cudaEventSynchronize"), (do.NO_SYNCHRONIZE,)),
}


def synchronizations(trace: TraceReport, ledger: TimeLedger) -> InTrace | None:
    """Return the idle time that would not be there without the calls that make the host wait for the device."""
    lines = scaled(ledger.of(*AFTER_WAITS), waits_ns(trace, ledger))
    calls = sorted((call for call in trace.synchronizations if call.gap_ns > 0), key=lambda call: -call.gap_ns)
    if not lines or not calls:
        return None
    count, steps = sum(call.count for call in calls), len(trace.steps)
    often = f"{times(round(count / steps))} per step" if count >= steps > 1 else times(count)
    gap_ns, whole = sum(call.gap_ns for call in calls), stretch(trace, ledger)[1]
    return lines, Detail(
        fields={"often": often},
        measured=(f"After these calls the GPU's queue is empty for {format_ns(gap_ns)} of {whole}: {_named(calls)}"),
        remedies=remedies(trace, *(step for call in calls for step in _advice(call.name)), do.FIND_SYNC_CALLS),
        numbers={
            "calls": count,
            "by_name": {call.name: {"calls": call.count, "gap_ns": call.gap_ns} for call in calls},
        },
        evidence=longest_in(trace, calls[0].longest_start_ns, calls[0].longest_gap_ns),
    )


def _advice(name: str) -> tuple[Remedy, ...]:
    return ADVICE.get(name, (do.COPY_FROM_PINNED,) if "Memcpy" in name else ())


def _named(calls: Sequence[Synchronization]) -> str:
    return ", ".join(
        f"{format_ns(call.gap_ns)} after {shorter_name(call.name)} ({times(call.count)})" for call in calls[:2]
    )


COPY_NEXT: Final = {
    "HtoD": (do.PIN_MEMORY, do.COPY_FROM_PINNED),
    "DtoH": (do.KEEP_ON_DEVICE, do.KEEP_PINNED),
}
DIRECTIONS: Final = {"HtoD": "to the GPU", "DtoH": "from the GPU"}
SUMS: Final = ("total_ns", "count", "bytes")


def copied(trace: TraceReport, ledger: TimeLedger, *, is_pageable: bool) -> InTrace | None:
    """Return the copies from or to pageable or pinned memory that nothing else overlaps, in both directions.

    Of pinned copies what can run beside kernels is saved, at most their time; or the time of half of the bytes.
    """
    names = [f"{kind} ({'pageable' if is_pageable else 'pinned'})" for kind in DIRECTIONS]
    copies = [each for each in trace.copies if each.kind in DIRECTIONS and each.is_pageable is is_pageable]
    lines = tuple(line for line in ledger.of(Part.COPY) if line.name in names)
    if not copies or not lines:
        return None
    copies.sort(key=lambda each: -(each.exposed_ns or each.total_ns))
    longest, kinds = copies[0], list(dict.fromkeys(each.kind for each in copies))
    beside = min(ledger.ns(Part.COMPUTE, Part.COLLECTIVE) / total(lines), 1.0)
    is_trip = is_pageable and _is_round_trip(copies)
    choices: tuple[Remedy, ...] = (do.COPY_IN_STREAM, do.COPY_FEWER_BYTES)
    if is_pageable:
        choices = remedies(trace, *itertools.chain(*(COPY_NEXT[kind] for kind in kinds)))
    elif beside < 1:
        choices = choices[::-1]
    return lines, Detail(
        fields={"direction": DIRECTIONS[kinds[0]] if len(kinds) == 1 else "to and from the GPU"},
        measured="; ".join(map(_amount, copies)),
        why="The same number of bytes moves to the GPU and back." if is_trip else "",
        # The same number of bytes may be a batch and an output of its size.
        remedies=((do.STAY_ON_GPU,) if is_trip else ()) + choices,
        saves=None if is_pageable else (max(0.5, beside) / 2, max(0.5, beside)),
        numbers={"kinds": kinds, **{name: sum(getattr(each, name) or 0 for each in copies) for name in SUMS}},
        evidence=longest_in(trace, longest.longest_start_ns, longest.total_ns // max(longest.count, 1)),
    )


def _is_round_trip(copies: Sequence[Copies]) -> bool:
    moved, returned = (sum(each.bytes or 0 for each in copies if each.kind == kind) for kind in DIRECTIONS)
    return abs(moved - returned) < POLICY.same_size * moved


def _amount(copies: Copies) -> str:
    size = f"{format_bytes(copies.bytes)} in " if copies.bytes is not None else ""
    rate = f", {format_bytes(copies.bytes * 1e9 / copies.total_ns)}/s" if copies.bytes and copies.total_ns else ""
    return f"{copies.kind} {times(copies.count)}, {size}{format_ns(copies.total_ns)}{rate}"


ROWS: Final = (
    Rule(
        id="synchronization",
        about=(
            "Calls make the host wait for the device (cudaStreamSynchronize, a blocking copy, .item(), nonzero). After "
            "each call the device is idle until the host launches again. A host that is far ahead may wait."
        ),
        when="Counts the idle time that work queued ahead would hide; copies to pageable memory do not count.",
        trade_off="None, or values that are read later.",
        of=AFTER_WAITS,
        in_trace=synchronizations,
        says="Waits for the GPU ({often}) leave it idle {share}{rank}.",
        saves=(0.5, 1.0),
    ),
    Rule(
        id="blocking_transfers",
        about="The driver copies pageable memory into its own buffer first, and the call returns only then.",
        trade_off="Pinned memory cannot be paged out.",
        of=(Part.COPY,),
        in_trace=partial(copied, is_pageable=True),
        says="blocking copies {direction} take {share}{rank}.",
        bound="Transfer-bound",
        saves=(0.5, 1.0),
    ),
    Rule(
        id="exposed_copies",
        about="Copies from or to pinned memory run while no kernel does: the kernels behind them wait.",
        trade_off="Lower precision of the copied data, or memory for the next batch.",
        of=(Part.COPY,),
        in_trace=partial(copied, is_pageable=False),
        says="pinned copies {direction} take {share}{rank}.",
        bound="Transfer-bound",
        saves=(0.5, 1.0),
    ),
)
