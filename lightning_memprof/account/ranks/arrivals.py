"""Who waits for whom: the same collective in every rank's summary, on one clock."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lightning_memprof.account.ranks.summary import Arrivals, RankSummary
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
# The keys of a summary, in numbers: thousands of ranks have the same, and share one tuple of keys.
Signature = tuple[tuple[Kind, ...], tuple[int, ...], tuple[int, ...]]


class RankTrack(msgspec.Struct, frozen=True):
    """One rank's collectives of a window as columns: starts in ns after ``base_ns`` of its own clock."""

    rank: int
    host: str
    keys: Keys
    base_ns: int
    start_ns: Sequence[int]
    duration_ns: Sequence[int]

    def end_ns(self, at: int) -> int:
        """Return the end of one collective by this rank's clock."""
        return self.base_ns + self.start_ns[at] + self.duration_ns[at]


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

    ``waited_ns`` is the total wait of the median rank, ``caused_ns`` its part by the rank that causes it, and
    ``largest_ns`` the maximum of that within one step. ``own_wait_ns`` is the wait of each rank. ``clock_error_ns`` is
    the median distance of the ends of one collective on the aligned clocks. ``last_ns`` is when the last rank came to
    each collective, on the clock of the first track, and ``shifts`` by how many collectives tracks begin later.
    """

    meetings: list[Meeting] = msgspec.field(default_factory=list)
    waited_ns: int = 0
    caused_ns: Counter[int] = msgspec.field(default_factory=Counter)
    largest_ns: dict[int, int] = msgspec.field(default_factory=dict)
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
        for (kind, number), begin, ns in zip(track.keys, track.start_ns, track.duration_ns, strict=True):
            start = track.base_ns + begin
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


def track(summary: RankSummary, shared: dict[Signature, Keys]) -> RankTrack | None:
    """Return a summary's collectives, or None where it has none."""
    arrivals: Arrivals = summary.arrivals
    if not arrivals.kind:
        return None
    signature = (tuple(arrivals.kinds), tuple(arrivals.kind), tuple(arrivals.sequence))
    keys = shared.get(signature)
    if keys is None:
        keys = tuple((arrivals.kinds[kind], number) for kind, number in zip(*signature[1:], strict=True))
        shared[signature] = keys
    return RankTrack(
        summary.rank, summary.host, keys, arrivals.base_ns, arrivals.start_ns, arrivals.duration_ns
    )  # fmt: skip


def trace_track(rank: int, found: Sequence[Collective]) -> RankTrack:
    """Return a trace's collectives, one at least; each is a host of its own, for traces need not share a clock."""
    base = found[0].start_ns
    return RankTrack(
        rank=rank,
        host=str(rank),
        keys=tuple((collective.kind, collective.sequence) for collective in found),
        base_ns=base,
        start_ns=[collective.start_ns - base for collective in found],
        duration_ns=[collective.duration_ns for collective in found],
    )


def window_waits(tracks: Sequence[RankTrack], steps: float = 1.0) -> WindowWaits:
    """Match the collectives of one window and measure who waited for whom.

    Hosts' clocks are aligned by the ends of the collectives; the ranks of one host share its clock. A trace that begins
    some collectives later than the others is shifted to where the ends agree. ``steps`` is how many the collectives
    are of.
    """
    waits = WindowWaits()
    if len(tracks) < 2:
        return waits
    lead = _Lead(tracks[0])
    differences: dict[str, list[int]] = defaultdict(list)
    errors: list[int] = []
    placed = [lead.track]
    alike = _alike(tracks[1:], lead)
    for track in tracks[1:]:
        agreed = alike.get(track.rank)
        if agreed is None or agreed.spread_ns > _SAME_NS:
            agreed = _agreement(track, lead)
        if shift := agreed.shift:
            waits.shifts[track.rank] = shift
        placed.append(
            replace(track, keys=tuple((kind, number + shift) for kind, number in track.keys)) if shift else track
        )
        if agreed.middle_ns is not None:
            differences[track.host].append(agreed.middle_ns)
            errors.append(agreed.spread_ns)
    waits.clock_offsets_ns = {
        host: 0 if host == lead.track.host else statistics.median_low(found) for host, found in differences.items()
    }
    waits.clock_error_ns = statistics.median_low(errors) if errors else 0
    _meet(waits, placed)
    _share(waits, steps)
    return waits


class _Lead:
    """The rank whose clock is taken: the ends of its collectives, and of those that end together the first."""

    def __init__(self, track: RankTrack) -> None:
        self.track = track
        self.ends = {key: track.end_ns(at) for at, key in enumerate(track.keys)}
        together = (at for at, (kind, _) in enumerate(track.keys) if kind[0] in TOGETHER)
        self.first = list(islice(together, _ENDS))


class _Agreement(NamedTuple):
    """By how many collectives a track begins later than the lead's, and how its clock then differs from the lead's.

    ``middle_ns`` is None where they have none in common that tells it.
    """

    shift: int
    middle_ns: int | None
    spread_ns: int
    common: int


