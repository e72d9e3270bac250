"""A run that has not ended: steps done, step time, memory and ranks until now."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Final

from lightning_memprof.account.parts import Part, phase_label
from lightning_memprof.account.steps.statistics import mean_parts
from lightning_memprof.read.run.following import Follower, RankProgress, total_steps
from lightning_memprof.report.document import Chart, Item, Line, Lines, Section, Table, Words, joined, phrase
from lightning_memprof.report.live import SILENT_NS, Live
from lightning_memprof.report.sections.labels import PEAKS
from lightning_memprof.report.sections.tables import Field, filled, ratio
from lightning_memprof.units import format_count

MAX_RANKS: Final = 8
SECOND_NS: Final = 1_000_000_000
# A step that takes longer than this many usual ones may never end.
SILENT_STEPS: Final = 20


def live_section(live: Live | None) -> Section | None:
    """Return a run until now; None where nothing is live."""
    if live is None or not live.follower.ranks:
        return None
    lead = live.follower.lead
    parts: list[Item] = [
        Lines("", list(_progress(live, lead))),
        Chart("step-times", "Step time over the run", lead.durations_ns.values),
        Chart("rss", "RSS over the run", lead.rss_bytes.values),
    ]
    return Section("now", "Now", "", [*parts, *_ranks(live.follower)], summary=True)


def live_line(live: Live) -> Words:
    """Return one line: for a log file, where a page that changes would be unreadable."""
    rows = _progress(live, live.follower.lead)
    return joined(" · ", [phrase("{} {}", row.label, row.words) for row in rows])


def _progress(live: Live, lead: RankProgress) -> Iterator[Line]:
    if lead.recent:
        yield Line("steps", _position(lead))
        yield Line("step time", _pace(lead))
        if (rss := lead.recent[-1]["rss_bytes"]) is not None:
            yield Line("RSS", phrase("{bytes}, max {bytes}", rss, max(lead.rss_bytes.values)))
        if lead.device_peak_bytes is not None:
            yield Line(PEAKS["device"].label, phrase("{bytes}", lead.device_peak_bytes))
    yield Line("now", _state(live, lead))


def _position(lead: RankProgress) -> Words:
    done, total, epoch = _steps_done(lead), total_steps(lead) or 0, lead.recent[-1]["epoch"]
    parts = [phrase("{} of {} ({share})", done, total, done / total) if total >= done else phrase("{}", done)]
    if epoch is not None:
        parts.append(phrase("epoch {index}", epoch))
    if total > done:
        parts.append(phrase("about {} to go at this pace", passed((total - done) * statistics.fmean(_durations(lead)))))
    return joined(" · ", parts)


def _pace(lead: RankProgress) -> Words:
    found, times = _durations(lead), mean_parts(lead)
    recent = format_count(len(found), "step")
    words = phrase("median {ns}, max {ns} in the last {}", _median(lead), max(found), recent)
    if not (whole := sum(times.values())):
        return words
    shown = dict.fromkeys((max(times, key=lambda part: times[part]), Part.DATA_WAIT))
    shares = [phrase("{} {share}", part.label, times[part] / whole) for part in shown]
    return phrase("{}; {}", words, joined(", ", shares))


def _state(live: Live, lead: RankProgress) -> str:
    beat = lead.beat
    age = live.now_ns - ((beat and beat.time_ns) or 0)
    if lead.last_ns is None and beat is None:
        return "before its first step"
    silent = max(0, live.now_ns - lead.last_ns) if lead.last_ns else 0
    words = f"last step {passed(silent)} ago" if lead.last_ns else "in its first step"
    if silent <= max(SILENT_NS, SILENT_STEPS * _median(lead)) and lead.last_ns:
        return words
    if beat is None or age > SILENT_NS:
        return f"{words}: it {'waits' if beat is None else 'is stopped'}, or was killed"
    return f"{words}: in {phase_label(beat.phase)} of step {beat.step} for {passed(age + (beat.waited_ns or 0))}"


def passed(ns: float) -> str:
    """Write a long duration in whole units: ``"12 min"``, ``"3 h 5 min"``."""
    seconds = round(ns / SECOND_NS)
    if seconds < 1:
        return "less than a second"
    if seconds < 120:
        return f"{seconds} s"
    minutes = seconds // 60
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 48 * 60 else f"{minutes // 1440} days"


def _durations(lead: RankProgress) -> list[int]:
    return [ns for row in lead.usual() if (ns := row["duration_ns"]) is not None] or [0]


def _median(lead: RankProgress) -> int:
    return int(statistics.median(_durations(lead)))


def _ranks(follower: Follower) -> Iterator[Table]:
    if follower.world_size < 2:
        return
    slowest = sorted(follower.ranks.values(), key=lambda rank: -_median(rank))[:MAX_RANKS]
    notes = [f"{follower.found} of {follower.world_size} ranks have written"]
    notes += [f"the {len(slowest)} slowest ranks"] if len(slowest) < follower.found else []
    yield from filled(
        Table("live-ranks", "", notes=notes, top=None),
        sorted(slowest, key=lambda rank: rank.rank),
        Field("rank", "index", lambda rank: rank.rank),
        Field("status", "text", lambda rank: "ended" if rank.end is not None else "running"),
        Field("steps", "count", _steps_done),
        Field("in", "text", lambda rank: None if rank.beat is None else phase_label(rank.beat.phase)),
        Field("median step", "ns", lambda rank: _median(rank) if rank.recent else None),
        Field(Part.DATA_WAIT.label, "share", _data_wait),
        Field("RSS", "bytes", lambda rank: rank.recent[-1]["rss_bytes"] if rank.recent else None),
    )


def _steps_done(rank: RankProgress) -> int:
    step = rank.recent[-1]["step"] if rank.recent else None
    return rank.steps if step is None else step + 1


def _data_wait(rank: RankProgress) -> float | None:
    times = mean_parts(rank)
    return ratio(times[Part.DATA_WAIT], sum(times.values()))
