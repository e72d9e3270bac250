"""Memory of a run: at the peak, out of memory, of workers, and of the data set."""

from __future__ import annotations

from typing import Final

from lightning_memprof.account.ledger.growth import copied_on_write, validation_growth, who_holds, worker_growth
from lightning_memprof.account.memory.activations import CheckpointedGroup
from lightning_memprof.account.memory.report import RankMemory
from lightning_memprof.account.oom.autopsy import autopsies
from lightning_memprof.account.oom.causes import CAUSES
from lightning_memprof.account.steps.events import VALIDATION, action_name
from lightning_memprof.artifacts.naming import holders_name, processes_name
from lightning_memprof.artifacts.series import UNTRACKED, HolderRow, ProcessRow
from lightning_memprof.judge.byte_rule import ByteDetail, ByteRule, FoundBytes, RankBytes, facts_of
from lightning_memprof.judge.causes import dataset_name, file_of, growth_text, holder_cause, rank_memory
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Finding, Severity, titled
from lightning_memprof.judge.loading import sample_method
from lightning_memprof.judge.out_of_memory import remedies_for
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    AGGREGATE_VALIDATION,
    BOUND_WORKER_CACHE,
    CHECKPOINT_BLOCKS,
    CHECKPOINT_WITH_FSDP,
    HALF_PRECISION,
    IN_PARTS,
    LESS_STATE,
    MAP_FILE,
    NO_GRAD,
    RECORD_FROM_START,
    RECORD_STEP,
    SAMPLES_IN_ARRAYS,
    SAVE_LESS,
    SHARD_STATE,
    SHARE_CACHE,
    SMALLER_BATCH,
    SMALLER_DTYPE,
    VALIDATE_IN_SMALLER_BATCHES,
    Remedy,
)
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_bytes, format_count, format_ns, percent


def out_of_memory(facts: Facts) -> Finding | None:
    """Find out-of-memory errors: the step and phase, the failed allocation, and why it did not fit."""
    # The page itself shows what the allocator's snapshot says.
    found = autopsies(facts.run, max_bytes=0)
    if not found:
        return None
    fatal = [autopsy for autopsy in found if autopsy.ended_run]
    autopsy = fatal[0] if fatal else found[-1]
    phase = f", in {str(autopsy.place['phase']).replace('_', ' ')}" if autopsy.place["phase"] else ""
    where = "before the first step" if autopsy.place["step"] is None else f"in step {autopsy.place['step']}"
    return Finding(
        rule="out_of_memory",
        severity=Severity.CRITICAL if fatal else Severity.WARNING,
        title=titled(
            "{device}{rank} ran out of memory{often} {where}{phase}: {cause}.",
            device="The host" if autopsy.is_host else autopsy.device,
            rank=f" of rank {autopsy.rank}" if len(facts.run.ranks) > 1 else "",
            often="" if fatal else f" {format_count(len(found), 'time')}, last",
            where=where,
            phase=phase,
            cause=CAUSES[autopsy.cause],
        ),
        why=autopsy.why,
        remedies=remedies_for(autopsy),
        numbers={
            "asked_bytes": autopsy.asked_bytes,
            "cause": autopsy.cause,
            "step": autopsy.place["step"],
            "events": len(found),
        },
        weight=1.0,
    )


def growing_workers(facts: Facts) -> FoundBytes | None:
    """Return the growth of DataLoader workers, beside the peak of their process.

    Copies of objects of the main process end when all are copied: they matter where the memory is nearly full.
    """
    series = [(rank, rank.read(ProcessRow).rows) for rank in facts.run.ranks if rank.in_full]
    found = [(growth, rank, rows) for rank, rows in series if (growth := worker_growth(rows)) is not None]
    if not found:
        return None
    growth, rank, rows = max(found, key=lambda entry: entry[0].added_bytes)
    ledger = next((fact.ledger for fact in facts_of(facts, "workers") if fact.rank is rank), None)
    start = growth.start_bytes + (ledger.peak_bytes - ledger.bytes("workers") if ledger is not None else 0)
    name, copied = dataset_name(rank), copied_on_write(rows)
    # Then the memory of a worker is a copy, not a cache.
    is_copy = copied >= POLICY.most
    fact = RankBytes(
        owner=name or "",
        bytes=growth.added_bytes,
        whole=start + growth.added_bytes,
        ledger=ledger,
        rank=rank,
        evidence=(file_of(facts, rank, processes_name(rank.rank)),),
    )
    held = max(row.private_bytes or 0 for row in rows)
    method = sample_method(rank.training.dataloaders if rank.training else ())
    bound = BOUND_WORKER_CACHE.filled(sample=f"{name}.{method}" if name else "the data set")
    workers = max(row.workers or 0 for row in rows)
    return fact, ByteDetail(
        fields={
            "rate": format_bytes(growth.bytes_per_step),
            "copies": ": they copy objects of the main process" if is_copy else "",
        },
        measured=f"The memory of {format_count(workers, 'worker')} {growth_text(growth)}",
        why=f"{percent(copied)} of this memory was shared before: pages are copied when a reference count changes."
        if is_copy
        else f"{format_bytes(held)} are private, and not part of the RSS of the main process.",
        remedies=(SAMPLES_IN_ARRAYS,) if is_copy else (bound, SHARE_CACHE),
        at_most=Severity.INFO if is_copy else None,
        at_least=Severity.WARNING,
        numbers={
            "workers": workers,
            "bytes_per_step": round(growth.bytes_per_step),
            "steps": growth.steps,
            "private_bytes": held,
        },
    )


