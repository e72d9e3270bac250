"""Alignment of the clocks of a run's hosts, or of the traces of several ranks, by the ends of collectives.

See :func:`lightning_memprof.account.ranks.arrivals.window_waits`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from lightning_memprof.account.ranks.arrivals import Keys, RankTrack, trace_track, track, window_waits
from lightning_memprof.account.ranks.summary import read_summary, readable_collectives
from lightning_memprof.account.trace.report import recorded_number
from lightning_memprof.artifacts.naming import summary_path
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.run.model import Rank, Run
from lightning_memprof.read.trace.text import TraceText
from lightning_memprof.timeline.steps import steps_of
from lightning_memprof.units import format_ns


class Clocks(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets of the clocks of hosts, or of trace files.

    Attributes:
        offsets_ns: by host or file, the ns to add to its times.
        residual_ns: distance that remains between the ends of a collective on two of them, None without any.
        matched: number of collectives compared.
        unaligned: those without a collective in common with the others; their times are not changed.
    """

    offsets_ns: Mapping[str, int] = msgspec.field(default_factory=dict)
    residual_ns: int | None = None
    matched: int = 0
    unaligned: tuple[str, ...] = ()

    def offset_ns(self, rank: Rank) -> int:
        """Return the nanoseconds to add to the times of a rank."""
        return self.offsets_ns.get(rank.facts.host or "", 0)

    def of_files(self, files: Sequence[Path]) -> list[int]:
        """Return the nanoseconds to add to the times of each trace file."""
        return [self.offsets_ns.get(str(file), 0) for file in files]

    def notes(self, of: str) -> Iterator[str]:
        """Yield the error of the alignment, and what could not be aligned; ``of`` are hosts or traces."""
        if self.residual_ns is not None:
            yield (
                f"The clocks of {len(self.offsets_ns)} {of} were aligned by {self.matched} collectives; "
                f"the residual error is {format_ns(self.residual_ns)}."
            )
        if self.unaligned:
            yield f"No collective aligns the clock of {', '.join(self.unaligned)}: it is used unchanged."


def align_clocks(run: Run, window: int | None = None, ranks: Collection[int] | None = None) -> Clocks:
    """Align the clocks of a run's hosts by the collectives in the ranks' summaries; a single host needs no reading.

    Args:
        run: the run.
        window: index of one window; None for all.
        ranks: global ranks; None for all.
    """
    chosen = [rank for rank in run.ranks if ranks is None or rank.rank in ranks]
    hosts = list(dict.fromkeys(rank.facts.host or "" for rank in chosen))
    if len(hosts) < 2:
        return Clocks(offsets_ns=dict.fromkeys(hosts, 0))
    windows: dict[int, list[RankTrack]] = defaultdict(list)
    shared: dict[Keys, Keys] = {}
    for rank in chosen:
        for index in (each.index for each in rank.windows if window in {None, each.index}):
            # A killed window has no summary.
            with suppress(ArtifactError):
                arrivals = read_summary(run.directory / summary_path(index, rank.rank)).arrivals
                if arrivals.kind:
                    windows[index].append(track(rank.rank, rank.facts.host or "", arrivals, shared))
    known = _aligned(windows.values())
    unaligned = tuple(host for host in hosts[1:] if host not in known.offsets_ns)
    return replace(known, offsets_ns={host: known.offsets_ns.get(host, 0) for host in hosts}, unaligned=unaligned)


def align_traces(traces: Sequence[Path]) -> Clocks:
    """Align the clocks of traces of several ranks, as ``show`` does; a rank has one clock in all its windows.

    Traces of different windows begin with different steps. A trace without its rank keeps its clock, and one that
    cannot be read.
    """
    if len(traces) < 2:
        return Clocks()
    windows: dict[int | None, dict[int, RankTrack]] = defaultdict(dict)
    ranks: dict[str, int | None] = {}
    for trace in traces:
        if found := readable_collectives(trace):
            rank, step = _rank_and_step(trace)
            ranks[str(trace)] = rank
            if rank is not None:
                windows[step].setdefault(rank, trace_track(rank, found))
    known = _aligned([window[rank] for rank in sorted(window)] for window in windows.values())
    offsets = {file: known.offsets_ns[str(rank)] for file, rank in ranks.items() if str(rank) in known.offsets_ns}
    unaligned = [file for file in ranks if file not in offsets]
    if not offsets:
        # The first one is the clock of the others, and one rank needs no other.
        unaligned = unaligned[1:] if len(set(ranks.values())) > 1 or None in ranks.values() else []
    return replace(known, offsets_ns=offsets, unaligned=tuple(unaligned))


def _aligned(windows: Iterable[Sequence[RankTrack]]) -> Clocks:
    """Return the clocks of hosts that have collectives in common, window by window.

    Args:
        windows: the tracks of each window, the lowest rank first.
    """
    offsets_ns: dict[str, int] = {}
    errors: list[int] = []
    matched = 0
    for tracks in windows:
        waits = window_waits(tracks)
        if waits.clock_offsets_ns and waits.are_matched:
            ahead = {tracks[0].host: 0, **waits.clock_offsets_ns}
            # Relative to a host whose offset an earlier window gave.
            lead = next((host for host in ahead if host in offsets_ns), tracks[0].host)
            true = offsets_ns.get(lead, 0) + ahead[lead]
            offsets_ns = {host: true - ns for host, ns in ahead.items()} | offsets_ns
            errors.append(waits.clock_error_ns)
            matched += len(waits.meetings)
    return Clocks(offsets_ns=offsets_ns, residual_ns=max(errors, default=None), matched=matched)


def _rank_and_step(trace: Path) -> tuple[int | None, int | None]:
    """Return the rank of a trace and its first step; no rank where it cannot be read."""
    text = TraceText(trace)
    try:
        step = min((number for number, *_ in steps_of(text)), default=None)
    except ArtifactError:
        return None, None
    return recorded_number(text.metadata, "rank"), step
