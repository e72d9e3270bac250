"""A run that goes on, in lines of styled text: how fast, where the time goes, how much memory, what was found."""

from __future__ import annotations

import statistics
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings import Severity
from lightning_memprof.analysis.run.following import progress_of
from lightning_memprof.analysis.run.rows import text
from lightning_memprof.artifacts.series import PHASES
from lightning_memprof.report.memory_tables import DIM, Line, bar, cut, notes, sparkline, table, tops
from lightning_memprof.report.words import clean
from lightning_memprof.units import format_bytes, format_ns, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.findings import Finding
    from lightning_memprof.analysis.run.following import Follower, RankSoFar, RecordedWindow

__all__ = ["SILENT_NS", "Watched", "watch_line", "watch_page"]

LABEL: Final = 10
NAME: Final = 12
NARROWEST: Final = 40
MAX_RANKS: Final = 8
MAX_WINDOWS: Final = 4
MAX_FINDINGS: Final = 4
SECOND_NS: Final = 1_000_000_000
# A step that takes longer than this many usual ones may never end.
SILENT_STEPS: Final = 20
SILENT_NS: Final = 30 * SECOND_NS
STYLES: Final = {
    "data_wait": "yellow",
    "forward": "cyan",
    "backward": "blue",
    "optimizer": "magenta",
    "callbacks": "green",
    "other": DIM,
}
SEVERITIES: Final = {Severity.WARNING: "yellow", Severity.CRITICAL: "red", Severity.INFO: "cyan", Severity.NONE: ""}


@dataclass(frozen=True)
class Watched:
    """A run until now: its ranks, what the rules found at the last look that asked them, and Unix time in ns."""

    name: str
    follower: Follower
    findings: tuple[Finding, ...]
    now_ns: int


def watch_page(watched: Watched, width: int, *, ascii_only: bool) -> list[Line]:
    """Return the page in lines of at most ``width`` characters (at least 40)."""
    width = max(width, NARROWEST)
    lead = watched.follower.lead
    lines = _head(watched, lead, width)
    if lead.recent:
        lines += [(), *_times(lead, width, ascii_only=ascii_only), (), *_memory(lead, width, ascii_only=ascii_only)]
    if len(watched.follower.ranks) > 1:
        lines += [(), *_ranks(watched.follower, width)]
    if lead.windows:
        lines += [(), *_windows(lead, width)]
    if watched.findings:
        lines += [(), *_findings(watched, width)]
    for error in lead.errors:
        lines += notes(f"failed: {error}", width, LABEL)
    return lines


def watch_line(watched: Watched) -> str:
    """Return one line: for a log file, where a page that changes would be unreadable."""
    lead = watched.follower.lead
    if not lead.recent:
        return f"{watched.name}: {_state(watched, lead)}"
    row = lead.recent[-1]
    phases = lead.phases_ns()
    whole = sum(phases.values())
    first = max(phases, key=lambda phase: phases[phase])
    words = [
        f"steps {_steps(lead)}",
        f"{format_ns(_median(lead))} a step",
        f"{first.replace('_', ' ')} {percent(phases[first] / whole)}" if whole else None,
        f"data wait {percent(phases['data_wait'] / whole)}" if whole and first != "data_wait" else None,
        f"rss {format_bytes(row['rss_bytes'])}" if row["rss_bytes"] is not None else None,
        f"device peak {format_bytes(lead.device_peak_bytes)}" if lead.device_peak_bytes is not None else None,
        _state(watched, lead),
    ]
    return " · ".join(word for word in words if word)


def _heading(label: str, words: str, width: int) -> list[Line]:
    first, *more = textwrap.wrap(clean(words), max(width - LABEL, 20)) or [""]
    return [((f"{label:<{LABEL}}", "bold"), (first, "")), *(((f"{'':<{LABEL}}{line}", ""),) for line in more)]


def _head(watched: Watched, lead: RankSoFar, width: int) -> list[Line]:
    model = text(lead.training, "model")
    follower = watched.follower
    known = [
        f"{text(lead.facts, 'stage') or 'fit'}{f' of {model}' if model else ''}",
        f"{follower.world_size} ranks" if follower.world_size > 1 else None,
        f"on {text(lead.facts, 'device') or '?'}",
    ]
    lines: list[Line] = [((f"{'run':<{LABEL}}", "bold"), (cut(clean(watched.name), width - LABEL), ""))]
    lines += notes(" · ".join(word for word in known if word), width, LABEL)
    lines += _heading("now", _state(watched, lead), width)
    if lead.recent:
        lines += _heading("steps", _position(lead), width)
    return lines


def _position(lead: RankSoFar) -> str:
    words = [_steps(lead)]
    epoch = lead.recent[-1]["epoch"]
    if epoch is not None:
        words.append(f"epoch {epoch}")
    total = progress_of(lead)
    step = lead.recent[-1]["step"]
    if total and step is not None and lead.end is None and total > step:
        words.append(f"about {_duration((total - step - 1) * _mean(lead))} to go at this pace")
    return " · ".join(words)


def _steps(lead: RankSoFar) -> str:
    step = lead.recent[-1]["step"] if lead.recent else None
    total = progress_of(lead)
    if step is None:
        return f"{lead.steps:,}"
    of = f" of {total:,} ({percent((step + 1) / total)})" if total and total > step else ""
    return f"{step + 1:,}{of}"


