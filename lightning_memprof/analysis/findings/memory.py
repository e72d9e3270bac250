"""Memory of a run: at the peak, out of memory, and an allocator under pressure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Evidence, Facts, Finding, Severity
from lightning_memprof.analysis.findings.traces import (
    times,
)
from lightning_memprof.analysis.oom.autopsy import autopsies
from lightning_memprof.artifacts.naming import series_path
from lightning_memprof.artifacts.series import AllocatorRow
from lightning_memprof.units import MIB, format_bytes, format_count, format_ns, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.memory.activations import Activations, CheckpointedGroup
    from lightning_memprof.analysis.memory.report import CategoryPeak, RankMemory
    from lightning_memprof.analysis.run.model import Rank, RecordedWindow

__all__ = ["activation_peak", "allocator_retries", "optimizer_state", "out_of_memory"]

# A smaller category fits everywhere.
MIN_BYTES: Final = 64 * MIB
LESS_MEMORY: Final = (
    "Free memory: a smaller batch with Trainer(accumulate_grad_batches=2), or activation checkpointing."
)

# The page itself shows the contribution of the allocator's snapshot.
NO_SNAPSHOT: Final = 0


def out_of_memory(facts: Facts) -> list[Finding]:
    """Find out-of-memory errors: where the run ended, or how often it continued."""
    found = autopsies(facts.run, max_bytes=NO_SNAPSHOT)
    if not found:
        return []
    fatal = [autopsy for autopsy in found if autopsy.ended_run]
    autopsy = fatal[0] if fatal else found[-1]
    rank = f" of rank {autopsy.rank}" if len(facts.run.ranks) > 1 else ""
    where = "before the first step" if autopsy.place["step"] is None else f"in step {autopsy.place['step']}"
    phase = f", in {str(autopsy.place['phase']).replace('_', ' ')}" if autopsy.place["phase"] else ""
    often = "" if fatal else f" {format_count(len(found), 'time')}, last"
    return [
        Finding(
            rule="out_of_memory",
            severity=Severity.CRITICAL if fatal else Severity.WARNING,
            sentence=(
                f"{'The host' if autopsy.is_host else autopsy.device}{rank} ran out of memory{often} {where}{phase}: "
                f"{autopsy.cause}."
            ),
            why=autopsy.why,
            next_steps=autopsy.next_steps,
            numbers={
                "asked_bytes": autopsy.asked_bytes,
                "cause": autopsy.cause,
                "step": autopsy.place["step"],
                "events": len(found),
            },
            weight=1.0,
        )
    ]


# Below half of the peak, parameters, gradients and optimizer state come first.
NOTABLE_ACTIVATIONS: Final = 0.5
# Checkpointing that saves less of the peak is not worth its time.
MIN_SAVED_SHARE: Final = 0.1
SHOWN: Final = 3
SMALLER: Final = "Save fewer activations: a smaller batch with Trainer(accumulate_grad_batches=2), or bf16-mixed."


def activation_peak(facts: Facts) -> list[Finding]:
    """Find a peak that is mostly saved activations, their largest modules, and the effect of checkpointing."""
    memory = facts.memory.lead if facts.memory is not None else None
    if memory is None or memory.peak is None or memory.activations is None or not facts.is_fit:
        return []
    total, saved = memory.peak.total_bytes, memory.peak.categories.get("activation") or 0
    if saved < MIN_BYTES or saved < NOTABLE_ACTIVATIONS * total:
        return []
    group = _best(memory, total)
    rank = next(rank for rank in facts.run.ranks if rank.rank == memory.rank)
    steps = (memory.peak.step,)
    return [
        Finding(
            rule="activation_peak",
            severity=Severity.INFO,
            sentence=(
                f"Saved activations are {percent(saved / total)} of peak memory{facts.on_rank(rank)}: "
                f"{format_bytes(saved)}."
            ),
            why=_why_activations(memory.activations, group),
            next_steps=_next_for_activations(group),
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
        )
    ]


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
    named = ", ".join(f"{module.name} ({format_bytes(module.own_activation_bytes)})" for module in largest)
    total = format_bytes(activations.total_bytes)
    parts = [f"At the start of backward in step {activations.step}, saved activations were {total}"]
    parts += [f"the largest: {named}"] if named else []
    if group is not None:
        cost = "" if group.recompute_ns is None else f" for {format_ns(group.recompute_ns)} more per step"
        saved = format_bytes(group.saved_bytes - group.recompute_peak_bytes)
        parts.append(f"checkpointing {group.name} ({len(group.blocks)} blocks) would save {saved}{cost}")
    return "; ".join(parts) + "."


def _next_for_activations(group: CheckpointedGroup | None) -> tuple[str, ...]:
    if group is None:
        return (SMALLER,)
    return (
        f"Checkpoint each of {group.name}: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).",
        "With FSDP: FSDPStrategy(activation_checkpointing_policy={Block}).",
        SMALLER,
    )


# Adam's two moments are as large as two copies of the parameters; SGD's momentum is one.
NOTABLE_PARAMETERS: Final = 1.0
# Below 20% of the peak, something else comes first.
NOTABLE_STATE: Final = 0.2
STATE_NEXT: Final = (
    "Shard it over the ranks: FSDPStrategy(), ModelParallelStrategy() with fully_shard, or ZeroRedundancyOptimizer.",
    "Use an optimizer with less state: torch.optim.Adafactor, SGD without momentum, or 8-bit state.",
)


def optimizer_state(facts: Facts) -> list[Finding]:
    """Find the permanent memory of the first optimizer step: a model that fits before it may not fit after it."""
    memory = facts.memory.lead if facts.memory is not None else None
    if memory is None or memory.peak is None or not facts.is_fit:
        return []
    peak = memory.peak
    state, parameters = peak.categories.get("optimizer_state") or 0, peak.categories.get("parameter") or 0
    if state < MIN_BYTES or state < NOTABLE_PARAMETERS * parameters or state < NOTABLE_STATE * peak.total_bytes:
        return []
    rank = next(rank for rank in facts.run.ranks if rank.rank == memory.rank)
    risen = _risen(rank)
    first_steps = tuple(row["step"] for row in rank.pulse[:2] if row["step"] is not None)
    return [
        Finding(
            rule="optimizer_state",
            severity=Severity.INFO,
            sentence=(
                f"Optimizer state takes {format_bytes(state)} from the first optimizer step on{facts.on_rank(rank)}: "
                f"{percent(state / peak.total_bytes)} of the peak."
            ),
            why=_why_state(rank, peak, state, parameters)
            + (f" Step 2 peaks {format_bytes(risen)} above step 1." if risen is not None else ""),
            next_steps=STATE_NEXT,
            evidence=(*facts.recorded(rank, peak.source, (peak.step,)), facts.pulse(rank, first_steps)),
            numbers={
                "rank": memory.rank,
                "optimizer_state_bytes": state,
                "parameter_bytes": parameters,
                "peak_bytes": peak.total_bytes,
                "first_step_bytes": risen,
            },
            weight=state / peak.total_bytes,
        )
    ]


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


# Ranks of one job are equally full: these many represent all.
MAX_RANKS: Final = 32
MAX_WINDOWS: Final = 16
# A retry waits for all kernels, frees segments and allocates new ones: at one per step, every step pays for it.
SEVERE_PER_STEP: Final = 1.0
RETRIES_NEXT: Final = (
    LESS_MEMORY,
    "Reduce fragmentation: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and batches of few different shapes.",
    "Find the allocation sites at the peak: MemProfilerCallback(collectors=[AllocatorHistory()]).",
)


@dataclass(frozen=True, kw_only=True)
class _Retries:
    """Counts in a window's rows: ``grown`` within the window, ``total`` since the process started."""

    rank: int
    window: RecordedWindow
    device: str
    grown: int
    total: int
    reserved_bytes: int | None


