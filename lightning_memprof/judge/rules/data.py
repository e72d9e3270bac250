"""Waiting for data: in the steps of a run, and in an operator trace; copies that block."""

from __future__ import annotations

import statistics as stats
from collections.abc import Sequence
from typing import Final

from lightning_memprof.account.ledger.model import TimeLedger, total
from lightning_memprof.account.ledger.run import RESTART
from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.workers import loading, private_memory, workers_end
from lightning_memprof.artifacts.manifest import DataLoaderFacts
from lightning_memprof.artifacts.series import ProcessRow, ThroughputRow
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Finding, Recovery, Severity
from lightning_memprof.judge.measures import (
    Rhythm,
    cores_of_loading,
    in_workers,
    line_of_samples,
    more_workers,
    one_by_one,
    ranks_on_host,
    rhythm,
    sample_method,
    slow_function,
    takes_turns,
    torch_threads,
    worker_advice,
)
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.rules.program.lines import has, of_samples
from lightning_memprof.judge.traces import (
    BESIDE_THE_STEP,
    MIN_TRACE_STEPS,
    NOTABLE_SHARE,
    exposed_loading,
    idle_ns,
    longest_in,
    on_rank,
    recovered_ns,
    seen_in,
    severity_of,
)
from lightning_memprof.read.run.model import Rank
from lightning_memprof.read.trace.model import TraceReport
from lightning_memprof.units import format_bytes, format_count, format_ns, percent

# The Trainer fetches a batch that is ready in less: no setting of the loader saves it.
MIN_COST_NS: Final = 1_000_000
# In fewer turns of the workers, a few steps that wait show no pattern.
MIN_TURNS: Final = 4
# If the first fetch of each epoch holds this share of the wait, workers restart every epoch.
EPOCH_STARTS_SHARE: Final = 0.5
SETTINGS: Final = ("num_workers", "persistent_workers", "pin_memory", "prefetch_factor")
METHODS: Final = (".fetch", ".collate", ".sampler")
MOST_OF_WAIT: Final = 0.5
MORE_WORKERS: Final = 4
DEFAULT_PREFETCH: Final = 2
KEEP_WORKERS: Final = "Keep the workers from epoch to epoch: DataLoader(persistent_workers=True)."
LESS_PER_SAMPLE: Final = "Do less per sample in {method}: decode and tokenize once, before training."
# Each worker has a copy of the data set, and iterates over the whole copy unless the program divides it.
SHARE: Final = (
    " Share the samples of the IterableDataset among them with torch.utils.data.get_worker_info(): each worker "
    "iterates over its own copy."
)
# Of the parts of loading in the training process, by the names of their lines.
FASTER: Final = {
    "fetch": "do less per sample: decode and tokenize once, before training",
    "collate": "do less per batch: whole tensors (torch.stack, pad_sequence), no loops over values",
    "sampler": (
        "draw the indices of an epoch at once, as in torch.multinomial(weights, count).tolist(): workers do not run it"
    ),
}

# One step with this share of the loading is a start of workers or of an epoch, not the usual step.
ONE_STEP: Final = 0.75
WORKERS: Final = (
    "Load in worker processes: DataLoader(num_workers=4, persistent_workers=True); if there are any, use more."
)
FIRST_WORKERS: Final = "Load in worker processes: DataLoader(num_workers=4, persistent_workers=True)."
MORE: Final = "Use more worker processes, up to the cores of each rank: a higher DataLoader(num_workers=...)."
ONE_BATCH: Final = "Look at the samples of the slow batch; if it starts an epoch, set persistent_workers=True."
PIN: Final = "Overlap copies with the step: DataLoader(pin_memory=True)."