def _state(watched: Watched, lead: RankSoFar) -> str:
    if watched.follower.has_ended:
        exception = next((text(rank.end, "exception") for rank in watched.follower.ranks.values() if rank.end), None)
        return f"ended: {clean(exception)}" if exception else "finished"
    last = lead.last_ns
    if last is None:
        return "before its first step"
    silent = max(0, watched.now_ns - last)
    long = max(SILENT_NS, SILENT_STEPS * _median(lead))
    words = f"last step {_duration(silent)} ago"
    return f"{words}: it waits, or was killed" if silent > long else words


def _duration(ns: float) -> str:
    seconds = round(ns / SECOND_NS)
    if seconds < 1:
        return "less than a second"
    if seconds < 120:
        return f"{seconds} s"
    minutes = seconds // 60
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _durations(lead: RankSoFar) -> list[int]:
    return [ns for row in lead.usual() if (ns := row["duration_ns"]) is not None] or [0]


def _median(lead: RankSoFar) -> int:
    return int(statistics.median(_durations(lead)))


def _mean(lead: RankSoFar) -> float:
    return statistics.fmean(_durations(lead))


def _times(lead: RankSoFar, width: int, *, ascii_only: bool) -> list[Line]:
    durations = _durations(lead)
    words = f"{format_ns(_median(lead))}, from {format_ns(min(durations))} to {format_ns(max(durations))}"
    lines = _heading("a step", f"{words} in the last {len(durations)}", width)
    if len(lead.durations_ns.values) > 1:
        drawn = sparkline(tops(lead.durations_ns.values, width - LABEL), ascii_only=ascii_only)
        lines.append(((f"{'':<{LABEL}}", ""), (drawn, "cyan")))
    phases = lead.phases_ns()
    whole = sum(phases.values()) or 1
    room = max(width - LABEL - NAME - 9 - 7, 4)
    for phase in PHASES:
        share = phases[phase] / whole
        head = f"{'':<{LABEL}}{phase.replace('_', ' '):<{NAME}}{format_ns(phases[phase]):>9}{percent(share):>6} "
        lines.append(((head, ""), (bar(share, room, ascii_only=ascii_only), STYLES[phase])))
    return lines


def _memory(lead: RankSoFar, width: int, *, ascii_only: bool) -> list[Line]:
    rss = lead.rss_bytes.values
    if not rss:
        return []
    now = lead.recent[-1]["rss_bytes"]
    words = f"rss {format_bytes(now) if now is not None else '-'}, at most {format_bytes(max(rss))}"
    if lead.device_peak_bytes is not None:
        words += f" · device peak {format_bytes(lead.device_peak_bytes)}"
    drawn = sparkline(tops(rss, width - LABEL), ascii_only=ascii_only) if len(rss) > 1 else ""
    lines = _heading("memory", words, width)
    return [*lines, ((f"{'':<{LABEL}}", ""), (drawn, "green"))] if drawn else lines


def _ranks(follower: Follower, width: int) -> list[Line]:
    ranks = sorted(follower.ranks.values(), key=lambda rank: -_median(rank))[:MAX_RANKS]
    rows = []
    for rank_so_far in sorted(ranks, key=lambda rank: rank.rank):
        last = rank_so_far.recent[-1] if rank_so_far.recent else None
        phases = rank_so_far.phases_ns()
        whole = sum(phases.values())
        rows.append(
            (
                f"rank {rank_so_far.rank}",
                "ended" if rank_so_far.end is not None else _steps(rank_so_far),
                format_ns(_median(rank_so_far)) if rank_so_far.recent else "-",
                percent(phases["data_wait"] / whole) if whole else "-",
                format_bytes(last["rss_bytes"]) if last and last["rss_bytes"] is not None else "-",
            )
        )
    words = f"{follower.found} of {follower.world_size} are there" if follower.found < follower.world_size else "all"
    if len(rows) < follower.found:
        words += f"; the {len(rows)} slowest of those that are followed"
    return [
        *_heading("ranks", words, width),
        *table(("", "steps", "a step", "data wait", "rss"), rows, width),
    ]


def _windows(lead: RankSoFar, width: int) -> list[Line]:
    windows = sorted(lead.windows.values(), key=lambda window: window.index)
    recorded = sum(window.closed for window in windows)
    words = [f"{recorded} recorded", *(_window(window) for window in windows[-MAX_WINDOWS:])]
    return _heading("windows", " · ".join(words), width)


def _window(window: RecordedWindow) -> str:
    steps = f"steps {window.steps[0]}-{window.steps[-1]}" if window.steps else "no steps"
    return f"{window.index}: {steps}{'' if window.closed else ', open now'}"


def _findings(watched: Watched, width: int) -> list[Line]:
    lines: list[Line] = []
    for index, finding in enumerate(watched.findings[:MAX_FINDINGS]):
        label = "" if index else "so far"
        first, *more = textwrap.wrap(clean(finding.sentence), max(width - LABEL, 20)) or [""]
        lines.append(((f"{label:<{LABEL}}", "bold"), (first, SEVERITIES[finding.severity])))
        lines += [((f"{'':<{LABEL}}{line}", SEVERITIES[finding.severity]),) for line in more]
        lines += notes(finding.next_steps[0], width, LABEL) if finding.next_steps else []
    return lines
