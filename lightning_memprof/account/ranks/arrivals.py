"""Who waits for whom: the same collective in every rank's summary, on one clock."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from lightning_memprof.account.ranks.lateness import Lateness
from lightning_memprof.account.ranks.summary import Arrivals, arrivals_of
from lightning_memprof.read.trace.communication import Collective

# These end on every rank when the last one has come, so their ends tell what the clocks differ by.
TOGETHER: Final = frozenset({"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "barrier"})
# The ends of one collective lie within this on one clock; where they do not, the traces begin at different ones.
_SAME_NS: Final = 1_000_000
# So many ends tell what two clocks differ by.
_ENDS: Final = 32
_SHIFTS: Final = (1, -1, 2, -2)
_BEFORE: Final = -(1 << 62)
# Clocks that differ by more (73 years) are damage, and their sums would be more than 64 bits.
_FURTHEST: Final = 1 << 61

Kind = tuple[str, str, "int | None"]
Key = tuple[Kind, int]
Keys = tuple[Key, ...]


class RankTrack(msgspec.Struct, frozen=True):
    """One rank's collectives of a window, on its own clock, with a key for each."""

    rank: int
    host: str
    arrivals: Arrivals
    keys: Keys

    def end_ns(self, at: int) -> int:
        """Return the end of one collective by this rank's clock."""
        return self.arrivals.base_ns + self.arrivals.start_ns[at] + self.arrivals.duration_ns[at]


class Meeting(msgspec.Struct, frozen=True):
    """One collective of several ranks: arrival of the median and the last rank, which was last, and who made it late.

    ``cause`` is the last rank, or the rank of another group for which it had waited before.
    """

    kind: Kind
    ranks: int
    middle_ns: int
    last_ns: int
    last_rank: int
    cause: int


class CollectiveWait(msgspec.Struct, frozen=True):
    """All collectives of one kind. ``wait_ns`` is the mean wait of the median rank for the last one.

    ``last_rank`` was last in ``last_count`` of ``count``.
    """

    name: str
    group: str
    bytes: int | None
    count: int
    ranks: int
    wait_ns: int
    last_rank: int
    last_count: int


class WindowWaits(msgspec.Struct):
    """The waiting of one window, in nanoseconds.

    ``late`` is the wait of the median rank in each of ``steps``, each moment once, by the rank that causes it.
    ``own_wait_ns`` is the wait of each rank. ``clock_error_ns`` is the median distance of the ends of one collective on
    the aligned clocks. ``last_ns`` is when the last rank came to each collective, on the clock of the first track, and
    ``shifts`` by how many collectives tracks begin later.
    """

    meetings: list[Meeting] = msgspec.field(default_factory=list)
    steps: float = 1.0
    late: list[Lateness] = msgspec.field(default_factory=list)
    own_wait_ns: Counter[int] = msgspec.field(default_factory=Counter)
    clock_offsets_ns: dict[str, int] = msgspec.field(default_factory=dict)
    clock_error_ns: int = 0
    last_ns: dict[Key, int] = msgspec.field(default_factory=dict)
    shifts: dict[int, int] = msgspec.field(default_factory=dict)

    @property
    def are_matched(self) -> bool:
        """Whether the ends of collectives agree: else they are not the same, and nobody knows who waits."""
        return self.clock_error_ns <= _SAME_NS

    def of(self, track: RankTrack) -> dict[int, int]:
        """Return a rank's wait in each collective that another rank has too, by its start on the rank's own clock."""
        if not self.are_matched:
            return {}
        offset, shift = self.clock_offsets_ns.get(track.host, 0), self.shifts.get(track.rank, 0)
        found = {}
        arrivals = track.arrivals
        for (kind, number), begin, ns in zip(track.keys, arrivals.start_ns, arrivals.duration_ns, strict=True):
            start = arrivals.base_ns + begin
            if (last := self.last_ns.get((kind, number + shift))) is not None:
                found[start] = max(0, min(last + offset - start, ns))
        return found

    def by_kind(self) -> list[CollectiveWait]:
        """Return the waiting by kind of collective, the longest together first."""
        groups: dict[Kind, list[Meeting]] = defaultdict(list)
        for meeting in self.meetings:
            groups[meeting.kind].append(meeting)
        waits = []
        for (name, group, size), found in groups.items():
            last, count = Counter(meeting.last_rank for meeting in found).most_common(1)[0]
            waits.append(
                CollectiveWait(
                    name, group, size, len(found), max(meeting.ranks for meeting in found),
                    sum(meeting.last_ns - meeting.middle_ns for meeting in found) // len(found), last, count,
                )
            )  # fmt: skip
        return sorted(waits, key=lambda wait: wait.wait_ns * wait.count, reverse=True)


