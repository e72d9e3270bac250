"""Alignment of the clocks of a run's hosts, or of the traces of several ranks, by the ends of collectives.

A collective ends nearly at once on all its ranks. The ends of the same collective on two hosts therefore differ by the
difference of the two clocks, plus the time to deliver the last message, which can have either sign: the median over
many collectives is the difference of the clocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from lightning_memprof.account.ranks.arrivals import TOGETHER, RankTrack, trace_track, window_waits
from lightning_memprof.account.trace.report import recorded_rank
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.run.model import Rank, Run
from lightning_memprof.read.trace.communication import Collective, collectives
from lightning_memprof.read.trace.text import TraceText
from lightning_memprof.timeline.merge import steps_of
from lightning_memprof.units import format_ns

# Ranks read per host: they share a clock, and a trace of hundreds of megabytes takes seconds.
_RANKS_OF_A_HOST: Final = 2

Key = tuple[str, str, int | None, int, int]


class Clocks(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets of the clocks of hosts, or of trace files.

    Attributes:
        offsets_ns: by host or file, the ns to add to its times.
        residual_ns: median distance that remains between the ends of a collective on two of them, None without any.
        matched: number of collectives compared.
        unaligned: those without a collective in common with the first one, which keep their own clocks.
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
    """Align the clocks of a run's hosts by the collectives in their traces; a single host needs no reading.

    Args:
        run: the run.
        window: index of one window; None for all.
        ranks: global ranks; None for all.
    """
    hosts: dict[str, list[Rank]] = {}
    for rank in run.ranks:
        if ranks is None or rank.rank in ranks:
            hosts.setdefault(rank.facts.host or "", []).append(rank)
    if len(hosts) < 2:
        return Clocks(offsets_ns=dict.fromkeys(hosts, 0))
    ends: dict[str, list[Mapping[Key, int]]] = {host: [] for host in hosts}
    for host, members in hosts.items():
        for rank in members:
            found = _rank_ends(run, rank.rank, window) if len(ends[host]) < _RANKS_OF_A_HOST else {}
            if found:
                ends[host].append(found)
    return align_hosts({host: _host_ends(found) for host, found in ends.items()})


def align_traces(traces: Sequence[Path]) -> Clocks:
    """Align the clocks of traces of several ranks, as ``show`` does; a rank has one clock in all its windows.

    Traces of different windows begin with different steps. A trace without its rank keeps its clock, and one that
    cannot be read.
    """
    windows: dict[int | None, dict[int, tuple[str, RankTrack]]] = defaultdict(dict)
    ranks: dict[str, int | None] = {}
    for trace in traces:
        rank, step, found = _recorded(trace)
        if found:
            ranks[str(trace)] = rank
        if found and rank is not None:
            windows[step].setdefault(rank, (str(trace), trace_track(rank, found)))
    clocks: dict[int, int] = {}
    errors: list[int] = []
    matched = 0
    for window in windows.values():
        waits = window_waits([window[rank][1] for rank in sorted(window)])
        if waits.clock_offsets_ns and waits.are_matched:
            ahead = {min(window): 0, **{int(host): ns for host, ns in waits.clock_offsets_ns.items()}}
            known = next((rank for rank in ahead if rank in clocks), min(window))
            true = clocks.get(known, 0) + ahead[known]
            clocks = {rank: true - ns for rank, ns in ahead.items()} | clocks
            errors.append(waits.clock_error_ns)
            matched += len(waits.meetings)
    files = ((rank, file) for window in windows.values() for rank, (file, _) in window.items())
    offsets = {file: clocks[rank] for rank, file in files if rank in clocks}
    unaligned = [file for file in ranks if file not in offsets]
    if not offsets:
        # The first one is the clock of the others, and one rank needs no other.
        unaligned = unaligned[1:] if len(set(ranks.values())) > 1 or None in ranks.values() else []
    return Clocks(
        offsets_ns=offsets, residual_ns=max(errors, default=None), matched=matched, unaligned=tuple(unaligned)
    )


def _recorded(trace: Path) -> tuple[int | None, int | None, list[Collective]]:
    """Return the rank of a trace, its first step and its collectives; no collectives where it cannot be read."""
    text = TraceText(trace)
    try:
        found = collectives(trace)
        step = min((number for number, *_ in steps_of(text)), default=None) if found else None
    except ArtifactError:
        return None, None, []
    return recorded_rank(text.metadata), step, found


def align_hosts(ends: Mapping[str, Mapping[Key, int]]) -> Clocks:
    """Align hosts by the ends of collectives.

    A host without a collective in common with the first is aligned through a third one, if possible.

    Args:
        ends: per host, the end of each collective (name, group, size, sequence and window), Unix epoch ns of that host.
    """
    hosts = list(ends)
    offsets = {hosts[0]: 0}
    distances: list[int] = []
    matched = 0
    waiting = hosts[1:]
    while waiting:
        pairs = [(len(ends[done].keys() & ends[host].keys()), done, host) for done in offsets for host in waiting]
        shared, done, host = max(pairs, key=lambda pair: pair[0])
        if not shared:
            break
        differences = [
            ends[done][key] + offsets[done] - ends[host][key] for key in ends[done].keys() & ends[host].keys()
        ]
        offsets[host] = int(median(differences))
        distances += [abs(difference - offsets[host]) for difference in differences]
        matched += shared
        waiting.remove(host)
    offsets |= dict.fromkeys(waiting, 0)
    return Clocks(
        offsets_ns=offsets,
        residual_ns=int(median(distances)) if distances else None,
        matched=matched,
        unaligned=tuple(waiting),
    )


def _rank_ends(run: Run, rank: int, window: int | None) -> dict[Key, int]:
    found: dict[Key, int] = {}
    for trace in run.files("trace", rank=rank):
        if window in {None, trace.window}:
            found |= _ends(trace.window or 0, trace.file)
    return found


def _ends(window: int, trace: Path) -> dict[Key, int]:
    try:
        read: Iterable[Collective] = collectives(trace)
    except ArtifactError:
        return {}
    return {
        (collective.name, collective.group, collective.bytes, collective.sequence, window): collective.end_ns
        for collective in read
        if collective.name in TOGETHER
    }  # fmt: skip


def _host_ends(found: list[Mapping[Key, int]]) -> dict[Key, int]:
    """Return the last end of each collective among a host's ranks: other ranks may see it earlier."""
    merged: dict[Key, int] = {}
    for ends in found:
        for key, end in ends.items():
            merged[key] = max(end, merged.get(key, end))
    return merged