def _alike(tracks: Sequence[RankTrack], lead: _Lead) -> dict[int, _Agreement]:
    """Return by rank how tracks with the lead's own keys agree with it, unshifted: thousands of them in one go."""
    same = [track for track in tracks if track.keys is lead.track.keys]
    if not same or not lead.first:
        return {}
    first, others, base = lead.first, len(lead.first), lead.track.base_ns
    ends = np.array([[track.start_ns[at] + track.duration_ns[at] for at in first] for track in (lead.track, *same)])
    found = ends[1:] - ends[0] + np.array([[track.base_ns - base] for track in same])
    middle = np.sort(found, axis=1)[:, (others - 1) // 2]
    spread = np.sort(np.abs(found - middle[:, None]), axis=1)[:, (others - 1) // 2]
    both = zip(same, middle.tolist(), spread.tolist(), strict=True)
    return {track.rank: _Agreement(0, middle_ns, spread_ns, others) for track, middle_ns, spread_ns in both}


def _agreement(track: RankTrack, lead: _Lead) -> _Agreement:
    best = _differences(track, lead.ends, 0)
    if best.spread_ns > _SAME_NS:
        for shift in _SHIFTS:
            found = _differences(track, lead.ends, shift)
            # With few left, anything agrees.
            if 2 * found.common >= best.common and found.common > 2 and 4 * found.spread_ns < best.spread_ns:
                best = found
    return best


def _differences(track: RankTrack, ends: Mapping[Key, int], shift: int) -> _Agreement:
    every = (
        track.end_ns(at) - other
        for at, (kind, number) in enumerate(track.keys)
        if kind[0] in TOGETHER and (other := ends.get((kind, number + shift))) is not None
    )
    found = sorted(islice(every, _ENDS))
    if not found:
        return _Agreement(shift, None, 0, 0)
    half = (len(found) - 1) // 2
    middle = found[half]
    return _Agreement(shift, middle, sorted(abs(ns - middle) for ns in found)[half], len(found))


class _Group(msgspec.Struct):
    """Ranks that have the same collectives.

    ``came_ns`` has a row for each rank and a column for each collective; ``waited_ns`` is by rank, ``until_ns`` the end
    of their last wait. ``waits`` are those of each collective with their cause, where the ranks meet in several process
    groups, and ``met`` their count, with ``waited_ns``, after the last collective of each.
    """

    ranks: list[int]
    came_ns: NDArray[np.int64]
    waited_ns: NDArray[np.int64]
    until_ns: int = _BEFORE
    waits: list[tuple[NDArray[np.int64], int]] | None = None
    met: dict[str, tuple[int, NDArray[np.int64]]] = msgspec.field(default_factory=dict)

    def since(self, name: str) -> list[tuple[NDArray[np.int64], int]]:
        """Return the waits since the last collective of a process group."""
        if self.waits is None:
            return []
        return self.waits[self.met[name][0] :] if name in self.met else self.waits

    def waited_since(self, name: str) -> NDArray[np.int64]:
        """Return the sum of these waits, by rank."""
        if self.waits is None:
            return np.zeros_like(self.waited_ns)
        return self.waited_ns - self.met[name][1] if name in self.met else self.waited_ns


def _meet(waits: WindowWaits, tracks: Sequence[RankTrack]) -> None:
    """Gather who came when to each collective, then the waiting; ranks with the same keys are taken together."""
    alike: dict[Keys, list[RankTrack]] = defaultdict(list)
    for track in tracks:
        alike[track.keys].append(track)
    groups: list[_Group] = []
    zero = tracks[0].base_ns
    came: dict[Key, list[tuple[_Group, int]]] = defaultdict(list)
    last_ns: dict[Key, int] = {}
    for keys, members in alike.items():
        later = [
            max(-_FURTHEST, min(_FURTHEST, member.base_ns - zero - waits.clock_offsets_ns.get(member.host, 0)))
            for member in members
        ]
        times = (
            np.array([member.start_ns for member in members], dtype=np.int64) + np.array(later, dtype=np.int64)[:, None]
        )
        group = _Group(
            [member.rank for member in members],
            np.asfortranarray(times),
            np.zeros(len(members), dtype=np.int64),
            waits=[] if len({name for (_, name, _), _ in keys}) > 1 else None,
        )
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
            if group.waits is not None:
                group.waits.append((until_last, cause))
        if group.waits is not None:
            group.met[kind[1]] = len(group.waits), group.waited_ns.copy()
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
    longer = own.total() - int(np.median(np.concatenate([group.waited_since(name) for group in groups])))
    return own.most_common(1)[0][0] if 2 * longer >= middle > 0 else last_of.ranks[place]


def _share(waits: WindowWaits, steps: float) -> None:
    """Assign the wait of the median rank, each moment once, to the rank that causes it."""
    until = 0
    parts: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for collective in sorted(waits.meetings, key=lambda meeting: meeting.middle_ns):
        begin = max(collective.middle_ns, until)
        if collective.last_ns > begin:
            waits.waited_ns += collective.last_ns - begin
            waits.caused_ns[collective.cause] += collective.last_ns - begin
            parts[collective.cause].append((begin, collective.last_ns - begin))
            until = collective.last_ns
    if waits.meetings:
        times = [collective.middle_ns for collective in waits.meetings]
        step_ns = (max(until, *times) - min(times)) / max(steps, 1)
        waits.largest_ns = {rank: _most_within(found, step_ns) for rank, found in parts.items()}


def _most_within(parts: Sequence[tuple[int, int]], span_ns: float) -> int:
    """Return the largest sum of the parts that begin within one span."""
    first, total, most = 0, 0, 0
    for begin, ns in parts:
        total += ns
        while begin - parts[first][0] > span_ns:
            total -= parts[first][1]
            first += 1
        most = max(most, total)
    return most