def track(rank: int, host: str, arrivals: Arrivals, shared: dict[Keys, Keys]) -> RankTrack:
    """Return a rank's collectives, one at least; thousands of ranks share one tuple of keys."""
    numbers = zip(arrivals.kind, arrivals.sequence, strict=True)
    keys = tuple((arrivals.kinds[kind], number) for kind, number in numbers)
    return RankTrack(rank, host, arrivals, shared.setdefault(keys, keys))


def trace_track(rank: int, found: Sequence[Collective]) -> RankTrack:
    """Return a trace's collectives, one at least; each is a host of its own, for traces need not share a clock."""
    return track(rank, str(rank), arrivals_of(found), {})


def window_waits(tracks: Sequence[RankTrack], steps: float = 1.0) -> WindowWaits:
    """Match the collectives of one window and measure who waited for whom.

    Hosts' clocks are aligned by the ends of the collectives; the ranks of one host share its clock. A trace that begins
    some collectives later than the others is shifted to where the ends agree. ``steps`` is how many the collectives
    are of.
    """
    waits = WindowWaits(steps=steps)
    if len(tracks) < 2:
        return waits
    lead = tracks[0]
    ends = {key: lead.end_ns(at) for at, key in enumerate(lead.keys) if key[0][0] in TOGETHER}
    differences: dict[str, list[int]] = defaultdict(list)
    errors: list[int] = []
    placed = [lead]
    for track in tracks[1:]:
        shift, found = _agreement(track, ends)
        if shift:
            waits.shifts[track.rank] = shift
        keys = tuple((kind, number + shift) for kind, number in track.keys) if shift else track.keys
        placed.append(replace(track, keys=keys))
        if found:
            differences[track.host].append(statistics.median_low(found))
            errors.append(_spread(found))
    waits.clock_offsets_ns = {
        host: 0 if host == lead.host else statistics.median_low(found) for host, found in differences.items()
    }
    waits.clock_error_ns = statistics.median_low(errors) if errors else 0
    _meet(waits, placed)
    waits.late = _lateness(waits.meetings, steps)
    return waits


def _agreement(track: RankTrack, ends: Mapping[Key, int]) -> tuple[int, list[int]]:
    """Return by how many collectives a track begins later than the first one, and then its ends after that one's."""
    shift, best = 0, _differences(track, ends, 0)
    if _spread(best) > _SAME_NS:
        for later in _SHIFTS:
            found = _differences(track, ends, later)
            # With few left, anything agrees.
            if 2 * len(found) >= len(best) and len(found) > 2 and 4 * _spread(found) < _spread(best):
                shift, best = later, found
    return shift, best


def _differences(track: RankTrack, ends: Mapping[Key, int], shift: int) -> list[int]:
    every = (
        track.end_ns(at) - other
        for at, (kind, number) in enumerate(track.keys)
        if (other := ends.get((kind, number + shift))) is not None
    )
    return list(islice(every, _ENDS))


def _spread(differences: Sequence[int]) -> int:
    """Return the median distance from the median, 0 without any."""
    middle = statistics.median_low(differences or [0])
    return statistics.median_low([abs(ns - middle) for ns in differences or [0]])


class _Group(msgspec.Struct):
    """Ranks that have the same collectives.

    ``came_ns`` has a row for each rank and a column for each collective; ``waited_ns`` is by rank, ``until_ns`` the end
    of their last wait. ``waits`` are those of each collective with their cause, and ``met`` their count after the last
    collective of each process group.
    """

    ranks: list[int]
    came_ns: NDArray[np.int64]
    waited_ns: NDArray[np.int64]
    until_ns: int = _BEFORE
    waits: list[tuple[NDArray[np.int64], int]] = msgspec.field(default_factory=list)
    met: dict[str, int] = msgspec.field(default_factory=dict)

    def since(self, name: str) -> list[tuple[NDArray[np.int64], int]]:
        """Return the waits since the last collective of a process group."""
        return self.waits[self.met.get(name, 0) :]


