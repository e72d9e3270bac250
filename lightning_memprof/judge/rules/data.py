"""Waiting for data, workers that restart, and padding: in the steps of a run, and in an operator trace."""

from __future__ import annotations

import statistics as stats
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from lightning_memprof.account.ledger.model import TimeLedger, scaled, total
from lightning_memprof.account.ledger.run import RESTART
from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.statistics import typical_steps
from lightning_memprof.account.steps.workers import loading, workers_end
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.artifacts.manifest import DataLoaderFacts
from lightning_memprof.artifacts.series import ThroughputRow
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.cores import free_cores, torch_threads
from lightning_memprof.judge.fact import PASSES, Fact
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
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.judge.rhythm import Rhythm, rhythm
from lightning_memprof.judge.rule import Detail, Found, Rule
from lightning_memprof.judge.traces import (
    longest_in,
    seen_in,
    stretch,
    workers_in,
)
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_count, format_ns, percent

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


def data_wait(facts: Facts, fact: Fact) -> Detail | None:
    """Return the wait for batches, what it is for, and the settings that are not in use.

    Recovers at most the wait, by faster code; at least half of what more workers save, where their times or the free
    cores show that they do: with ``w`` workers, and cores for them, a batch that takes one process ``l`` ns is ready
    every ``l / w`` ns.
    """
    lines = tuple(line for line in fact.lines if line.name != RESTART)
    if not lines:
        return None
    rank, loaders, fact = fact.rank, loaders_of(fact.rank), replace(fact, lines=lines)
    few, starts = rhythm(rank, "data_wait"), _share_at_epoch_starts(rank)
    in_few_steps = _in_few_steps(rank, fact.share)
    cause, saves = _cause(rank, fact.ledger, starts, few), _saves(facts, fact, starts)
    mostly, settings = ", mostly in a few steps" if in_few_steps else "", f"; {_settings(loaders)}" if loaders else ""
    return Detail(
        lines=lines,
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
        is_note=few is not None and few.is_hiccup and starts < POLICY.most,
    )


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
            return replace(found, how=", in ", owner=owner, faster=do.FASTER_FETCH.filled(owner=owner))
        return replace(found, how=f", in {few.subject[0].lower()}{few.subject[1:]}", owner="")
    return found if _is_sampler(found) or not workers else _in_workers(rank, workers)


def _is_sampler(cause: Cause) -> bool:
    return cause.faster is not None and cause.faster.id == do.FASTER_SAMPLER.id


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
        "fetch": (f"{owner}.{sample_method(loaders)}", do.FASTER_FETCH),
        "collate": ("collate_fn", do.FASTER_COLLATE),
        "sampler": ("the sampler", do.FASTER_SAMPLER),
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
    share = (do.SHARE_SAMPLES,) if loader is not None and loader.is_iterable else ()
    method = worker_method(rank)
    faster = cause.faster or (do.FASTER_COLLATE if method == "collate_fn" else do.FASTER_FETCH).filled(owner=method)
    if _is_sampler(cause):
        return (faster,)
    if not workers:
        cores = rank.facts.cpu_count or POLICY.workers
        more = (do.WORKERS.filled(workers=min(POLICY.workers, cores)), *share)
        found = [*one_by_one(rank, fact.ledger)[1], *((*more, faster) if by_workers else (faster, *more))]
    else:
        keep = [do.PERSISTENT_WORKERS] if loader is not None and loader.persistent_workers is False else []
        restart = starts >= POLICY.most or workers_end(rank)
        # Batches in stock cover a few slow ones; they do not help workers that are slower than the training.
        stock = do.PREFETCH.filled(batches=2 * ((loader.prefetch_factor if loader else None) or DEFAULT_PREFETCH))
        found = [*keep] if restart else [stock] if in_few_steps else []
        found += [*_more_workers(facts, fact, faster), *share, *([] if restart else keep)]
    if loader is not None and loader.pin_memory is False and not rank.facts.is_cpu:
        found.append(do.PIN_MEMORY)
    return tuple(dict.fromkeys(found))


def _more_workers(facts: Facts, fact: Fact, faster: Remedy) -> tuple[Remedy, ...]:
    """Return what to do with workers that cannot keep up: by their times, else by the cores."""
    rank, workers, cores = fact.rank, workers_of(fact.rank), fact.rank.facts.cpu_count
    if (turns := takes_turns(rank)) is not None:
        return do.WITHOUT_LOCK.filled(owner=turns.lock or worker_method(rank)), faster
    if (wanted := wanted_workers(facts, rank, fact.ledger)) is not None:
        return do.WORKERS.filled(workers=wanted), faster
    if loading(rank) is not None or (cores is not None and workers >= cores):
        return (faster,)
    return do.WORKERS.filled(workers=min(2 * workers, cores) if cores else 2 * workers), faster


def loading_in_traces(facts: Facts) -> Iterator[Found]:
    """Yield the loading that traces without a pulse show."""
    yield from filter(None, map(_loading, () if facts.ledgers else facts.steady_traces))


