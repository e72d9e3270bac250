"""What a rule reads: a run, its ledgers, traces and snapshots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Final

import msgspec

from lightning_memprof.account.ledger.memory import ByteLedger, resident_bytes, run_bytes
from lightning_memprof.account.ledger.model import TimeLedger, total
from lightning_memprof.account.ledger.ranks import log_waits, with_waits
from lightning_memprof.account.ledger.run import run_ledger, typical_in_windows
from lightning_memprof.account.ledger.steady import in_steady_state
from lightning_memprof.account.memory.report import MemoryReport
from lightning_memprof.account.oom.autopsy import owned_at_failure
from lightning_memprof.account.parts import Part
from lightning_memprof.account.ranks.report import RankReport, rank_report
from lightning_memprof.account.snapshot.report import SnapshotReport
from lightning_memprof.account.steps.statistics import PulseStatistics, pulse_statistics
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.artifacts.naming import pulse_name
from lightning_memprof.judge.finding import Evidence, Finding
from lightning_memprof.read.run.model import ArtifactFile, Rank, Run

# What the host does in a step beside the passes and the optimizer; a median step has none of what is rare.
_ALWAYS: Final = (Part.DATA_WAIT, Part.TRANSFER)
_BESIDE: Final = (*_ALWAYS, Part.CALLBACK, Part.MODULE_HOOK, Part.LOGGING, Part.SELF_LOG, Part.METRIC)
_OFTEN: Final = 0.5
NO_RUN: Final = Run(Path())


class Facts(msgspec.Struct, frozen=True, dict=True):
    """A run, the pulse statistics of its ranks that have a pulse, and the comparison of its ranks.

    Files without a run have :data:`NO_RUN`. ``traces`` and ``snapshots`` are the analyzed ones, which takes time in
    proportion to their size; ``memory`` is None if it was not read.
    """

    run: Run
    statistics: Mapping[int, PulseStatistics]
    ranks: RankReport | None = None
    traces: tuple[TraceReport, ...] = ()
    snapshots: tuple[SnapshotReport, ...] = ()
    memory: MemoryReport | None = None

    @classmethod
    def of(
        cls,
        run: Run,
        traces: tuple[TraceReport, ...] = (),
        snapshots: tuple[SnapshotReport, ...] = (),
        memory: MemoryReport | None = None,
    ) -> Facts:
        """Return the facts of a run."""
        found = {rank.rank: pulse_statistics(rank) for rank in run.ranks}
        pulses = {rank: statistics for rank, statistics in found.items() if statistics is not None}
        ranks = rank_report(run, pulses)
        waits = ranks.lead_waits_ns if ranks is not None else {}
        return cls(
            run=run,
            statistics=pulses,
            ranks=ranks,
            traces=tuple(with_waits(trace, waits) for trace in traces) if waits else traces,
            snapshots=snapshots,
            memory=memory,
        )

    @cached_property
    def ledgers(self) -> Mapping[int, TimeLedger]:
        """The time ledgers of the ranks that have a pulse, by rank."""
        recorded = {trace.rank: trace.host_ledger for trace in reversed(self.traces)}
        devices = {trace.rank: trace.device_ledger for trace in reversed(self.traces)}
        is_alone = len(self.run.ranks) == 1
        alone, device = (recorded.get(None), devices.get(None)) if is_alone else (None, None)
        waits = self.ranks.waits_ns if self.ranks is not None else {}
        has_straggler = self.ranks is not None and self.ranks.straggler is not None
        in_log = log_waits(self.run.ranks, recorded, has_straggler=has_straggler) if self.ranks is not None else {}
        found = {
            rank.rank: run_ledger(
                rank,
                recorded.get(rank.rank) or alone,
                {
                    **(late := waits.get(rank.rank, {})),
                    "self_log": max(late.get("self_log", 0), in_log.get(rank.rank, 0)),
                },
                devices.get(rank.rank) or device,
            )
            for rank in self.run.ranks
            if rank.rank in self.statistics
        }
        return {rank: ledger for rank, ledger in found.items() if ledger is not None}

    @cached_property
    def steady_traces(self) -> tuple[TraceReport, ...]:
        """The traces, with the device's time in the steps outside windows where the pulse has enough of these.

        A trace with a part of its events tells neither waits nor overlap: it is left out.
        """
        lone = self.run.lead if len(self.run.ranks) == 1 else None
        ranks = {rank.rank: rank for rank in self.run.ranks}
        found = []
        for trace in (trace for trace in self.traces if not trace.is_sample):
            rank = lone if trace.rank is None else ranks.get(trace.rank)
            ledger = self.ledgers.get(rank.rank) if rank is not None else None
            if rank is not None and ledger is not None and not typical_in_windows(rank):
                others = (line for line in ledger.of(*_BESIDE) if line.count >= _OFTEN or line.part in _ALWAYS)
                found.append(in_steady_state(trace, ledger.median_ns, total(others)))
            else:
                found.append(trace)
        return tuple(found)

    @cached_property
    def byte_ledgers(self) -> Mapping[int, ByteLedger]:
        """The byte ledgers of the ranks whose peak was measured, by rank."""
        memory = {rank.rank: rank for rank in (self.memory.ranks if self.memory is not None else ())}
        hosts = Counter(rank.facts.host for rank in self.run.ranks)
        found = {
            rank.rank: run_bytes(rank, memory.get(rank.rank), hosts[rank.facts.host])
            for rank in self.run.ranks
            if rank.in_full
        }
        return {
            rank: owned_at_failure(ledger, (event for event in self.run.ooms if event.rank == rank))
            for rank, ledger in found.items()
            if ledger is not None
        }

    @cached_property
    def resident_ledgers(self) -> Mapping[int, ByteLedger]:
        """The ledgers of the resident memory of ranks with an accelerator, by rank."""
        hosts = Counter(rank.facts.host for rank in self.run.ranks)
        found = {rank.rank: resident_bytes(rank, hosts[rank.facts.host]) for rank in self.run.ranks if rank.in_full}
        return {rank: ledger for rank, ledger in found.items() if ledger is not None}

    def heaviest(self, cost: Callable[[TimeLedger], float]) -> tuple[Rank, TimeLedger] | None:
        """Return the rank with the highest cost in its ledger; None if no rank has a cost."""
        found = [(rank, self.ledgers[rank.rank]) for rank in self.run.ranks if rank.rank in self.ledgers]
        return max((pair for pair in found if cost(pair[1]) > 0), key=lambda pair: cost(pair[1]), default=None)

    @property
    def is_fit(self) -> bool:
        """Whether the run is a training run, not ``validate``, ``test`` or ``predict``."""
        return self.run.lead.facts.stage == "fit"

    def pulse(self, rank: Rank, steps: Collection[int] = ()) -> Evidence:
        """Return a rank's pulse as evidence, from the first to the last of ``steps``; all steps if it is empty."""
        rows = [row for row in rank.pulse if row["step"] is not None and (not steps or row["step"] in steps)]
        first, last = (rows[0], rows[-1]) if rows else (None, None)
        start = last_start = duration = None
        if first is not None and last is not None:
            start, last_start, duration = first["start_ns"], last["start_ns"], last["duration_ns"]
        return Evidence(
            artifact=f"{self.run.directory.name}/{pulse_name(rank.rank)}",
            rank=rank.rank,
            steps=(first["step"] or 0, last["step"] or 0) if first is not None and last is not None else None,
            start_ns=start,
            end_ns=None if last_start is None or duration is None else last_start + duration,
        )

    def pulse_and_trace(self, rank: Rank) -> tuple[Evidence, ...]:
        """Return the pulse of a rank and its trace, if it has one, as evidence."""
        traces = (Evidence(artifact=str(trace.file), rank=rank.rank) for trace in self._traces(rank)[:1])
        return self.pulse(rank), *traces

    def host_ledger(self, rank: Rank) -> TimeLedger | None:
        """Return the host ledger of a rank's trace, None without one."""
        return next((trace.host_ledger for trace in self._traces(rank)), None)

    def _traces(self, rank: Rank) -> list[TraceReport]:
        return [trace for trace in self.traces if trace.host_ledger is not None and trace.rank in {rank.rank, None}]

    def recorded(self, rank: Rank, collector: str, steps: Collection[int] = ()) -> tuple[Evidence, ...]:
        """Return a collector's files of the windows that recorded any of ``steps``; of all windows if it is empty."""
        files = {
            artifact.window: artifact
            for artifact in self.run.artifacts
            if artifact.rank == rank.rank and artifact.collector == collector
        }
        found = []
        for window in rank.windows:
            chosen = [step for step in window.steps if not steps or step in steps]
            if window.index in files and chosen:
                found.append(self._in_window(rank, files[window.index], chosen))
        return tuple(found)

    def _in_window(self, rank: Rank, artifact: ArtifactFile, steps: list[int]) -> Evidence:
        at = self.pulse(rank, steps)
        return Evidence(
            artifact=artifact.path,
            rank=rank.rank,
            window=artifact.window,
            steps=(steps[0], steps[-1]),
            start_ns=at.start_ns,
            end_ns=at.end_ns,
        )

    def on_rank(self, source: Rank | TraceReport | int) -> str:
        """Return ``" on rank 3"`` where there are several ranks, else an empty string."""
        if isinstance(source, TraceReport):
            return trace_rank(source)
        number = source if isinstance(source, int) else source.rank
        return f" on rank {number}" if len(self.run.ranks) > 1 else ""


def facts_of_files(traces: Iterable[TraceReport] = (), snapshots: Iterable[SnapshotReport] = ()) -> Facts:
    """Return the facts of files without a run."""
    return Facts(run=NO_RUN, statistics={}, traces=tuple(traces), snapshots=tuple(snapshots))


def trace_rank(trace: TraceReport) -> str:
    """Return ``" on rank 3"`` if the trace is from one of several ranks, else an empty string."""
    several = trace.rank is not None and (trace.rank > 0 or (trace.world_size or 1) > 1)
    return f" on rank {trace.rank}" if several else ""


Judge = Callable[[Facts], Finding | list[Finding] | None]
"""A rule as a function."""
