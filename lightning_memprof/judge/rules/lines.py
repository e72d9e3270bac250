"""Hot lines: functions, loops and Python of the program that take much of a step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, grouped, total
from lightning_memprof.account.ledger.modules import OF_VALUES, READS, ROOT, VIEWS, in_compiled
from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.lines import MIN_LOOKS, Spot, forward_lines, main_spot, source_of
from lightning_memprof.artifacts.series import MODULE_CALL, LineRow
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.fact import PASSES, Fact
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.operators import FAMILIES, spot_remedies
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.judge.rule import Detail, Found, Rule
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_ns, percent

# What is done less often or in another way leaves some of its time; of other work nobody knows.
SAVED: Final = (0.5, 0.95)
SAVED_UNKNOWN: Final = (0.0, 0.5)
# Reading whole tensors leaves next to nothing.
SAVED_READS: Final = (0.8, 1.0)
# Batching the calls of a loop saves their dispatch, and lets an operator use all cores: of calls that compute this
# part, of shorter ones, which are mostly dispatch, up to all.
IN_BATCHES: Final = (0.2, 0.7)
TRAINING_STEP: Final = (Part.FORWARD, Part.FORWARD_HOOK, Part.SELF_LOG)
PARAMETRIZATIONS: Final = ".parametrizations."
# DDP marks ranges of its own work with this; the program does not call them.
OF_STRATEGY: Final = "torch.distributed."
# What torch calls to write a tensor as text, beside the reads of its values.
FORMATS: Final = frozenset({"aten::masked_select", "aten::resolve_conj"})


class _Hot(NamedTuple):
    """Time with a remedy, in modules or around them."""

    in_module: bool
    owner: str
    ns: float
    detail: Detail


def hot_lines(facts: Facts) -> Iterator[Found]:
    """Yield the owner around modules, and the one inside them, whose remedy saves most."""
    if (worst := facts.heaviest(lambda ledger: ledger.ns(*PASSES))) is None:
        return
    rank, ledger = worst
    found = [
        *(_functions(rank, ledger) if facts.is_fit and rank.facts.is_cpu else ()),
        *_loops(rank, ledger, facts.host_ledger(rank) or ledger),
        *_python(rank, ledger),
    ]
    for in_module in (False, True):
        alike = (each for each in found if each.in_module == in_module)
        hot = max(alike, key=lambda each: each.ns * sum(each.detail.saves or ()), default=None)
        if hot is not None:
            line = TimeLine(part=Part.FORWARD, name=hot.owner, ns=hot.ns)
            yield Fact(source=rank, ledger=ledger, lines=(line,)), hot.detail


def _functions(rank: Rank, ledger: TimeLedger) -> Iterator[_Hot]:
    """Yield the functions of the training step that wait, call what has a remedy, or that only the program calls."""
    rows = forward_lines(rank)
    scale = ledger.ns(*TRAINING_STEP) / max(sum(row.ns or 0 for row in rows), 1)
    # Inside an operator the thread sleeps until those that compute its other parts are done.
    outside_operators = total(line for line in ledger.of(*TRAINING_STEP) if not line.operator)
    alike: dict[tuple[str, bool, Remedy], list[LineRow]] = defaultdict(list)
    for row in rows:
        if row.functions[-1] != MODULE_CALL and (remedy := _remedy(row)) is not None:
            alike[row.functions[-1], MODULE_CALL in row.functions, remedy].append(row)
    for (function, in_module, remedy), those in alike.items():
        if sum(row.looks or 0 for row in those) < MIN_LOOKS:
            continue
        sampled, asleep = (
            sum(times) for times in zip(*((row.ns or 0, row.asleep_ns or 0) for row in those), strict=True)
        )
        waits, longest = remedy.id == do.WAIT_OUTSIDE.id, max(those, key=lambda row: row.ns or 0)
        ns = min(scale * sampled, outside_operators) if waits else scale * sampled
        family = _family(ledger, ns) if remedy.id == do.WORK_LESS.id else (remedy,)
        calls = f"; it calls {longest.called}" if longest.called else ""
        sleeps = f"; the training thread sleeps {percent(asleep / sampled)} of this time" if asleep else ""
        detail = Detail(
            says="{owner} waits {share}{rank}." if waits else "",
            measured=f"{format_ns(ns)} of {ledger.length_text}{sleeps}",
            why=f"The longest line: `{source_of(longest)}`{calls}.",
            remedies=tuple(dict.fromkeys(each.filled(owner=function) for each in (*family, do.WORK_LESS))),
            saves=SAVED if family else SAVED_UNKNOWN,
            numbers={"function": function, "place": longest.place, "asleep_share": asleep / max(sampled, 1)},
        )
        yield _Hot(in_module, f"{function} ({longest.place})", ns, detail)


def _remedy(row: LineRow) -> Remedy | None:
    """Return the remedy of a line: of a wait, of what it calls, or that of a function that only the program calls."""
    function = row.functions[-1]
    waits = (row.asleep_ns or 0) >= POLICY.most * (row.ns or 1)
    spot = Spot(function=function, share=1.0, depth=0, called=row.called, inside=row.inside, waits=waits)
    is_helper = len(row.functions) > 1 and MODULE_CALL not in row.functions
    return next(iter((*spot_remedies(spot), *((do.WORK_LESS,) if is_helper else ()))), None)


def _family(ledger: TimeLedger, ns: float) -> tuple[Remedy, ...]:
    """Return the remedy of the family of operators that explains most of a time in the forward, if one does."""
    spent = Counter[Remedy]()
    for family in FAMILIES:
        spent[family.remedy] = round(total(line for line in ledger.of(Part.FORWARD) if family.matches(line.operator)))
    return tuple(remedy for remedy, most in spent.most_common(1) if most >= POLICY.most * ns)


class _Loop(msgspec.Struct, frozen=True, kw_only=True):
    """A module whose forward calls the same operator, or submodule, many times.

    ``lines`` have the calls of the loop, at least ``least`` of each operator; those of ``made`` compute parameters.
    """

    module: str
    repeated: str
    times: float
    least: float
    lines: list[TimeLine]
    made: list[TimeLine]


def _loops(rank: Rank, ledger: TimeLedger, recorded: TimeLedger) -> Iterator[_Hot]:
    """Yield the modules with loops: one batched call does the same arithmetic with the dispatch of one.

    Args:
        rank: the rank.
        ledger: the time of operators.
        recorded: the ledger of the trace, which has the calls also of modules without self time.
    """
    spot, place = _around_modules(rank) if rank.facts.is_cpu else (None, "")
    for loop in (*_submodules(ledger, recorded), *_operators(ledger, recorded)):
        short, work = _in_short_calls(loop.lines, loop.least)
        ns, made = total(loop.made) + short, total(loop.made)
        if not ns or in_compiled(loop.module, rank):
            continue
        # Around modules a line of the program may be the loop.
        line = spot if loop.module == ROOT else None
        is_named = line is not None and line.is_helper
        least, of_work = IN_BATCHES
        computing = f"; computing parameters takes {format_ns(made)} of this time" if made else ""
        detail = Detail(
            says="Python loop: {owner} runs {repeated} {times} times in each forward: {share}{rank}.",
            fields={"repeated": loop.repeated, "times": f"{loop.times:,.0f}"},
            measured=(
                f"{_passes_of(loop.lines)} {format_ns(ns)} of {ledger.length_text}{computing}"
                f"{line.share_text(place) if line else ''}"
            ),
            why="Each small call is dispatched from Python and uses few cores.",
            remedies=(
                *((do.CACHE_PARAMETERS.filled(owner=loop.repeated),) if made >= POLICY.most * ns else ()),
                *(spot_remedies(line) if line else ()),
                do.VECTORIZE.filled(owner=line.function if line and is_named else f"the forward of {loop.module}"),
                do.COMPILE.filled(module=loop.module),
            ),
            saves=(least, 1 - (1 - of_work) * work / ns),
            numbers={"module": loop.module, "repeated": loop.repeated, "times": loop.times},
        )
        yield _Hot(loop.module != ROOT, line.text if line and is_named else loop.module, ns, detail)


def _around_modules(rank: Rank) -> tuple[Spot | None, str]:
    """Return the function with much of the forward, or else of its code outside modules, and what its share is of."""
    rows = forward_lines(rank)
    if (spot := main_spot(rows)) is not None:
        return spot, "the forward"
    return main_spot([row for row in rows if MODULE_CALL not in row.functions]), "the forward outside modules"


def _operators(ledger: TimeLedger, recorded: TimeLedger) -> Iterator[_Loop]:
    """Yield the modules whose forward calls one operator in a loop, those of the slowest operator first."""
    together = grouped(ledger.of(*PASSES))
    calls = _calls(grouped(recorded.of(Part.FORWARD)))
    for line in sorted(together, key=lambda line: -line.ns):
        if line.part != Part.FORWARD or line.module is None or not line.operator:
            continue
        if line.operator in VIEWS or line.operator.startswith(OF_STRATEGY):
            continue
        own = [other for other in together if other.module == line.module]
        times = line.called / max(calls[line.module], 1.0)
        # A loop that reads a value in each turn is one over values.
        if times >= POLICY.loop and _reads(own) < max(line.called, POLICY.reads):
            yield _Loop(
                module=line.module or ROOT,
                repeated=line.operator,
                times=times,
                least=line.called / 2,
                lines=own,
                made=[],
            )


def _submodules(ledger: TimeLedger, recorded: TimeLedger) -> Iterator[_Loop]:
    """Yield the modules whose forward calls one submodule in a loop."""
    calls = _calls(recorded.of(Part.FORWARD))
    for module, count in calls.items():
        parent = module.rpartition(".")[0]
        while parent and not calls[parent]:
            parent = parent.rpartition(".")[0]
        times = count / max(calls[parent], 1.0)
        if module and times >= POLICY.loop:
            within = [line for line in ledger.of(*PASSES) if f"{line.module}.".startswith(f"{module}.")]
            # A parametrization that is evaluated once is not in the loop.
            within = [line for line in within if calls[line.module or ""] >= count]
            # What computes parameters has a remedy of its own, however long a call takes.
            made = [line for line in within if PARAMETRIZATIONS in (line.module or "")]
            yield _Loop(
                module=parent or ROOT,
                repeated=module,
                times=times,
                least=count / 2,
                lines=[line for line in within if line not in made],
                made=made,
            )


def _passes_of(lines: Sequence[TimeLine]) -> str:
    has_backward = any(line.part == Part.BACKWARD for line in lines)
    return "Forward and backward of the loop take" if has_backward else "The loop takes"


def _in_short_calls(lines: Sequence[TimeLine], least: float) -> tuple[float, float]:
    """Return the time of operators that run at least so often in short calls, and of those among them that compute.

    The first includes their share of Python's time.
    """
    operators = [line for line in lines if line.operator]
    looped = [line for line in operators if line.count >= least and line.ns < POLICY.long_ns * line.count]
    calls = sum(line.count for line in operators)
    python = total(lines) - total(operators)
    work = total(line for line in looped if line.ns >= POLICY.parallel_ns * line.count)
    return total(looped) + (python * sum(line.count for line in looped) / calls if calls else 0.0), work


def _calls(lines: Iterable[TimeLine]) -> Counter[str]:
    """Return the calls of each module's forward."""
    found = Counter[str]()
    for line in lines:
        if line.part == Part.FORWARD and line.module is not None and not line.operator:
            found[line.module] += line.count  # type: ignore[assignment]  # a mean per step is a float
    return found


