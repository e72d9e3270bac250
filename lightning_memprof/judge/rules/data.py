"""Waiting for data, workers that start, and padding: in the steps of a run, and in an operator trace."""

from __future__ import annotations

import statistics as stats
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, total
from lightning_memprof.account.ledger.run import RESTART
from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.statistics import typical_steps
from lightning_memprof.account.steps.workers import loading, private_memory, workers_end
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.artifacts.manifest import DataLoaderFacts
from lightning_memprof.artifacts.series import ProcessRow, ThroughputRow
from lightning_memprof.judge.cores import free_cores, ranks_on_host, torch_threads
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.loading import (
    cores_of_loading,
    in_workers,
    line_of_samples,
    loaders_of,
    one_by_one,
    sample_method,
    slow_function,
    takes_turns,
    wanted_workers,
    worker_method,
    workers_of,
)
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    FASTER_COLLATE,
    FASTER_FETCH,
    FASTER_SAMPLER,
    FEWER_WORKERS,
    GROUP_BY_LENGTH,
    LONGER_EPOCHS,
    MORE_FOR_WAITS,
    MORE_WORKERS,
    PAD_TO_LONGEST,
    PERSISTENT_WORKERS,
    PIN_MEMORY,
    PREFETCH,
    SHARE_SAMPLES,
    WITHOUT_LOCK,
    WORKERS,
    Remedy,
)
from lightning_memprof.judge.rhythm import Rhythm, rhythm
from lightning_memprof.judge.rule import PASSES, Detail, Fact, Found, Rule
from lightning_memprof.judge.traces import (
    longest_in,
    seen_in,
    stretch,
    sure_ledger,
    workers_in,
)
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_bytes, format_count, format_ns, percent

SETTINGS: Final = ("num_workers", "persistent_workers", "pin_memory", "prefetch_factor")
METHODS: Final = (".fetch", ".collate", ".sampler")
DEFAULT_PREFETCH: Final = 2


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """What the loop waits for.

    Attributes:
        how: the end of the title, before ``owner``.
        owner: function, data set or part of loading.
        why: a sentence.
        faster: the remedy for the part of loading in the training process that has most of the wait.
    """

    how: str = ""
    owner: str = ""
    why: str = ""
    faster: Remedy | None = None


SAYS: Final = "the {loop} waits for data {share}{rank}"


def data_waits(facts: Facts) -> Iterator[Found]:
    """Yield the longest wait of a run for batches, and the loading that traces without a pulse show."""
    yield from _data_wait(facts)
    for trace in () if facts.ledgers else facts.steady_traces:
        yield from _loading(trace)


def _data_wait(facts: Facts) -> Iterator[Found]:
    """Yield the wait for batches, what it is for, and the settings that are not in use.

    Recovers at most the wait, by faster code; at least half of what more workers save, where their times or the free
    cores show that they do: with ``w`` workers, and cores for them, a batch that takes one process ``l`` ns is ready
    every ``l / w`` ns.
    """
    fact = _heaviest(facts, restart=False)
    if fact is None:
        return
    rank, loaders = fact.rank, loaders_of(fact.rank)
    few, starts = rhythm(rank, "data_wait"), _share_at_epoch_starts(rank)
    in_few_steps = _in_few_steps(rank, fact.share)
    cause, saves = _cause(rank, fact.ledger, starts, few), _saves(facts, fact, starts)
    mostly, settings = ", mostly in a few steps" if in_few_steps else "", f"; {_settings(loaders)}" if loaders else ""
    yield (
        fact,
        Detail(
            says=f"{SAYS}{cause.how}{{owner}}.",
            fields={"loop": "training loop" if facts.is_fit else "loop", "owner": cause.owner},
            measured=f"The wait takes {format_ns(fact.ns)} of {fact.ledger.length_text}{mostly}{settings}",
            why=f"{cause.why}." if cause.why else "",
            remedies=_remedies(facts, fact, cause, by_workers=saves[0] > 0, starts=starts, in_few_steps=in_few_steps),
            numbers={
                "action": cause.owner or None,
                "data_wait_share": fact.share,
                "data_wait_ns": round(fact.ns),
                "dataloaders": [loader.fields for loader in loaders],
            },
            saves=saves,
            is_note=few is not None and few.is_hiccup,
        ),
    )


