"""The ranks of a run beside each other: imbalance, waiting, and the rank for which the others wait."""

from __future__ import annotations

import heapq
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from lightning_memprof.account.parts import Part
from lightning_memprof.account.ranks.arrivals import (
    CollectiveWait,
    Keys,
    Meeting,
    RankTrack,
    Signature,
    WindowWaits,
    track,
    window_waits,
)
from lightning_memprof.account.ranks.lateness import (
    MAIN_SHARE,
    MIN_WAIT_NS,
    MIN_WAIT_SHARE,
    Excess,
    PulseLateness,
    beyond_others,
    pulse_lateness,
    share_cores,
)
from lightning_memprof.account.ranks.summary import Arrivals, Figures, RankSummary, read_summary
from lightning_memprof.account.steps.statistics import PulseStatistics, peak_rss_bytes
from lightning_memprof.artifacts.naming import parse_summary_path
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.run.locate import names_in
from lightning_memprof.read.run.model import Rank, Run
from lightning_memprof.read.run.problems import Problem

# With fewer steps, most are first steps, which differ for other reasons.
FEW_STEPS: Final = 5
# On shared cores, which rank is last in so few steps is chance.
COIN_FLIP: Final = 3
# A phase that explains this part of the lateness is its cause.
EXPLAINS_SHARE: Final = 0.3
# The phases of Lightning in which a rank does not wait for others; forward and backward hold collectives.
_OWN: Final = (Part.DATA_WAIT, Part.CALLBACK, Part.OPTIMIZER, Part.UNTRACKED)
_ALONE: Final = (Part.DATA_WAIT, Part.CALLBACK)


class RankTimes(msgspec.Struct, frozen=True):
    """One rank's mean step in ns, on the host's clock, and its peaks of memory in bytes; None where not measured.

    ``steps`` is its largest known count. ``source`` names the steps of the times: those of the whole run (``pulse``),
    before the last window (``summary``), or of the last window, with the profiler overhead (``window``). ``wait_ns`` is
    its wait for other ranks per recorded step, ``compute_ns`` its forward and backward there without that wait.
    """

    rank: int
    host: str | None
    steps: int
    step_ns: int
    phases_ns: Mapping[str, int]
    source: Literal["pulse", "summary", "window"]
    callbacks_ns: Mapping[str, int] = msgspec.field(default_factory=dict)
    wait_ns: int | None = None
    compute_ns: int | None = None
    rss_peak_bytes: int | None = None
    device_peak_bytes: int | None = None

    def spent_ns(self, part: Part, unknown: int = 0) -> int:
        """Return the time of the phase that a part has, ``unknown`` where it was not measured."""
        return self.phases_ns.get(part.phase or "", unknown)


class Spread(msgspec.Struct, frozen=True):
    """One quantity over the ranks: minimum and maximum with their ranks, and the median."""

    lowest: int
    lowest_rank: int
    median: int
    highest: int
    highest_rank: int


class Waiting(msgspec.Struct, frozen=True):
    """Waiting in collectives, in ns per recorded step: the wait of the median rank, and its part by each last rank.

    ``collectives`` were matched over the ranks, ``steps`` recorded. ``largest_ns`` is the maximum within one step.
    ``clock_error_ns`` is the uncertainty of the hosts' clocks after alignment on the ends of the collectives.
    """

    collectives: int
    steps: int
    waited_ns: int
    caused_ns: Mapping[int, int]
    largest_ns: Mapping[int, int]
    last: Mapping[int, int]
    kinds: tuple[CollectiveWait, ...]
    clock_offsets_ns: Mapping[str, int]
    clock_error_ns: int


class Straggler(msgspec.Struct, frozen=True):
    """The rank for which the others wait, and the cause.

    ``caused_ns`` is the maximum by which a step would be shorter without the wait, ``caused_share`` its share of all
    waiting; None and 0 where no collective was recorded and only ``cause`` is known. ``own_ns`` is the cause's
    time per step on this rank, ``others_ns`` the median of the other ranks. ``callback`` is the callback with
    the largest excess over the other ranks, where callbacks are the cause. ``pulse_steps`` is the number of steps of
    the pulse that show it; None where recorded collectives do.
    """

    rank: int
    host: str | None
    step_ns: int
    caused_ns: int | None
    caused_share: float
    cause: Part | None
    own_ns: int | None
    others_ns: int | None
    callback: str | None
    pulse_steps: int | None = None