def beyond_steps(facts: Facts) -> FoundBytes | None:
    """Return what the peak of the run needs beyond the training steps, or that of a device beyond the recorded ones."""
    outside = ((fact, _outside(facts, fact)) for fact in facts_of(facts, "outside_steps"))
    ranks = {rank.rank: rank for rank in facts.run.ranks}
    found = (_unrecorded(facts, ranks[each.rank], each) for each in (facts.memory.ranks if facts.memory else ()))
    return max((*outside, *filter(None, found)), key=lambda each: each[0].share, default=None)


# The Trainer's own actions outside the steps, for people, and how to make them smaller.
OWN_ACTIONS: Final = {
    VALIDATION: ("a validation", VALIDATE_IN_SMALLER_BATCHES),
    "save_checkpoint": ("saving a checkpoint", SAVE_LESS),
}


def _outside(facts: Facts, fact: RankBytes) -> ByteDetail:
    """Return how to make a validation or a checkpoint smaller, which need some memory by design, and the rest."""
    owner, *remedies = OWN_ACTIONS.get(fact.owner, (fact.owner, IN_PARTS.filled(owner=fact.owner, size=fact.size)))
    rest = format_bytes(fact.whole - fact.bytes)
    return ByteDetail(
        owner=owner,
        why=f"The peak RSS rose by {fact.size} over it; the rest of the run needs {rest}.",
        remedies=tuple(remedies),
        at_most=Severity.INFO if fact.owner in OWN_ACTIONS else None,
        evidence=(file_of(facts, fact.rank, processes_name(fact.rank.rank)),),
    )


def _unrecorded(facts: Facts, rank: Rank, memory: RankMemory) -> FoundBytes | None:
    """Return the peak of a device in a step that was not recorded, and the action that was slowest in it."""
    devices = [device for window in memory.allocations for device in window.devices if device.device != "cpu"]
    recorded = max((device.start_bytes + device.peak_bytes for device in devices if device.start_bytes), default=0)
    rows = [(row["step"] or 0, row["device_peak_bytes"] or 0) for row in rank.pulse]
    most = max((peak for _, peak in rows), default=0)
    if not recorded or most <= recorded:
        return None
    step = next(step for step, peak in rows if peak == most)
    action = action_name(next((row.action for row in rank.stalls if row.step == step), None) or UNTRACKED)
    doing = f" in {action}"
    remedies: tuple[Remedy, ...] = (NO_GRAD.filled(name=action),)
    if action in {UNTRACKED, VALIDATION}:
        doing, remedies = (" in a validation", (VALIDATE_IN_SMALLER_BATCHES,)) if action == VALIDATION else ("", ())
    fact = RankBytes(
        bytes=most - recorded,
        whole=most,
        place=rank.facts.device or "device",
        ledger=facts.byte_ledgers.get(rank.rank),
        rank=rank,
        evidence=(facts.pulse(rank, [step]),),
    )
    slow = f"{action} took longer than usual in step {step}" if doing else "A hook or a validation may need more"
    is_first = step == rows[0][0]
    return fact, ByteDetail(
        says="The device peak of {peak}{rank} is in step {step}{doing}, not in the recorded steps.",
        fields={"peak": format_bytes(most), "step": step, "doing": doing},
        measured=f"The recorded steps need {format_bytes(recorded)}",
        why=f"{slow}.",
        remedies=(*(() if is_first else (*remedies, RECORD_STEP.filled(step=step))), RECORD_FROM_START),
        at_most=Severity.INFO,
        numbers={"recorded_bytes": recorded, "step": step},
    )


