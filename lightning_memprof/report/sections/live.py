"""A live run: its speed, the time of a step, memory, ranks, windows, and findings so far."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Final

import msgspec

from lightning_memprof.account.ledger.model import TimeLedger
from lightning_memprof.account.parts import Part, phase_label
from lightning_memprof.account.steps.statistics import mean_parts
from lightning_memprof.judge import Finding
from lightning_memprof.read.run.following import Follower, RankProgress, total_steps
from lightning_memprof.report.document import (
    Cell,
    Chart,
    Document,
    Item,
    Line,
    Lines,
    Phrase,
    Section,
    Stack,
    Style,
    Table,
    Words,
    count,
    duration,
    phrase,
    share,
    size,
)
from lightning_memprof.report.sections.labels import BADGES, PEAKS, bars
from lightning_memprof.report.sections.overview import step_stack
from lightning_memprof.report.sections.tables import Field, filled, ratio
from lightning_memprof.units import format_steps

MAX_RANKS: Final = 8
MAX_WINDOWS: Final = 4
MAX_FINDINGS: Final = 4
SECOND_NS: Final = 1_000_000_000
# A step that takes longer than this many usual ones may never end.
SILENT_STEPS: Final = 20
SILENT_NS: Final = 30 * SECOND_NS
STYLES: Final[dict[str, Style]] = {"none": "", "info": "", "warning": "warn", "critical": "bad"}


class Watched(msgspec.Struct, frozen=True):
    """A run until now: its ranks, Unix time in ns, and the ledger and findings of the last look that computed them."""

    name: str
    follower: Follower
    now_ns: int
    ledger: TimeLedger | None = None
    findings: tuple[Finding, ...] = ()


def live_document(watched: Watched) -> Document:
    """Return the run until now."""
    lead = watched.follower.lead
    sections = [Section("now", "Run", parts=[Lines("", list(_head(watched, lead)))])]
    if lead.recent:
        sections.append(Section("steps", "Steps", _step_times(lead), list(_times(lead, watched.ledger))))
        if memory := list(_memory(lead)):
            sections.append(Section("memory", "Memory", parts=memory))
    if len(watched.follower.ranks) > 1:
        sections.append(_ranks(watched.follower))
    lines = [*_windows(lead), *_findings(watched), *(Line("failed", error, "bad") for error in lead.errors)]
    if lines:
        sections.append(Section("findings", "Windows and findings", parts=[Lines("", lines)]))
    return Document(title=watched.name, kind="live", sections=sections)


def live_line(watched: Watched) -> Words:
    """Return one line: for a log file, where a page that changes would be unreadable."""
    lead = watched.follower.lead
    if not lead.recent:
        return f"{watched.name}: {_state(watched, lead)}"
    rss = lead.recent[-1]["rss_bytes"]
    times = mean_parts(lead)
    whole = sum(times.values())
    first = max(times, key=lambda part: times[part])
    parts: list[tuple[str | Cell, ...]] = [("steps ", *_steps(lead)), ("median step ", duration(_median(lead)))]
    if whole:
        shown = dict.fromkeys((first, Part.DATA_WAIT))
        parts += [(f"{part.label} ", share(times[part] / whole)) for part in shown]
    if rss is not None:
        parts.append(("RSS ", size(rss)))
    if lead.device_peak_bytes is not None:
        parts.append((f"{PEAKS['device'].label} ", size(lead.device_peak_bytes)))
    return _joined([*parts, (_state(watched, lead),)])


def _joined(parts: list[tuple[str | Cell, ...]]) -> Phrase:
    return Phrase(tuple(piece for place, part in enumerate(parts) for piece in ((" · ",) * (place > 0) + part)))


def _head(watched: Watched, lead: RankProgress) -> Iterator[Line]:
    model = lead.training.model if lead.training else None
    follower = watched.follower
    known = [
        f"{lead.facts.stage if lead.facts else 'fit'}{f' of {model}' if model else ''}",
        f"{follower.world_size} ranks" if follower.world_size > 1 else "",
        f"on {(lead.facts.device if lead.facts else None) or '?'}",
    ]
    yield Line("run", watched.name)
    yield Line("", " · ".join(word for word in known if word), "dim")
    yield Line("now", _state(watched, lead))
    if lead.recent:
        yield Line("steps", _position(lead))


def _position(lead: RankProgress) -> Words:
    parts: list[tuple[str | Cell, ...]] = [_steps(lead)]
    epoch, step, total = lead.recent[-1]["epoch"], lead.recent[-1]["step"], total_steps(lead)
    if epoch is not None:
        parts.append((f"epoch {epoch}",))
    if total and step is not None and lead.end is None and total > step:
        parts.append((f"about {passed((total - step - 1) * statistics.fmean(_durations(lead)))} to go at this pace",))
    return _joined(parts)


def _steps(lead: RankProgress) -> tuple[str | Cell, ...]:
    step = lead.recent[-1]["step"] if lead.recent else None
    total = total_steps(lead)
    if step is None:
        return (count(lead.steps),)
    if not total or total <= step:
        return (count(step + 1),)
    return count(step + 1), " of ", count(total), " (", share((step + 1) / total), ")"


def _state(watched: Watched, lead: RankProgress) -> str:
    if watched.follower.has_ended:
        ends = (rank.end for rank in watched.follower.ranks.values() if rank.end)
        exception = next((end.exception for end in ends), None)
        return f"ended: {exception}" if exception else "finished"
    beat = lead.beat
    age = watched.now_ns - ((beat and beat.time_ns) or 0)
    if lead.last_ns is None and beat is None:
        return "before its first step"
    silent = max(0, watched.now_ns - lead.last_ns) if lead.last_ns else 0
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


def _step_times(lead: RankProgress) -> Words:
    found = _durations(lead)
    times = map(duration, (_median(lead), min(found), max(found)))
    return phrase("Step time in the last {} steps: median {}, min {}, max {}.", len(found), *times)


def _times(lead: RankProgress, ledger: TimeLedger | None) -> Iterator[Item]:
    yield Chart("step-times", "Step time over the run", lead.durations_ns.values)
    times = mean_parts(lead)
    whole = sum(times.values())
    if ledger is not None:
        yield step_stack(ledger)
    elif whole:
        mean = statistics.fmean(_durations(lead))
        yield Stack("Mean step by phase", duration(mean), bars(times, whole, "ns"))


def _memory(lead: RankProgress) -> Iterator[Item]:
    rss = lead.rss_bytes.values
    if not rss:
        return
    rows = [Line("RSS", phrase("{}, max {}", size(lead.recent[-1]["rss_bytes"]), size(max(rss))))]
    if lead.device_peak_bytes is not None:
        rows.append(Line(PEAKS["device"].label, phrase("{}", size(lead.device_peak_bytes))))
    yield Lines("", rows)
    yield Chart("rss", "RSS over the run", rss)


def _ranks(follower: Follower) -> Section:
    slowest = sorted(follower.ranks.values(), key=lambda rank: -_median(rank))[:MAX_RANKS]
    lead = f"{follower.found} of {follower.world_size} ranks have written."
    notes = [f"the {len(slowest)} slowest ranks"] if len(slowest) < follower.found else []
    parts = filled(
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
    return Section("ranks", "Ranks", lead, list(parts))


def _steps_done(rank: RankProgress) -> int:
    step = rank.recent[-1]["step"] if rank.recent else None
    return rank.steps if step is None else step + 1


def _data_wait(rank: RankProgress) -> float | None:
    times = mean_parts(rank)
    return ratio(times[Part.DATA_WAIT], sum(times.values()))


def _windows(lead: RankProgress) -> Iterator[Line]:
    windows = sorted(lead.windows.values(), key=lambda window: window.index)
    if windows:
        recorded = sum(window.closed for window in windows)
        named = [
            f"{window.index}: {format_steps(tuple(window.steps))}{'' if window.closed else ', open'}"
            for window in windows[-MAX_WINDOWS:]
        ]
        yield Line("windows", " · ".join([f"{recorded} recorded", *named]))


def _findings(watched: Watched) -> Iterator[Line]:
    for finding in watched.findings[:MAX_FINDINGS]:
        badge = BADGES[finding.severity]
        yield Line(badge, finding.title, STYLES[badge])
        if finding.next_steps:
            yield Line("", finding.next_steps[0], "dim")
