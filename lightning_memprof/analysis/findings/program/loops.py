"""Loops over operators and submodules in Python."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

from lightning_memprof.analysis.findings.measures import LOOP, VIEWS
from lightning_memprof.analysis.findings.model import Facts, Finding, Recovery
from lightning_memprof.analysis.findings.modules import MOSTLY, ROOT, in_compiled
from lightning_memprof.analysis.findings.program.lines import has, of_forward, of_spot
from lightning_memprof.analysis.ledger.model import grouped, total
from lightning_memprof.units import format_ns

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from lightning_memprof.analysis.ledger.model import TimeLedger, TimeLine

# Batching the calls of a loop saves their dispatch, and lets an operator use all cores.
IN_BATCHES: Final = (0.2, 0.7)
NOTABLE_LOOP: Final = 0.10
# A longer call has work for all cores, and computes for much longer than its dispatch takes.
SHORT_CALL_NS: Final = 300_000
PARAMETRIZATIONS: Final = ".parametrizations."
CACHED: Final = "Compute the parameters of {module} once: with torch.nn.utils.parametrize.cached(): around the loop."


class _Loop(msgspec.Struct, frozen=True, kw_only=True):
    """A module whose forward calls the same operator, or submodule, many times."""

    module: str
    repeated: str
    repeated_ns: float
    times: float
    ns: float


def python_loop(facts: Facts) -> Finding | None:
    """Find a forward that runs an operator or a submodule many times in a Python loop.

    Recovers 20% to 70% of the time of the loop's short calls, forward and backward: one batched call has the same
    arithmetic without the dispatch of each. Calls of 0.3 ms or more count nothing.
    """
    if (worst := facts.heaviest(lambda ledger: ledger.ns("forward", "backward"))) is None:
        return None
    rank, ledger = worst
    recorded = facts.host_ledger(rank) or ledger
    loops = _loops(ledger, recorded)
    eager = [loop for loop in loops if not in_compiled(loop.module, rank)]
    loop = max(eager, key=lambda loop: (loop.ns, loop.repeated_ns), default=None)
    if loop is None or loop.ns < NOTABLE_LOOP * ledger.running_ns:
        return None
    calls = _calls(recorded.of("forward"))
    anew = {path for path, count in calls.items() if PARAMETRIZATIONS in path and count >= calls[loop.repeated]}
    inside = [line for line in ledger.of("forward", "backward") if f"{line.module}.".startswith(f"{loop.repeated}.")]
    made = total(line for line in inside if line.module in anew)
    at = of_forward(rank) if loop.module == ROOT and rank.facts.is_cpu else None
    where = at.function if at and at.is_helper else f"the forward of {loop.module}"
    worth = Recovery(unit="ns", min=loop.ns * IN_BATCHES[0], max=loop.ns * IN_BATCHES[1], whole=ledger.running_ns)
    return Finding(
        rule="python_loop",
        sentence=(
            f"Python loop: {loop.module} runs {loop.repeated} {loop.times:,.0f} times in each forward and takes "
            f"{ledger.share_text(loop.ns)}{has(at, 'the forward') if at else ''}{facts.on_rank(rank)}."
        ),
        why=(
            f"Forward and backward of the loop take {format_ns(loop.ns)} of {ledger.length_text}"
            f"{f', {format_ns(made)} of it to compute parameters' if made else ''}; each small call is dispatched "
            "from Python and uses few cores."
        ),
        next_steps=(
            *((CACHED.format(module=loop.repeated),) if made >= MOSTLY * loop.ns else ()),
            *(of_spot(at) if at else ()),
            (
                f"Vectorize the loop in {where}: one batched operator (bmm, einsum, scaled_dot_product_attention) "
                "on all slices."
            ),
            "Compile it, so that the loop becomes a few fused kernels: torch.compile(module).",
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
                spent = _in_short_calls(own, line.called / 2)
                yield _Loop(
                    module=line.module or ROOT, repeated=line.operator, repeated_ns=line.ns, times=times, ns=spent
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
            inside = total(made) + _in_short_calls([line for line in within if line not in made], count / 2)
            yield _Loop(module=parent or ROOT, repeated=module, repeated_ns=inside, times=times, ns=inside)


def _in_short_calls(lines: Sequence[TimeLine], least: float) -> float:
    """Return the time of operators that run at least so often in short calls, with their part of Python's time."""
    operators = [line for line in lines if line.operator]
    looped = [line for line in operators if line.count >= least and line.ns < SHORT_CALL_NS * line.count]
    calls = sum(line.count for line in operators)
    python = total(lines) - total(operators)
    return total(looped) + (python * sum(line.count for line in looped) / calls if calls else 0.0)


def _calls(lines: Iterable[TimeLine]) -> Counter[str]:
    """Return the calls of each module's forward."""
    found = Counter[str]()
    for line in lines:
        if line.part == "forward" and line.module is not None and not line.operator:
            found[line.module] += line.count  # type: ignore[assignment]  # a mean per step is a float
    return found
