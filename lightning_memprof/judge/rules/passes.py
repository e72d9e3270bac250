"""Backward passes: gradients that no optimizer uses, gradients of gradients, forwards that run again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, total
from lightning_memprof.account.ledger.modules import ACCUMULATE
from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.events import rank_events
from lightning_memprof.artifacts.manifest import OptimizerFacts, TrainingFacts
from lightning_memprof.artifacts.series import SavedTensorsRow
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.fact import PASSES, Fact
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.rule import Detail, Rule
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_bytes, format_ns, percent

PAIR: Final = 2
# Other modules may need the gradients of a module's inputs, half of its backward.
FROZEN: Final = (0.4, 1.0)


def unused_gradients(_: Facts, fact: Fact) -> Detail | None:
    """Return the backward of modules whose gradients no optimizer uses, or uses only some of.

    Of modules that are in no optimizer, or whose learning rate is 0, 40% to 100% are saved, the lower figure where
    modules before them train. With several optimizers and ``n`` passes per step that all reach all of their parameters:
    one pass of the optimizer with the shortest backward, to ``n - 1`` of the one with the longest. With two passes that
    both compute the gradients of one of two optimizers: 40% to 100% of one of these.
    """
    rank, ledger, training = fact.rank, fact.ledger, fact.rank.training
    if training is None:
        return None
    return _not_optimized(training, ledger) or _of_other_optimizers(rank, training.optimizers, ledger)


def repeated_backward(facts: Facts, fact: Fact) -> Detail | None:
    """Return the part of backward in passes that follow another one without a forward, for the same optimizer."""
    rank = fact.rank
    rows = [row for window in rank.windows for row in window.read(SavedTensorsRow).recorded if row.modules]
    again = [row for row in rows if row.activation_bytes and not any(cells[2] for cells in row.modules.values())]
    optimizers = rank.training.optimizers if rank.training else []
    if not again or len(optimizers) != 1:
        return None
    passes = f"{len(rows) / max(len(rows) - len(again), 1):.2g}"
    return Detail(
        lines=(TimeLine(part=Part.BACKWARD, ns=fact.ns * len(again) / len(rows)),),
        fields={"passes": passes},
        why=f"{len(again)} of {len(rows)} recorded passes follow another one without a forward (retain_graph=True).",
        numbers={"passes": len(rows), "repeated": len(again)},
        evidence=facts.recorded(rank, "saved_tensors"),
    )


def recomputation(facts: Facts, fact: Fact) -> Detail | None:
    """Return the forwards of modules that activation checkpointing runs again in backward."""
    memory = facts.byte_ledgers.get(fact.rank.rank)
    if memory is None or memory.filled is None:
        return None
    peak = f"{format_bytes(memory.peak_bytes)} is {percent(memory.filled)} of the memory"
    return Detail(
        lines=(TimeLine(part=Part.BACKWARD, ns=fact.ledger.recomputed_ns),),
        why=f"The peak of {peak}.",
        is_note=memory.filled > POLICY.ample,
        numbers={"peak_bytes": memory.peak_bytes},
    )


def _not_optimized(training: TrainingFacts, ledger: TimeLedger) -> Detail | None:
    """Return the module that no optimizer changes with the longest backward."""
    modules = [*training.not_optimized, *training.zero_lr]
    path = max(modules, key=lambda module: total(_backward(ledger, [module])), default="")
    lines = _backward(ledger, [path]) if path else ()
    state = "which is in no optimizer" if path in training.not_optimized else "whose learning rate is 0"
    if not lines:
        return None
    return Detail(
        lines=lines,
        says=f"Unused gradients: backward of {{module}}, {state}, takes {{share}}{{rank}}.",
        fields={"module": path},
        why=f"Backward computes the gradients of {path}, and no optimizer uses them.",
        remedies=(do.FREEZE.filled(module=path),),
    )


def _of_other_optimizers(rank: Rank, optimizers: Sequence[OptimizerFacts], ledger: TimeLedger) -> Detail | None:
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


def _to_all(passes: int, optimizers: Sequence[OptimizerFacts], ledger: TimeLedger) -> Detail | None:
    if passes < PAIR:
        return None
    spent = [total(_backward(ledger, optimizer.modules)) for optimizer in optimizers]
    whole, number = max(sum(spent), 1.0), "both" if len(optimizers) == PAIR else f"all {len(optimizers)}"
    parts = (f"{format_ns(ns)} in {', '.join(each.modules)}" for each, ns in zip(optimizers, spent, strict=True))
    return Detail(
        lines=_backward(ledger, [module for optimizer in optimizers for module in optimizer.modules]),
        says="Unused gradients: {passes} backward passes per step reach all optimizers: {share}{rank}.",
        fields={"passes": passes},
        why=(
            f"Each pass computes gradients for {number} optimizers (no detach()), and only one optimizer "
            f"steps after it; backward takes {', '.join(parts)}."
        ),
        remedies=(do.DETACH_PARTS,),
        saves=(min(spent) / passes / whole, max(spent) * (passes - 1) / passes / whole),
    )


def _computed_twice(optimizer: OptimizerFacts, ledger: TimeLedger) -> Detail:
    names = ", ".join(optimizer.modules)
    return Detail(
        lines=_backward(ledger, optimizer.modules),
        says="Unused gradients: both backward passes of each step reach {modules}: {share}{rank}.",
        fields={"modules": names},
        why=f"The optimizer of {names} uses the gradients of one pass only; the other pass needs a detach().",
        remedies=(do.DETACH_PARTS,),
        saves=(FROZEN[0] / PAIR, FROZEN[1] / PAIR),
    )


def _backward(ledger: TimeLedger, modules: Iterable[str]) -> tuple[TimeLine, ...]:
    """Return the lines of backward in modules, with their submodules."""
    prefixes = tuple(f"{module}." for module in modules)
    return tuple(line for line in ledger.of("backward") if f"{line.module}.".startswith(prefixes))


ROWS: Final = (
    Rule(
        id="unused_gradients",
        about=(
            "Backward computes gradients that no optimizer uses: of modules in no optimizer or with a learning rate of "
            "0, or of several optimizers although only one steps after the pass. Needs an operator trace."
        ),
        trade_off="None. Less is recovered if modules before them train, or passes share them.",
        of=(Part.BACKWARD,),
        detail=unused_gradients,
        says="Unused gradients take {share}{rank}.",
        saves=FROZEN,
    ),
    Rule(
        id="repeated_backward",
        about="Backward passes run through the same graph, such as one per loss with retain_graph=True.",
        trade_off="None: the gradients of the sum are the same.",
        of=(Part.BACKWARD,),
        detail=repeated_backward,
        says="Repeated backward: {passes} passes run through one graph; the extra passes take {share}{rank}.",
        remedies=(do.SUM_LOSSES,),
        # The other passes may have a part of the graph of their own.
        saves=(0.4, 1.0),
    ),
    Rule(
        id="recomputation",
        about="Backward runs forwards again; `info` if the activations may not fit. Needs an operator trace.",
        trade_off="Memory for the activations.",
        of=PASSES,
        detail=recomputation,
        says="Activation checkpointing: backward runs forwards again: {share}{rank}.",
        remedies=(do.SAVE_ACTIVATIONS,),
        saves=(0.7, 1.0),
    ),
)
