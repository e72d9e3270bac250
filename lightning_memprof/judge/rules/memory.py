"""Memory of a run: at the peak, out of memory, of workers, and of the data set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from lightning_memprof.account.ledger.growth import copied_on_write, validation_growth, worker_growth
from lightning_memprof.account.ledger.memory import ByteLedger
from lightning_memprof.account.memory.activations import Activations, CheckpointedGroup
from lightning_memprof.account.memory.report import CategoryPeak, RankMemory
from lightning_memprof.account.oom.autopsy import autopsies
from lightning_memprof.account.oom.causes import CAUSES
from lightning_memprof.account.steps.events import VALIDATION, action_name
from lightning_memprof.artifacts.naming import processes_name
from lightning_memprof.artifacts.series import UNTRACKED, ProcessRow
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Evidence, Finding, Recovery, Severity, recovered
from lightning_memprof.judge.measures import sample_method
from lightning_memprof.judge.rules.growth import dataset_name
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import GIB, MIB, format_bytes, format_count, format_ns, percent

# A smaller category fits everywhere.
MIN_BYTES: Final = 64 * MIB

# From this share of the memory at the start on, growth ends the run soon.
SEVERE_GROWTH: Final = 0.5

NO_SNAPSHOT: Final = 0  # the page itself shows what the allocator's snapshot says


def out_of_memory(facts: Facts) -> Finding | None:
    """Find out-of-memory errors: where the run ended, or how often it continued."""
    found = autopsies(facts.run, max_bytes=NO_SNAPSHOT)
    if not found:
        return None
    fatal = [autopsy for autopsy in found if autopsy.ended_run]
    autopsy = fatal[0] if fatal else found[-1]
    rank = f" of rank {autopsy.rank}" if len(facts.run.ranks) > 1 else ""
    where = "before the first step" if autopsy.place["step"] is None else f"in step {autopsy.place['step']}"
    phase = f", in {str(autopsy.place['phase']).replace('_', ' ')}" if autopsy.place["phase"] else ""
    often = "" if fatal else f" {format_count(len(found), 'time')}, last"
    return Finding(
        rule="out_of_memory",
        severity=Severity.CRITICAL if fatal else Severity.WARNING,
        title=(
            f"{'The host' if autopsy.is_host else autopsy.device}{rank} ran out of memory{often} {where}{phase}: "
            f"{CAUSES[autopsy.cause]}."
        ),
        why=autopsy.why,
        remedies=autopsy.next_steps,
        numbers={
            "asked_bytes": autopsy.asked_bytes,
            "cause": autopsy.cause,
            "step": autopsy.place["step"],
            "events": len(found),
        },
        weight=1.0,
    )


# From this share on, new private memory is called copies.
MOSTLY: Final = 0.5
COPIES: Final = (
    "Store the samples in arrays or tensors instead of lists, dicts and strings: numpy.array(...), torch.tensor(...)."
)


def worker_memory(facts: Facts) -> Finding | None:
    """Find DataLoader workers that grow with every step.

    Copies of objects of the main process end when all are copied: they matter where the memory is nearly full. Recovers
    what the slope added to the line ``workers`` of the byte ledger.
    """
    series = [(rank, rank.read(ProcessRow).rows) for rank in facts.run.ranks if rank.in_full]
    found = [(growth, rank, rows) for rank, rows in series if (growth := worker_growth(rows)) is not None]
    if not found:
        return None
    growth, rank, rows = max(found, key=lambda entry: entry[0].added_bytes)
    ledger = facts.byte_ledgers.get(rank.rank)
    start = growth.start_bytes + (ledger.peak_bytes - ledger.bytes("workers") if ledger is not None else 0)
    share = growth.added_bytes / start if start else 1.0
    workers = max(row.workers or 0 for row in rows)
    name = dataset_name(rank)
    held = max(row.private_bytes or 0 for row in rows)
    copied = copied_on_write(rows)
    is_copy = copied >= MOSTLY
    recovers = recovered(ledger, growth.added_bytes, "workers")
    severity = Severity.CRITICAL if share >= SEVERE_GROWTH else Severity.WARNING
    return Finding(
        rule="worker_memory",
        severity=_severity(ledger, recovers) if is_copy else severity,
        title=(
            f"DataLoader workers{f' of {name}' if name else ''} grow by {format_bytes(growth.bytes_per_step)} per "
            f"step{facts.on_rank(rank)}{': they copy objects of the main process' if is_copy else ''}."
        ),
        why=(
            f"The memory of {format_count(workers, 'worker')} rose steadily by {format_bytes(growth.added_bytes)} in "
            f"{growth.steps} steps; {format_bytes(held)} are private. It rises by 1 GiB every "
            f"{GIB / growth.bytes_per_step:,.0f} steps. "
            + (
                f"{percent(copied)} of it was shared before: pages are copied when a reference count changes."
                if is_copy
                else "The RSS of the main process does not contain it."
            )
        ),
        remedies=(COPIES,) if is_copy else _caches(rank, name),
        numbers={
            "rank": rank.rank,
            "workers": workers,
            "bytes_per_step": round(growth.bytes_per_step),
            "added_bytes": growth.added_bytes,
            "start_bytes": growth.start_bytes,
            "steps": growth.steps,
            "private_bytes": held,
            "copied_share": copied,
        },
        weight=min(share, 1.0),
        evidence=(_processes(facts, rank),),
        recovers=recovers,
    )


def _caches(rank: Rank, name: str | None) -> tuple[str, str]:
    method = sample_method(rank.training.dataloaders if rank.training else ())
    sample = f"{name}.{method}" if name else "the data set"
    return (
        f"Find what {sample} or a function it calls keeps (attribute, global, lru_cache(maxsize=None)), and bound it.",
        "Each worker has its own copy: cache on disk or in a shared tensor.",
    )


def validation_memory(facts: Facts) -> Finding | None:
    """Find a validation that keeps memory of each batch until its end.

    Recovers the line ``validation`` of the byte ledger: what its batches add to the peak.
    """
    series = [(rank, rank.read(ProcessRow).rows) for rank in facts.run.ranks if rank.in_full]
    found = [(growth, rank) for rank, rows in series if (growth := validation_growth(rows)) is not None]
    if not found:
        return None
    growth, rank = max(found, key=lambda entry: entry[0].added_bytes)
    model = (rank.training.model if rank.training is not None else None) or "LightningModule"
    return Finding(
        rule="validation_memory",
        severity=Severity.WARNING,
        title=(
            f"Validation keeps {format_bytes(growth.bytes_per_step)} of memory per batch{facts.on_rank(rank)}: "
            f"{format_bytes(growth.added_bytes)} at its end."
        ),
        why=(
            f"Memory rises steadily from an RSS of {format_bytes(growth.start_bytes)} over {growth.steps} batches of "
            "a validation: something of each batch is kept. It grows with the validation set."
        ),
        remedies=(
            f"Aggregate in {model}.validation_step, in a metric or a sum, instead of keeping each batch's outputs.",
            "Keep less of each batch: detached, and reduced to what the metric needs.",
        ),
        numbers={
            "rank": rank.rank,
            "bytes_per_batch": round(growth.bytes_per_step),
            "added_bytes": growth.added_bytes,
            "start_bytes": growth.start_bytes,
            "batches": growth.steps,
        },
        weight=growth.added_bytes / (growth.start_bytes + growth.added_bytes),
        evidence=(_processes(facts, rank),),
        recovers=recovered(facts.byte_ledgers.get(rank.rank), growth.added_bytes, "validation"),
    )


def _processes(facts: Facts, rank: Rank) -> Evidence:
    return Evidence(artifact=f"{facts.run.directory.name}/{processes_name(rank.rank)}", rank=rank.rank)


def _severity(ledger: ByteLedger | None, recovers: Recovery | None) -> Severity:
    """Return the severity of a line of the peak: memory that fits needs no remedy."""
    if ledger is None or recovers is None or not ledger.is_under_pressure:
        return Severity.INFO
    return recovers.severity


def _pressure(ledger: ByteLedger | None) -> str:
    """Return the sentence that the memory is nearly full, or how full a device is."""
    if ledger is None or not ledger.limit_bytes:
        return ""
    full, place = percent(ledger.filled or 0), "the machine" if ledger.place == "host" else ledger.place
    if not ledger.is_under_pressure:
        fits = ": a larger batch fits" if ledger.has_room else ""
        return "" if ledger.place == "host" else f" {place} is {full} full at its peak{fits}."
    ranks = f" in each of {ledger.sharing} processes" if ledger.sharing > 1 else ""
    others = f" and {format_bytes(ledger.outside_bytes)} outside the allocator" if ledger.outside_bytes else ""
    peak, limit = format_bytes(ledger.peak_bytes), format_bytes(ledger.limit_bytes)
    return f" The peak of {peak}{ranks}{others} is {full} of the {limit} that {place} can hold."


# Below half of the peak, parameters, gradients and optimizer state come first.
NOTABLE_ACTIVATIONS: Final = 0.5
# Checkpointing that saves less of the peak is not worth its time.
MIN_SAVED_SHARE: Final = 0.1
SHOWN: Final = 3
SMALLER: Final = "Save fewer activations: a smaller batch with Trainer(accumulate_grad_batches=2)"
HALF: Final = ", or Trainer(precision='bf16-mixed')"


def activation_peak(facts: Facts) -> Finding | None:
    """Find a peak that is mostly saved activations, their largest modules, and the effect of checkpointing.

    Recovers what checkpointing the blocks saves beyond the recomputation of one; without repeated blocks half of the
    activations, for half of the batch. At most the line ``activation`` of the byte ledger.
    """
    memory = facts.memory.lead if facts.memory is not None else None
    if memory is None or memory.peak is None or memory.activations is None or not facts.is_fit:
        return None
    total, saved = memory.peak.total_bytes, memory.peak.categories.get("activation") or 0
    if saved < MIN_BYTES or saved < NOTABLE_ACTIVATIONS * total:
        return None
    group = _best(memory, total)
    rank = next(rank for rank in facts.run.ranks if rank.rank == memory.rank)
    steps = (memory.peak.step,)
    ledger = facts.byte_ledgers.get(rank.rank)
    fewer = group.saved_bytes - group.recompute_peak_bytes if group else saved / 2
    recovers = recovered(ledger, fewer, "activation")
    return Finding(
        rule="activation_peak",
        severity=_severity(ledger, recovers),
        title=(
            f"Saved activations are {percent(saved / total)} of the tensor peak{facts.on_rank(rank)}: "
            f"{format_bytes(saved)} of {format_bytes(total)}."
        ),
        why=_why_activations(memory.activations, group) + _pressure(ledger),
        remedies=tuple(_next_for_activations(group, rank)),
        evidence=facts.recorded(rank, memory.peak.source, steps) or facts.recorded(rank, "saved_tensors"),
        numbers={
            "rank": memory.rank,
            "activation_bytes": saved,
            "peak_bytes": total,
            "activation_share": saved / total,
            "step": memory.peak.step,
            "checkpointed": group.name if group else None,
            "saved_bytes": group.saved_bytes - group.recompute_peak_bytes if group else None,
            "recompute_ns": group.recompute_ns if group else None,
        },
        weight=saved / total,
        recovers=recovers,
    )


# A step that needs a quarter more than the recorded ones does something that these do not.
MORE: Final = 1.25
VALIDATE_LESS: Final = "Validate in smaller batches: batch_size of the DataLoader that val_dataloader returns."
NO_GRAD: Final = (
    "Call models in {name} under torch.no_grad() if nothing trains on their outputs, or in smaller batches."
)
FROM_START: Final = "Record the memory from the start: lightning_memprof.start_memory_history() before the Trainer."


def peak_elsewhere(facts: Facts) -> list[Finding]:
    """Find a device peak that recorded steps do not reach, the step that did, and the action that was slowest in it.

    Recovers at most what that step needs beyond the recorded ones.
    """
    ranks = {rank.rank: rank for rank in facts.run.ranks}
    found = (_beyond(facts, ranks[memory.rank], memory) for memory in (facts.memory.ranks if facts.memory else ()))
    return [finding for finding in found if finding is not None][:1]


def _beyond(facts: Facts, rank: Rank, memory: RankMemory) -> Finding | None:
    devices = [device for window in memory.allocations for device in window.devices if device.device != "cpu"]
    recorded = max((device.start_bytes + device.peak_bytes for device in devices if device.start_bytes), default=0)
    rows = [(row["step"] or 0, row["device_peak_bytes"] or 0) for row in rank.pulse]
    most = max((peak for _, peak in rows), default=0)
    if not recorded or most < max(MORE * recorded, recorded + 4 * MIN_BYTES):
        return None
    step = next(step for step, peak in rows if peak == most)
    action = action_name(next((row.action for row in rank.stalls if row.step == step), None) or UNTRACKED)
    doing, remedies = f", in which {action} took longer than usual", [NO_GRAD.format(name=action)]
    if action in {UNTRACKED, VALIDATION}:
        doing, remedies = (", in a validation", [VALIDATE_LESS]) if action == VALIDATION else ("", [])
    ledger = facts.byte_ledgers.get(rank.rank)
    recovers = recovered(ledger, most - recorded, "unattributed")
    record = f"Record that step: MemProfilerCallback(schedule=Schedule(steps=({step},), active=1))."
    return Finding(
        rule="peak_elsewhere",
        severity=_severity(ledger, recovers),
        title=(
            f"The device peak of {format_bytes(most)}{facts.on_rank(rank)} is not that of the recorded steps, which "
            f"need {format_bytes(recorded)}: step {step} reached it{doing}."
        ),
        why="A hook, a callback or a validation may need it: recorded steps do not have it.",
        remedies=(FROM_START,) if step == rows[0][0] else (*remedies, record, FROM_START),
        evidence=(facts.pulse(rank, [step]),),
        numbers={"rank": rank.rank, "peak_bytes": most, "recorded_bytes": recorded, "step": step},
        weight=(most - recorded) / most,
        recovers=recovers,
    )


def _best(memory: RankMemory, total: int) -> CheckpointedGroup | None:
    """Return the blocks whose checkpointing saves the most, None if that is little."""
    groups = [
        group
        for group in memory.checkpointing
        if group.saved_bytes - group.recompute_peak_bytes >= MIN_SAVED_SHARE * total
    ]
    return max(groups, key=lambda group: group.saved_bytes - group.recompute_peak_bytes, default=None)


def _why_activations(activations: Activations, group: CheckpointedGroup | None) -> str:
    largest = sorted(activations.modules, key=lambda module: -module.own_activation_bytes)[:SHOWN]
    named = ", ".join(
        f"{module.name or 'the model itself'} ({format_bytes(module.own_activation_bytes)})" for module in largest
    )
    total = format_bytes(activations.total_bytes)
    parts = [f"At the start of backward in step {activations.step}, saved activations were {total}"]
    parts += [f"the largest: {named}"] if named else []
    if group is not None:
        cost = "" if group.recompute_ns is None else f" for {format_ns(group.recompute_ns)} more per step"
        saved = format_bytes(group.saved_bytes - group.recompute_peak_bytes)
        parts.append(f"checkpointing {group.name} ({len(group.blocks)} blocks) would save {saved}{cost}")
    return "; ".join(parts) + "."


def _next_for_activations(group: CheckpointedGroup | None, rank: Rank) -> Iterator[str]:
    if group is not None:
        yield f"Checkpoint each of {group.name}: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)."
        if rank.facts.strategy == "FSDPStrategy":
            yield "Or in the strategy: FSDPStrategy(activation_checkpointing_policy={Block})."
    precision = rank.training.precision if rank.training is not None else None
    yield f"{SMALLER}{HALF if (precision or '32').startswith(('32', '64')) else ''}."


# Adam's two moments are as large as two copies of the parameters; SGD's momentum is one.
NOTABLE_PARAMETERS: Final = 1.0
# Below 20% of the peak, something else comes first.
NOTABLE_STATE: Final = 0.2
SHARDED: Final = (
    "Shard it over the ranks: FSDPStrategy(), ModelParallelStrategy() with fully_shard, or ZeroRedundancyOptimizer."
)
LESS_STATE: Final = "Use an optimizer with less state: torch.optim.Adafactor, SGD without momentum, or 8-bit state."
# Of a matrix it keeps a row and a column; 8-bit state would recover three quarters.
ADAFACTOR: Final = 0.9


def optimizer_state(facts: Facts) -> Finding | None:
    """Find the permanent memory of the first optimizer step: a model that fits before it may not fit after it.

    Recovers the part of the line ``optimizer_state`` that other ranks would hold, or that Adafactor does without.
    """
    memory = facts.memory.lead if facts.memory is not None else None
    if memory is None or memory.peak is None or not facts.is_fit:
        return None
    peak = memory.peak
    state, parameters = peak.categories.get("optimizer_state") or 0, peak.categories.get("parameter") or 0
    if state < MIN_BYTES or state < NOTABLE_PARAMETERS * parameters or state < NOTABLE_STATE * peak.total_bytes:
        return None
    rank = next(rank for rank in facts.run.ranks if rank.rank == memory.rank)
    risen = _risen(rank)
    ledger, ranks = facts.byte_ledgers.get(rank.rank), len(facts.run.ranks)
    recovers = recovered(ledger, state * ((ranks - 1) / ranks if ranks > 1 else ADAFACTOR), "optimizer_state")
    first_steps = tuple(row["step"] for row in rank.pulse[:2] if row["step"] is not None)
    return Finding(
        rule="optimizer_state",
        severity=_severity(ledger, recovers),
        title=(
            f"Optimizer state takes {format_bytes(state)} from the first optimizer step on{facts.on_rank(rank)}: "
            f"{percent(state / peak.total_bytes)} of the peak."
        ),
        why=_why_state(rank, peak, state, parameters)
        + (f" Step 2 peaks {format_bytes(risen)} above step 1." if risen is not None else "")
        + _pressure(ledger),
        remedies=(SHARDED, LESS_STATE) if ranks > 1 else (LESS_STATE,),
        evidence=(*facts.recorded(rank, peak.source, (peak.step,)), facts.pulse(rank, first_steps)),
        numbers={
            "rank": memory.rank,
            "optimizer_state_bytes": state,
            "parameter_bytes": parameters,
            "peak_bytes": peak.total_bytes,
            "first_step_bytes": risen,
        },
        weight=state / peak.total_bytes,
        recovers=recovers,
    )


def _why_state(rank: Rank, peak: CategoryPeak, state: int, parameters: int) -> str:
    names = [optimizer.name for optimizer in rank.training.optimizers if optimizer.name] if rank.training else []
    ratio = f", {state / parameters:.1f} times the parameters' {format_bytes(parameters)}" if parameters else ""
    return (
        f"{names[0] if names else 'The optimizer'} holds {format_bytes(state)} of state in step {peak.step}{ratio}; "
        "the first forward runs without it."
    )


def _risen(rank: Rank) -> int | None:
    """Return the increase of the device peak from the first to the second step; None without an increase."""
    match [row["device_peak_bytes"] for row in rank.pulse[:2]]:
        case [int() as first, int() as second] if second > first:
            return second - first
    return None


# Below a quarter of the peak, something else comes first.
NOTABLE_DATA: Final = 0.25
# float16 has half of float32, uint8 a quarter; a mapped file needs none.
SAVED_OF_DATA: Final = (0.5, 1.0)
AS_STORED: Final = (
    "Keep the samples as they are stored ({small}) and convert each one in {method}: they are {dtype} in {name}."
)
SMALLER_TYPES: Final = {
    "float32": "uint8, float16", "float64": "uint8, float16, float32", "int64": "uint8, int16, int32",
    "int32": "uint8, int16",
}  # fmt: skip
MAP: Final = "Map a file instead of reading it: numpy.load(path, mmap_mode='r'), torch.load(path, mmap=True)."


def data_memory(facts: Facts) -> Finding | None:
    """Find a data set whose tensors and arrays are much of the resident memory.

    Recovers half to all of the line ``data_set`` of the byte ledger; on an accelerator, whose ledger is that of the
    device, the peak is that of the resident memory and nothing is recovered.
    """
    found = [
        (loader.data_bytes or 0, rank, loader)
        for rank in facts.run.ranks
        for loader in (rank.training.dataloaders if rank.training else ())
    ]
    if not found:
        return None
    size, rank, loader = max(found, key=lambda each: each[0])
    ledger = facts.byte_ledgers.get(rank.rank) if rank.facts.is_cpu else None
    peak = rank.peak_rss_bytes or 0
    size = min(size, ledger.bytes("data_set") if ledger is not None else peak)
    if size < max(MIN_BYTES, NOTABLE_DATA * peak):
        return None
    least, most = (recovered(ledger, size * share, "data_set") for share in SAVED_OF_DATA)
    recovers = replace(most, min=least.min) if least is not None and most is not None else None
    name, dtype = loader.data_largest or "the data set", loader.data_dtype or ""
    method, small = sample_method([loader]), SMALLER_TYPES.get(dtype)
    convert = (AS_STORED.format(small=small, method=method, dtype=dtype, name=name),) if small else ()
    return Finding(
        rule="data_memory",
        severity=_severity(ledger, recovers),
        title=(
            f"The data set keeps {format_bytes(size)} in memory{facts.on_rank(rank)} ({name}, {dtype}), "
            f"{percent(size / peak)} of the peak RSS."
        ),
        why=(
            f"Tensors and arrays that the data set refers to, without mapped files; peak RSS is {format_bytes(peak)}."
            f"{_pressure(ledger)}"
        ),
        remedies=(*convert, MAP),
        evidence=(facts.pulse(rank),),
        numbers={"rank": rank.rank, "data_bytes": size, "peak_rss_bytes": peak, "largest": name, "dtype": dtype},
        weight=size / peak,
        recovers=recovers,
    )