def activation_detail(facts: Facts, fact: RankBytes) -> ByteDetail:
    """Return the largest modules, and what checkpointing the repeated blocks saves beyond the recomputation of one."""
    memory = rank_memory(facts, fact.rank)
    precision = fact.rank.training.precision if fact.rank.training is not None else None
    is_full = not fact.rank.facts.is_cpu and (precision or "32").startswith(("32", "64"))
    halves = (HALF_PRECISION,) if is_full else ()
    if memory is None or memory.activations is None or memory.peak is None:
        return ByteDetail(remedies=halves)
    found = memory.activations
    group = max(memory.checkpointing, key=_saved_by, default=None)
    if group is not None and _saved_by(group) < POLICY.verdict * fact.whole:
        group = None
    largest = sorted(found.modules, key=lambda module: -module.own_activation_bytes)[: POLICY.owners]
    named = ", ".join(
        f"{module.name or 'the model itself'} ({format_bytes(module.own_activation_bytes)})" for module in largest
    )
    parts = [f"They are {format_bytes(found.total_bytes)} at the start of backward in step {found.step}"]
    parts += [f"the largest: {named}"] if named else []
    checkpoint: tuple[Remedy, ...] = ()
    if group is not None:
        cost = "" if group.recompute_ns is None else f" for {format_ns(group.recompute_ns)} more per step"
        parts.append(
            f"checkpointing {group.name} ({len(group.blocks)} blocks) would save {format_bytes(_saved_by(group))}{cost}"
        )
        checkpoint = (CHECKPOINT_BLOCKS.filled(blocks=group.name),)
        checkpoint += (CHECKPOINT_WITH_FSDP.filled(),) if fact.rank.facts.strategy == "FSDPStrategy" else ()
    steps = (memory.peak.step,)
    return ByteDetail(
        why=f"{'; '.join(parts)}.",
        remedies=(*checkpoint, *halves),
        saves_bytes=(_saved_by(group),) * 2 if group is not None else None,
        numbers={
            "step": memory.peak.step,
            "checkpointed": group.name if group else None,
            "saved_bytes": _saved_by(group) if group else None,
        },
        evidence=facts.recorded(fact.rank, memory.peak.source, steps) or facts.recorded(fact.rank, "saved_tensors"),
    )


def _saved_by(group: CheckpointedGroup) -> int:
    return group.saved_bytes - group.recompute_peak_bytes


def state_detail(facts: Facts, fact: RankBytes) -> ByteDetail:
    """Return the optimizer and its parameters, and what other ranks would hold."""
    training, ranks = fact.rank.training, len(facts.run.ranks)
    parameters = fact.ledger.bytes("parameter") if fact.ledger is not None else 0
    name = next((each.name for each in training.optimizers if each.name), None) if training else None
    ratio = f": {fact.bytes / parameters:.1f} times the parameters ({format_bytes(parameters)})" if parameters else ""
    shards = (ranks - 1) / ranks
    return ByteDetail(
        why=f"{name or 'The optimizer'} allocates it in the first optimizer step{ratio}.",
        remedies=(SHARD_STATE,) if ranks > 1 else (),
        saves_bytes=(fact.bytes * shards,) * 2 if ranks > 1 else None,
        numbers={"parameter_bytes": parameters},
    )


SMALLER_TYPES: Final = {
    "float32": "uint8, float16", "float64": "uint8, float16, float32", "int64": "uint8, int16, int32",
    "int32": "uint8, int16",
}  # fmt: skip


def data_detail(facts: Facts, fact: RankBytes) -> ByteDetail:  # noqa: ARG001 as other details
    """Return the largest tensor or array of the data set, and the types in which it is smaller."""
    loaders = fact.rank.training.dataloaders if fact.rank.training else ()
    loader = max(loaders, key=lambda each: each.data_bytes or 0)
    dtype, name = loader.data_dtype or "", loader.data_largest or "the data set"
    small = SMALLER_TYPES.get(dtype)
    smaller = SMALLER_DTYPE.filled(small=small, method=sample_method([loader]), dtype=dtype, name=name)
    return ByteDetail(
        why=f"Tensors and arrays count, mapped files do not; the largest is {name}{f' ({dtype})' * bool(dtype)}.",
        owner=name,
        remedies=(smaller,) if small else (),
        numbers={"dtype": dtype},
    )