def _reads(lines: Iterable[TimeLine]) -> float:
    """Return the values of tensors that are read one by one."""
    return sum(line.called for line in lines if line.operator in READS)


def _python(rank: Rank, ledger: TimeLedger) -> Iterator[_Hot]:
    """Yield the modules with their time outside operators, and the training step around them."""
    modules: dict[str, list[TimeLine]] = defaultdict(list)
    for line in grouped(ledger.of(Part.FORWARD)):
        modules[line.module or ""].append(line)
    called, rows = sum(line.called for lines in modules.values() for line in lines), forward_lines(rank)
    for module, lines in modules.items():
        reads = _reads(lines) if _reads(lines) >= POLICY.reads else 0.0
        ns = _read_ns(ledger, lines, reads) if reads else _outside_ns(ledger, module, lines)
        # Where Python has most of the time, the longest line is Python's.
        inside = [row for row in rows if (MODULE_CALL in row.functions) == bool(module)]
        spot = main_spot(inside) if ns >= POLICY.most * total(lines) else None
        # In a forward of few operators, a recording explains the remaining time only by a line of the program.
        if called < (1 if spot is not None and spot.place is not None else POLICY.loop):
            continue
        waits = spot is not None and spot.waits
        says = "{owner} waits {share}{rank}." if waits else "Python code in {owner} takes {share}{rank}."
        does = "Python outside operators takes"
        fit = (spot_remedies(spot) or (do.WORK_LESS.filled(owner=spot.function),)) if spot else ()
        remedies = (*fit, do.SELF_LOG_LESS_OFTEN, do.WHOLE_TENSORS)
        if reads:
            says = "Scalar loop: {owner} reads {reads} values one by one: {share}{rank}."
            does, remedies = "The reads, each an operator call and a Python object, take", (do.WHOLE_TENSORS,)
            if {line.operator for line in lines if line.called} >= FORMATS:
                says = "Tensors as text: {owner} formats {reads} tensor values: {share}{rank}."
        record = () if spot else (do.RECORD_PYTHON_STACKS.filled(profiler="ExtendedPyTorchProfiler"),)
        detail = Detail(
            says=says,
            fields={"reads": f"{reads:,.0f}"},
            measured=f"{does} {format_ns(ns)} of {ledger.length_text}{spot.share_text('this time') if spot else ''}",
            remedies=(*remedies, *record),
            saves=SAVED_READS if reads else SAVED,
            numbers={"module": module or None, "reads": reads},
        )
        where = f"the forward of {module}" if module else "training_step"
        yield _Hot(bool(module), spot.text if spot else where, ns, detail)


