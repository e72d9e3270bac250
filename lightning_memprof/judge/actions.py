"""What callbacks, hooks, transfers and checkpoints do, with the remedies that fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from lightning_memprof.account.ledger.model import TimeLine, total
from lightning_memprof.account.ledger.modules import READS, VIEWS
from lightning_memprof.account.steps.lines import action_spot
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.fact import Fact
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.operators import spot_remedies
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.judge.rule import Detail
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_bytes, sentence

TRANSFER: Final = ".batch_to_device"
HOOKS: Final = {
    **dict.fromkeys(
        ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"), do.GRADIENTS_AT_ONCE
    ),
    **dict.fromkeys(("train_dataloader", "val_dataloader"), do.BUILD_ONCE),
}
# Parts whose modules and operators are those of an action.
LOOKS_INSIDE: Final = frozenset({"callback", "module_hook", "transfer"})
# copy.deepcopy calls set_ for each tensor.
COPIES: Final = frozenset({"aten::copy_", "aten::clone", "aten::set_"})


def work_of_action(facts: Facts, fact: Fact) -> Detail:
    """Return what an action does, and the remedies that fit this.

    Recorded operators show a loop over an operator, the forward of a module, and collectives of ``self.log``.
    """
    rank, owner = fact.rank, fact.owner
    hook = owner.rpartition(".")[2]
    recorded, calls, part = facts.host_ledger(rank), max(fact.count, 1.0), fact.lines[0].part
    lines = [line for line in recorded.lines if line.name == owner] if recorded and owner else []
    synced = sum(line.count for line in lines if line.part == "rank_wait")
    if part == "self_log" and synced >= POLICY.loop:
        return Detail(why=f"It has {synced:,.0f} collectives per step.", remedies=(do.NO_SYNC,))
    known = HOOKS.get(hook)
    special = (known.filled(owner=owner),) if known is not None else ()
    lines = [line for line in lines if line.part == part in LOOKS_INSIDE]
    reads = max((line.called for line in lines if line.operator in READS), default=0.0) / calls
    if reads >= POLICY.loop and not rank.facts.is_cpu:
        remedies = (do.WHOLE_TENSORS, *special)
        return Detail(why=f"It reads {reads:,.0f} values from the GPU, one by one.", remedies=remedies)
    modules = Counter[str]()
    for line in lines:
        modules[(line.module or "").partition(".")[0]] += round(line.ns)
    module, ns = modules.most_common(1)[0] if modules else ("", 0)
    if module and ns >= POLICY.most * max(total(lines), fact.ns) and part != "transfer":
        remedies = (do.REUSE_OUTPUTS.filled(owner=owner, module=module), *special)
        return Detail(why=f"It runs {module}.", remedies=remedies)
    spot = action_spot(rank, owner)
    fit = spot_remedies(spot) if spot is not None and known is not do.BUILD_ONCE else ()
    does, remedies = _loop_of(rank, lines, calls, owner, in_transfer=part == "transfer")
    mostly = spot.share_text("it", owner).lstrip("; ") if spot is not None and spot.place else ""
    return Detail(why=sentence(does, mostly), remedies=tuple(dict.fromkeys((*remedies, *fit, *special))))


def _loop_of(
    rank: Rank, lines: Sequence[TimeLine], calls: float, owner: str, *, in_transfer: bool
) -> tuple[str, tuple[Remedy, ...]]:
    """Return the operator that an action calls most, or what it copies, and the remedies."""
    loops = [
        line for line in lines if line.operator and line.operator not in VIEWS and line.called >= POLICY.loop * calls
    ]
    loop = max(loops, key=lambda line: line.ns, default=None)
    often = f"{loop.operator} {loop.called / calls:,.0f} times" if loop else ""
    if in_transfer:
        # Other hooks need not run for each batch.
        return f"it calls {often}" if loop else "", (do.WHOLE_BATCH.filled(owner=owner, often=often),) if loop else ()
    makes_copies = loop is not None and loop.operator in COPIES
    copied = _copied(rank, lines, calls) or ("tensors" if makes_copies else "")
    does = " and ".join(filter(None, (f"calls {often}" if loop else "", f"copies {copied}" if copied else "")))
    return f"it {does}" if does else "", (do.COPY_LESS,) if copied else ()


def work_of_transfer(facts: Facts, fact: Fact) -> Detail:
    """Return what the transfer of a batch does: the strategy's own visits each object, a hook is an action."""
    is_cpu = fact.rank.facts.is_cpu
    fields = {"moving": "Converting batches" if is_cpu else "Moving batches to the device"}
    if fact.owner.endswith(TRANSFER):
        remedies = (do.RETURN_TENSORS,) if is_cpu else (do.PIN_MEMORY, do.RETURN_TENSORS)
        return Detail(fields=fields, why="It visits each object of a batch.", remedies=remedies)
    return replace(work_of_action(facts, fact), fields=fields)


def contents_of_checkpoint(facts: Facts, fact: Fact) -> Detail:
    """Return what a checkpoint holds: large hyper-parameters, or more buffers than trained tensors."""
    large = fact.rank.training.large_hyperparameters if fact.rank.training is not None else []
    if large:
        names, quoted = ", ".join(large), ", ".join(f"'{name}'" for name in large)
        why = f"Each one contains the hyper-parameters, {names} among them."
        return Detail(why=why, remedies=(do.NO_HYPERPARAMETERS.filled(names=quoted),))
    ledger = facts.byte_ledgers.get(fact.rank.rank)
    if ledger is None:
        return Detail()
    held, trained = ledger.bytes("buffer"), ledger.bytes("parameter") + ledger.bytes("optimizer_state")
    if held <= trained:
        return Detail()
    sizes = f"{format_bytes(held)} of buffers, {format_bytes(trained)} of parameters and optimizer state"
    return Detail(why=f"The model has {sizes}.", remedies=(do.NO_BUFFERS,))


def _copied(rank: Rank, lines: Sequence[TimeLine], calls: float) -> str:
    """Return ``the model`` if lines copy as many tensors as the optimizers update, as ``copy.deepcopy`` does."""
    optimizers = rank.training.optimizers if rank.training else []
    least = max(sum(optimizer.parameters or 0 for optimizer in optimizers), POLICY.loop)
    copies = Counter[str]()
    for line in lines:
        copies[line.operator or ""] += round(line.called / calls)
    return "the model" if max(copies["aten::clone"], copies["aten::set_"]) >= least else ""