class RankReport(msgspec.Struct, frozen=True):
    """All ranks of a run. ``spreads`` is by quantity: each phase, ``step_ns``, ``rss_peak_bytes``, ...

    ``waits_ns`` is the wait for the late rank in the mean step of the pulse, by phase. ``lead_waits_ns`` is
    the wait of the leading rank in recorded collectives, by their start (Unix ns).
    """

    ranks: tuple[RankTimes, ...]
    world_size: int
    summaries: int
    spreads: Mapping[str, Spread]
    waiting: Waiting | None
    straggler: Straggler | None
    problems: tuple[Problem, ...] = ()
    waits_ns: Mapping[int, Mapping[str, int]] = msgspec.field(default_factory=dict)
    lead_waits_ns: Mapping[int, int] = msgspec.field(default_factory=dict)


def rank_report(run: Run, pulses: Mapping[int, PulseStatistics]) -> RankReport | None:
    """Compare the ranks of a run, or return None where there is one rank.

    Args:
        run: the run; each rank's summaries are read from its windows, one window at a time.
        pulses: the statistics of the pulses that were read, by rank.
    """
    if len(run.ranks) < 2:
        return None
    gathered = _Gathered(run.lead.rank)
    here = {rank.rank for rank in run.ranks}
    for window in _windows(run.directory):
        gathered.add([(rank, path) for rank, path in window if rank in here])
    if not all(rank.in_full for rank in run.ranks):
        # Ranks are compared over the same steps only.
        pulses = {rank: pulse for rank, pulse in pulses.items() if rank not in gathered.latest}
    ranks = tuple(times for rank in run.ranks if (times := _times(rank, pulses.get(rank.rank), gathered)) is not None)
    waiting, pulse = gathered.waiting(), pulse_lateness(run.ranks)
    return RankReport(
        ranks=ranks,
        world_size=max((row.world_size for row in gathered.latest.values()), default=len(run.ranks)),
        summaries=gathered.count,
        spreads=_spreads(ranks),
        waiting=waiting,
        straggler=_straggler(ranks, waiting, pulse, on_cores=share_cores(run.ranks)),
        problems=tuple(gathered.problems),
        waits_ns=pulse.waits_ns if pulse is not None else {},
        lead_waits_ns=gathered.lead_waits_ns,
    )


class _Gathered(msgspec.Struct):
    """The summaries, window after window; the waits in single collectives are of the rank that leads."""

    lead: int
    lead_waits_ns: dict[int, int] = msgspec.field(default_factory=dict)
    latest: dict[int, RankSummary] = msgspec.field(default_factory=dict)
    peaks: dict[int, dict[str, int]] = msgspec.field(default_factory=lambda: defaultdict(dict))
    windows: list[WindowWaits] = msgspec.field(default_factory=list)
    steps: list[float] = msgspec.field(default_factory=list)
    """Of each of the windows the steps that its collectives are of."""
    count: int = 0
    problems: list[Problem] = msgspec.field(default_factory=list)
    shared: dict[Signature, Keys] = msgspec.field(default_factory=dict)

    def add(self, files: list[tuple[int, str]]) -> None:
        """Read the summaries of one window."""
        tracks: list[RankTrack] = []
        steps = 0.0
        for rank, path in files:
            try:
                summary = read_summary(path)
            except ArtifactError as error:
                self.problems.append(Problem(path.rpartition("/")[2], str(error), rank))
                continue
            self.count += 1
            peaks = self.peaks[rank]
            for name, value in summary.memory.items():
                peaks[name] = max(value, peaks.get(name, 0))
            if found := track(summary, self.shared):
                tracks.append(found)
                arrivals = summary.arrivals
                steps = max(steps, len(summary.steps) * len(arrivals.kind) / max(arrivals.count, 1))
            # Of thousands of ranks the collectives would take most of the memory.
            self.latest[rank] = msgspec.structs.replace(summary, rank=rank, arrivals=Arrivals())
        if len(tracks) > 1:
            waits = window_waits(tracks, steps)
            for each in tracks:
                self.lead_waits_ns |= waits.of(each) if each.rank == self.lead else {}
            self.windows.append(waits)
            self.steps.append(steps)

    def waiting(self) -> Waiting | None:
        """Return the waiting of all windows per step; None where no two ranks have the same collective."""
        meetings: list[Meeting] = [meeting for window in self.windows for meeting in window.meetings]
        total = sum(self.steps)
        if not meetings or not total:
            return None
        caused: Counter[int] = Counter()
        largest: Counter[int] = Counter()
        offsets: dict[str, int] = {}
        for window in self.windows:
            caused.update(window.caused_ns)
            largest |= Counter(window.largest_ns)
            offsets.update(window.clock_offsets_ns)
        return Waiting(
            collectives=len(meetings),
            steps=round(total),
            waited_ns=round(sum(window.waited_ns for window in self.windows) / total),
            caused_ns={rank: round(ns / total) for rank, ns in caused.most_common()},
            largest_ns=dict(largest.most_common()),
            last=dict(Counter(meeting.last_rank for meeting in meetings).most_common()),
            kinds=tuple(WindowWaits(meetings).by_kind()),
            clock_offsets_ns=offsets,
            clock_error_ns=max(window.clock_error_ns for window in self.windows),
        )

    def own_wait_ns(self, rank: int) -> int | None:
        """Return how long a rank waits for others in a recorded step; None where it recorded no collective."""
        both = zip(self.windows, self.steps, strict=True)
        found = [(window.own_wait_ns[rank], steps) for window, steps in both if rank in window.own_wait_ns]
        steps = sum(steps_of_window for _, steps_of_window in found)
        return round(sum(ns for ns, _ in found) / steps) if steps else None


