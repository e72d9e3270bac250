"""Work in many small parts: loops in Python, batches of few samples, gradients that each of several passes averages."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from lightning_memprof.account.ledger.memory import ByteLedger
from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, grouped, total
from lightning_memprof.account.steps.events import Event, rank_events
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.artifacts.series import ThroughputRow
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Finding, Recovery, titled
from lightning_memprof.judge.measures import LOOP, VIEWS
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    CACHE_PARAMETERS,
    COMPILE_LOOP,
    JOIN_BATCHES,
    LARGER_BATCHES,
    REDUCE_LAST,
    STEP_LESS_OFTEN,
    TRAINER_ACCUMULATES,
    VECTORIZE,
    Remedy,
)
from lightning_memprof.judge.rules.compute import PARALLEL_NS
from lightning_memprof.judge.rules.modules import MOSTLY, ROOT, in_compiled, is_wrapped
from lightning_memprof.judge.rules.program.lines import has, of_forward, of_spot
from lightning_memprof.judge.rules.program.passes import ALL_GRADIENTS
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_bytes, format_count, format_ns, percent

# Batching the calls of a loop saves their dispatch, and lets an operator use all cores: of calls of PARALLEL_NS and
# longer this part, of shorter ones, which are mostly dispatch, up to all.
IN_BATCHES: Final = (0.2, 0.7)
# A longer call has work for all cores, and computes for much longer than its dispatch takes.
SHORT_CALL_NS: Final = 300_000
PARAMETRIZATIONS: Final = ".parametrizations."


class _Loop(msgspec.Struct, frozen=True, kw_only=True):
    """A module whose forward calls the same operator, or submodule, many times.

    ``ns`` is the time of its short calls and of Python around them, ``work_ns`` of those among them that compute.
    """

    module: str
    repeated: str
    repeated_ns: float
    times: float
    ns: float
    work_ns: float


def python_loop(facts: Facts) -> Finding | None:
    """Find a forward that runs an operator or a submodule many times in a Python loop.

    Recovers 20% to 100% of the time of the loop's short calls and of Python around them, forward and backward; of
    calls of 0.1 ms and longer, at most 70%. One batched call does the same arithmetic without the Python, dispatch
    and autograd work of each call, which dominates shorter calls. Calls of 0.3 ms or more do not count.
    """
    if (worst := facts.heaviest(lambda ledger: ledger.ns("forward", "backward"))) is None:
        return None
    rank, ledger = worst
    recorded = facts.host_ledger(rank) or ledger
    loops = _loops(ledger, recorded)
    eager = [loop for loop in loops if not in_compiled(loop.module, rank)]
    loop = max(eager, key=lambda loop: (loop.ns, loop.repeated_ns), default=None)
    if loop is None or loop.ns < POLICY.verdict * ledger.step_ns:
        return None
    calls = _calls(recorded.of("forward"))
    anew = {path for path, count in calls.items() if PARAMETRIZATIONS in path and count >= calls[loop.repeated]}
    inside = [line for line in ledger.of("forward", "backward") if f"{line.module}.".startswith(f"{loop.repeated}.")]
    made = total(line for line in inside if line.module in anew)
    at = of_forward(rank) if loop.module == ROOT and rank.facts.is_cpu else None
    where = at.function if at and at.is_helper else f"the forward of {loop.module}"
    least, of_work = IN_BATCHES
    most = loop.ns - (1 - of_work) * loop.work_ns
    worth = Recovery(unit="ns", min=loop.ns * least, max=most, whole=ledger.step_ns)
    return Finding(
        rule="python_loop",
        owner=at.function if at and at.is_helper else "",
        title=titled(
            "Python loop: {module} runs {repeated} {times} times in each forward and takes {share}{rank}.",
            module=loop.module,
            repeated=loop.repeated,
            times=f"{loop.times:,.0f}",
            share=ledger.share_text(loop.ns),
            rank=facts.on_rank(rank),
        ),
        why=(
            f"Forward and backward of the loop take {format_ns(loop.ns)} of {ledger.length_text}"
            f"{f', {format_ns(made)} of it to compute parameters' if made else ''}"
            f"{has(at, 'the forward') if at else ''}. Each small call is dispatched from Python and uses few cores."
        ),
        remedies=(
            *((CACHE_PARAMETERS.filled(owner=loop.repeated),) if made >= MOSTLY * loop.ns else ()),
            *(of_spot(at) if at else ()),
            VECTORIZE.filled(owner=where),
            COMPILE_LOOP,
        ),
        evidence=facts.pulse_and_trace(rank),
        numbers={
            "rank": rank.rank,
            "module": loop.module,
            "repeated": loop.repeated,
            "times": loop.times,
            "loop_ns": loop.ns,
            "duration_ns": ledger.step_ns,
        },
        **worth.parts,
    )


def _loops(ledger: TimeLedger, recorded: TimeLedger) -> Iterator[_Loop]:
    """Yield the modules whose forward calls one operator, or one submodule, at least ``LOOP`` times.

    Args:
        ledger: the time of operators.
        recorded: the ledger of the trace, which has the calls also of modules without self time.
    """
    together = grouped(ledger.of("forward", "backward"))
    calls = _calls(grouped(recorded.of("forward")))
    for line in together:
        if line.part == "forward" and line.module is not None and line.operator and line.operator not in VIEWS:
            times = line.called / max(calls[line.module], 1.0)
            if times >= LOOP:
                own = [other for other in together if other.module == line.module]
                spent, work = _in_short_calls(own, line.called / 2)
                yield _Loop(
                    module=line.module or ROOT,
                    repeated=line.operator,
                    repeated_ns=line.ns,
                    times=times,
                    ns=spent,
                    work_ns=work,
                )
    lines = ledger.of("forward", "backward")
    calls = _calls(recorded.of("forward"))
    for module, count in calls.items():
        parent = module.rpartition(".")[0]
        while parent and not calls[parent]:
            parent = parent.rpartition(".")[0]
        times = count / max(calls[parent], 1.0)
        if module and times >= LOOP:
            # A parametrization that is evaluated once is not in the loop.
            within = [
                line
                for line in lines
                if f"{line.module}.".startswith(f"{module}.") and calls[line.module or ""] >= count
            ]
            # What computes parameters has a remedy of its own, however long a call takes.
            made = [line for line in within if PARAMETRIZATIONS in (line.module or "")]
            spent, work = _in_short_calls([line for line in within if line not in made], count / 2)
            inside = total(made) + spent
            yield _Loop(
                module=parent or ROOT, repeated=module, repeated_ns=inside, times=times, ns=inside, work_ns=work
            )


def _in_short_calls(lines: Sequence[TimeLine], least: float) -> tuple[float, float]:
    """Return the time of operators that run at least so often in short calls, and of those among them that compute.

    The first includes their share of Python's time.
    """
    operators = [line for line in lines if line.operator]
    looped = [line for line in operators if line.count >= least and line.ns < SHORT_CALL_NS * line.count]
    calls = sum(line.count for line in operators)
    python = total(lines) - total(operators)
    work = total(line for line in looped if line.ns >= PARALLEL_NS * line.count)
    return total(looped) + (python * sum(line.count for line in looped) / calls if calls else 0.0), work


def _calls(lines: Iterable[TimeLine]) -> Counter[str]:
    """Return the calls of each module's forward."""
    found = Counter[str]()
    for line in lines:
        if line.part == "forward" and line.module is not None and not line.operator:
            found[line.module] += line.count  # type: ignore[assignment]  # a mean per step is a float
    return found


