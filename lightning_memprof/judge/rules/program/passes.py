"""Backward passes: gradients that no optimizer uses, gradients of gradients, forwards that run again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from lightning_memprof.account.ledger.model import TimeLedger, total
from lightning_memprof.account.steps.events import rank_events
from lightning_memprof.artifacts.manifest import OptimizerFacts, TrainingFacts
from lightning_memprof.artifacts.series import SavedTensorsRow
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Finding, Recovery, Severity
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_bytes, format_ns, percent

ACCUMULATE: Final = "torch::autograd::AccumulateGrad"
# Of the gradients that all passes of a step could compute: parameters that a pass does not need are missing.
ALL_GRADIENTS: Final = 0.95
PAIR: Final = 2
DETACH: Final = "Cut the graph with detach() where a loss trains one part only: discriminator(generated.detach())."
TOGGLE: Final = "Or train one part at a time: self.toggle_optimizer(optimizer), self.untoggle_optimizer(optimizer)."
# Other modules may need the gradients of a module's inputs, half of its backward.
FROZEN: Final = (0.4, 1.0)


class _Unused(msgspec.Struct, frozen=True, kw_only=True):
    """Gradients that no optimizer uses: the texts of the finding, and the nanoseconds per step that they cost."""

    title: str
    why: str
    remedies: tuple[str, ...]
    min: float
    max: float


def unused_gradients(facts: Facts) -> Finding | None:
    """Find backward passes that compute gradients which no optimizer uses.

    Of modules that are in no optimizer, or whose learning rate is 0: recovers 40% to 100% of their backward, the lower
    figure where modules before them train. With several optimizers and ``n`` passes per step that all reach all of
    their parameters: one pass of the optimizer with the shortest backward, to ``n - 1`` of the one with the longest.
    With two passes that both compute the gradients of one of two optimizers: 40% to 100% of one of these.
    """
    if (worst := facts.heaviest(lambda ledger: ledger.ns("backward"))) is None or worst[0].training is None:
        return None
    rank, ledger = worst
    training = worst[0].training
    unused = _not_optimized(training, ledger) or _of_other_optimizers(rank, training.optimizers, ledger)
    if unused is None:
        return None
    worth = Recovery(unit="ns", min=unused.min, max=unused.max, whole=ledger.step_ns)
    if worth.share < POLICY.note:
        return None
    return Finding(
        rule="unused_gradients",
        title=f"Unused gradients: {unused.title}{facts.on_rank(rank)}.",
        why=f"{unused.why} of {ledger.length_text}.",
        remedies=unused.remedies,
        evidence=facts.pulse_and_trace(rank),
        numbers={"rank": rank.rank, "backward_ns": ledger.ns("backward"), "duration_ns": ledger.step_ns},
        **worth.parts,
    )


# Of a penalty in every 16th step a sixteenth remains; in every second one half.
LESS_OFTEN: Final = (1 / 2, 15 / 16)
LAZY: Final = "Apply the gradient penalty in every 16th step, with 16 times its weight (lazy regularization)."
NO_GRAPH: Final = "Remove create_graph=True where nothing differentiates the gradients."


def double_backward(facts: Facts) -> Finding | None:
    """Find gradients of gradients in each step: a penalty on gradients, or a graph of them that nothing uses.

    Recovers half of the nodes that build or run the graph of gradients, to 15/16 of them. Lost: a penalty applies less
    often.
    """
    if (worst := facts.heaviest(lambda ledger: ledger.double_backward_ns)) is None:
        return None
    rank, ledger = worst
    ns = ledger.double_backward_ns
    worth = Recovery(unit="ns", min=ns * LESS_OFTEN[0], max=ns * LESS_OFTEN[1], whole=ledger.step_ns)
    if worth.share < POLICY.note:
        return None
    share = ledger.share_text(ns)
    return Finding(
        rule="double_backward",
        title=f"Double backward: gradients of gradients take {share}{facts.on_rank(rank)}.",
        why=(
            f"{format_ns(ns)} of {ledger.length_text}: backward builds a graph of the gradients "
            "(create_graph=True), and a second backward runs through it."
        ),
        remedies=(LAZY, NO_GRAPH),
        evidence=facts.pulse_and_trace(rank),
        numbers={"rank": rank.rank, "double_backward_ns": round(ns), "duration_ns": round(ledger.step_ns)},
        **worth.parts,
    )


# Of the peak: what the memory can hold is four times as much, so that activations fit that checkpointing does not save.
AMPLE: Final = 0.25
# Saving activations takes some time, too.
SAVED: Final = (0.7, 1.0)
NO_CHECKPOINTS: Final = (
    "Save the activations: call the modules without torch.utils.checkpoint (gradient_checkpointing=False).",
    "Checkpoint fewer modules, such as every second one.",
)


def recomputation(facts: Facts) -> Finding | None:
    """Find activation checkpointing, which runs forwards of modules again in backward, where memory is ample.

    Recovers 70% to all of these forwards. Lost: memory for the activations that they save then.
    """
    if (worst := facts.heaviest(lambda ledger: ledger.recomputed_ns)) is None:
        return None
    rank, ledger = worst
    memory, ns = facts.byte_ledgers.get(rank.rank), ledger.recomputed_ns
    worth = Recovery(unit="ns", min=ns * SAVED[0], max=ns * SAVED[1], whole=ledger.step_ns)
    if worth.share < POLICY.note or memory is None or memory.filled is None:
        return None
    limit = f"{format_bytes(memory.peak_bytes)} is {percent(memory.filled)} of what {memory.place} can hold"
    return Finding(
        rule="recomputation",
        severity=worth.severity if memory.filled <= AMPLE else Severity.INFO,
        title=(
            f"Activation checkpointing: backward runs forwards again, {ledger.share_text(ns)}{facts.on_rank(rank)}."
        ),
        why=f"Forwards of modules in backward take {format_ns(ns)} of {ledger.length_text}. The peak of {limit}.",
        remedies=NO_CHECKPOINTS,
        evidence=facts.pulse_and_trace(rank),
        numbers={"rank": rank.rank, "recomputed_ns": round(ns), "peak_bytes": memory.peak_bytes},
        weight=worth.share,
        recovers=worth,
    )


def _not_optimized(training: TrainingFacts, ledger: TimeLedger) -> _Unused | None:
    """Return the module that no optimizer changes with the longest backward."""
    modules = [*training.not_optimized, *training.zero_lr]
    path, ns = max(((path, _backward(ledger, [path])) for path in modules), key=lambda pair: pair[1], default=("", 0.0))
    if not ns:
        return None
    freeze = f"self.{path}.requires_grad_(False)"
    cause = (
        "which is in no optimizer"
        if path in training.not_optimized
        else "whose learning rate is 0 when training starts"
    )
    return _Unused(
        title=f"backward computes those of {path}, {cause}",
        why=f"Backward of {path} takes {format_ns(ns)}",
        remedies=(f"Freeze it: {freeze}; where nothing before it trains, call it under torch.no_grad().",),
        min=ns * FROZEN[0],
        max=ns * FROZEN[1],
    )


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
    if gradients >= ALL_GRADIENTS * passes * sum(sizes):
        return _to_all(round(passes), optimizers, ledger)
    if not passes == len(optimizers) == PAIR or not _run_in_each_pass(rank, optimizers):
        return None
    # Those of one optimizer are computed twice: the other one's parameters are frozen in its pass.
    twice = [index for index, size in enumerate(sizes) if _is_about(gradients - sum(sizes), size)]
    return _computed_twice(optimizers[twice[0]], ledger) if len(twice) == 1 else None


def _is_about(gradients: float, parameters: int) -> bool:
    return ALL_GRADIENTS * parameters <= gradients <= parameters / ALL_GRADIENTS


def _run_in_each_pass(rank: Rank, optimizers: Sequence[OptimizerFacts]) -> bool:
    """Return whether each recorded backward begins with saved activations of all optimizers' modules."""
    rows = [row.modules for window in rank.windows for row in window.read(SavedTensorsRow).recorded if row.modules]
    saved = (any((row.get(path) or (0, 0))[1] for path in each.modules) for row in rows for each in optimizers)
    return bool(rows) and all(saved)