def _windows(directory: Path) -> Iterator[list[tuple[int, str]]]:
    """Yield the summaries of each window in order, by rank."""
    for window in names_in(directory):
        files = [
            (place[1], f"{directory}/{window}/{name}")
            for name in names_in(directory / window)
            if (place := parse_summary_path(f"{window}/{name}")) is not None
        ]
        if files:
            yield files


def _times(rank: Rank, pulse: PulseStatistics | None, gathered: _Gathered) -> RankTimes | None:
    summary = gathered.latest.get(rank.rank)
    figures: Figures | None = (summary.usual or summary.recorded) if summary else None
    source: Literal["pulse", "summary", "window"]
    if pulse is not None and pulse.clock == "host":
        step_ns, source = pulse.mean_ns, "pulse"
        phases = {name: ns for name, ns in pulse.breakdown_ns.items() if ns is not None}
    elif summary is not None and figures is not None:
        step_ns, phases, source = figures.mean_ns, figures.phases_ns, "summary" if summary.usual else "window"
    else:
        return None
    wait = gathered.own_wait_ns(rank.rank)
    recorded = summary.recorded.phases_ns if summary and summary.recorded else None
    peaks = gathered.peaks.get(rank.rank, {})
    device = max((ns for row in rank.pulse if (ns := row["device_peak_bytes"]) is not None), default=0)
    return RankTimes(
        rank=rank.rank,
        host=summary.host if summary else None,
        steps=max(rank.steps, max(summary.steps, default=0) if summary else 0),
        step_ns=step_ns,
        phases_ns=phases,
        source=source,
        callbacks_ns=summary.callbacks_ns if summary else {},
        wait_ns=wait,
        compute_ns=(
            max(0, recorded.get("forward", 0) + recorded.get("backward", 0) - wait)
            if recorded is not None and wait is not None
            else None
        ),
        rss_peak_bytes=max(peak_rss_bytes(rank) or 0, peaks.get("peak_rss_bytes", 0)) or None,
        device_peak_bytes=max(device, peaks.get("allocated_bytes.all.peak", 0)) or None,
    )


def _spreads(ranks: tuple[RankTimes, ...]) -> dict[str, Spread]:
    quantities: dict[str, Callable[[RankTimes], int | None]] = {
        "step_ns": lambda rank: rank.step_ns,
        **{phase: lambda rank, phase=phase: rank.phases_ns.get(phase) for phase in _phases(ranks)},  # type: ignore[misc]
        "wait_ns": lambda rank: rank.wait_ns,
        "compute_ns": lambda rank: rank.compute_ns,
        "rss_peak_bytes": lambda rank: rank.rss_peak_bytes,
        "device_peak_bytes": lambda rank: rank.device_peak_bytes,
    }
    spreads = {}
    for name, quantity in quantities.items():
        values = sorted((value, rank.rank) for rank in ranks if (value := quantity(rank)) is not None)
        if len(values) > 1:
            median = statistics.median_low([value for value, _ in values])
            spreads[name] = Spread(*values[0], median, *values[-1])
    return spreads


def _phases(ranks: tuple[RankTimes, ...]) -> list[str]:
    return list(dict.fromkeys(phase for rank in ranks for phase in rank.phases_ns))


def _straggler(
    ranks: tuple[RankTimes, ...], waiting: Waiting | None, pulse: PulseLateness | None, *, on_cores: bool
) -> Straggler | None:
    """Return the late rank of the whole pulse; else that of recorded collectives, if the pulse cannot know it."""
    if len(ranks) < 2:
        return None
    by_rank = {rank.rank: rank for rank in ranks}
    if pulse is not None and pulse.late is not None and (mine := by_rank.get(pulse.late.rank)) is not None:
        late, excess = pulse.late, pulse.late.excess
        if excess.cause in _OWN:  # the figures of the page's table
            own, rest = mine.spent_ns(excess.cause, excess.own_ns), [rank for rank in ranks if rank is not mine]
            excess = replace(excess, own_ns=own, others_ns=_median(rest, excess.cause))
        return replace(_found(mine, excess, late.caused_ns, None), caused_share=late.share, pulse_steps=pulse.steps)
    found = _of_windows(ranks, by_rank, waiting)
    if found is None or pulse is None:
        return found
    # The phases outside the passes, and forward, are those of every step: few recorded ones do not refute them.
    in_passes = found.cause in {None, Part.COMPUTE} and found.caused_ns is not None
    return found if in_passes and not (on_cores and waiting is not None and waiting.steps < COIN_FLIP) else None


