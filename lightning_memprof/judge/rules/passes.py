"""Backward passes: gradients that no optimizer uses, gradients of gradients, forwards that run again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, total
from lightning_memprof.account.ledger.modules import ACCUMULATE
from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.events import rank_events
from lightning_memprof.artifacts.manifest import OptimizerFacts, TrainingFacts
from lightning_memprof.artifacts.series import SavedTensorsRow
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    DETACH_PARTS,
    FREEZE,
    LAZY_PENALTY,
    NO_CREATE_GRAPH,
    SAVE_ACTIVATIONS,
    SUM_LOSSES,
    TOGGLE_OPTIMIZER,
)
from lightning_memprof.judge.rule import PASSES, Detail, Fact, Found, Rule
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_bytes, format_ns, percent

PAIR: Final = 2
# Other modules may need the gradients of a module's inputs, half of its backward.
FROZEN: Final = (0.4, 1.0)


def unused_gradients(facts: Facts) -> Iterator[Found]:
    """Return the backward of modules whose gradients no optimizer uses, or uses only some of.

    Of modules that are in no optimizer, or whose learning rate is 0, 40% to 100% are saved, the lower figure where
    modules before them train. With several optimizers and ``n`` passes per step that all reach all of their parameters:
    one pass of the optimizer with the shortest backward, to ``n - 1`` of the one with the longest. With two passes that
    both compute the gradients of one of two optimizers: 40% to 100% of one of these.
    """
    if (worst := facts.heaviest(lambda ledger: ledger.ns("backward"))) is None or worst[0].training is None:
        return
    rank, ledger = worst
    training = worst[0].training
    found = _not_optimized(training, ledger) or _of_other_optimizers(rank, training.optimizers, ledger)
    if found is not None:
        lines, detail = found
        yield Fact(source=rank, ledger=ledger, lines=lines), detail


_Unused = tuple[tuple[TimeLine, ...], Detail]


def double_backward(facts: Facts) -> Iterator[Found]:
    """Return the nodes that build or run the graph of gradients."""
    if (worst := facts.heaviest(lambda ledger: ledger.double_backward_ns)) is None:
        return
    rank, ledger = worst
    detail = Detail(
        why="Backward builds a graph of the gradients (create_graph=True), and a second backward runs through it.",
        # A loss of gradients, as in a physics-informed network, needs them; so does a penalty.
        is_note=True,
    )
    yield Fact(source=rank, ledger=ledger, lines=(TimeLine(part=Part.BACKWARD, ns=ledger.double_backward_ns),)), detail


def repeated_backward(facts: Facts) -> Iterator[Found]:
    """Return the part of backward in passes that follow another one without a forward, for the same optimizer."""
    if (worst := facts.heaviest(lambda ledger: ledger.ns(Part.BACKWARD))) is None:
        return
    rank, ledger = worst
    rows = [row for window in rank.windows for row in window.read(SavedTensorsRow).recorded if row.modules]
    again = [row for row in rows if row.activation_bytes and not any(cells[2] for cells in row.modules.values())]
    optimizers = rank.training.optimizers if rank.training else []
    if not again or len(optimizers) != 1:
        return
    spent = ledger.ns(Part.BACKWARD) * len(again) / len(rows)
    passes = f"{len(rows) / max(len(rows) - len(again), 1):.2g}"
    detail = Detail(
        fields={"passes": passes},
        why=f"{len(again)} of {len(rows)} recorded passes follow another one without a forward (retain_graph=True).",
        numbers={"passes": len(rows), "repeated": len(again)},
        evidence=facts.recorded(rank, "saved_tensors"),
    )
    yield Fact(source=rank, ledger=ledger, lines=(TimeLine(part=Part.BACKWARD, ns=spent),)), detail


def recomputation(facts: Facts) -> Iterator[Found]:
    """Return the forwards of modules that activation checkpointing runs again in backward."""
    if (worst := facts.heaviest(lambda ledger: ledger.recomputed_ns)) is None:
        return
    rank, ledger = worst
    memory = facts.byte_ledgers.get(rank.rank)
    if memory is None or memory.filled is None:
        return
    peak = f"{format_bytes(memory.peak_bytes)} is {percent(memory.filled)} of the memory"
    detail = Detail(
        why=f"The peak of {peak}.",
        is_note=memory.filled > POLICY.ample,
        numbers={"peak_bytes": memory.peak_bytes},
    )
    yield Fact(source=rank, ledger=ledger, lines=(TimeLine(part=Part.BACKWARD, ns=ledger.recomputed_ns),)), detail


def _not_optimized(training: TrainingFacts, ledger: TimeLedger) -> _Unused | None:
    """Return the module that no optimizer changes with the longest backward."""
    modules = [*training.not_optimized, *training.zero_lr]
    path = max(modules, key=lambda module: total(_backward(ledger, [module])), default="")
    lines = _backward(ledger, [path]) if path else ()
    is_apart = path in training.not_optimized
    detail = Detail(
        says=(
            "Unused gradients: backward of {module}, which is in no optimizer, takes {share}{rank}."
            if is_apart
            else "Unused gradients: backward of {module}, whose learning rate is 0, takes {share}{rank}."
        ),
        fields={"module": path},
        why=f"Backward computes the gradients of {path}, and no optimizer uses them.",
        remedies=(FREEZE.filled(module=path),),
        saves=FROZEN,
    )
    return (lines, detail) if lines else None


def _of_other_optimizers(rank: Rank, optimizers: Sequence[OptimizerFacts], ledger: TimeLedger) -> _Unused | None:
    """Return the gradients of passes after which the optimizer of other modules steps."""
    recorded = rank_events(rank)
    actions = Counter(
        (event.action.partition("]")[0], event.action.rpartition(".")[2]) for step in recorded for event in step.events
    )
    calls, steps = actions["[Precision", "backward"], actions["[Optimizer", "step"]
    modules = [module for optimizer in optimizers for module in optimizer.modules]
    sizes = [optimizer.parameters or 0 for optimizer in optimizers]
    if len(optimizers) < 2 or not recorded or calls != steps or len(set(modules)) < len(modules) or not all(sizes):
        return None
    passes = calls / len(recorded)
    gradients = sum(line.called for line in ledger.of("backward") if line.operator == ACCUMULATE)
    if gradients >= POLICY.all_gradients * passes * sum(sizes):
        return _to_all(round(passes), optimizers, ledger)
    if not passes == len(optimizers) == PAIR or not _run_in_each_pass(rank, optimizers):
        return None
    # Those of one optimizer are computed twice: the other one's parameters are frozen in its pass.
    twice = [index for index, size in enumerate(sizes) if _is_about(gradients - sum(sizes), size)]
    return _computed_twice(optimizers[twice[0]], ledger) if len(twice) == 1 else None


def _is_about(gradients: float, parameters: int) -> bool:
    return POLICY.all_gradients * parameters <= gradients <= parameters / POLICY.all_gradients


def _run_in_each_pass(rank: Rank, optimizers: Sequence[OptimizerFacts]) -> bool:
    """Return whether each recorded backward begins with saved activations of all optimizers' modules."""
    rows = [row.modules for window in rank.windows for row in window.read(SavedTensorsRow).recorded if row.modules]
    saved = (any((row.get(path) or (0, 0))[1] for path in each.modules) for row in rows for each in optimizers)
    return bool(rows) and all(saved)