def _heaviest(facts: Facts, *, restart: bool) -> Fact | None:
    """Return the longest wait for data, or restart of workers, of a rank."""

    def lines(ledger: TimeLedger) -> tuple[TimeLine, ...]:
        return tuple(line for line in ledger.of(Part.DATA_WAIT) if (line.name == RESTART) == restart)

    worst = facts.heaviest(lambda ledger: total(lines(ledger)))
    return Fact(source=worst[0], ledger=worst[1], lines=lines(worst[1])) if worst is not None else None


def _saves(facts: Facts, fact: Fact, starts: float) -> tuple[float, float]:
    if starts >= POLICY.most:
        return starts / 2, starts
    return min(max(_saved_by_workers(facts, fact), 0.0), fact.ns) / fact.ns / 2 if fact.ns else 0.0, 1.0


def _saved_by_workers(facts: Facts, fact: Fact) -> float:
    """Return what the workers of the remedy save, in ns per step; 0 where neither times nor free cores show it."""
    rank, wait, step_ns = fact.rank, fact.ns, fact.ledger.step_ns
    # The loop takes one batch every `others` ns at best.
    others = step_ns - wait
    if (turns := takes_turns(rank)) is not None:
        return step_ns - max(others, step_ns * (1 - turns.lock_share))
    if workers_of(rank):
        cost, wanted = loading(rank), wanted_workers(facts, rank, fact.ledger)
        return step_ns - max(others, cost.fetch_ns / wanted) if cost is not None and wanted is not None else 0.0
    saved = step_ns - max(others, wait / min(POLICY.workers, rank.facts.cpu_count or POLICY.workers))
    busy, free = cores_of_loading(facts, rank, fact.ledger), free_cores(facts, rank) or POLICY.workers
    if busy is None:
        return saved
    return min(saved, step_ns * (1 - busy / free)) if (torch_threads(rank) or 1) < free else 0.0


def _in_few_steps(rank: Rank, share: float) -> bool:
    """Return whether the loader keeps up except in a few steps.

    N workers that start together finish together, and one step in N waits for all of them: the wait is counted per
    turn of N steps.
    """
    typical, turn = typical_steps(rank), max(workers_of(rank), 1)
    if typical is None or (turn > 1 and len(typical.steps) < POLICY.rhythm * turn):
        return False
    waits = [(breakdown["data_wait"] or 0, duration) for _, duration, breakdown in typical.steps]
    turns = [waits[start : start + turn] for start in range(0, len(waits) - turn + 1, turn)]
    shares = [sum(ns for ns, _ in turn) / (sum(duration for _, duration in turn) or 1) for turn in turns]
    return stats.median(shares) < share / 2


def _share_at_epoch_starts(rank: Rank) -> float:
    """Return the share of the wait, after the run's first fetch, in the first steps of later epochs."""
    rows = rank.pulse[1:]
    whole = sum(row["data_wait_ns"] or 0 for row in rows)
    starts = sum(
        row["data_wait_ns"] or 0
        for before, row in zip(rank.pulse, rows, strict=False)
        if row["epoch"] != before["epoch"]
    )
    return starts / whole if whole else 0.0


def _cause(rank: Rank, ledger: TimeLedger, starts: float, few: Rhythm | None) -> Cause:
    """Return what the wait is for: few steps, workers, or the part of loading in this process."""
    workers, loaders, found = workers_of(rank), loaders_of(rank), _slowest_part(rank, ledger, few)
    if workers and starts >= POLICY.most:
        restart = bool(loaders) and loaders[0].persistent_workers is False
        return Cause(
            how=", as workers restart" if restart else ", as epochs start",
            why=f"{percent(starts)} of the wait is at the start of epochs",
        )
    if (turns := takes_turns(rank)) is not None:
        place = f" in {turns.lock}" if turns.lock else ""
        waited = f"each waits there for {percent(turns.lock_share)} of a batch"
        return Cause(how=", as workers share a lock", why=f"{workers} workers take turns at a lock{place}: {waited}")
    if few is not None and few.period is not None:
        owners = {line.name.rpartition(".")[0] for line in ledger.of(Part.DATA_WAIT) if line.name.endswith(METHODS)}
        found = replace(found, why=f"{few.subject} waits {format_ns(few.mean_ns)}")
        if workers_end(rank):
            return replace(found, how=", as workers start again", owner="")
        if len(owners) == 1:
            owner = owners.pop()
            return replace(found, how=", in ", owner=owner, faster=FASTER_FETCH.filled(owner=owner))
        return replace(found, how=f", in {few.subject[0].lower()}{few.subject[1:]}", owner="")
    return found if _is_sampler(found) or not workers else _in_workers(rank, workers)


