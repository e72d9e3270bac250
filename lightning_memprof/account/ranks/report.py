"""The ranks of a run beside each other: imbalance, waiting, and the rank for which the others wait."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from lightning_memprof.account.parts import Part
from lightning_memprof.account.ranks.arrivals import CollectiveWait, Keys, RankTrack, WindowWaits, track, window_waits
from lightning_memprof.account.ranks.lateness import (
    FEW_STEPS,
    MIN_WAIT_NS,
    MIN_WAIT_SHARE,
    Lateness,
    LateRank,
    PulseLateness,
    late_rank,
    pulse_lateness,
    share_cores,
)
from lightning_memprof.account.ranks.summary import Arrivals, Figures, RankSummary, read_summary
from lightning_memprof.account.steps.events import action_name, usual_action_ns
from lightning_memprof.account.steps.statistics import PulseStatistics, peak_rss_bytes
from lightning_memprof.artifacts.naming import parse_summary_path
from lightning_memprof.artifacts.series import GC_PAUSE
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.run.locate import names_in
from lightning_memprof.read.run.model import Rank, Run
from lightning_memprof.read.run.problems import Problem

# On shared cores, which rank is last in so few steps is chance.
COIN_FLIP: Final = 3
# A phase that explains this part of the lateness is its cause; GC pauses are in whichever phase.
EXPLAINS_SHARE: Final = 0.3
PAUSES_EXPLAIN: Final = 0.5
# The phases of Lightning in which a rank does not wait for others; forward and backward hold collectives.
_OWN: Final = (Part.DATA_WAIT, Part.CALLBACK, Part.OPTIMIZER, Part.UNTRACKED)
_ALONE: Final = (Part.DATA_WAIT, Part.CALLBACK)
# A part, the time of the late rank per step, and the median of the others.
_Excess = tuple[Part, int, int]


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

    def spent_ns(self, part: Part) -> int | None:
        """Return the time of computing, or of the phase that a part has."""
        return self.compute_ns if part == Part.COMPUTE else self.phases_ns.get(part.phase or "", 0)


class Spread(msgspec.Struct, frozen=True):
    """One quantity over the ranks: minimum and maximum with their ranks, and the median."""

    lowest: int
    lowest_rank: int
    median: int
    highest: int
    highest_rank: int


class Waiting(msgspec.Struct, frozen=True):
    """Waiting in collectives, in ns per recorded step: the wait of the median rank, and its part by each last rank.

    ``collectives`` were matched over the ranks, ``steps`` recorded. ``clock_error_ns`` is the uncertainty of the hosts'
    clocks after alignment on the ends of the collectives.
    """

    collectives: int
    steps: int
    waited_ns: int
    caused_ns: Mapping[int, int]
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
    pulse = pulse_lateness(run.ranks)
    return RankReport(
        ranks=ranks,
        world_size=max((row.world_size for row in gathered.latest.values()), default=len(run.ranks)),
        spreads=_spreads(ranks),
        waiting=gathered.waiting(),
        straggler=_straggler(ranks, run.ranks, gathered, pulse),
        problems=tuple(gathered.problems),
        waits_ns=pulse.waits_ns if pulse is not None else {},
        lead_waits_ns=gathered.lead_waits_ns,
    )


class _Gathered(msgspec.Struct):
    """The summaries, window after window; the waits in single collectives are of the rank that leads."""

    lead: int
    lead_waits_ns: dict[int, int] = msgspec.field(default_factory=dict)
    latest: dict[int, RankSummary] = msgspec.field(default_factory=dict)
    peaks: dict[int, Counter[str]] = msgspec.field(default_factory=lambda: defaultdict(Counter))
    windows: list[WindowWaits] = msgspec.field(default_factory=list)
    problems: list[Problem] = msgspec.field(default_factory=list)
    shared: dict[Keys, Keys] = msgspec.field(default_factory=dict)

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
            self.peaks[rank] |= Counter(summary.memory)
            arrivals = summary.arrivals
            if arrivals.kind:
                tracks.append(track(summary.rank, summary.host, arrivals, self.shared))
                steps = max(steps, len(summary.steps) * len(arrivals.kind) / max(arrivals.count, 1))
            # Of thousands of ranks the collectives would take most of the memory.
            self.latest[rank] = replace(summary, rank=rank, arrivals=Arrivals())
        if len(tracks) > 1:
            waits = window_waits(tracks, steps)
            for each in tracks:
                self.lead_waits_ns |= waits.of(each) if each.rank == self.lead else {}
            self.windows.append(waits)

    @property
    def steps(self) -> float:
        """The recorded steps that the collectives are of."""
        return sum(window.steps for window in self.windows)

    @property
    def clock_error_ns(self) -> int:
        """The largest uncertainty of the clocks in a window."""
        return max((window.clock_error_ns for window in self.windows), default=0)

    @property
    def lateness(self) -> list[Lateness]:
        """The rows of all windows, whose steps follow each other."""
        rows: list[Lateness] = []
        first = 0
        for window in self.windows:
            rows += [row._replace(step=first + row.step) for row in window.late]
            first += max(round(window.steps), 1)
        return rows

    def late(self, least_ns: float, fewest: int) -> LateRank | None:
        """Return the rank for which the others wait in ``fewest`` recorded steps or more."""
        is_chance = round(self.steps) < fewest
        return None if is_chance else late_rank(self.lateness, self.steps, max(least_ns, self.clock_error_ns))

    def waiting(self) -> Waiting | None:
        """Return the waiting of all windows per step; None where no two ranks have the same collective."""
        meetings = [meeting for window in self.windows for meeting in window.meetings]
        if not meetings or not self.steps:
            return None
        caused: dict[int, float] = defaultdict(float)
        for row in self.lateness:
            caused[row.rank] += row.ns
        return Waiting(
            collectives=len(meetings),
            steps=round(self.steps),
            waited_ns=round(sum(caused.values()) / self.steps),
            caused_ns={rank: round(ns / self.steps) for rank, ns in sorted(caused.items(), key=lambda row: -row[1])},
            last=dict(Counter(meeting.last_rank for meeting in meetings).most_common()),
            kinds=tuple(WindowWaits(meetings).by_kind()),
            clock_offsets_ns={host: ns for window in self.windows for host, ns in window.clock_offsets_ns.items()},
            clock_error_ns=self.clock_error_ns,
        )

    def own_wait_ns(self, rank: int) -> int | None:
        """Return how long a rank waits for others in a recorded step; None where it recorded no collective."""
        found = [(window.own_wait_ns[rank], window.steps) for window in self.windows if rank in window.own_wait_ns]
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
    peaks = gathered.peaks[rank.rank]
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
        rss_peak_bytes=max(peak_rss_bytes(rank) or 0, peaks["peak_rss_bytes"]) or None,
        device_peak_bytes=max(device, peaks["allocated_bytes.all.peak"]) or None,
    )


def _spreads(ranks: tuple[RankTimes, ...]) -> dict[str, Spread]:
    phases = dict.fromkeys(phase for rank in ranks for phase in rank.phases_ns)
    spreads = {}
    for name in ("step_ns", *phases, "wait_ns", "compute_ns", "rss_peak_bytes", "device_peak_bytes"):
        found = ((rank.phases_ns.get(name) if name in phases else getattr(rank, name), rank.rank) for rank in ranks)
        values = sorted((value, rank) for value, rank in found if value is not None)
        if len(values) > 1:
            median = statistics.median_low([value for value, _ in values])
            spreads[name] = Spread(*values[0], median, *values[-1])
    return spreads


def _straggler(
    ranks: Sequence[RankTimes], files: Sequence[Rank], gathered: _Gathered, pulse: PulseLateness | None
) -> Straggler | None:
    """Return the rank that is late in the steps of the pulse, else in recorded collectives; without any, in its phases.

    The phases outside the passes, and forward, are those of every step: where the pulse has no late rank, few recorded
    steps do not refute it.
    """
    if len(ranks) < 2:
        return None
    if pulse is not None and pulse.late is not None:
        # A rank that is late in forward computes longer.
        cause = _pauses(files, pulse.late) or _longest(ranks, pulse.late, 0, *_OWN, Part.FORWARD)
        return _found(ranks, files, pulse.late, cause, pulse_steps=pulse.steps)
    least_ns = max(MIN_WAIT_NS, MIN_WAIT_SHARE * statistics.median(rank.step_ns for rank in ranks))
    late = gathered.late(least_ns, COIN_FLIP if pulse is not None and share_cores(files) else 2)
    if late is not None and late.rank in {rank.rank for rank in ranks}:
        explains_ns = EXPLAINS_SHARE * late.caused_ns
        # Computing is the rest of forward and backward: it grows where ranks share the cores of a machine.
        cause = _longest(ranks, late, explains_ns, *_OWN) or _longest(ranks, late, explains_ns, Part.COMPUTE)
        is_refuted = pulse is not None and cause is not None and cause[0] != Part.COMPUTE
        return None if is_refuted else _found(ranks, files, late, cause)
    late = _late_in_phases(ranks, least_ns) if pulse is None else None
    if late is None:
        return None
    found = _found(ranks, files, late, _longest(ranks, late, least_ns, *_ALONE))
    return replace(found, caused_ns=None, caused_share=0.0)


def _late_in_phases(ranks: Sequence[RankTimes], least_ns: float) -> LateRank | None:
    """Return the rank whose data wait or callbacks stand out among the ranks that recorded no collective.

    If only some ranks record collectives, one of the others may be the last in each.
    """
    excess: Counter[int] = Counter()
    for part in _ALONE:
        spent = {rank.rank: rank.spent_ns(part) or 0 for rank in ranks}
        usual = statistics.median_low(spent.values())
        excess |= Counter({rank: ns - usual for rank, ns in spent.items()})
    unseen = [rank.rank for rank in ranks if rank.wait_ns is None and rank.steps >= FEW_STEPS]
    return late_rank([Lateness(0, rank, excess[rank]) for rank in unseen if excess[rank] >= least_ns], 1, least_ns)


def _longest(ranks: Sequence[RankTimes], late: LateRank, least_ns: float, *parts: Part) -> _Excess | None:
    """Return the part that takes the late rank the longest beyond the others, if by ``least_ns`` or more."""
    found: list[_Excess] = []
    for part in parts:
        spent = {rank.rank: ns for rank in ranks if (ns := rank.spent_ns(part)) is not None}
        own = spent.pop(late.rank, None)
        if own is not None and spent:
            found.append((part, own, statistics.median_low(spent.values())))
    long = (excess for excess in found if excess[1] - excess[2] >= least_ns)
    return max(long, key=lambda excess: excess[1] - excess[2], default=None)


def _pauses(files: Sequence[Rank], late: LateRank) -> _Excess | None:
    """Return the GC pauses in the mean step outside windows, if they are most of the lateness."""
    pauses = {rank.rank: usual_action_ns(rank, lambda row: row.action == GC_PAUSE)[True] for rank in files}
    own, usual = pauses.pop(late.rank), round(statistics.median(pauses.values()))
    return (Part.GC_PAUSES, own, usual) if own - usual >= PAUSES_EXPLAIN * late.caused_ns else None


def _callback(files: Sequence[Rank], late: LateRank) -> str | None:
    """Return the callback and hook that takes a rank the longest beyond the others, None where none does."""
    spent = {
        rank.rank: usual_action_ns(
            rank, lambda row: action_name(row.action or "") if row.phase == "callbacks" else None
        )
        for rank in files
        if rank.in_full or rank.rank == late.rank
    }
    own = spent.pop(late.rank)
    own.subtract({name: statistics.median_low([times[name] for times in spent.values()]) for name in own})
    return next((name for name, ns in own.most_common(1) if ns > 0), None)


def _found(
    ranks: Sequence[RankTimes],
    files: Sequence[Rank],
    late: LateRank,
    excess: _Excess | None,
    *,
    pulse_steps: int | None = None,
) -> Straggler:
    mine = next(rank for rank in ranks if rank.rank == late.rank)
    part, own_ns, others_ns = excess or (None, None, None)
    return Straggler(
        rank=mine.rank,
        host=mine.host,
        step_ns=mine.step_ns,
        caused_ns=round(late.caused_ns),
        caused_share=late.share,
        cause=Part.COMPUTE if part == Part.FORWARD else part,
        own_ns=own_ns,
        others_ns=others_ns,
        callback=_callback(files, late) if part == Part.CALLBACK else None,
        pulse_steps=pulse_steps,
    )