def _of_windows(
    ranks: tuple[RankTimes, ...], by_rank: Mapping[int, RankTimes], waiting: Waiting | None
) -> Straggler | None:
    # If only some ranks record collectives, one of the others may be the last in each.
    unseen = [rank for rank in ranks if rank.wait_ns is None and rank.steps >= FEW_STEPS]
    if waiting is None:
        return _without_collectives(unseen, ranks)
    (rank, caused), (_, next_ns), *_ = (*waiting.caused_ns.items(), (-1, 0), (-1, 0))
    mine = by_rank.get(rank)
    # Equal ranks take turns, and one hiccup in a few steps is chance: both are subtracted first.
    steady = caused - waiting.largest_ns.get(rank, 0) / max(waiting.steps, 1) - next_ns
    threshold_ns = max(MIN_WAIT_NS, waiting.clock_error_ns, MIN_WAIT_SHARE * mine.step_ns if mine else 0)
    if mine is None or caused < MAIN_SHARE * waiting.waited_ns or steady < threshold_ns:
        return _without_collectives(unseen, ranks)
    cause = _cause(mine, [rank for rank in ranks if rank is not mine], EXPLAINS_SHARE * caused)
    return _found(mine, cause, caused, waiting)


def _without_collectives(unseen: Sequence[RankTimes], ranks: Sequence[RankTimes]) -> Straggler | None:
    """Return the straggler by the phases in which no rank waits for another; only where one rank stands out."""
    found: list[tuple[int, RankTimes, Excess]] = []
    medians = {part: _median(ranks, part) for part in _ALONE}
    # Each is compared with all others, which takes long for thousands: two that stand out are enough.
    excesses = [(max(rank.spent_ns(part) - medians[part] for part in _ALONE), rank) for rank in unseen]
    for _, rank in heapq.nlargest(4, excesses, lambda entry: entry[0]):
        others = [other for other in ranks if other is not rank]
        threshold_ns = max(MIN_WAIT_NS, round(MIN_WAIT_SHARE * rank.step_ns))
        cause = _cause(rank, others, threshold_ns, parts=_ALONE)
        if cause is not None:
            found.append((cause.ns, rank, cause))
    if not found:
        return None
    excess, rank, cause = max(found, key=lambda entry: entry[0])
    second = sorted(entry[0] for entry in found)[-2:-1]
    return None if second and second[0] > excess * MAIN_SHARE else _found(rank, cause, None, None)


def _cause(
    mine: RankTimes, others: list[RankTimes], threshold_ns: float, parts: tuple[Part, ...] = _OWN
) -> Excess | None:
    """Return the phase that takes this rank longer than the others by ``threshold_ns`` or more.

    The phases come before computing, which is the rest of forward and backward: it grows where ranks share the cores of
    a machine.
    """
    found = [Excess(part, mine.spent_ns(part), _median(others, part)) for part in parts]
    computes = [rank.compute_ns for rank in others if rank.compute_ns is not None]
    compute = None
    if mine.compute_ns is not None and computes and Part.UNTRACKED in parts:
        compute = Excess(Part.COMPUTE, mine.compute_ns, statistics.median_low(computes))
    best = max(found, key=lambda excess: excess.ns)
    if best.ns >= threshold_ns:
        if best.cause != Part.CALLBACK:
            return best
        return replace(best, callback=beyond_others(mine.callbacks_ns, [rank.callbacks_ns for rank in others]))
    return compute if compute is not None and compute.ns >= threshold_ns else None


def _median(others: Sequence[RankTimes], part: Part) -> int:
    return statistics.median_low([rank.spent_ns(part) for rank in others])


def _found(mine: RankTimes, cause: Excess | None, caused_ns: int | None, waiting: Waiting | None) -> Straggler:
    return Straggler(
        rank=mine.rank,
        host=mine.host,
        step_ns=mine.step_ns,
        caused_ns=caused_ns,
        caused_share=caused_ns / waiting.waited_ns if caused_ns and waiting else 0.0,
        cause=cause.cause if cause else None,
        own_ns=cause.own_ns if cause else None,
        others_ns=cause.others_ns if cause else None,
        callback=cause.callback if cause else None,
    )