def _is_sampler(cause: Cause) -> bool:
    return cause.faster is not None and cause.faster.id == FASTER_SAMPLER.id


def _in_workers(rank: Rank, workers: int) -> Cause:
    """Return the function in which workers spend most of a fetch, or that they cannot keep up."""
    cost, (named, state), slow = loading(rank), in_workers(rank), slow_function(rank)
    times = [f"a worker needs {format_ns(cost.fetch_ns)} per batch, mostly {state}"] if cost is not None else []
    takes = f"{slow.function} takes {percent(slow.share)} of a fetch" if slow else None
    why = "; ".join([takes or f"{format_count(workers, 'worker')} cannot keep up", *times])
    owner = slow.function if slow else named
    return Cause(how=", in " if owner else f", with {format_count(workers, 'worker')}", owner=owner, why=why)


def _slowest_part(rank: Rank, ledger: TimeLedger, few: Rhythm | None) -> Cause:
    """Return the part of loading in the training process with most of the wait.

    The parts are those of the recorded steps, which may wait less than the others, for the same parts. Where few steps
    hold most of the wait, the recorded ones may have missed them: a part must explain the wait of the run itself.
    """
    loaders = loaders_of(rank)
    how = ", with num_workers=0" if loaders and not workers_of(rank) else ""
    lines = [line for line in ledger.of(Part.DATA_WAIT) if line.name not in {"", RESTART}]
    slowest = max((line for line in lines if line.name.endswith(METHODS)), key=lambda line: line.ns, default=None)
    if slowest is None or slowest.ns < POLICY.most * (total(lines) if few is None else ledger.ns(Part.DATA_WAIT)):
        return Cause(how=how)
    owner, _, part = slowest.name.rpartition(".")
    named, faster = {
        "fetch": (f"{owner}.{sample_method(loaders)}", FASTER_FETCH),
        "collate": ("collate_fn", FASTER_COLLATE),
        "sampler": ("the sampler", FASTER_SAMPLER),
    }[part]
    spot, many = line_of_samples(rank, (owner, part)), one_by_one(rank, ledger)[0]
    found = [f"{spot.text} has {percent(spot.share)} of this time{spot.at}"] if spot is not None else []
    found += [f"Samples are fetched {many}"] if many else []
    faster = faster.filled(owner=spot.text if spot is not None else named)
    return Cause(how=", in ", owner=named, why="; ".join(found), faster=faster)


def _settings(loaders: Sequence[DataLoaderFacts]) -> str:
    return ", ".join(f"{name}={loaders[0].fields[name]}" for name in SETTINGS if name in loaders[0].fields)


def _remedies(
    facts: Facts, fact: Fact, cause: Cause, *, by_workers: bool, starts: float, in_few_steps: bool
) -> tuple[Remedy, ...]:
    """Return the settings that are not in use, and faster code: first where workers may save nothing."""
    rank, loaders, workers = fact.rank, loaders_of(fact.rank), workers_of(fact.rank)
    loader = loaders[0] if loaders else None
    share = (SHARE_SAMPLES,) if loader is not None and loader.is_iterable else ()
    method = worker_method(rank)
    faster = cause.faster or (FASTER_COLLATE if method == "collate_fn" else FASTER_FETCH).filled(owner=method)
    if _is_sampler(cause):
        return (faster,)
    if not workers:
        cores = rank.facts.cpu_count or POLICY.workers
        more = (WORKERS.filled(workers=min(POLICY.workers, cores)), *share)
        found = [*one_by_one(rank, fact.ledger)[1], *((*more, faster) if by_workers else (faster, *more))]
    else:
        keep = [PERSISTENT_WORKERS] if loader is not None and loader.persistent_workers is False else []
        restart = starts >= POLICY.most or workers_end(rank)
        # Batches in stock cover a few slow ones; they do not help workers that are slower than the training.
        stock = PREFETCH.filled(batches=2 * ((loader.prefetch_factor if loader else None) or DEFAULT_PREFETCH))
        found = [*keep] if restart else [stock] if in_few_steps else []
        found += [*_more_workers(facts, fact, faster), *share, *([] if restart else keep)]
    if loader is not None and loader.pin_memory is False and not rank.facts.is_cpu:
        found.append(PIN_MEMORY)
    return tuple(dict.fromkeys(found))