def _to_all(passes: int, optimizers: Sequence[OptimizerFacts], ledger: TimeLedger) -> _Unused | None:
    if passes < PAIR:
        return None
    spent = [total(_backward(ledger, optimizer.modules)) for optimizer in optimizers]
    whole, number = max(sum(spent), 1.0), "both" if len(optimizers) == PAIR else f"all {len(optimizers)}"
    parts = (f"{format_ns(ns)} in {', '.join(each.modules)}" for each, ns in zip(optimizers, spent, strict=True))
    detail = Detail(
        says="Unused gradients: {passes} backward passes per step reach all optimizers: {share}{rank}.",
        fields={"passes": passes},
        why=(
            f"Each pass computes gradients for {number} optimizers (no detach()), and only one optimizer "
            f"steps after it; backward takes {', '.join(parts)}."
        ),
        remedies=(DETACH_PARTS, TOGGLE_OPTIMIZER),
        saves=(min(spent) / passes / whole, max(spent) * (passes - 1) / passes / whole),
    )
    return _backward(ledger, [module for optimizer in optimizers for module in optimizer.modules]), detail


def _computed_twice(optimizer: OptimizerFacts, ledger: TimeLedger) -> _Unused:
    lines, names = _backward(ledger, optimizer.modules), ", ".join(optimizer.modules)
    detail = Detail(
        says="Unused gradients: both backward passes of each step reach {modules}: {share}{rank}.",
        fields={"modules": names},
        why=f"The optimizer of {names} uses the gradients of one pass only; the other pass needs a detach().",
        remedies=(DETACH_PARTS, TOGGLE_OPTIMIZER),
        saves=(FROZEN[0] / PAIR, FROZEN[1] / PAIR),
    )
    return lines, detail