# More samples are a choice of the optimization, not an oversight; so are more positions, in a batch of sequences. Where
# gradients of several batches accumulate, one batch of all makes the same step.
FEW_SAMPLES: Final = 8
# Python, autograd and the dispatcher take this for each operator that a program calls, on CPUs of 2020 and later. Calls
# of less than PARALLEL_NS compute little in any case, and read parameters, whatever the number of samples.
CALL_NS: Final = 10_000
# More calls of an operator in a module are a loop.
CALLS: Final = 8
# A batch of twice the size pays the fixed part half as often, one of eight times the size an eighth as often.
LARGER_BATCH: Final = (1 / 2, 7 / 8)
TIMES_LARGER: Final = 8


def small_batch(facts: Facts) -> Finding | None:
    """Find steps of few samples that take much time for work that does not depend on their number.

    Recovers 1/2 to 7/8 of that work for the same number of samples, in batches of twice to eight times the size: of the
    optimizer, of the Trainer and callbacks, of operators and Python in forward and backward that take less than 0.1 ms
    per call, and of 10 µs for each call of the others. Where gradients accumulate, without the optimizer, and up to one
    batch instead of all that fit into memory.
    """
    heaviest = facts.heaviest(lambda ledger: ledger.ns("forward", "backward", "optimizer"))
    if heaviest is None or not facts.is_fit:
        return None
    rank, ledger = heaviest
    memory = facts.byte_ledgers.get(rank.rank)
    accumulated = (rank.training.accumulate_grad_batches if rank.training else None) or 1
    joined = _joined(memory, accumulated)
    samples = _samples(rank, with_positions=accumulated == 1)
    if samples is None or samples > FEW_SAMPLES or joined == 1 < accumulated:
        return None
    lines = [line for line in ledger.of("forward", "backward") if line.operator is not None]
    called, calling = sum(min(line.count, CALLS) for line in lines if line.operator), sum(map(_calling, lines))
    # Accumulated batches share the optimizer's step.
    optimizer, around = ledger.ns("optimizer") * (joined == 1), ledger.ns("untracked", "callback")
    fixed = optimizer + around + calling
    if not called or fixed < POLICY.severe * ledger.step_ns:
        return None
    least, most = LARGER_BATCH if joined == 1 else (1 / 2, 1 - 1 / joined)
    worth = Recovery(unit="ns", min=fixed * least, max=fixed * most, whole=ledger.step_ns)
    return Finding(
        rule="small_batch",
        title=titled(
            "Small batch ({samples}): {share} does not depend on the batch size{rank}.",
            samples=format_count(samples, "sample"),
            share=ledger.share_text(fixed),
            rank=facts.on_rank(rank),
        ),
        why=(
            f"Of {ledger.length_text}, "
            f"{f'the optimizer takes {format_ns(optimizer)}, the Trainer' if joined == 1 else 'the Trainer takes'} "
            f"{format_ns(around)}, and calling {called:,.0f} operators {format_ns(calling)}."
            f"{_accumulation(memory, accumulated) if joined > 1 else ''}"
        ),
        remedies=_larger(samples, joined, accumulated // joined),
        evidence=(facts.pulse(rank), *facts.recorded(rank, "throughput")),
        numbers={"rank": rank.rank, "samples": samples, "joined": joined, "fixed_ns": fixed, "called": called},
        **worth.parts,
    )


def _joined(memory: ByteLedger | None, accumulated: int) -> int:
    """Return how many of the batches whose gradients accumulate fit as one; all where the memory is not known."""
    divisors = (count for count in range(accumulated, 1, -1) if accumulated % count == 0)
    return next((count for count in divisors if memory is None or memory.fits(count)), 1)


def _accumulation(memory: ByteLedger | None, accumulated: int) -> str:
    text = f" Gradients of {accumulated} batches accumulate"
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
    return min(calls, CALLS) * (each if each < PARALLEL_NS else CALL_NS)


def _samples(rank: Rank, *, with_positions: bool) -> int | None:
    """Return the median number of samples, or of positions, of the recorded batches."""
    rows = [row for window in rank.windows for row in window.read(ThroughputRow).recorded]
    sizes = [max(row.samples, (row.positions or 0) * with_positions) for row in rows if row.samples]
    return statistics.median_low(sizes) if sizes else None


ALL_REDUCE: Final = "all_reduce"
ADD: Final = "aten::add_"
# Fewer are two optimizers that share a pass, or an epoch whose last batches are too few for a step.
MIN_PASSES: Final = 1.75
# The last all-reduce may wait for the ranks, and fewer of them overlap a pass.
OF_THE_OTHERS: Final = (0.5, 1.0)


def synced_passes(facts: Facts) -> Finding | None:
    """Find gradients that several backward passes accumulate for one optimizer step, and that each pass all-reduces.

    Recovers, of ``n`` passes, half to all of ``n - 1`` of ``n`` parts of the all-reduces that nothing hides, on the
    host.
    """
    if (worst := facts.heaviest(lambda ledger: ledger.communicates("collective"))) is None:
        return None
    rank, ledger = worst
    trace = next((trace for trace in facts.traces if trace.rank == rank.rank and trace.host_ledger), None)
    passes = _passes(rank, trace) if trace is not None and is_wrapped(rank) else 0.0
    spent = total(line for line in ledger.communication if (line.part, line.name) == ("collective", ALL_REDUCE))
    if passes < MIN_PASSES or not spent:
        return None
    least, most = (share * spent * (1 - 1 / passes) for share in OF_THE_OTHERS)
    worth = Recovery(unit="ns", min=least, max=most, whole=ledger.step_ns)
    return Finding(
        rule="synced_passes",
        title=titled(
            "DDP all-reduces in each of {passes} backward passes per optimizer step: {share}{rank}.",
            passes=f"{passes:.0f}",
            share=ledger.share_text(spent),
            rank=facts.on_rank(rank),
        ),
        why=(
            f"All-reduces take {format_ns(spent)} of {ledger.length_text}; the passes accumulate gradients, and the "
            "optimizer needs their average only once."
        ),
        remedies=(REDUCE_LAST, TRAINER_ACCUMULATES.filled(passes=round(passes))),
        evidence=facts.pulse_and_trace(rank),
        numbers={"rank": rank.rank, "passes": passes, "all_reduce_ns": round(spent), "duration_ns": ledger.step_ns},
        **worth.parts,
    )


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
    return added >= ALL_GRADIENTS * parameters * (passes // 2) > 0


def _is(event: Event, owner: str, method: str) -> bool:
    return event.action.startswith(owner) and event.action.endswith(f".{method}")


def _within(span: tuple[int, int], moments: Iterable[int]) -> int:
    return sum(span[0] <= moment < span[1] for moment in moments)
