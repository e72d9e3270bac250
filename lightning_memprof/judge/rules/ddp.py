"""Needless traffic of DistributedDataParallel: constant buffers, and gradients of each of several passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from msgspec.structs import replace

from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.events import Event, rank_events
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import OWN_BUFFERS, PLAIN_ATTRIBUTE, REDUCE_LAST, TRAINER_ACCUMULATES
from lightning_memprof.judge.rule import PASSES, Detail, Fact, Found, Rule
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_bytes

BROADCAST: Final = "broadcast"
IN_FORWARD: Final = "c10d::broadcast_"
WRAPPER: Final = "DDP"
# What training changes has to be sent: the statistics of BatchNorm.
STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")


def buffer_broadcast(facts: Facts) -> Iterator[Found]:
    """Return the broadcast of constant buffers before each forward, on the host, where nothing hides it."""
    if (worst := facts.heaviest(lambda ledger: ledger.communicates("collective"))) is None:
        return
    rank, ledger = worst
    recorded = facts.host_ledger(rank)
    calls = sum(line.count for line in recorded.of("forward") if line.operator == IN_FORWARD) if recorded else 0.0
    buffers = rank.training.largest_buffers if rank.training else []
    constant = [buffer for buffer in buffers if not buffer.name.endswith(STATISTICS)]
    sent = sum(buffer.bytes for buffer in constant)
    sends = [line for line in ledger.communication if line.part == "collective" and line.name == BROADCAST]
    if not calls or not sends or sent < POLICY.sent_bytes or not is_wrapped(rank):
        return
    part = sent / sum(buffer.bytes for buffer in buffers)
    detail = Detail(
        fields={"buffer": constant[0].name},
        why=(
            f"DistributedDataParallel sends {format_bytes(sent)} of buffers that do not change, mostly "
            f"{constant[0].name}, from rank 0 before each forward."
        ),
        numbers={"buffers": {buffer.name: buffer.bytes for buffer in buffers}},
    )
    lines = tuple(replace(line, ns=part * line.ns, count=0.0) for line in sends)
    yield Fact(source=rank, ledger=ledger, lines=lines), detail


def is_wrapped(rank: Rank) -> bool:
    """Return whether DistributedDataParallel wraps the model."""
    return (rank.facts.strategy or "").startswith(WRAPPER)


ALL_REDUCE: Final = "all_reduce"
ADD: Final = "aten::add_"
# The last all-reduce may wait for the ranks, and fewer of them overlap a pass.
OF_THE_OTHERS: Final = (0.5, 1.0)


def synced_passes(facts: Facts) -> Iterator[Found]:
    """Return the all-reduces of several backward passes that accumulate gradients for one optimizer step."""
    if (worst := facts.heaviest(lambda ledger: ledger.communicates("collective"))) is None:
        return
    rank, ledger = worst
    trace = next((trace for trace in facts.traces if trace.rank == rank.rank and trace.host_ledger), None)
    passes = _passes(rank, trace) if trace is not None and is_wrapped(rank) else 0.0
    reduces = [line for line in ledger.communication if (line.part, line.name) == ("collective", ALL_REDUCE)]
    if passes < POLICY.passes or not reduces:
        return
    detail = Detail(
        fields={"passes": f"{passes:.0f}"},
        why="The passes accumulate gradients, and the optimizer needs their average only once.",
        remedies=(REDUCE_LAST, TRAINER_ACCUMULATES.filled(passes=round(passes))),
        saves=(OF_THE_OTHERS[0] * (1 - 1 / passes), OF_THE_OTHERS[1] * (1 - 1 / passes)),
        numbers={"passes": passes},
    )
    yield Fact(source=rank, ledger=ledger, lines=tuple(reduces)), detail


def _passes(rank: Rank, trace: TraceReport) -> float:
    """Return the backward passes per optimizer step, if the recorded ones accumulate and each all-reduces; else 0."""
    steps = [
        step for step in rank_events(rank) if trace.start_ns <= step.start_ns + step.duration_ns / 2 < trace.end_ns
    ]
    events = [(step.start_ns + event.offset_ns, event) for step in steps for event in step.events]
    passes = [(at, at + event.duration_ns) for at, event in events if _is(event, "[Precision]", "backward")]
    updates = [(at, at + event.duration_ns) for at, event in events if _is(event, "[Optimizer]", "step")]
    reduced = [call.start_ns for call in trace.arrivals if (call.name, call.device) == (ALL_REDUCE, "host")]
    # An optimizer that evaluates a closure several times needs each of its gradients.
    is_closure = any(_within(update, [start for start, _ in passes]) > 1 for update in updates)
    counted = [row for row in rank.pulse if row.step is not None and row.global_step is not None]
    if len(passes) < 2 or is_closure or not all(_within(each, reduced) for each in passes) or not counted:
        return 0.0
    first, last = counted[0], counted[-1]
    optimized = (last.global_step or 0) - (first.global_step or 0)
    batches = (last.step or 0) - (first.step or 0)
    if not optimized or not _accumulate(rank, trace, len(passes)):
        return 0.0
    return len(passes) / len(steps) * batches / optimized


def _accumulate(rank: Rank, trace: TraceReport, passes: int) -> bool:
    """Return whether gradients are added to others: of passes in a row, in every second one at least."""
    ledger, training = trace.host_ledger, rank.training
    if ledger is None or training is None:
        return False
    per_step = sum(line.count for line in ledger.of("backward") if line.operator == ADD and not line.module)
    added = per_step * ledger.steps
    parameters = sum(optimizer.parameters or 0 for optimizer in training.optimizers)
    return added >= POLICY.all_gradients * parameters * (passes // 2) > 0


def _is(event: Event, owner: str, method: str) -> bool:
    return event.action.startswith(owner) and event.action.endswith(f".{method}")


def _within(span: tuple[int, int], moments: Iterable[int]) -> int:
    return sum(span[0] <= moment < span[1] for moment in moments)


ROWS: Final = (
    Rule(
        id="buffer_broadcast",
        about=(
            "DistributedDataParallel sends buffers of 1 MiB or more to all ranks before each forward, and no operator "
            "hides it. Statistics of BatchNorm, which training changes, do not count. Needs an operator trace."
        ),
        trade_off="The ranks' buffers may differ.",
        of=(*PASSES, Part.OPTIMIZER, Part.RANK_WAIT, Part.UNTRACKED),
        find=buffer_broadcast,
        says="The constant buffer {buffer} is broadcast to all ranks in each step: {share}{rank}.",
        remedies=(OWN_BUFFERS, PLAIN_ATTRIBUTE),
        # Another collective of the step may wait for the same rank instead.
        saves=(0.5, 1.0),
    ),
    Rule(
        id="synced_passes",
        about=(
            "Several backward passes accumulate gradients for one optimizer step, and DistributedDataParallel averages "
            "them in each pass. The optimizer needs the average once: the sum of averages is the average of sums."
        ),
        when=(
            "With an operator trace, on the host (gloo): every backward pass of a window has an all-reduce, gradients "
            "are added to those of the pass before, and the run has at least 1.75 backward passes per optimizer step. "
            "Not if the optimizer evaluates a closure several times, as LBFGS does."
        ),
        trade_off="None; of n passes per step, (n - 1) / n of this time is recovered.",
        of=(*PASSES, Part.OPTIMIZER, Part.RANK_WAIT, Part.UNTRACKED),
        find=synced_passes,
        says="DDP all-reduces in each of {passes} backward passes per optimizer step: {share}{rank}.",
        saves=OF_THE_OTHERS,
    ),
)