def _more_workers(facts: Facts, fact: Fact, faster: Remedy) -> tuple[Remedy, ...]:
    """Return what to do with workers that cannot keep up: by their times, else by the cores."""
    rank, workers, cores = fact.rank, workers_of(fact.rank), fact.rank.facts.cpu_count
    if (turns := takes_turns(rank)) is not None:
        return WITHOUT_LOCK.filled(owner=turns.lock or worker_method(rank)), faster
    if (wanted := wanted_workers(facts, rank, fact.ledger)) is not None:
        return MORE_WORKERS.filled(workers=wanted), faster
    if loading(rank) is not None or (cores is not None and workers >= POLICY.many_per_core * cores):
        return (faster,)
    if cores is not None and workers >= cores:
        return faster, MORE_FOR_WAITS.filled(owner=worker_method(rank), workers=2 * workers)
    return MORE_WORKERS.filled(workers=min(2 * workers, cores) if cores else 2 * workers), faster


def _loading(trace: TraceReport) -> Iterator[Found]:
    """Yield loading while the device is idle; without a device, loading of several steps that are not very short.

    Workers load while the step runs, as far as there are cores for them.
    """
    ledger, has_device = sure_ledger(trace) or trace.host_ledger, trace.device_ledger is not None
    loads = [step.data_loading_ns for step in trace.steps] or [trace.loads.max_ns]
    loading_ns, steps = (sum(loads), len(loads)) if trace.steps else (trace.loads.total_ns, trace.loads.count)
    if ledger is None or not loading_ns or not (lines := ledger.of(Part.IDLE_DATA, Part.DATA_WAIT)):
        return
    if not has_device and (steps < 2 or ledger.step_ns * ledger.steps < steps * POLICY.short_step_ns):
        return
    in_one = steps > 1 and max(loads) >= POLICY.one_step * loading_ns
    where = f", {percent(max(loads) / loading_ns)} of this time in one of {steps} steps" if in_one else ""
    longest = next((cause for cause in trace.idle if cause.cause == Part.IDLE_DATA), None)
    idle = f"; the GPU is idle for {format_ns(ledger.steps * total(lines))} meanwhile" if has_device else ""
    whole = stretch(trace, ledger)[1]
    pageable = any(each.kind == "HtoD" and each.is_pageable for each in trace.copies)
    yield (
        Fact(source=trace, ledger=ledger, lines=lines),
        Detail(
            fields={"loop": "training loop" if trace.program.trains else "program"},
            measured=f"The DataLoader takes {format_ns(loading_ns)} of {whole}{where}{idle}",
            remedies=(
                workers_in(ledger, in_one=in_one),
                *((PIN_MEMORY,) if pageable and not in_one else ()),
                *(() if in_one else (FASTER_FETCH.filled(owner="the data set"),)),
            ),
            evidence=longest_in(trace, longest.longest_start_ns, longest.longest_ns) if longest else seen_in(trace),
            numbers={"data_loading_ns": loading_ns, "steps": len(trace.steps)},
            # A single step may be the start of the workers.
            saves=None if steps > 1 else (0.0, 1.0),
            # The start of an epoch.
            is_note=in_one,
        ),
    )


