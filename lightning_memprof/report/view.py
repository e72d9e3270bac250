"""The view model: everything that any format shows of a run, computed once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import asdict, replace

from lightning_memprof.account.ledger.memory import ByteLedger
from lightning_memprof.account.ledger.model import TimeLedger
from lightning_memprof.account.memory.model import WindowAllocations
from lightning_memprof.account.memory.report import MemoryReport, memory_report
from lightning_memprof.account.oom.autopsy import Autopsy, autopsies
from lightning_memprof.account.ranks.hangs import first_exception
from lightning_memprof.account.ranks.report import RankReport
from lightning_memprof.account.snapshot.report import SnapshotReport
from lightning_memprof.account.steps.events import StepEvents, rank_events
from lightning_memprof.account.steps.pauses import Pauses, pauses
from lightning_memprof.account.steps.statistics import (
    DeviceMemory,
    HostMemory,
    PulseStatistics,
    StepReport,
    peak_rss_bytes,
    window_steps,
)
from lightning_memprof.account.steps.system import RankSystem, systems
from lightning_memprof.account.steps.throughput import RankThroughput, throughputs
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.artifacts.files import read_object
from lightning_memprof.artifacts.naming import RUN_DIRECTORY, TRIED, parse_numbered
from lightning_memprof.artifacts.series import HangRow
from lightning_memprof.compare.trial import Trial, tried_words
from lightning_memprof.errors import ArtifactError
from lightning_memprof.judge import Facts, Finding, examine
from lightning_memprof.read.run.locate import find_run, is_run_directory, log_directory, shown_place, trace_directory
from lightning_memprof.read.run.model import Rank, RecordedWindow, Run
from lightning_memprof.read.run.problems import Note, Problem
from lightning_memprof.report.document import Command
from lightning_memprof.report.live import Live
from lightning_memprof.report.named import Moment, named_moments
from lightning_memprof.units import quoted

ShownStatus = Literal["finished", "exception", "running or killed", "did not start"]


class WindowView(msgspec.Struct, frozen=True):
    """A window of a rank and its recorded steps."""

    rank: int
    index: int
    planned_steps: tuple[int, ...]
    closed: bool
    truncated: bool
    reason: str | None
    steps: tuple[StepReport, ...]


class Overhead(msgspec.Struct, frozen=True):
    """The profiler overhead of a rank in nanoseconds of wall time; None where it was not counted.

    ``pulse_cpu_ns`` is the CPU time of the training thread in the pulse, which other programs barely affect.
    ``run_ns`` is the time of all steps, which does not include opening and closing windows.
    """

    rank: int
    pulse_ns: int | None
    pulse_cpu_ns: int | None
    windows_ns: int | None
    collectors_ns: Mapping[str, int]
    steps: int
    run_ns: int | None

    @property
    def net_pulse_ns(self) -> int | None:
        """The CPU time of the pulse; its wall time if the recording has no CPU time."""
        return self.pulse_ns if self.pulse_cpu_ns is None else self.pulse_cpu_ns

    @property
    def whole_ns(self) -> int | None:
        """The time of all steps and windows, the whole of which shares of the run are parts."""
        return None if self.run_ns is None else self.run_ns + (self.windows_ns or 0)


class RankView(msgspec.Struct, frozen=True):
    """One rank. ``host`` and ``device`` hold its memory: sizes as last seen, maxima and peaks over the whole run.

    ``device`` is None without a figure.
    """

    rank: int
    host_name: str | None
    status: ShownStatus
    exception: str | None
    steps: int
    statistics: PulseStatistics | None
    host: HostMemory
    device: DeviceMemory | None
    windows: tuple[WindowView, ...]
    overhead: Overhead | None


class View(msgspec.Struct, frozen=True):
    """The results of the analysis of a run; ``run`` is their source.

    ``device_note`` is the reason for missing figures of a device, None where there are figures. ``commands`` are the
    next commands.
    """

    status: ShownStatus
    exception: str | None
    findings: tuple[Finding, ...]
    lead: RankView
    ranks: tuple[RankView, ...]
    device_note: str | None
    notes: tuple[Note, ...]
    problems: tuple[Problem, ...]
    others: tuple[Path, ...]
    named: tuple[Moment, ...]
    memory: MemoryReport
    ooms: tuple[Autopsy, ...]
    commands: tuple[Command, ...]
    run: Run
    across: RankReport | None = None
    ledger: TimeLedger | None = None
    byte_ledger: ByteLedger | None = None
    events: tuple[StepEvents, ...] = ()
    pauses: Pauses | None = None
    throughput: tuple[RankThroughput, ...] = ()
    system: tuple[RankSystem, ...] = ()
    traces: tuple[TraceReport, ...] = ()
    snapshots: tuple[SnapshotReport, ...] = ()
    trial: Trial | None = None
    live: Live | None = None

    @property
    def verdict(self) -> Finding:
        """The first finding."""
        return self.findings[0]

    @property
    def rank_suffix(self) -> str:
        """``, rank 0`` for the title of the lead rank's figures; empty where there is one rank."""
        return f", rank {self.lead.rank}" if len(self.ranks) > 1 else ""