def validation_detail(facts: Facts, fact: RankBytes) -> ByteDetail:
    """Return how much each batch of a validation keeps, and the variable that keeps it if a search found one."""
    growth = validation_growth(fact.rank.read(ProcessRow).rows)
    if growth is None:
        return ByteDetail()
    holder = next((row for row in who_holds(fact.rank.read(HolderRow).rows) if row.place and not row.bound), None)
    cause = holder_cause(holder) if holder is not None else None
    evidence = (file_of(facts, fact.rank, processes_name(fact.rank.rank)),)
    return ByteDetail(
        owner=cause.owner if cause else "",
        why=(
            f"From {format_bytes(growth.start_bytes)}, RSS rises by {format_bytes(growth.bytes_per_step)} per batch "
            f"over {growth.steps} batches.{f' {cause.why}{cause.line}.' if cause else ''}"
        ),
        remedies=(cause.remedy,) if cause else (),
        evidence=(*evidence, file_of(facts, fact.rank, holders_name(fact.rank.rank))) if cause else evidence,
        numbers={"bytes_per_batch": round(growth.bytes_per_step), "batches": growth.steps},
    )


ROWS: Final = (
    ByteRule(
        id="activation_peak",
        about=(
            "Saved activations limit the batch size: they grow with batch size and sequence length. The finding names "
            "the modules that save the most, and how much memory and time checkpointing of the repeated blocks saves "
            "and costs."
        ),
        trade_off="Checkpointing computes each block twice; smaller batches are less efficient.",
        of=("activation",),
        says="Saved activations are {share} of the peak{rank}: {size}.",
        remedies=(SMALLER_BATCH,),
        saves=(0.5, 0.5),
        detail=activation_detail,
    ),
    ByteRule(
        id="optimizer_state",
        about=(
            "The first optimizer step allocates the optimizer's state, which stays live: a model whose first "
            "step fits may not fit in its second step. Adam's moments are as large as two copies of the "
            "parameters."
        ),
        trade_off="More communication, or slower convergence with another optimizer.",
        of=("optimizer_state",),
        says="Optimizer state is {share} of the peak{rank}: {size}.",
        remedies=(LESS_STATE,),
        # Adafactor keeps a row and a column of a matrix; 8-bit state is a quarter.
        saves=(0.75, 0.9),
        detail=state_detail,
    ),
    ByteRule(
        id="data_memory",
        about=(
            "The training data set refers to tensors and arrays in memory; mapped files do not count. Each rank has "
            "its own copy, and with spawn each worker too."
        ),
        trade_off="Each sample is converted or read whenever it is used.",
        of=("data_set",),
        says="The data set is {share} of the peak RSS{rank}: {size}, mostly {owner}.",
        remedies=(MAP_FILE,),
        # float16 has half of float32; a mapped file needs none.
        saves=(0.5, 1.0),
        detail=data_detail,
    ),
    ByteRule(
        id="validation_memory",
        about=(
            "RSS rises steadily over the batches of a validation: data of each batch stays live. The growth "
            "depends on the size of the validation set."
        ),
        trade_off="None.",
        of=("validation",),
        says="Validation keeps {size} live until it ends, in {owner}{rank}.",
        unnamed="Validation keeps {size} live until it ends{rank}.",
        remedies=(AGGREGATE_VALIDATION,),
        saves=(0.8, 1.0),
        at_most=Severity.WARNING,
        detail=validation_detail,
    ),
    ByteRule(
        id="peak_elsewhere",
        about=(
            "The peak RSS is reached outside the training steps: in a hook at the end of an epoch, in a validation or "
            "while a checkpoint is saved; or the device peak is in a step that was not recorded. The tables of memory "
            "by module and category do not explain this peak."
        ),
        trade_off="More time, if the work is split into parts.",
        of=("outside_steps", "unattributed"),
        find=beyond_steps,
        says="The peak RSS is reached in {owner}{rank}, {size} above the training steps.",
        saves=(0.5, 1.0),
        at_most=Severity.WARNING,
    ),
    ByteRule(
        id="worker_memory",
        about=(
            "DataLoader workers grow with every step: each worker keeps data of the samples that it loads, and "
            "the RSS of the main process does not contain it. The machine runs out of memory, sooner with more "
            "workers. Where reference counts change, workers copy objects of the main process until all are "
            "copied."
        ),
        when=(
            "The memory of the workers, private and shared, rises at a steady rate until the end, over at least "
            "three samples, by 32 MiB and 10%. Copies of objects of the main process are `info` unless the "
            "memory is nearly full."
        ),
        trade_off="Samples that a worker does not keep are loaded again.",
        of=("workers",),
        find=growing_workers,
        says="DataLoader workers of {owner} grow by {rate} per step{rank}{copies}.",
        unnamed="DataLoader workers grow by {rate} per step{rank}{copies}.",
        saves=(1, 1),
        # A small part will be more.
        note=POLICY.note,
        at_most=Severity.CRITICAL,
    ),
)