def input_bound(facts: Facts) -> Finding | None:
    """Find steps that wait for their batch, and the DataLoader settings to change.

    Recovers at most the wait, by faster code; at least half of what more workers save: with ``w`` workers, and cores
    for them, a batch that takes one process ``l`` ns is ready every ``l / w`` ns. Where the training process computes
    while it loads, a step that keeps ``b`` of ``c`` cores busy takes at least ``b / c`` of its time with workers too,
    and workers may save nothing where operators use all cores.
    """
    worst = facts.worst("data_wait")
    if worst is None:
        return None
    rank, statistics = worst
    ledger = facts.ledgers[rank.rank]
    share, wait_ns = statistics.share("data_wait"), statistics.breakdown_ns["data_wait"] or 0
    if share <= NOTABLE_SHARE:
        return None
    if statistics.mean_ns < POLICY.short_step_ns and wait_ns < MIN_COST_NS:
        return None
    loaders = rank.training.dataloaders if rank.training else []
    in_few_steps = _in_few_steps(rank, share, loaders)
    at_epoch_starts = _share_at_epoch_starts(rank)
    few, worth = rhythm(rank, "data_wait"), _recovery(facts, rank, ledger, loaders, at_epoch_starts)
    why = [f"The wait takes {format_ns(wait_ns)} of a {format_ns(statistics.mean_ns)} step"]
    why += ["mostly in a few steps"] if in_few_steps else []
    why += [f"{percent(at_epoch_starts)} of it at the start of epochs"] if at_epoch_starts >= EPOCH_STARTS_SHARE else []
    return Finding(
        rule="input_bound",
        severity=Severity.INFO if few is not None and few.is_hiccup else worth.severity,
        title=(
            f"Input-bound: the {'training ' if facts.is_fit else ''}loop waits for data {percent(share)} of each step"
            f"{facts.on_rank(rank)}{_cause(rank, ledger, loaders, at_epoch_starts, few)}."
        ),
        why=", ".join(why) + (f"; {_settings(loaders[0])}" if loaders else "") + ".",
        remedies=_next_steps(
            rank,
            ledger,
            at_epoch_starts,
            _slowest_part(ledger, few),
            in_few_steps=in_few_steps,
            measured=worker_advice(facts, rank, ledger),
        ),
        evidence=(facts.pulse(rank), *facts.recorded(rank, "hooks")),
        numbers={
            "rank": rank.rank,
            "data_wait_share": share,
            "data_wait_ns": wait_ns,
            "duration_ns": statistics.mean_ns,
            "epoch_starts_share": at_epoch_starts,
            "in_few_steps": in_few_steps,
            "dataloaders": [loader.fields for loader in loaders],
        },
        weight=worth.share,
        recovers=worth,
    )


def workers_restart(facts: Facts) -> Finding | None:
    """Find workers of a DataLoader that end and start again in every epoch.

    Recovers half to all of the time between epochs. Lost: the memory of the workers while they wait.
    """
    if (worst := facts.heaviest(_restarting)) is None:
        return None
    rank, ledger = worst
    ns = _restarting(ledger)
    if ns < POLICY.note * ledger.step_ns:
        return None
    count = sum(line.count for line in ledger.of("data_wait") if line.name == RESTART)
    worth = Recovery(unit="ns", min=ns / 2, max=ns, whole=ledger.step_ns)
    loader = rank.training.dataloaders[0] if rank.training else None
    return Finding(
        rule="workers_restart",
        title=(
            f"DataLoader workers restart in every epoch: {ledger.share_text(ns)}"
            f"{facts.on_rank(rank)} (persistent_workers=False)."
        ),
        why=(
            f"{format_ns(ns / count)} between epochs, once every {1 / count:,.0f} steps"
            f"{f'; {_settings(loader)}' if loader else ''}."
        ),
        remedies=(KEEP_WORKERS, "Make epochs longer: several passes over the data set in one epoch."),
        evidence=(facts.pulse(rank),),
        numbers={"rank": rank.rank, "restart_ns": ns, "epochs_per_step": count},
        **worth.parts,
    )


def _restarting(ledger: TimeLedger) -> float:
    return sum(line.ns for line in ledger.of("data_wait") if line.name == RESTART)


# Of the steps, at most the first third are the start.
MOST_OF_STEPS: Final = 1 / 3


def worker_start(facts: Facts) -> list[Finding]:
    """Find more DataLoader workers than cores, whose start delays the first batches of the run.

    The start is what the first batch of each worker waits beyond the mean wait of later steps, at most the mean time
    that a worker waits for a core until its first sample: workers that start from disk or network start together.
    With ``n`` workers instead of ``w`` the run is shorter by ``1 - n / w`` of the start to the whole start, once: as
    many as there are cores, or as many as a step needs where they mostly wait. The steps of the ledger, and so what a
    finding recovers, do not include the first one.
    """
    found = [finding for rank in facts.run.ranks if (finding := _start_of(facts, rank)) is not None]
    return sorted(found, key=lambda finding: -finding.weight)[:1]