def run_view(
    run: Run,
    allocations: Sequence[WindowAllocations] = (),
    *,
    max_memory_bytes: int | None = None,
    traces: tuple[TraceReport, ...] = (),
    snapshots: tuple[SnapshotReport, ...] = (),
) -> View:
    """Analyse a run.

    Args:
        run: the run.
        allocations: its allocations over time; empty where they were not read, which takes as long as its traces are.
        max_memory_bytes: as ``max_bytes`` of :func:`lightning_memprof.account.memory.report.memory_report`.
        traces: those of its traces that were analysed.
        snapshots: those of its snapshots that were analysed.
    """
    memory = memory_report(run.in_full, allocations, max_bytes=max_memory_bytes)
    facts = Facts.of(run, traces, snapshots, memory)
    tried, unread = _tried(run)
    findings = _with_results(_named_as_listed(run, examine(facts)), tried)
    ranks = [_rank_view(rank, facts.statistics.get(rank.rank)) for rank in run.ranks]
    view = View(
        status="did not start" if all(map(_did_not_start, run.ranks)) else run.status,
        exception=first_exception(run.ranks),
        findings=findings,
        lead=next(rank for rank in ranks if rank.rank == run.lead.rank),
        ranks=tuple(sorted(ranks, key=lambda rank: rank.rank)),
        device_note=_device_note(run, ranks),
        notes=(*run.notes, *memory.notes, *unread),
        problems=(*run.problems, *(facts.ranks.problems if facts.ranks else ())),
        others=_others(run),
        named=named_moments(run),
        memory=memory,
        ooms=autopsies(run, max_bytes=max_memory_bytes),
        commands=_commands(run),
        run=run,
        across=facts.ranks,
        ledger=facts.ledgers.get(run.lead.rank),
        byte_ledger=facts.byte_ledgers.get(run.lead.rank),
        events=tuple(rank_events(run.lead)),
        pauses=pauses(run.lead),
        throughput=throughputs(run),
        system=systems(run),
        traces=facts.traces,
        snapshots=snapshots,
        trial=tried,
    )
    # Now all series have been read that any part needs.
    return replace(view, problems=(*view.problems, *run.series_problems))