def restarts(facts: Facts) -> Iterator[Found]:
    """Return the time between epochs in which workers end and start again."""
    fact = _heaviest(facts, restart=True)
    if fact is None:
        return
    loaders = loaders_of(fact.rank)
    settings = f"; {_settings(loaders)}" if loaders else ""
    between = (
        f"{format_ns(fact.ns / fact.count)} between epochs, once every {format_count(round(1 / fact.count), 'step')}"
    )
    yield fact, Detail(measured=between + settings, numbers={"restart_ns": fact.ns})


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The start of more workers than cores.

    ``delay_ns`` is what the first batch of each worker waits beyond the mean wait of later steps, ``usual_ns``;
    ``waited_ns`` is the mean time that a worker had waited for a core when it was first measured. ``wanted`` workers
    keep up with the steps.
    """

    workers: int
    wanted: int
    cores: int
    delay_ns: float
    waited_ns: float
    usual_ns: float
    run_ns: int

    @property
    def saved_ns(self) -> tuple[float, float]:
        """Least and most time of the run that fewer workers save, at most the wait for a core."""
        most = min(self.delay_ns, self.waited_ns)
        return most * (1 - max(self.wanted, self.cores) / self.workers), most


def _start_of(facts: Facts, rank: Rank) -> Start | None:
    """Return the start of the workers of a rank, None where they are no more than cores, or more are needed.

    Workers that start from disk or network start together. As many are wanted as there are cores, or as a step needs
    where they mostly wait.
    """
    ledger, loaders = facts.ledgers.get(rank.rank), loaders_of(rank)
    workers = max((loader.num_workers or 0 for loader in loaders), default=0)
    cores = max((rank.facts.cpu_count or workers) // len(ranks_on_host(facts, rank)), 1)
    # Recording makes batches late, too.
    waits = [row["data_wait_ns"] or 0 for row in rank.pulse if row["window"] is None]
    turn = min(workers, int(len(waits) * POLICY.few))
    firsts = {row.pid: row.core_wait_ns or 0 for row in reversed(rank.read(ProcessRow).rows) if row.kind == "worker"}
    if ledger is None or workers <= cores or not turn or not firsts:
        return None
    cost, step_ns = loading(rank), ledger.step_ns - ledger.ns(Part.DATA_WAIT)
    needed = cost.workers_for(step_ns) if cost is not None else cores
    wanted = needed if cost is not None and not cost.is_cpu_bound else min(needed, cores)
    usual_ns = stats.mean(waits[turn:])
    start = Start(
        workers=workers,
        wanted=wanted,
        cores=cores,
        delay_ns=sum(waits[:turn]) - turn * usual_ns,
        waited_ns=stats.mean(firsts.values()),
        usual_ns=usual_ns,
        run_ns=sum(row["duration_ns"] or 0 for row in rank.pulse),
    )
    return start if wanted < workers and start.run_ns else None


def starts(facts: Facts) -> Iterator[Found]:
    """Return the longest start of more workers than cores; the mean step of the ledger has nothing of it."""
    found = [(start, rank) for rank in facts.run.ranks if (start := _start_of(facts, rank)) is not None]
    if not found:
        return
    start, rank = max(found, key=lambda pair: sum(pair[0].saved_ns) / pair[0].run_ns)
    ledger, steps = facts.ledgers[rank.rank], len(rank.pulse)
    lines = (TimeLine(part=Part.DATA_WAIT, ns=stats.mean(start.saved_ns) / steps),)
    private, cost = max(private_memory(rank), default=0), loading(rank)
    needs = f"; a worker needs {format_ns(cost.fetch_ns)} per batch" if cost else ""
    held = f"; the workers together have {format_bytes(private)} of private memory" if private else ""
    yield (
        Fact(source=rank, ledger=replace(ledger, step_ns=start.run_ns / steps, lines=lines), lines=lines),
        Detail(
            fields={
                "workers": start.workers,
                "cores": format_count(start.cores, "core"),
                "delay": format_ns(start.delay_ns),
                "share": percent(start.delay_ns / start.run_ns),
                "wanted": start.wanted,
            },
            measured=(
                f"By its first measurement, a worker had waited {format_ns(start.waited_ns)} for a core (mean)"
                f"{needs}; later steps wait {format_ns(start.usual_ns)} for a batch{held}"
            ),
            numbers={
                "workers": start.workers,
                "cores": start.cores,
                "start_ns": round(start.delay_ns),
                "core_wait_ns": round(start.waited_ns),
                "saved_ns": tuple(map(round, start.saved_ns)),
                "private_bytes": private,
            },
        ),
    )


def padding(facts: Facts) -> Iterator[Found]:
    """Return the padded share of forward and backward: their work is in proportion to the positions, or to more."""
    if (worst := facts.heaviest(lambda ledger: ledger.ns(*PASSES))) is None:
        return
    rank, ledger = worst
    rows = [row for window in rank.windows for row in window.read(ThroughputRow).recorded if row.positions]
    positions, padded, beyond = (
        sum(getattr(row, name) or 0 for row in rows) for name in ("positions", "padded", "beyond_longest")
    )
    if not positions or padded < POLICY.padding * positions:
        return
    lines = tuple(replace(line, ns=line.ns * padded / positions) for line in ledger.of(*PASSES))
    yield (
        Fact(source=rank, ledger=ledger, lines=lines),
        Detail(
            fields={"share": percent(padded / positions)},
            measured=(
                f"{padded:,} of {positions:,} positions in {len(rows)} recorded batches, {percent(beyond / positions)} "
                "beyond the longest sample of their batch; forward and backward take "
                f"{format_ns(ledger.ns(*PASSES))} of {ledger.length_text}"
            ),
            remedies=(PAD_TO_LONGEST, GROUP_BY_LENGTH) if beyond > padded / 2 else (GROUP_BY_LENGTH, PAD_TO_LONGEST),
            evidence=facts.recorded(rank, "throughput"),
            numbers={
                "positions": positions,
                "padded": padded,
            },
        ),
    )


ROWS: Final = (
    Rule(
        id="input_bound",
        about=(
            "The training loop waits for its batches: the next batch is not ready when the step ends. Every step pays "
            "the wait, and so do all ranks at the next collective."
        ),
        when=(
            "`info` if only a few steps wait and a busy machine explains it. In an operator trace alone, the "
            "time is that of DataLoader ranges in which the device is idle: `info` if one step has three "
            "quarters of it, such as the start of an epoch. Without a device, the trace needs at least two steps "
            "of 10 ms."
        ),
        trade_off=(
            "None, or memory of the workers. More workers count only as far as measured times and free cores "
            "show that they help."
        ),
        of=(Part.DATA_WAIT, Part.IDLE_DATA),
        find=data_waits,
        says=f"{SAYS}.",
        bound="Input-bound",
        saves=(0.5, 1.0),
        # Every training loads data.
        note=POLICY.verdict,
    ),
    Rule(
        id="workers_restart",
        about=(
            "The worker processes of a DataLoader end and start again between epochs: each start imports the program "
            "again (with spawn) or copies the process, and the first batches are not prefetched."
        ),
        when=(
            "Counts the untracked time of the last step of each epoch beyond that of the median step, in at least "
            "three epochs."
        ),
        trade_off="Idle workers keep their memory.",
        of=(Part.DATA_WAIT,),
        find=restarts,
        says="DataLoader workers restart every epoch: {share}{rank} (persistent_workers=False).",
        remedies=(PERSISTENT_WORKERS, LONGER_EPOCHS),
        saves=(0.5, 1.0),
    ),
    Rule(
        id="worker_start",
        about=(
            "A DataLoader has more workers than the process has cores, and their start delays the first batches: "
            "all workers import and build their tables at the same time, so the first one is ready about as late "
            "as the last."
        ),
        when=(
            "Counts the wait for the first batch of each worker beyond the mean wait of later steps, at most the mean "
            "time that a worker waited for a core until it was first measured. Workers that wait for disk or network "
            "do not count."
        ),
        trade_off="None. The remedy saves this time once per run, in steps that are not in the ledger.",
        of=(Part.DATA_WAIT,),
        find=starts,
        says="{workers} DataLoader workers for {cores}{rank}: their start takes {delay}, {share} of the run.",
        remedies=(FEWER_WORKERS,),
        saves=None,
    ),
    Rule(
        id="padding",
        about=(
            "Much of each batch of sequences is padding: the model computes on positions without data. The time "
            "of attention grows with the square of the length."
        ),
        when=(
            "At least 20% of the positions in the recorded batches are padding, according to a mask, or else a "
            "run of one token or of zeros at the start or end of the sequences. Counts their share of forward "
            "and backward."
        ),
        trade_off="Batches of samples of similar length are less random.",
        of=PASSES,
        find=padding,
        says="Padding: {share} of the positions in a batch are padding{rank}.",
        # Each operator has a cost that does not depend on the length.
        saves=(0.4, 1.0),
    ),
)
