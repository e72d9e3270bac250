"""Alignment of the clocks of a run's hosts by the ends of collectives.

A collective ends nearly at once on all its ranks. The ends of the same collective on two hosts therefore differ by the
difference of the two clocks, plus the time to deliver the last message, which can have either sign: the median over
many collectives is the difference of the clocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from lightning_memprof.analysis.run.model import Rank, Run
from lightning_memprof.analysis.trace.communication import Collective, collectives
from lightning_memprof.errors import ArtifactError

# These end on all ranks at the same time; in others some ranks continue before the last one arrives.
_TOGETHER: Final = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
# Ranks read per host: they share a clock, and a trace of hundreds of megabytes takes seconds.
_RANKS_OF_A_HOST: Final = 2

Key = tuple[str, str, int | None, int, int]


class Clocks(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets of the hosts' clocks.

    Attributes:
        offsets_ns: by host, the ns to add to its times.
        residual_ns: median distance that remains between the ends of a collective on two hosts, None without any.
        matched: number of collectives compared.
        unaligned: hosts without a collective in common with the first one, which keep their own clocks.
    """

    offsets_ns: Mapping[str, int] = msgspec.field(default_factory=dict)
    residual_ns: int | None = None
    matched: int = 0
    unaligned: tuple[str, ...] = ()

    def offset_ns(self, rank: Rank) -> int:
        """Return the nanoseconds to add to the times of a rank."""
        return self.offsets_ns.get(rank.facts.host or "", 0)


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
        if collective.name in _TOGETHER
    }  # fmt: skip


def _host_ends(found: list[Mapping[Key, int]]) -> dict[Key, int]:
    """Return the last end of each collective among a host's ranks: other ranks may see it earlier."""
    merged: dict[Key, int] = {}
    for ends in found:
        for key, end in ends.items():
            merged[key] = max(end, merged.get(key, end))
    return merged
