"""Memory of a run: at the peak, out of memory, of workers, and of the data set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from lightning_memprof.account.ledger.growth import copied_on_write, validation_growth, worker_growth
from lightning_memprof.account.ledger.holders import who_holds
from lightning_memprof.account.memory.activations import CheckpointedGroup
from lightning_memprof.account.oom.autopsy import autopsies
from lightning_memprof.account.oom.causes import CAUSES
from lightning_memprof.account.steps.events import VALIDATION
from lightning_memprof.artifacts.naming import holders_name, processes_name
from lightning_memprof.artifacts.series import BEFORE_STEPS, HolderRow, ProcessRow
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.causes import dataset_name, file_of, growth_text, holder_cause, rank_memory
from lightning_memprof.judge.fact import ByteFact, bytes_of
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Finding, Severity, titled
from lightning_memprof.judge.loading import sample_method
from lightning_memprof.judge.out_of_memory import HALF_BATCH, remedies_for
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.judge.rule import Detail, Found, Rule
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


def growing_workers(facts: Facts) -> Iterator[Found]:
    """Yield the growth of DataLoader workers, beside the peak of their process.

    Copies of objects of the main process end when all are copied: they matter where the memory is nearly full.
    """
    series = [(rank, rank.read(ProcessRow).rows) for rank in facts.run.ranks if rank.in_full]
    found = [(growth, rank, rows) for rank, rows in series if (growth := worker_growth(rows)) is not None]
    if not found:
        return
    growth, rank, rows = max(found, key=lambda entry: entry[0].added)
    ledger = next((fact.ledger for fact in bytes_of(facts, "workers") if fact.rank is rank), None)
    start = growth.start + (ledger.peak_bytes - ledger.bytes("workers") if ledger is not None else 0)
    name, copied = dataset_name(rank), copied_on_write(rows)
    # Then the memory of a worker is a copy, not a cache.
    is_copy = copied >= POLICY.most
    fact = ByteFact(
        owner=name or "",
        bytes=growth.added,
        whole=start + growth.added,
        ledger=ledger,
        source=rank,
        evidence=(file_of(facts, rank, processes_name(rank.rank)),),
    )
    held = max(row.private_bytes or 0 for row in rows)
    method = sample_method(rank.training.dataloaders if rank.training else ())
    bound = do.BOUND_WORKER_CACHE.filled(sample=f"{name}.{method}" if name else "the data set")
    workers = max(row.workers or 0 for row in rows)
    detail = Detail(
        fields={
            "rate": format_bytes(growth.per_step),
            "copies": ": they copy objects of the main process" if is_copy else "",
        },
        measured=f"The memory of {format_count(workers, 'worker')} {growth_text(growth)}",
        why=f"{percent(copied)} of it was shared before: a changed reference count copies a page." if is_copy else "",
        remedies=(do.SAMPLES_IN_ARRAYS if is_copy else bound,),
        at_most=Severity.INFO if is_copy else None,
        at_least=Severity.WARNING,
        numbers={
            "workers": workers,
            "bytes_per_step": round(growth.per_step),
            "steps": growth.steps,
            "private_bytes": held,
        },
    )
    yield fact, detail


# What the Trainer does outside the steps, and what ran before, for people, and how to make them smaller.
OWN_ACTIONS: Final = {
    VALIDATION: ("a validation", do.SMALLER_INPUT),
    "save_checkpoint": ("saving a checkpoint", do.SAVE_LESS),
    BEFORE_STEPS: ("code before the first step", do.START_SMALLER),
}


def outside_detail(facts: Facts, fact: ByteFact) -> Detail:
    """Return how to make a validation, a checkpoint or the start smaller, which need memory by design, and the rest."""
    owner, *remedies = OWN_ACTIONS.get(fact.owner, (fact.owner, do.IN_PARTS.filled(owner=fact.owner, size=fact.size)))
    rest = format_bytes(fact.whole - fact.bytes)
    return Detail(
        owner=owner,
        why=f"The peak RSS rose by {fact.size} over it; the rest of the run needs {rest}.",
        remedies=tuple(remedies),
        at_most=Severity.INFO if fact.owner in OWN_ACTIONS else None,
        evidence=(file_of(facts, fact.rank, processes_name(fact.rank.rank)),),
    )


def activation_detail(facts: Facts, fact: ByteFact) -> Detail:
    """Return the largest modules, and what checkpointing the repeated blocks saves beyond the recomputation of one."""
    memory = rank_memory(facts, fact.rank)
    precision = fact.rank.training.precision if fact.rank.training is not None else None
    is_full = not fact.rank.facts.is_cpu and (precision or "32").startswith(("32", "64"))
    halves = (do.BFLOAT16,) if is_full else ()
    if memory is None or memory.activations is None or memory.peak is None:
        return Detail(remedies=halves)
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
        checkpoint = (do.CHECKPOINTING.filled(blocks=group.name),)
    steps = (memory.peak.step,)
    return Detail(
        why=f"{'; '.join(parts)}.",
        remedies=(*checkpoint, *halves),
        saves=(_saved_by(group) / fact.bytes,) * 2 if group is not None else None,
        numbers={
            "step": memory.peak.step,
            "checkpointed": group.name if group else None,
            "saved_bytes": _saved_by(group) if group else None,
        },
        evidence=facts.recorded(fact.rank, memory.peak.source, steps) or facts.recorded(fact.rank, "saved_tensors"),
    )


def _saved_by(group: CheckpointedGroup) -> int:
    return group.saved_bytes - group.recompute_peak_bytes


def state_detail(facts: Facts, fact: ByteFact) -> Detail:
    """Return the optimizer and its parameters, and what other ranks would hold."""
    training, ranks = fact.rank.training, len(facts.run.ranks)
    parameters = fact.ledger.bytes("parameter") if fact.ledger is not None else 0
    name = next((each.name for each in training.optimizers if each.name), None) if training else None
    ratio = f": {fact.bytes / parameters:.1f} times the parameters ({format_bytes(parameters)})" if parameters else ""
    shards = (ranks - 1) / ranks
    return Detail(
        why=f"{name or 'The optimizer'} allocates it in the first optimizer step{ratio}.",
        remedies=(do.SHARD_MODEL,) if ranks > 1 else (),
        saves=(shards, shards) if ranks > 1 else None,
        numbers={"parameter_bytes": parameters},
    )


SMALLER_TYPES: Final = {
    "float32": "uint8, float16", "float64": "uint8, float16, float32", "int64": "uint8, int16, int32",
    "int32": "uint8, int16",
}  # fmt: skip


def data_detail(facts: Facts, fact: ByteFact) -> Detail:  # noqa: ARG001 as other details
    """Return the largest tensor or array of the data set, and the types in which it is smaller."""
    loaders = fact.rank.training.dataloaders if fact.rank.training else ()
    loader = max(loaders, key=lambda each: each.data_bytes or 0)
    dtype, name = loader.data_dtype or "", loader.data_largest or "the data set"
    small = SMALLER_TYPES.get(dtype)
    smaller = do.SMALLER_DTYPE.filled(small=small, method=sample_method([loader]), dtype=dtype, name=name)
    return Detail(
        why=f"Tensors and arrays count, mapped files do not; the largest is {name}{f' ({dtype})' * bool(dtype)}.",
        owner=name,
        remedies=(smaller,) if small else (),
        numbers={"dtype": dtype},
    )


def validation_detail(facts: Facts, fact: ByteFact) -> Detail:
    """Return how much each batch of a validation keeps, and the variable that keeps it if a search found one."""
    growth = validation_growth(fact.rank.read(ProcessRow).rows)
    if growth is None:
        return Detail()
    holder = next((row for row in who_holds(fact.rank.read(HolderRow).rows) if row.place and not row.bound), None)
    cause = holder_cause(holder) if holder is not None else None
    evidence = (file_of(facts, fact.rank, processes_name(fact.rank.rank)),)
    return Detail(
        owner=cause.owner if cause else "",
        why=(
            f"From {format_bytes(growth.start)}, RSS rises by {format_bytes(growth.per_step)} per batch "
            f"over {growth.steps} batches{f'; {cause.why}{cause.line}' if cause else ''}."
        ),
        remedies=(cause.remedy,) if cause else (),
        evidence=(*evidence, file_of(facts, fact.rank, holders_name(fact.rank.rank))) if cause else evidence,
        numbers={"bytes_per_batch": round(growth.per_step), "batches": growth.steps},
    )


ROWS: Final = (
    Rule(
        id="activation_peak",
        about="The modules with the most saved activations; checkpointing of repeated blocks computes them again.",
        trade_off="Checkpointing computes each block twice; smaller batches are less efficient.",
        of=("activation",),
        says="Saved activations are {share} of the peak{rank}: {size}.",
        remedies=(HALF_BATCH,),
        # Half of them; temporary tensors become fewer with them, and checkpointing keeps the inputs of its blocks.
        saves=(0.25, 1.0),
        # Every training saves activations.
        note=POLICY.verdict,
        at_most=Severity.INFO,
        detail=activation_detail,
    ),
    Rule(
        id="optimizer_state",
        about="The first optimizer step allocates the state, which stays live: Adam's is twice the parameters.",
        trade_off="More communication, or slower convergence with another optimizer.",
        of=("optimizer_state",),
        says="Optimizer state is {share} of the peak{rank}: {size}.",
        remedies=(do.LESS_OPTIMIZER_STATE,),
        # Adafactor keeps a row and a column of a matrix; 8-bit state is a quarter.
        saves=(0.75, 0.9),
        # Adam's is twice the parameters in every training.
        note=POLICY.verdict,
        at_most=Severity.INFO,
        detail=state_detail,
    ),
    Rule(
        id="data_memory",
        about="The data set refers to tensors and arrays in memory, in each rank; mapped files do not count.",
        trade_off="Each sample is converted or read whenever it is used.",
        of=("data_set",),
        says="The data set is {share} of the peak RSS{rank}: {size}, mostly {owner}.",
        remedies=(do.MAP_FILE,),
        # float16 has half of float32; a mapped file needs none.
        saves=(0.5, 1.0),
        # Every training has a data set.
        note=POLICY.verdict,
        at_most=Severity.INFO,
        detail=data_detail,
    ),
    Rule(
        id="validation_memory",
        about="RSS rises steadily over the batches of a validation: data of each batch stays live.",
        trade_off="None.",
        of=("validation",),
        says="Validation keeps {size} live until it ends, in {owner}{rank}.",
        unnamed="Validation keeps {size} live until it ends{rank}.",
        remedies=(do.AGGREGATE_VALIDATION,),
        saves=(0.8, 1.0),
        at_most=Severity.WARNING,
        detail=validation_detail,
    ),
    Rule(
        id="peak_elsewhere",
        about="The peak is reached in a hook, a validation, a checkpoint, or before the first step.",
        trade_off="More time, if the work is split into parts.",
        of=("outside_steps",),
        says="The peak RSS is reached in {owner}{rank}, {size} above the training steps.",
        saves=(0.5, 1.0),
        at_most=Severity.WARNING,
        detail=outside_detail,
    ),
    Rule(
        id="worker_memory",
        about="Each worker keeps data of the samples that it loads, or copies objects of the main process.",
        when=(
            "The memory of the workers rises at a steady rate until the end, over at least three samples, by 32 MiB "
            "and 10%. Copies of objects of the main process are `info` unless the memory is nearly full."
        ),
        trade_off="Samples that a worker does not keep are loaded again.",
        of=("workers",),
        find=growing_workers,
        says="DataLoader workers of {owner} grow by {rate} per step{rank}{copies}.",
        unnamed="DataLoader workers grow by {rate} per step{rank}{copies}.",
        saves=(1, 1),
    ),
)
