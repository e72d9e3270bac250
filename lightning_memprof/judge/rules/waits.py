"""Waits of the host that leave the device without work, and copies that kernels wait for, in an operator trace."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.model import Copies, Synchronization
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    COPY_FEWER_BYTES,
    COPY_FROM_PINNED,
    COPY_IN_STREAM,
    FIND_SYNC_CALLS,
    FIXED_SIZES,
    KEEP_ON_DEVICE,
    KEEP_PINNED,
    MOVE_RESULTS_LESS_OFTEN,
    NO_BRANCH,
    NO_SYNCHRONIZE,
    PIN_MEMORY,
    READ_EVENTS_LATER,
    STAY_ON_GPU,
    Remedy,
)
from lightning_memprof.judge.rule import Detail, Fact, Found, Rule
from lightning_memprof.judge.traces import (
    CAUSES,
    device_traces,
    longest_in,
    remedies,
    scaled,
    shorter_name,
    stretch,
    times,
    waits_ns,
)
from lightning_memprof.units import format_bytes, format_ns

READS: Final = (KEEP_ON_DEVICE,)
# A gap after a wait: the end of the call, and what the host then does up to the next launch.
AFTER_WAITS: Final = tuple(part for part in CAUSES if part != Part.IDLE_DATA)
ADVICE: Final[Mapping[str, tuple[Remedy, ...]]] = {
    "aten::item": READS,
    "aten::_local_scalar_dense": READS,
    "aten::is_nonzero": (NO_BRANCH,),
    "aten::nonzero": (FIXED_SIZES.filled(instead="torch.where instead of a boolean index"),),
    "aten::masked_select": (FIXED_SIZES.filled(instead="torch.where instead of masked_select"),),
    "aten::unique": (FIXED_SIZES.filled(instead="unique in the DataLoader's workers"),),
    "aten::to": (COPY_FROM_PINNED, PIN_MEMORY),
    "aten::copy_": (COPY_FROM_PINNED,),
    "cudaDeviceSynchronize": (NO_SYNCHRONIZE,),
    "cudaEventSynchronize": (READ_EVENTS_LATER,),
}


def synchronizations(facts: Facts) -> Iterator[Found]:
    """Yield the idle time that would not be there without the calls that make the host wait for the device."""
    for trace, ledger in device_traces(facts):
        lines = scaled(ledger.of(*AFTER_WAITS), waits_ns(trace, ledger))
        calls = sorted((call for call in trace.synchronizations if call.gap_ns > 0), key=lambda call: -call.gap_ns)
        if not lines or not calls:
            continue
        count, steps = sum(call.count for call in calls), len(trace.steps)
        often = f"{times(round(count / steps))} per step" if count >= steps > 1 else times(count)
        gap_ns, whole = sum(call.gap_ns for call in calls), stretch(trace, ledger)[1]
        yield (
            Fact(source=trace, ledger=ledger, lines=lines),
            Detail(
                fields={"often": often},
                measured=(
                    f"After these calls the GPU's queue is empty for {format_ns(gap_ns)} of {whole}: {_named(calls)}"
                ),
                remedies=remedies(trace, *(step for call in calls for step in _advice(call.name)), FIND_SYNC_CALLS),
                numbers={
                    "calls": count,
                    "by_name": {call.name: {"calls": call.count, "gap_ns": call.gap_ns} for call in calls},
                },
                evidence=longest_in(trace, calls[0].longest_start_ns, calls[0].longest_gap_ns),
            ),
        )


def _advice(name: str) -> tuple[Remedy, ...]:
    return ADVICE.get(name, (COPY_FROM_PINNED,) if "Memcpy" in name else ())


def _named(calls: Sequence[Synchronization]) -> str:
    return ", ".join(
        f"{format_ns(call.gap_ns)} after {shorter_name(call.name)} ({times(call.count)})" for call in calls[:2]
    )


COPY_NEXT: Final = {
    "HtoD": (PIN_MEMORY, COPY_FROM_PINNED),
    "DtoH": (MOVE_RESULTS_LESS_OFTEN, KEEP_PINNED),
}
DIRECTIONS: Final = {"HtoD": "to the GPU", "DtoH": "from the GPU"}
SUMS: Final = ("total_ns", "count", "bytes")


def copied(facts: Facts, *, is_pageable: bool) -> Iterator[Found]:
    """Yield the copies from or to pageable or pinned memory that nothing else overlaps, in both directions.

    Of pinned copies what can run beside kernels is saved, at most their time; or the time of half of the bytes.
    """
    names = [f"{kind} ({'pageable' if is_pageable else 'pinned'})" for kind in DIRECTIONS]
    for trace, ledger in device_traces(facts):
        copies = [each for each in trace.copies if each.kind in DIRECTIONS and each.is_pageable is is_pageable]
        lines = tuple(line for line in ledger.of(Part.COPY) if line.name in names)
        if not copies or not lines:
            continue
        fact = Fact(source=trace, ledger=ledger, lines=lines)
        copies.sort(key=lambda each: -(each.exposed_ns or each.total_ns))
        longest, kinds = copies[0], list(dict.fromkeys(each.kind for each in copies))
        beside = min(ledger.ns(Part.COMPUTE, Part.COLLECTIVE) / fact.ns, 1.0)
        is_trip = is_pageable and _is_round_trip(copies)
        choices: tuple[Remedy, ...] = (COPY_IN_STREAM, COPY_FEWER_BYTES)
        if is_pageable:
            choices = remedies(trace, *itertools.chain(*(COPY_NEXT[kind] for kind in kinds)))
        elif beside < 1:
            choices = choices[::-1]
        yield (
            fact,
            Detail(
                fields={"direction": DIRECTIONS[kinds[0]] if len(kinds) == 1 else "to and from the GPU"},
                measured="; ".join(map(_amount, copies)),
                why="The same number of bytes moves to the GPU and back." if is_trip else "",
                # The same number of bytes may be a batch and an output of its size.
                remedies=((STAY_ON_GPU,) if is_trip else ()) + choices,
                saves=None if is_pageable else (max(0.5, beside) / 2, max(0.5, beside)),
                numbers={"kinds": kinds, **{name: sum(getattr(each, name) or 0 for each in copies) for name in SUMS}},
                evidence=longest_in(trace, longest.longest_start_ns, longest.total_ns // max(longest.count, 1)),
            ),
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
            "Calls make the host wait for the device (cudaStreamSynchronize, a blocking copy, .item(), nonzero, "
            "...). After each call the device's queue is empty, and the device is idle until the host launches "
            "again. Waiting alone is not a finding: a host that is far ahead may wait."
        ),
        when=(
            "Counts the idle time that work queued ahead would hide: each wait puts the host behind by the time "
            "that it waits for a busy device. Copies to pageable memory do not count: the host waits for them in "
            "any case."
        ),
        trade_off="None, or values that are read later.",
        of=AFTER_WAITS,
        find=synchronizations,
        says="Waits for the GPU ({often}) leave it idle {share}{rank}.",
        saves=(0.5, 1.0),
    ),
    Rule(
        id="blocking_transfers",
        about=(
            "Copies use pageable memory (Memcpy HtoD (Pageable -> Device), Memcpy DtoH (Device -> Pageable)) while no "
            "kernel runs. The driver first copies pageable memory into its own buffer, and the call returns only then. "
            "From pinned memory, a copy overlaps kernels and is about twice as fast. ROCm does not record the kind of "
            "memory."
        ),
        trade_off="Pinned memory cannot be paged out.",
        of=(Part.COPY,),
        find=partial(copied, is_pageable=True),
        says="blocking copies {direction} take {share}{rank}.",
        bound="Transfer-bound",
        saves=(0.5, 1.0),
    ),
    Rule(
        id="exposed_copies",
        about=(
            "Copies use pinned memory (Memcpy HtoD (Pinned -> Device), Memcpy DtoH (Device -> Pinned)) while no kernel "
            "runs: they do not block the host, but the kernels behind them wait."
        ),
        trade_off="Lower precision of the copied data, or memory for the next batch.",
        of=(Part.COPY,),
        find=partial(copied, is_pageable=False),
        says="pinned copies {direction} take {share}{rank}.",
        bound="Transfer-bound",
        saves=(0.5, 1.0),
    ),
)