def _read_ns(ledger: TimeLedger, lines: Iterable[TimeLine], reads: float) -> float:
    """Return the time of operators that read values, of Python around them, and of the GC pauses of their objects."""
    pauses = ledger.of(Part.GC_PAUSES)
    collections = sum(line.count for line in pauses)
    collected = min(reads / (POLICY.collected_after * collections), 1.0) if collections else 0.0
    return total(line for line in lines if line.operator in OF_VALUES) + total(pauses) * collected


def _outside_ns(ledger: TimeLedger, module: str, lines: Iterable[TimeLine]) -> float:
    # Collectives of the strategy around the forward of the model run outside operators, too.
    waits = 0.0 if module else ledger.communicates("collective")
    return max(total(line for line in lines if line.operator == "") - waits, 0.0)


ROWS: Final = (
    Rule(
        id="hot_line",
        about="The code around modules, and the code in modules, whose remedy saves most.",
        when=(
            "On a CPU, lines are sampled in windows; 6 samples are needed. A function counts if the thread mostly "
            "sleeps in it, if it calls code with a known remedy, or if training_step calls it outside modules. A loop "
            "runs an operator (views do not count) or a submodule at least 8 times in each forward, in calls of less "
            "than 0.3 ms. Python code is the time outside operators; if a step reads at least 256 tensor values one by "
            "one (.item(), float(x), print), it is these reads. Loops and Python code need an operator trace."
        ),
        trade_off="None, or older results; less than half is recovered of a function without a known remedy.",
        of=(*PASSES, Part.FORWARD_HOOK, Part.SELF_LOG, Part.GC_PAUSES),
        find=hot_lines,
        says="{owner} takes {share}{rank}.",
        each=True,
        saves=SAVED,
    ),
)