def _start_of(facts: Facts, rank: Rank) -> Finding | None:
    ledger, loaders = facts.ledgers.get(rank.rank), rank.training.dataloaders if rank.training else []
    workers = max((loader.num_workers or 0 for loader in loaders), default=0)
    cores = max((rank.facts.cpu_count or workers) // len(ranks_on_host(facts, rank)), 1)
    # Recording makes batches late, too.
    waits = [row["data_wait_ns"] or 0 for row in rank.pulse if row["window"] is None]
    turn = min(workers, int(len(waits) * MOST_OF_STEPS))
    samples = [row for row in rank.read(ProcessRow).rows if row.kind == "worker"]
    firsts = {row.pid: row.core_wait_ns or 0 for row in reversed(samples)}
    if ledger is None or workers <= cores or not turn or not firsts:
        return None
    cost, step_ns = loading(rank), ledger.step_ns - ledger.ns("data_wait")
    needed = cost.workers_for(step_ns) if cost is not None else cores
    wanted = needed if cost is not None and not cost.is_cpu_bound else min(needed, cores)
    usual_ns, waited_ns = stats.mean(waits[turn:]), stats.mean(firsts.values())
    delay_ns = sum(waits[:turn]) - turn * usual_ns
    run_ns, most_ns = sum(row["duration_ns"] or 0 for row in rank.pulse), min(delay_ns, waited_ns)
    least_ns = most_ns * (1 - max(wanted, cores) / workers)
    share = (least_ns + most_ns) / 2 / run_ns if run_ns else 0.0
    if wanted >= workers or share < POLICY.note:
        return None
    private = max(private_memory(rank), default=0)
    held = f"; all workers have {format_bytes(private)} of private memory" if private else ""
    needs = f"a worker needs {format_ns(cost.fetch_ns)} per batch, a step {format_ns(step_ns)}" if cost else ""
    return Finding(
        rule="worker_start",
        severity=Severity.WARNING,
        title=(
            f"{workers} DataLoader workers for {format_count(cores, 'core')}{facts.on_rank(rank)}: their start takes "
            f"{format_ns(delay_ns)}, {percent(delay_ns / run_ns)} of the run."
        ),
        why=(
            f"When first measured, a worker had waited {format_ns(waited_ns)} for a core; later steps wait "
            f"{format_ns(usual_ns)} for a batch{held}."
        ),
        remedies=(f"Use DataLoader(num_workers={wanted}): {needs or 'not more than there are cores'}.",),
        evidence=(facts.pulse(rank),),
        numbers={
            "rank": rank.rank,
            "workers": workers,
            "cores": cores,
            "start_ns": round(delay_ns),
            "core_wait_ns": round(waited_ns),
            "saved_ns": (round(least_ns), round(most_ns)),
            "run_ns": run_ns,
            "private_bytes": private,
        },
        weight=share,
    )


def _recovery(
    facts: Facts, rank: Rank, ledger: TimeLedger, loaders: Sequence[DataLoaderFacts], at_epoch_starts: float
) -> Recovery:
    wait = ledger.ns("data_wait")
    if at_epoch_starts >= EPOCH_STARTS_SHARE:
        return Recovery(unit="ns", min=wait * at_epoch_starts / 2, max=wait * at_epoch_starts, whole=ledger.step_ns)
    workers = (loaders[0].num_workers or 0) if loaders else 0
    cores, others = rank.facts.cpu_count or MORE_WORKERS, ledger.step_ns - wait
    # One batch every `batch_ns` from one worker; the loop takes one every `others` ns at best.
    batch_ns = wait if not workers else ledger.step_ns * workers
    wanted = min(MORE_WORKERS, cores) if not workers else min(2 * workers, max(cores, workers))
    if (turns := takes_turns(rank)) is not None:
        batch_ns, wanted = batch_ns * (1 - turns.lock_share), workers
    least = max(ledger.step_ns - max(others, batch_ns / wanted), 0.0)
    if not workers and (busy := cores_of_loading(facts, rank, ledger)) is not None:
        room = max(ledger.step_ns * (1 - busy / cores), 0.0)
        least = 0.0 if (torch_threads(rank) or 1) >= cores else min(least, room)
    return Recovery(unit="ns", min=min(least, wait) / 2, max=wait, whole=ledger.step_ns)


def _in_few_steps(rank: Rank, share: float, loaders: Sequence[DataLoaderFacts]) -> bool:
    """Return whether the loader keeps up except in a few steps.

    N workers that start together finish together, and one step in N waits for all of them: the wait is counted per
    turn of N steps.
    """
    typical = rank.typical_steps
    turn = max((loaders[0].num_workers if loaders else None) or 1, 1)
    if typical is None or (turn > 1 and len(typical.steps) < MIN_TURNS * turn):
        return False
    waits = [(breakdown["data_wait"] or 0, duration) for _, duration, breakdown in typical.steps]
    turns = [waits[start : start + turn] for start in range(0, len(waits) - turn + 1, turn)]
    shares = [sum(ns for ns, _ in turn) / (sum(duration for _, duration in turn) or 1) for turn in turns]
    return stats.median(shares) < share / 2


def _share_at_epoch_starts(rank: Rank) -> float:
    """Return the share of the wait, after the run's first fetch, in the first steps of later epochs."""
    rows = rank.pulse[1:]
    total = sum(row["data_wait_ns"] or 0 for row in rows)
    starts = sum(
        row["data_wait_ns"] or 0
        for before, row in zip(rank.pulse, rows, strict=False)
        if row["epoch"] != before["epoch"]
    )
    return starts / total if total else 0.0


def _cause(
    rank: Rank, ledger: TimeLedger, loaders: Sequence[DataLoaderFacts], at_epoch_starts: float, few: Rhythm | None
) -> str:
    """Return what the wait is for, to end the sentence: few steps, workers, or the part of loading in this process."""
    workers = (loaders[0].num_workers or 0) if loaders else None
    if workers and at_epoch_starts >= EPOCH_STARTS_SHARE:
        return ": its workers restart every epoch" if loaders[0].persistent_workers is False else " as epochs start"
    if (turns := takes_turns(rank)) is not None:
        return f": its {workers} workers take turns at a lock{f' in {turns.lock}' if turns.lock else ''}"
    part = _slowest_part(ledger, few)
    in_sampler = part is not None and part[1] == "sampler"
    if few is not None and few.period is not None:
        owners = {line.name.rpartition(".")[0] for line in ledger.of("data_wait") if line.name.endswith(METHODS)}
        owners = {"workers that start again"} if workers_end(rank) else owners
        source = f" for {owners.pop()}" if len(owners) == 1 else ""
        return f": {few.subject.lower()} waits {format_ns(few.mean_ns)}{source} (num_workers={workers or 0})"
    if workers and not in_sampler and (slow := slow_function(rank)) is not None:
        return f": {slow.function} takes {percent(slow.share)} of a fetch"
    if workers:
        behind = f": {format_count(workers, 'worker')} cannot keep up{in_workers(rank)}"
        return ", mostly in the sampler" if in_sampler else behind
    named, at = f", mostly in {_named(loaders, *part)}" if part else "", line_of_samples(rank, part)
    source = has(at, "it", named.rpartition(" ")[2]) if at else ""
    return "" if workers is None else f"{named}{one_by_one(rank, ledger)[0]} (num_workers=0){source}"


def _slowest_part(ledger: TimeLedger, few: Rhythm | None) -> tuple[str, str] | None:
    """Return the data set and the part of loading in the training process with most of the wait.

    The parts are those of the recorded steps, which may wait less than the others, for the same parts. Where few steps
    hold most of the wait, the recorded ones may have missed them: a part must explain the wait of the run itself.
    """
    lines = [line for line in ledger.of("data_wait") if line.name not in {"", RESTART}]
    slowest = max((line for line in lines if line.name.endswith(METHODS)), key=lambda line: line.ns, default=None)
    if slowest is None or slowest.ns < MOST_OF_WAIT * (total(lines) if few is None else ledger.ns("data_wait")):
        return None
    owner, _, part = slowest.name.rpartition(".")
    return owner, part


def _named(loaders: Sequence[DataLoaderFacts], owner: str, part: str) -> str:
    """Return a part of loading as a program calls it: ``Images.__getitem__``."""
    return {"fetch": f"{owner}.{sample_method(loaders)}", "collate": "collate_fn", "sampler": "the sampler"}[part]


def _settings(loader: DataLoaderFacts) -> str:
    return ", ".join(f"{name}={loader.fields[name]}" for name in SETTINGS if name in loader.fields)


def _next_steps(
    rank: Rank,
    ledger: TimeLedger,
    at_epoch_starts: float,
    part: tuple[str, str] | None,
    *,
    in_few_steps: bool,
    measured: str | None,
) -> tuple[str, ...]:
    """Return the settings that are not in use, in the order in which they usually help."""
    loaders = rank.training.dataloaders if rank.training else []
    if not loaders:
        return ("Load batches in parallel with the step: DataLoader(num_workers=4, persistent_workers=True).",)
    loader, slow = loaders[0], slow_function(rank)
    method = slow.function if slow is not None else sample_method(loaders)
    steps, workers = [*one_by_one(rank, ledger)[1]], loader.num_workers or 0
    cores, share = rank.facts.cpu_count, SHARE if loader.is_iterable else ""
    restart = at_epoch_starts >= EPOCH_STARTS_SHARE or workers_end(rank)
    faster = f"ake {_named(loaders, *part)} faster: {FASTER[part[1]]}" if part is not None else ""
    steps += of_samples(at) if (at := line_of_samples(rank, part)) is not None else ()
    if part is not None and part[1] == "sampler":
        return (f"M{faster}.",)
    if workers == 0:
        wanted = min(MORE_WORKERS, cores) if cores else MORE_WORKERS
        also = f"; or m{faster}" if faster else ""
        steps.append(f"num_workers is 0: use DataLoader(num_workers={wanted}, persistent_workers=True){also}.{share}")
    else:
        keep = [KEEP_WORKERS] if loader.persistent_workers is False else []
        steps += keep if restart else []
        if in_few_steps and not restart:
            # Batches in stock cover a few slow ones; they do not help workers that are slower than the training.
            prefetch = loader.prefetch_factor or DEFAULT_PREFETCH
            steps.append(f"prefetch_factor is {prefetch}: use DataLoader(prefetch_factor={2 * prefetch}).")
        steps.append((measured or more_workers(workers, cores, method)) + share)
        steps += keep if not restart else []
    if loader.pin_memory is False and not rank.facts.is_cpu:
        steps.append("pin_memory is False: use DataLoader(pin_memory=True) to overlap copies with the step.")
    return (*steps, LESS_PER_SAMPLE.format(method=method))


# Lengths vary in every data set, and batches of whole samples are never full.
MIN_PADDING: Final = 0.2
# Each operator has a cost that does not depend on the length.
SAVED_OF_PADDING: Final = (0.4, 1.0)
GROUP: Final = (
    "Batch samples of similar length, and pad to the longest of each batch: sort by length, then shuffle whole batches "
    "(batch_sampler)."
)
LONGEST: Final = "Pad each batch to its longest sample in collate_fn, not to a fixed length."


def padding(facts: Facts) -> Finding | None:
    """Find batches of sequences of which much is padding.

    Recovers 40% to 100% of the padded share of forward and backward: their work is in proportion to the positions, or
    to their square. Lost: batches of similar samples are less random.
    """
    if (heaviest := facts.heaviest(lambda ledger: ledger.ns("forward", "backward"))) is None:
        return None
    rank, ledger = heaviest
    rows = [row for window in rank.windows for row in window.read(ThroughputRow).recorded if row.positions]
    positions = sum(row.positions or 0 for row in rows)
    padded, beyond = (sum(getattr(row, name) or 0 for row in rows) for name in ("padded", "beyond_longest"))
    share = padded / positions if positions else 0.0
    if share < MIN_PADDING:
        return None
    spent = ledger.ns("forward", "backward") * share
    least, most = (spent * saved for saved in SAVED_OF_PADDING)
    worth = Recovery(unit="ns", min=least, max=most, whole=ledger.step_ns)
    steps = (LONGEST, GROUP) if beyond > padded / 2 else (GROUP, LONGEST)
    return Finding(
        rule="padding",
        title=f"Padding: {percent(share)} of the positions in a batch are padding{facts.on_rank(rank)}.",
        why=(
            f"{padded:,} of {positions:,} positions in {len(rows)} recorded batches"
            f", {percent(beyond / positions)} beyond the longest sample of their batch; forward and backward take "
            f"{format_ns(ledger.ns('forward', 'backward'))} of {ledger.length_text}."
        ),
        remedies=steps,
        evidence=facts.recorded(rank, "throughput"),
        numbers={
            "rank": rank.rank,
            "positions": positions,
            "padded": padded,
            "beyond_longest": beyond,
            "passes_ns": ledger.ns("forward", "backward"),
        },
        **worth.parts,
    )


def input_bound_trace(trace: TraceReport) -> Finding | None:
    """Find a device that is idle while batches load; without a device, loading that takes much of the steps.

    Recovers half to all of the exposed loading: workers load while the step runs, as far as there are cores for them.
    """
    loading = exposed_loading(trace)
    if loading is None:
        return None
    steps, has_device = loading.steps, trace.gpu_window is not None
    in_one = steps >= MIN_TRACE_STEPS and loading.most_ns >= ONE_STEP * loading.total_ns
    where = f", {percent(loading.most_ns / loading.total_ns)} of it in one of {steps} steps" if in_one else ""
    longest = next((cause for cause in trace.idle if cause.cause == Part.IDLE_DATA), None)
    # Before its first recorded event, the device's idle time is estimated.
    measured = idle_ns(trace, Part.IDLE_DATA)
    is_least = 0 < measured < loading.exposed_ns
    meanwhile = f"at least {format_ns(measured)}" if is_least else format_ns(loading.exposed_ns)
    idle = f"; the GPU is idle for {meanwhile} meanwhile" if has_device else ""
    ledger = trace.device_ledger if has_device else trace.host_ledger
    part, span = loading.total_ns / loading.span_ns, "the steps" if trace.steps else "the recorded time"
    return Finding(
        rule="input_bound_trace",
        severity=min(severity_of(loading.share), _most_severe(in_one=in_one, steps=steps)),
        title=f"Input-bound: loading batches takes {percent(part)} of {span}{on_rank(trace)}.",
        why=f"The DataLoader takes {format_ns(loading.total_ns)} of {format_ns(loading.span_ns)}{where}{idle}.",
        remedies=(
            workers_of(ledger, in_one=in_one),
            *((PIN,) if any(each.kind == "HtoD" and each.is_pageable for each in trace.copies) and not in_one else ()),
            *(() if in_one else (LESS_PER_SAMPLE.format(method="the data set"),)),
        ),
        evidence=longest_in(trace, longest.longest_start_ns, longest.longest_ns) if longest else seen_in(trace),
        numbers={
            "data_loading_share": part,
            "data_loading_ns": loading.total_ns,
            "exposed_ns": loading.exposed_ns,
            "window_ns": loading.span_ns,
            "steps": len(trace.steps),
            "in_one_step": in_one,
        },
        weight=loading.share,
        recovers=recovered_ns(ledger, BESIDE_THE_STEP, Part.IDLE_DATA, Part.DATA_WAIT, recorded_ns=loading.exposed_ns),
    )


def workers_of(ledger: TimeLedger | None, *, in_one: bool) -> str:
    """Return the next step for the workers that the iterators of a trace show."""
    names = " ".join(line.name for line in ledger.of("idle_data", "data_wait")) if ledger else ""
    alone, several = "_SingleProcess" in names, "_MultiProcessing" in names
    if alone == several:
        return WORKERS
    return FIRST_WORKERS if alone else ONE_BATCH if in_one else MORE


def _most_severe(*, in_one: bool, steps: int) -> Severity:
    """Return the highest severity: one loading step of several is the start of an epoch, a single one may be."""
    if in_one:
        return Severity.INFO
    return Severity.CRITICAL if steps >= MIN_TRACE_STEPS else Severity.WARNING