def allocator_retries(facts: Facts) -> list[Finding]:
    """Find retries of the allocator, in the recorded steps or before them."""
    found = [
        retries
        for rank in facts.run.ranks[:MAX_RANKS]
        for window in rank.windows[-MAX_WINDOWS:]
        if (retries := _retries(rank, window)) is not None
    ]
    if not found:
        return []
    worst = max(found, key=lambda retries: (retries.grown, retries.total))
    steps = max(len(worst.window.steps) + len(worst.window.warmup_steps), 1)
    rate = worst.grown / steps
    severe = Severity.CRITICAL if rate >= SEVERE_PER_STEP else Severity.WARNING
    device = f"{worst.device}{f' of rank {worst.rank}' if len(facts.run.ranks) > 1 else ''}"
    reserved = f" with {format_bytes(worst.reserved_bytes)} reserved" if worst.reserved_bytes is not None else ""
    return [
        Finding(
            rule="allocator_retries",
            severity=severe if worst.grown else Severity.INFO,
            sentence=(
                f"{device} is nearly full: the allocator emptied its cache {times(worst.grown)} in {steps} recorded "
                "steps."
                if worst.grown
                else f"{device} was full {times(worst.total)} before the recorded steps: the allocator emptied its "
                "cache."
            ),
            why=(
                f"An allocation failed{reserved}: the allocator waited for all kernels, freed its cache and retried; "
                "other ranks wait for that in their next collective."
            ),
            next_steps=RETRIES_NEXT,
            evidence=(
                Evidence(
                    artifact=f"{facts.run.directory.name}/{series_path(worst.window.index, worst.rank, 'allocator')}",
                    rank=worst.rank,
                    window=worst.window.index,
                    steps=(min(worst.window.steps), max(worst.window.steps)) if worst.window.steps else None,
                ),
            ),
            numbers={
                "rank": worst.rank,
                "device": worst.device,
                "retries": worst.grown,
                "retries_in_all": worst.total,
                "steps": steps,
                "reserved_bytes": worst.reserved_bytes,
            },
            weight=min(rate, 1.0),
        )
    ]


def _retries(rank: Rank, window: RecordedWindow) -> _Retries | None:
    series = window.read(AllocatorRow)
    rows = series.rows
    counts = [row.num_alloc_retries for row in rows if row.num_alloc_retries is not None]
    if series.problems or not counts or counts[-1] <= 0:
        return None
    reserved = [row.reserved_bytes for row in rows if row.reserved_bytes is not None]
    return _Retries(
        rank=rank.rank,
        window=window,
        device=next((row.device for row in rows if row.device), "the device"),
        grown=max(counts[-1] - counts[0], 0),
        total=counts[-1],
        reserved_bytes=max(reserved, default=None),
    )