def _loading(trace: TraceReport) -> Found | None:
    """Return loading while the device is idle; without a device, loading of several steps that are not very short.

    Workers load while the step runs, as far as there are cores for them.
    """
    ledger, has_device = trace.device_ledger or trace.host_ledger, trace.device_ledger is not None
    loads = [step.data_loading_ns for step in trace.steps] or [trace.loads.max_ns]
    loading_ns, steps = (sum(loads), len(loads)) if trace.steps else (trace.loads.total_ns, trace.loads.count)
    if ledger is None or not loading_ns or not (lines := ledger.of(Part.IDLE_DATA, Part.DATA_WAIT)):
        return None
    if not has_device and (steps < 2 or ledger.step_ns * ledger.steps < steps * POLICY.short_step_ns):
        return None
    in_one = steps > 1 and max(loads) >= POLICY.one_step * loading_ns
    where = f", {percent(max(loads) / loading_ns)} of this time in one of {steps} steps" if in_one else ""
    longest = next((cause for cause in trace.idle if cause.cause == Part.IDLE_DATA), None)
    idle = f"; the GPU is idle for {format_ns(ledger.steps * total(lines))} meanwhile" if has_device else ""
    whole = stretch(trace, ledger)[1]
    pageable = any(each.kind == "HtoD" and each.is_pageable for each in trace.copies)
    return (
        Fact(source=trace, ledger=ledger, lines=lines),
        Detail(
            fields={"loop": "training loop" if trace.program.trains else "program"},
            measured=f"The DataLoader takes {format_ns(loading_ns)} of {whole}{where}{idle}",
            remedies=(
                workers_in(ledger, in_one=in_one),
                *((do.PIN_MEMORY,) if pageable and not in_one else ()),
                *(() if in_one else (do.FASTER_FETCH.filled(owner="the data set"),)),
            ),
            evidence=longest_in(trace, longest.longest_start_ns, longest.longest_ns) if longest else seen_in(trace),
            numbers={"data_loading_ns": loading_ns, "steps": len(trace.steps)},
            # A single step may be the start of the workers.
            saves=None if steps > 1 else (0.0, 1.0),
            # The start of an epoch.
            is_note=in_one,
        ),
    )


def restarts(_: Facts, fact: Fact) -> Detail | None:
    """Return the time between epochs in which workers end and start again."""
    lines, loaders = tuple(line for line in fact.lines if line.name == RESTART), loaders_of(fact.rank)
    if not lines:
        return None
    ns, count = total(lines), sum(line.count for line in lines)
    settings = f"; {_settings(loaders)}" if loaders else ""
    between = f"{format_ns(ns / count)} between epochs, once every {format_count(round(1 / count), 'step')}"
    return Detail(lines=lines, measured=between + settings, numbers={"restart_ns": ns})


def padding(facts: Facts, fact: Fact) -> Detail | None:
    """Return the padded share of forward and backward: their work is in proportion to the positions, or to more."""
    rank = fact.rank
    rows = [row for window in rank.windows for row in window.read(ThroughputRow).recorded if row.positions]
    positions, padded, beyond = (
        sum(getattr(row, name) or 0 for row in rows) for name in ("positions", "padded", "beyond_longest")
    )
    if not positions or padded < POLICY.padding * positions:
        return None
    remedies = (do.PAD_TO_LONGEST, do.GROUP_BY_LENGTH)
    return Detail(
        lines=scaled(fact.lines, fact.ns * padded / positions),
        fields={"share": percent(padded / positions)},
        measured=(
            f"{padded:,} of {positions:,} positions in {len(rows)} recorded batches, {percent(beyond / positions)} "
            f"beyond the longest sample of their batch; forward and backward take {format_ns(fact.ns)} of "
            f"{fact.ledger.length_text}"
        ),
        remedies=remedies if beyond > padded / 2 else remedies[::-1],
        evidence=facts.recorded(rank, "throughput"),
        numbers={"positions": positions, "padded": padded},
    )


ROWS: Final = (
    Rule(
        id="input_bound",
        about="The next batch is not ready when the step ends; all ranks wait with it at the next collective.",
        when=(
            "`info` if only a few steps wait. In an operator trace alone, the time is that of DataLoader ranges in "
            "which the device is idle, `info` if one step has three quarters of it."
        ),
        trade_off="None, or memory of the workers.",
        of=(Part.DATA_WAIT, Part.IDLE_DATA),
        find=loading_in_traces,
        detail=data_wait,
        says=f"{SAYS}.",
        bound="Input-bound",
        saves=(0.5, 1.0),
        # Every training loads data.
        note=POLICY.verdict,
    ),
    Rule(
        id="workers_restart",
        about="The worker processes of a DataLoader end and start again between epochs, with no batch prefetched.",
        when="Counts the untracked time of the last steps of at least three epochs beyond that of the median step.",
        trade_off="Idle workers keep their memory.",
        of=(Part.DATA_WAIT,),
        detail=restarts,
        says="DataLoader workers restart every epoch: {share}{rank} (persistent_workers=False).",
        remedies=(do.PERSISTENT_WORKERS,),
        saves=(0.5, 1.0),
    ),
    Rule(
        id="padding",
        about="Much of each batch of sequences is padding: the model computes on positions without data.",
        when=(
            "At least 20% of the positions in the recorded batches are padding: by a mask, or a run of one token at an "
            "end of the sequences. Counts their share of forward and backward."
        ),
        trade_off="Batches of samples of similar length are less random.",
        of=PASSES,
        detail=padding,
        says="Padding: {share} of the positions in a batch are padding{rank}.",
        # Each operator has a cost that does not depend on the length.
        saves=(0.4, 1.0),
    ),
)