def _to_all(passes: int, optimizers: Sequence[OptimizerFacts], ledger: TimeLedger) -> _Unused | None:
    if passes < PAIR:
        return None
    spent = [_backward(ledger, optimizer.modules) for optimizer in optimizers]
    parts = (f"{', '.join(each.modules)} {format_ns(ns)}" for each, ns in zip(optimizers, spent, strict=True))
    return _Unused(
        title=(f"each of {passes} backward passes per step reaches all {len(optimizers)} optimizers, without detach()"),
        why=f"One optimizer steps after each pass and uses its own gradients only; backward takes {', '.join(parts)}",
        remedies=(DETACH, TOGGLE),
        min=min(spent) / passes,
        max=max(spent) * (passes - 1) / passes,
    )


def _computed_twice(optimizer: OptimizerFacts, ledger: TimeLedger) -> _Unused:
    ns, names = _backward(ledger, optimizer.modules), ", ".join(optimizer.modules)
    return _Unused(
        title=f"both backward passes of each step reach {names}, without detach()",
        why=f"Its optimizer uses the gradients of one pass; both take {format_ns(ns)}",
        remedies=(DETACH, TOGGLE),
        min=ns / PAIR * FROZEN[0],
        max=ns / PAIR,
    )


def _backward(ledger: TimeLedger, modules: Iterable[str]) -> float:
    """Return the time of backward in modules, with their submodules."""
    prefixes = tuple(f"{module}." for module in modules)
    return total(line for line in ledger.of("backward") if f"{line.module}.".startswith(prefixes))
