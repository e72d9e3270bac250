"""The clocks of a run's hosts, laid over each other by the ends of the collectives that they met in.

A collective ends nearly at once on all who take part, whoever came last. Of each pair of hosts the ends of the same
collectives therefore differ by the difference of the two clocks, plus what delivering the last message took, which has
no sign of its own: the median over many of them is the difference.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from lightning_memprof.analysis.run.load import Rank, Run
from lightning_memprof.analysis.run.rows import text
from lightning_memprof.analysis.trace.communication import Collective, collectives
from lightning_memprof.errors import ArtifactError

__all__ = ["Clocks", "align_clocks", "align_hosts"]

# One that ends for all at the same time; of the others some ranks go on before the last has come.
_TOGETHER: Final = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
# Ranks of a host that are read: its clock is one, and a trace of hundreds of megabytes takes seconds.
_RANKS_OF_A_HOST: Final = 2

Key = tuple[str, str, int | None, int, int]


@dataclass(frozen=True)
class Clocks:
    """What is added to the times of each host.

    ``offsets_ns`` maps a host's name to nanoseconds. ``residual_ns`` is the median distance that is left between the
    ends of one collective on two hosts, None where there is nothing to compare. ``matched`` counts those collectives.
    ``unaligned`` names the hosts that share no collective with the first one: their clocks are taken as they are.
    """

    offsets_ns: Mapping[str, int] = field(default_factory=dict)
    residual_ns: int | None = None
    matched: int = 0
    unaligned: tuple[str, ...] = ()

    def offset_ns(self, rank: Rank) -> int:
        """Nanoseconds to add to the times of a rank."""
        return self.offsets_ns.get(text(rank.facts, "host") or "", 0)


def align_clocks(run: Run, window: int | None = None, ranks: Collection[int] | None = None) -> Clocks:
    """Align the clocks of a run's hosts by the collectives in their traces; of one host there is nothing to read.

    Args:
        run: the run.
        window: index of the only window that is wanted; None takes all.
        ranks: the global ranks that are wanted; None takes all.

    """
    hosts: dict[str, list[Rank]] = {}
    for rank in run.ranks:
        if ranks is None or rank.rank in ranks:
            hosts.setdefault(text(rank.facts, "host") or "", []).append(rank)
    if len(hosts) < 2:
        return Clocks(dict.fromkeys(hosts, 0))
    ends: dict[str, list[Mapping[Key, int]]] = {host: [] for host in hosts}
    for host, members in hosts.items():
        for rank in members:
            found = _rank_ends(run, rank.rank, window) if len(ends[host]) < _RANKS_OF_A_HOST else {}
            if found:
                ends[host].append(found)
    return align_hosts({host: _host_ends(found) for host, found in ends.items()})


def align_hosts(ends: Mapping[str, Mapping[Key, int]]) -> Clocks:
    """Align hosts by when each saw each collective end.

    A host that shares none with the first is aligned by way of a third one, where there is one.

    Args:
        ends: per host, collective (window, name, group, size and sequence) to its end, Unix epoch ns of that host.

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
    return Clocks(offsets, int(median(distances)) if distances else None, matched, tuple(waiting))


def _rank_ends(run: Run, rank: int, window: int | None) -> dict[Key, int]:
    found: dict[Key, int] = {}
    for artifact in run.artifacts:
        wanted = window is None or artifact.window == window
        if artifact.rank == rank and artifact.type == "trace" and artifact.state == "present" and wanted:
            found |= _ends(artifact.window or 0, artifact.file)
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
    """Of several ranks of a host the last end of each collective: the others may not have looked yet."""
    merged: dict[Key, int] = {}
    for ends in found:
        for key, end in ends.items():
            merged[key] = max(end, merged.get(key, end))
    return merged
