"""Batches of few samples."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Final

from lightning_memprof.account.ledger.memory import ByteLedger
from lightning_memprof.account.ledger.model import TimeLine
from lightning_memprof.account.parts import Part
from lightning_memprof.artifacts.series import ThroughputRow
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import JOIN_BATCHES, LARGER_BATCHES, STEP_LESS_OFTEN, Remedy
from lightning_memprof.judge.rule import PASSES, Detail, Fact, Found, Rule
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_bytes, format_count, format_ns, percent

TIMES_LARGER: Final = 8
# A batch of twice the size pays the fixed part half as often, one of eight times the size an eighth as often.
LARGER_BATCH: Final = (1 / 2, 1 - 1 / TIMES_LARGER)


def small_batches(facts: Facts) -> Iterator[Found]:
    """Return the work of steps of few samples that does not depend on their number.

    It is that of the optimizer, of the Trainer and callbacks, of short calls of operators and Python in forward and
    backward, and a part of the others. Where gradients accumulate, without the optimizer, and up to one batch instead
    of all that fit into memory.
    """
    heaviest = facts.heaviest(lambda ledger: ledger.ns(*PASSES, Part.OPTIMIZER))
    if heaviest is None or not facts.is_fit:
        return
    rank, ledger = heaviest
    memory = facts.byte_ledgers.get(rank.rank)
    accumulated = (rank.training.accumulate_grad_batches if rank.training else None) or 1
    joined = _joined(memory, accumulated)
    samples = _samples(rank, with_positions=accumulated == 1)
    if samples is None or samples > POLICY.few_samples or joined == 1 < accumulated:
        return
    lines = [line for line in ledger.of(*PASSES) if line.operator is not None]
    called, calling = sum(min(line.count, POLICY.loop) for line in lines if line.operator), sum(map(_calling, lines))
    if not called:
        return
    # Accumulated batches share the optimizer's step.
    optimizer, around = ledger.ns(Part.OPTIMIZER) * (joined == 1), ledger.ns(Part.UNTRACKED, Part.CALLBACK)
    detail = Detail(
        fields={"samples": format_count(samples, "sample")},
        measured=(
            f"In {ledger.length_text}, "
            f"{f'the optimizer takes {format_ns(optimizer)}, the Trainer' if joined == 1 else 'the Trainer takes'} "
            f"{format_ns(around)}, and calling {called:,.0f} operators {format_ns(calling)}"
        ),
        why=_accumulation(memory, accumulated) if joined > 1 else "",
        remedies=_larger(samples, joined, accumulated // joined),
        saves=LARGER_BATCH if joined == 1 else (1 / 2, 1 - 1 / joined),
        numbers={"samples": samples, "joined": joined, "called": called},
        evidence=facts.recorded(rank, "throughput"),
    )
    yield (
        Fact(source=rank, ledger=ledger, lines=(TimeLine(part=Part.FORWARD, ns=optimizer + around + calling),)),
        detail,
    )


def _joined(memory: ByteLedger | None, accumulated: int) -> int:
    """Return how many of the batches whose gradients accumulate fit as one; all where the memory is not known."""
    divisors = (count for count in range(accumulated, 1, -1) if accumulated % count == 0)
    return next((count for count in divisors if memory is None or memory.fits(count)), 1)


def _accumulation(memory: ByteLedger | None, accumulated: int) -> str:
    text = f"Gradients of {accumulated} batches accumulate"
    if memory is None or memory.filled is None:
        return f"{text}."
    return f"{text}; the peak of {format_bytes(memory.peak_bytes)} is {percent(memory.filled)} of the memory."


def _larger(samples: int, joined: int, left: int) -> tuple[Remedy, ...]:
    if joined > 1:
        return (JOIN_BATCHES.filled(joined=joined, samples=samples * joined, left=left),)
    return LARGER_BATCHES.filled(samples=samples * TIMES_LARGER), STEP_LESS_OFTEN


def _calling(line: TimeLine) -> float:
    """Return the time of a line that does not depend on the number of samples, without that of a loop."""
    calls = max(line.count, 1)
    each = line.ns / calls
    return min(calls, POLICY.loop) * (each if each < POLICY.parallel_ns else POLICY.call_ns)


def _samples(rank: Rank, *, with_positions: bool) -> int | None:
    """Return the median number of samples, or of positions, of the recorded batches."""
    rows = [row for window in rank.windows for row in window.read(ThroughputRow).recorded]
    sizes = [max(row.samples, (row.positions or 0) * with_positions) for row in rows if row.samples]
    return statistics.median_low(sizes) if sizes else None


ROWS: Final = (
    Rule(
        id="small_batch",
        about=(
            "Steps of few samples spend much time on work that does not depend on the number of samples: the "
            "optimizer updates all parameters, Python calls all operators, and the operators read the "
            "parameters, for 2 samples as for 200."
        ),
        when=(
            "A batch has at most 8 samples (or positions, if it is of sequences). The time is that of the optimizer, "
            "the Trainer and callbacks, of operators and Python in forward and backward that take less than 0.1 ms per "
            "call, and 10 µs of each longer call; each operator counts at most 8 times per module: more calls are a "
            "loop. Where gradients accumulate, positions and the optimizer do not count, and at least two of the "
            "batches must fit into 70% of the memory as one. Needs an operator trace."
        ),
        trade_off=(
            "Fewer optimizer steps for the same number of samples, and memory for larger activations. Where "
            "gradients accumulate, the number of optimizer steps stays the same, and BatchNorm sees more samples."
        ),
        of=(*PASSES, Part.OPTIMIZER, Part.CALLBACK, Part.UNTRACKED),
        find=small_batches,
        says="Small batch ({samples}): {share} does not depend on the batch size{rank}.",
        saves=LARGER_BATCH,
        # Each step has some such work, whatever the size of its batch.
        note=POLICY.severe,
    ),
)
