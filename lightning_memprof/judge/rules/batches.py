"""Batches of few samples."""

from __future__ import annotations

import statistics
from typing import Final

from lightning_memprof.account.ledger.memory import ByteLedger
from lightning_memprof.account.ledger.model import TimeLine
from lightning_memprof.account.parts import Part
from lightning_memprof.artifacts.series import ThroughputRow
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.fact import PASSES, Fact
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.rule import Detail, Rule
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_bytes, format_count, format_ns, percent

# A batch of twice the size pays the fixed part half as often, one of eight times the size an eighth as often.
LARGER_BATCH: Final = (1 / 2, 1 - 1 / POLICY.times_larger)


def small_batches(facts: Facts, fact: Fact) -> Detail | None:
    """Return the work of steps of few samples that does not depend on their number.

    It is that of the optimizer, of the Trainer and callbacks, of short calls of operators and Python in forward and
    backward, and a part of the others. Where gradients accumulate, without the optimizer, and up to one batch instead
    of all that fit into memory.
    """
    rank, ledger = fact.rank, fact.ledger
    memory = facts.byte_ledgers.get(rank.rank)
    accumulated = (rank.training.accumulate_grad_batches if rank.training else None) or 1
    joined = _joined(memory, accumulated)
    samples = _samples(rank, with_positions=accumulated == 1)
    if not facts.is_fit or samples is None or samples > POLICY.few_samples or joined == 1 < accumulated:
        return None
    lines = [line for line in ledger.of(*PASSES) if line.operator is not None]
    called, calling = sum(min(line.count, POLICY.loop) for line in lines if line.operator), sum(map(_calling, lines))
    if not called:
        return None
    # Accumulated batches share the optimizer's step.
    optimizer, around = ledger.ns(Part.OPTIMIZER) * (joined == 1), ledger.ns(Part.UNTRACKED, Part.CALLBACK)
    return Detail(
        lines=(TimeLine(part=Part.FORWARD, ns=optimizer + around + calling),),
        fields={"samples": format_count(samples, "sample")},
        measured=(
            f"In {ledger.length_text}, "
            f"{f'the optimizer takes {format_ns(optimizer)}, the Trainer' if joined == 1 else 'the Trainer takes'} "
            f"{format_ns(around)}, and calling {called:,.0f} operators {format_ns(calling)}"
        ),
        why=_accumulation(memory, accumulated) if joined > 1 else "",
        remedies=(do.JOIN_BATCHES.filled(joined=joined, samples=samples * joined, left=accumulated // joined),)
        if joined > 1
        else (do.LARGER_BATCH.filled(samples=samples * POLICY.times_larger), do.ACCUMULATE),
        saves=LARGER_BATCH if joined == 1 else (1 / 2, 1 - 1 / joined),
        numbers={"samples": samples, "joined": joined, "called": called},
        evidence=facts.recorded(rank, "throughput"),
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
            "Steps of few samples spend much time on work that does not depend on the number of samples: the optimizer "
            "updates all parameters, and Python calls all operators, for 2 samples as for 200."
        ),
        when=(
            "A batch has at most 8 samples (or positions, if it is of sequences). The time is that of the optimizer, "
            "the Trainer and callbacks, of operators and Python that take less than 0.1 ms per call, and 10 µs of each "
            "longer call. Where gradients accumulate, the optimizer does not count, and at least two of the batches "
            "must fit into the memory as one. Needs an operator trace."
        ),
        trade_off="Fewer optimizer steps (as many where gradients accumulate), and memory for larger activations.",
        of=(*PASSES, Part.OPTIMIZER, Part.CALLBACK, Part.UNTRACKED),
        detail=small_batches,
        says="Small batch ({samples}): {share} does not depend on the batch size{rank}.",
        saves=LARGER_BATCH,
        # Each step has some such work, whatever the size of its batch.
        note=POLICY.severe,
    ),
)