def _meet(waits: WindowWaits, tracks: Sequence[RankTrack]) -> None:
    """Gather who came when to each collective, then the waiting; ranks with the same keys are taken together."""
    alike: dict[Keys, list[RankTrack]] = defaultdict(list)
    for track in tracks:
        alike[track.keys].append(track)
    groups: list[_Group] = []
    zero = tracks[0].arrivals.base_ns
    came: dict[Key, list[tuple[_Group, int]]] = defaultdict(list)
    last_ns: dict[Key, int] = {}
    for keys, members in alike.items():
        later = [
            max(-_FURTHEST, min(_FURTHEST, member.arrivals.base_ns - zero - waits.clock_offsets_ns.get(member.host, 0)))
            for member in members
        ]
        starts = np.array([member.arrivals.start_ns for member in members], np.int64)
        times = np.asfortranarray(starts + np.array(later, np.int64)[:, None])
        group = _Group([member.rank for member in members], times, np.zeros(len(members), np.int64))
        groups.append(group)
        for at, (key, last) in enumerate(zip(keys, times.max(axis=0).tolist(), strict=True)):
            came[key].append((group, at))
            last_ns[key] = max(last, last_ns.get(key, _BEFORE))
    for key in sorted(came, key=last_ns.__getitem__):
        if (found := _wait(key[0], came[key], last_ns[key])) is not None:
            waits.meetings.append(replace(found, middle_ns=zero + found.middle_ns, last_ns=zero + found.last_ns))
            waits.last_ns[key] = zero + last_ns[key]
    for group in groups:
        waits.own_wait_ns.update(dict(zip(group.ranks, group.waited_ns.tolist(), strict=True)))


def _wait(kind: Kind, parts: list[tuple[_Group, int]], last: int) -> Meeting | None:
    """Add what one collective, at which the last rank came at ``last``, made each rank wait; None where one rank came.

    A rank cannot wait for two at once: collectives that overlap are one wait.
    """
    waits = [last - group.came_ns[:, at] for group, at in parts]
    everyone = waits[0] if len(waits) == 1 else np.concatenate(waits)
    if len(everyone) < 2:
        return None
    half = len(everyone) // 2
    middle = int(np.partition(everyone, half)[half])
    last_of, place = next(
        (group, int(waited.argmin())) for (group, _), waited in zip(parts, waits, strict=True) if not waited.min()
    )
    cause = _cause(kind[1], [group for group, _ in parts], last_of, place, middle)
    for (group, _), waited in zip(parts, waits, strict=True):
        most = last - group.until_ns
        if most > 0:
            until_last = np.minimum(waited, most)
            group.waited_ns += until_last
            group.until_ns = last
            group.waits.append((until_last, cause))
        group.met[kind[1]] = len(group.waits)
    return Meeting(kind, len(everyone), last - middle, last, last_of.ranks[place], cause)


def _cause(name: str, groups: Sequence[_Group], last_of: _Group, place: int, middle: int) -> int:
    """Return the rank that makes others wait ``middle`` ns: the last one, or for which that one has waited longer.

    Ranks that meet in several process groups, as in tensor and data parallelism, are late together: those that share
    one with the late rank wait for it there, and then come last to the others.
    """
    own = Counter[int]()
    for waited, cause in last_of.since(name):
        own[cause] += int(waited[place])
    if not own:
        return last_of.ranks[place]
    waited_ns = [sum((waited for waited, _ in group.since(name)), 0 * group.waited_ns) for group in groups]
    longer = own.total() - int(np.median(np.concatenate(waited_ns)))
    return own.most_common(1)[0][0] if 2 * longer >= middle > 0 else last_of.ranks[place]


def _lateness(meetings: Sequence[Meeting], steps: float) -> list[Lateness]:
    """Return the wait of the median rank in each step, each moment once, by the rank that causes it.

    Steps are equal parts of the time from the first collective to the last: the first step begins where a rank comes to
    its first one.
    """
    if not meetings:
        return []
    ordered = sorted(meetings, key=lambda meeting: meeting.middle_ns)
    zero, until = ordered[0].middle_ns, 0
    waits: list[tuple[int, int, int]] = []
    for meeting in ordered:
        begin = max(meeting.middle_ns, until)
        if meeting.last_ns > begin:
            waits.append((begin, meeting.cause, meeting.last_ns - begin))
            until = meeting.last_ns
    count = max(round(steps), 1)
    step_ns = (max(until, ordered[-1].middle_ns) - zero) / count
    return [Lateness(min(int((begin - zero) / step_ns), count - 1), cause, ns) for begin, cause, ns in waits]
