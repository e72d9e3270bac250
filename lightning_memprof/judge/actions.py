"""What callbacks, hooks, transfers and checkpoints do, with the remedies that fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from lightning_memprof.account.ledger.model import TimeLine, total
from lightning_memprof.account.ledger.modules import READS, VIEWS
from lightning_memprof.account.steps.lines import action_spot
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.operators import spot_remedies
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    BUILD_ONCE,
    COPY_LESS,
    GRADIENTS_AT_ONCE,
    LEAVE_OUT,
    NO_BUFFERS,
    NO_SYNC,
    ON_GPU,
    PIN_MEMORY,
    READ_ONE_VALUE,
    REFRESH_LESS_OFTEN,
    RETURN_TENSORS,
    REUSE_OUTPUTS,
    SCHEDULE_ONCE,
    WHOLE_BATCH,
    Remedy,
)
from lightning_memprof.judge.rule import Detail, Fact
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_bytes

TRANSFER: Final = ".batch_to_device"
BEFORE_TRANSFER: Final = ".on_before_batch_transfer"
# By the hook, and by the class of a callback.
HOOKS: Final = {
    **dict.fromkeys(
        ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"), GRADIENTS_AT_ONCE
    ),
    **dict.fromkeys(("train_dataloader", "val_dataloader"), BUILD_ONCE),
    "lr_scheduler_step": SCHEDULE_ONCE,
}
PROGRESS_BARS: Final = ("RichProgressBar", "TQDMProgressBar")
# Parts whose modules and operators are those of an action.
LOOKS_INSIDE: Final = frozenset({"callback", "module_hook", "transfer"})
# copy.deepcopy calls set_ for each tensor.
COPIES: Final = frozenset({"aten::copy_", "aten::clone", "aten::set_"})


def work_of_action(facts: Facts, fact: Fact) -> Detail:
    """Return what an action does, and the remedies that fit this.

    Recorded operators show a loop over an operator, the forward of a module, and collectives of ``self.log``.
    """
    rank, owner = fact.rank, fact.owner
    place, _, hook = owner.rpartition(".")
    recorded, calls, part = facts.host_ledger(rank), max(fact.count, 1.0), fact.lines[0].part
    lines = [line for line in recorded.lines if line.name == owner] if recorded and owner else []
    synced = sum(line.count for line in lines if line.part == "rank_wait")
    if part == "self_log" and synced >= POLICY.loop:
        return Detail(why=f"It has {synced:,.0f} collectives per step.", remedies=(NO_SYNC,))
    known = HOOKS.get(hook) or (REFRESH_LESS_OFTEN if place in PROGRESS_BARS else None)
    special = (known.filled(owner=owner, object=place),) if known is not None else ()
    lines = [line for line in lines if line.part == part in LOOKS_INSIDE]
    reads = max((line.called for line in lines if line.operator in READS), default=0.0) / calls
    if reads >= POLICY.loop and not rank.facts.is_cpu:
        remedies = (READ_ONE_VALUE.filled(owner=owner), *special)
        return Detail(why=f"It reads {reads:,.0f} values from the GPU, one by one.", remedies=remedies)
    modules = Counter[str]()
    for line in lines:
        modules[(line.module or "").partition(".")[0]] += round(line.ns)
    module, ns = modules.most_common(1)[0] if modules else ("", 0)
    if module and ns >= POLICY.most * max(total(lines), fact.ns) and part != "transfer":
        remedies = (REUSE_OUTPUTS.filled(owner=owner, module=module), *special)
        return Detail(why=f"It runs {module}.", remedies=remedies)
    spot = action_spot(rank, owner)
    fit = spot_remedies(spot) if spot is not None and known is not BUILD_ONCE else ()
    does, remedies = _loop_of(rank, lines, calls, owner, in_transfer=part == "transfer")
    mostly = spot.share_text("it", owner).lstrip("; ") if spot is not None and spot.place else ""
    words = "; ".join(filter(None, (does, mostly)))
    remedies = tuple(dict.fromkeys((*remedies, *fit, *special)))
    return Detail(why=f"{words[:1].upper()}{words[1:]}." if words else "", remedies=remedies)


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
        return f"it calls {often}" if loop else "", (WHOLE_BATCH.filled(owner=owner, often=often),) if loop else ()
    makes_copies = loop is not None and loop.operator in COPIES
    copied = _copied(rank, lines, calls) or ("tensors" if makes_copies else "")
    does = " and ".join(filter(None, (f"calls {often}" if loop else "", f"copies {copied}" if copied else "")))
    return f"it {does}" if does else "", (COPY_LESS.filled(owner=owner),) if copied else ()


def work_of_transfer(facts: Facts, fact: Fact) -> Detail:
    """Return what the transfer of a batch does: the strategy's own visits each object, a hook is an action."""
    is_cpu = fact.rank.facts.is_cpu
    fields = {"moving": "Converting batches" if is_cpu else "Moving batches to the device"}
    if fact.owner.endswith(TRANSFER):
        remedies = (RETURN_TENSORS,) if is_cpu else (PIN_MEMORY, RETURN_TENSORS)
        return Detail(fields=fields, why="It visits each object of a batch.", remedies=remedies)
    work = work_of_action(facts, fact)
    moved = (ON_GPU.filled(owner=fact.owner),) if fact.owner.endswith(BEFORE_TRANSFER) and not is_cpu else ()
    return replace(work, fields=fields, remedies=(*work.remedies, *moved))


def work_of_checkpoint(facts: Facts, fact: Fact) -> Detail:
    """Return what a checkpoint holds: more buffers than trained tensors, or more than the tensors of the model."""
    ledger = facts.byte_ledgers.get(fact.rank.rank)
    if ledger is None:
        return Detail()
    held, trained = ledger.bytes("buffer"), ledger.bytes("parameter") + ledger.bytes("optimizer_state")
    if held > trained:
        sizes = f"{format_bytes(held)} of buffers, {format_bytes(trained)} of parameters and optimizer state"
        return Detail(why=f"The model has {sizes}.", remedies=(NO_BUFFERS,))
    each_ns = fact.ns / fact.count if fact.count else 0.0
    if each_ns <= POLICY.save_ns + (held + trained) * POLICY.save_byte_ns:
        return Detail()
    return Detail(
        why=f"The tensors of the model, {format_bytes(held + trained)}, do not take as long to write.",
        remedies=(LEAVE_OUT,),
    )


def _copied(rank: Rank, lines: Sequence[TimeLine], calls: float) -> str:
    """Return ``the model`` if lines copy as many tensors as the optimizers update, as ``copy.deepcopy`` does."""
    optimizers = rank.training.optimizers if rank.training else []
    least = max(sum(optimizer.parameters or 0 for optimizer in optimizers), POLICY.loop)
    copies = Counter[str]()
    for line in lines:
        copies[line.operator or ""] += round(line.called / calls)
    return "the model" if max(copies["aten::clone"], copies["aten::set_"]) >= least else ""