def _named_as_listed(run: Run, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Return the findings with the files of the run as its manifest names them, wherever they are now."""
    paths = {os.fspath(artifact.file): artifact.path for artifact in run.artifacts}
    return tuple(
        replace(
            finding,
            evidence=tuple(
                replace(source, artifact=paths.get(source.artifact, source.artifact)) for source in finding.evidence
            ),
        )
        for finding in findings
    )


def _tried(run: Run) -> tuple[Trial | None, tuple[Note, ...]]:
    """Return the trial of the run's program, and a note where it is damaged."""
    try:
        return read_object(run.directory / TRIED, Trial, "a trial"), ()
    except ArtifactError as error:
        return None, (Note(run.lead.rank, "run", str(error)),)


def _with_results(findings: tuple[Finding, ...], trial: Trial | None) -> tuple[Finding, ...]:
    """Return the findings with what their remedies gained."""
    results: dict[str, list[str]] = {}
    for outcome in trial.outcomes if trial is not None else ():
        results.setdefault(outcome.rule, []).append(f"Tried {outcome.remedy}: {tried_words(outcome)}.")
    return tuple(replace(finding, why=" ".join([finding.why, *results.get(finding.rule, ())])) for finding in findings)


def _window_view(rank: Rank, window: RecordedWindow) -> WindowView:
    copied = {name: getattr(window, name) for name in WindowView.__struct_fields__ if name != "steps"}
    return WindowView(**copied, steps=tuple(window_steps(rank, window)))


def _rank_view(rank: Rank, statistics: PulseStatistics | None) -> RankView:
    windows = tuple(_window_view(rank, window) for window in rank.windows if rank.in_full)
    steps = [step for window in windows for step in window.steps]
    rss = [row["rss_bytes"] for row in rank.pulse]
    device_peaks = [row["device_peak_bytes"] for row in rank.pulse]
    devices = [step.device for step in steps if step.device is not None]
    host = HostMemory(
        rss_bytes=_last([*(step.host.rss_bytes for step in steps), *rss]),
        max_rss_bytes=_most(*rss, *(step.host.max_rss_bytes for step in steps)),
        peak_rss_bytes=peak_rss_bytes(rank),
        uss_bytes=_last([step.host.uss_bytes for step in steps]),
        vms_bytes=_last([step.host.vms_bytes for step in steps]),
    )
    device = DeviceMemory(
        device=rank.facts.device,
        allocated_bytes=_last([device.allocated_bytes for device in devices]),
        reserved_bytes=_last([device.reserved_bytes for device in devices]),
        max_allocated_bytes=_most(*(device.max_allocated_bytes for device in devices)),
        peak_allocated_bytes=_most(*device_peaks, *(device.peak_allocated_bytes for device in devices)),
    )
    return RankView(
        rank=rank.rank,
        host_name=rank.facts.host,
        status="did not start" if _did_not_start(rank) else rank.status,
        exception=rank.exception,
        # When a step hangs, the last rows of the pulse are not written yet.
        steps=max([rank.steps, *(row.step or 0 for row in rank.read(HangRow).rows if row.kind != "other")]),
        statistics=statistics,
        host=host,
        device=device if devices or device.peak_allocated_bytes is not None else None,
        windows=windows,
        overhead=_overhead(rank),
    )


def _overhead(rank: Rank) -> Overhead | None:
    if rank.overhead is None:
        return None
    durations = [duration for row in rank.pulse if (duration := row["duration_ns"]) is not None]
    run_ns = sum(durations) if durations else None
    return Overhead(rank=rank.rank, **asdict(rank.overhead), steps=rank.steps, run_ns=run_ns)


def _did_not_start(rank: Rank) -> bool:
    """Return whether a rank wrote nothing after its setup: it ended there, or is still in it."""
    if rank.status != "running or killed" or rank.windows or rank.pulse:
        return False
    # A training row means that the loop has begun: the first step is running, or the process was killed in it.
    return rank.training is None


def _others(run: Run) -> tuple[Path, ...]:
    """Return the other runs in the log directory."""
    home = log_directory(run)
    found = set(run.others)
    name = run.directory.name
    names = {RUN_DIRECTORY, name} if parse_numbered(name)[0] == RUN_DIRECTORY else {RUN_DIRECTORY}
    for place in {run.root, home}:
        # Only runs directly in it: a deeper search takes long in a large directory.
        if any(is_run_directory(place / name) for name in names):
            beside = find_run(place)
            found |= {beside.directory, *beside.others}
    return tuple(sorted(found - {run.directory}))


def _device_note(run: Run, ranks: Sequence[RankView]) -> str | None:
    if any(rank.device is not None for rank in ranks):
        return None
    if run.lead.facts.is_cpu:
        return "no accelerator"
    return next((row.reason for row in run.unavailable if row.collector == "allocator"), "not recorded")


def _commands(run: Run) -> tuple[Command, ...]:
    # A further run in the same log directory would be the newest.
    name = run.root if run.directory.name == RUN_DIRECTORY and _is_newest(run) else run.directory
    place = quoted(shown_place(name, run.root, run.url))
    commands = [Command("lightning-memprof report", place), Command("lightning-memprof show", f"{place} --format json")]
    if traces := run.files("trace"):
        commands.append(Command("lightning-memprof view", place))
        logs = shown_place(trace_directory(run, traces[0].file), run.root, run.url)
        commands.append(Command("tensorboard --logdir", quoted(logs)))
    return tuple(commands)


def _is_newest(run: Run) -> bool:
    """Return whether the name of the log directory leads to this run."""
    try:
        return find_run(run.root).directory == run.directory
    except ArtifactError:
        return False


def _most(*values: int | None) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _last(values: Sequence[int | None]) -> int | None:
    return next((value for value in reversed(values) if value is not None), None)