def _backward(ledger: TimeLedger, modules: Iterable[str]) -> tuple[TimeLine, ...]:
    """Return the lines of backward in modules, with their submodules."""
    prefixes = tuple(f"{module}." for module in modules)
    return tuple(line for line in ledger.of("backward") if f"{line.module}.".startswith(prefixes))


ROWS: Final = (
    Rule(
        id="unused_gradients",
        about=(
            "Backward computes gradients that no optimizer uses: of modules that are in no optimizer or have a "
            "learning rate of 0, of several optimizers although only one steps after the pass, or of one part in "
            "the passes of two optimizers. Needs an operator trace, and optimizers that share no module."
        ),
        trade_off="None. Less is recovered if modules before them train, or passes share them.",
        of=(Part.BACKWARD,),
        find=unused_gradients,
        says="Unused gradients take {share}{rank}.",
        saves=FROZEN,
    ),
    Rule(
        id="double_backward",
        about=(
            "Each recorded step builds a graph of gradients (create_graph=True) and runs it. Always `info`: a loss of "
            "derivatives, as in a physics-informed network, needs it. Needs an operator trace of a CPU."
        ),
        trade_off="A gradient penalty is applied less often.",
        of=PASSES,
        find=double_backward,
        says="Double backward: gradients of gradients take {share}{rank}.",
        remedies=(LAZY_PENALTY, NO_CREATE_GRAPH),
        saves=(1 / 2, 15 / 16),
    ),
    Rule(
        id="repeated_backward",
        about=(
            "Several backward passes run through the same graph for one optimizer, such as one per loss with "
            "retain_graph=True. Only the passes after the first one count. Needs the series saved_tensors."
        ),
        trade_off="None: the gradients of the sum are the same.",
        of=(Part.BACKWARD,),
        find=repeated_backward,
        says="Repeated backward: {passes} passes run through one graph; the extra passes take {share}{rank}.",
        remedies=(SUM_LOSSES,),
        # The other passes may have a part of the graph of their own.
        saves=(0.4, 1.0),
    ),
    Rule(
        id="recomputation",
        about=(
            "Activation checkpointing runs forwards of modules again in backward. `info` if the peak exceeds a quarter "
            "of the memory: the activations may not fit. Needs an operator trace."
        ),
        trade_off="Memory for the activations.",
        of=PASSES,
        find=recomputation,
        says="Activation checkpointing: backward runs forwards again: {share}{rank}.",
        remedies=(SAVE_ACTIVATIONS,),
        saves=(0.7, 1.0),
    ),
)
