"""The view model: everything that any format shows of a run, computed once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from lightning_memprof.account.ledger.growth import left_by_windows
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
from lightning_memprof.read.run.locate import (
    find_run,
    is_run_directory,
    log_directory,
    shown_place,
    trace_directory,
)
from lightning_memprof.read.run.model import Rank, RecordedWindow, Run
from lightning_memprof.read.run.problems import Note, Problem
from lightning_memprof.report.document import Command
from lightning_memprof.report.named import NamedMoment, named_moments
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
    ``run_ns`` is the time of all steps, which does not include opening and closing windows; ``windows_rss_bytes`` the
    resident memory that remains after the windows, None where too few steps surround them.
    """

    rank: int
    pulse_ns: int | None
    pulse_cpu_ns: int | None
    windows_ns: int | None
    collectors_ns: Mapping[str, int]
    steps: int
    run_ns: int | None
    windows_rss_bytes: int | None

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
    next commands. ``facts`` and ``training`` are the lead rank's rows of the manifest.
    """

    status: ShownStatus
    exception: str | None
    facts: Mapping[str, Any]
    training: Mapping[str, Any] | None
    findings: tuple[Finding, ...]
    lead: RankView
    ranks: tuple[RankView, ...]
    device_note: str | None
    notes: tuple[Note, ...]
    problems: tuple[Problem, ...]
    others: tuple[Path, ...]
    named: tuple[NamedMoment, ...]
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

    @property
    def verdict(self) -> Finding:
        """The first finding."""
        return self.findings[0]


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
    ranks = _rank_views(facts)
    view = View(
        status="did not start" if all(map(_did_not_start, run.ranks)) else run.status,
        exception=first_exception(run.ranks),
        facts=run.lead.facts.fields,
        training=run.lead.training.fields if run.lead.training else None,
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


def _rank_views(facts: Facts) -> list[RankView]:
    """Return the ranks in the run's order."""
    ranks = []
    for rank in facts.run.ranks:
        windows = (_window_view(window, window_steps(rank, window)) for window in rank.windows if rank.in_full)
        ranks.append(_rank_view(rank, facts.statistics.get(rank.rank), tuple(windows)))
    return ranks


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


def _window_view(window: RecordedWindow, steps: list[StepReport]) -> WindowView:
    return WindowView(
        rank=window.rank,
        index=window.index,
        planned_steps=window.planned_steps,
        closed=window.closed,
        truncated=window.truncated,
        reason=window.reason,
        steps=tuple(steps),
    )


def _rank_view(rank: Rank, statistics: PulseStatistics | None, windows: tuple[WindowView, ...]) -> RankView:
    steps = [step for window in windows for step in window.steps]
    rss = [row["rss_bytes"] for row in rank.pulse]
    device_peaks = [row["device_peak_bytes"] for row in rank.pulse]
    devices = [step.device for step in steps if step.device is not None]
    host = HostMemory(
        rss_bytes=next(
            (rss_bytes for rss_bytes in reversed(rss) if rss_bytes is not None),
            _last(step.host.rss_bytes for step in steps),
        ),
        max_rss_bytes=_most(*rss, *(step.host.max_rss_bytes for step in steps)),
        peak_rss_bytes=peak_rss_bytes(rank),
        uss_bytes=_last(step.host.uss_bytes for step in steps),
        vms_bytes=_last(step.host.vms_bytes for step in steps),
    )
    device = DeviceMemory(
        device=rank.facts.device,
        allocated_bytes=_last(device.allocated_bytes for device in devices),
        reserved_bytes=_last(device.reserved_bytes for device in devices),
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
    return Overhead(
        rank=rank.rank,
        pulse_ns=rank.overhead.pulse_ns,
        pulse_cpu_ns=rank.overhead.pulse_cpu_ns,
        windows_ns=rank.overhead.windows_ns,
        collectors_ns=rank.overhead.collectors_ns,
        steps=rank.steps,
        run_ns=sum(durations) if durations else None,
        windows_rss_bytes=left_by_windows(rank.pulse, "rss_bytes"),
    )


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


def _last(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return known[-1] if known else None
