"""What the page says in words and lists, without its looks."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.run.locate import shown_place
from lightning_memprof.analysis.run.rows import text, whole
from lightning_memprof.report.named import NamedSummary, summarize
from lightning_memprof.units import format_bytes, format_ns, percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lightning_memprof.analysis.run.load import Artifact
    from lightning_memprof.report.view import View

__all__ = ["about", "clean", "cost", "ending", "file_rows", "named_lines", "trouble"]

TYPE_ORDER: Final = ("trace", "table", "snapshot", "blob", "pulse", "series")
# Longer lists hide the page; the whole list is in the manifest and in --format json.
MAX_FILES: Final = 4
MAX_RANKS: Final = 16
MAX_LINES: Final = 6
MAX_NAMES: Final = 12
MAX_TEXT: Final = 600
STATUS_WORDS: Final = {
    "finished": "finished",
    "exception": "ended by an exception",
    "running or killed": "still running, or killed",
    "did not start": "did not start",
}
TROUBLES: Final = ("failed", "damaged", "no data", "note")


def about(view: View) -> str:
    """Return what ran, on what, how many steps."""
    parameters = whole(view.training, "parameters")
    model = text(view.training, "model")
    device = text(view.facts, "device") or "?"
    words = [
        f"{text(view.facts, 'stage') or 'fit'}{f' of {model}' if model else ''}",
        f"{_count(parameters)} parameters" if parameters is not None else None,
        text(view.training, "precision"),
        f"on {device}" + (f" with {strategy}" if (strategy := text(view.facts, "strategy")) else ""),
        f"{len(view.ranks)} ranks" if len(view.ranks) > 1 else None,
        f"{view.lead.steps} step{'s' * (view.lead.steps != 1)}",
    ]
    return " · ".join(word for word in words if word)


def ending(view: View) -> tuple[str, str | None]:
    """Return how the run ended, and the exception that ended it."""
    return STATUS_WORDS[view.status], view.exception


def file_rows(view: View) -> Iterator[tuple[str, str, str]]:
    """Yield ``(type, size or state, name)``, first the directory that the names are in."""
    yield "files", "in", shown_place(view.root, view.root, view.url)
    by_type: dict[str, list[Artifact]] = defaultdict(list)
    for artifact in view.artifacts:
        by_type[artifact.type].append(artifact)
    for kind in sorted(
        by_type, key=lambda kind_name: TYPE_ORDER.index(kind_name) if kind_name in TYPE_ORDER else len(TYPE_ORDER)
    ):
        files = by_type[kind]
        if kind == "series":
            for folder, inside in _by_folder(files).items():
                names = ", ".join(sorted({file.collector for file in inside}))
                yield kind, _size(inside), f"{folder}/ ({names})"
            continue
        for file in files[:MAX_FILES]:
            yield kind, "missing" if file.state == "missing" else _size([file]), file.path
        if len(files) > MAX_FILES:
            yield kind, _size(files[MAX_FILES:]), f"{len(files) - MAX_FILES} more"


def named_lines(view: View) -> list[str]:
    """Return one line for each named region and snapshot."""
    summaries = summarize(view.named)
    width = max((len(summary.name) for summary in summaries[:MAX_NAMES]), default=0)
    lines = [
        f"{summary.name:<{min(width, MAX_NAMES * 2)}}  {_times(summary)} · {_memory(summary)}"
        + (f" (rank {summary.rank})" if len(view.ranks) > 1 else "")
        for summary in summaries[:MAX_NAMES]
    ]
    more = len(summaries) - MAX_NAMES
    return [*lines, f"{more} more: --format json"] if more > 0 else lines


def trouble(view: View) -> list[tuple[str, str]]:
    """Return ``(label, message)`` of what failed, is damaged, could not be measured or is worth a note."""
    lines: dict[tuple[str, str], list[int]] = defaultdict(list)
    for error in view.errors:
        window = f" in window {error.window}" if error.window is not None else ""
        lines["failed", f"{error.collector} on {error.where}{window}: {error.message}"].append(error.rank)
    for problem in view.problems:
        lines["damaged", f"{problem.piece}: {problem.message}"].append(problem.rank or 0)
    for row in view.unavailable:
        lines["no data", f"{row.collector}: {row.reason}"].append(row.rank)
    for note in view.notes:
        lines["note", f"{note.collector}: {note.message}"].append(note.rank)
    for cut in view.lead.windows:
        if cut.truncated and cut.reason:
            lines["note", f"window {cut.index} was cut short: {cut.reason}"].append(cut.rank)
    said: list[tuple[str, str]] = []
    for label in TROUBLES:
        chosen = [(message, ranks) for (kind, message), ranks in lines.items() if kind == label]
        for message, ranks in chosen[:MAX_LINES]:
            where = f" (rank {', '.join(map(str, ranks[:MAX_RANKS]))})" if len(view.ranks) > 1 else ""
            said.append((label, message + where))
        if len(chosen) > MAX_LINES:
            said.append((label, f"{len(chosen) - MAX_LINES} more: --format json"))
    if view.others:
        others = ", ".join(shown_place(path, view.root, view.url) for path in view.others[-MAX_FILES:])
        more = f" and {len(view.others) - MAX_FILES} more" if len(view.others) > MAX_FILES else ""
        said.append(("note", f"this is {view.directory.name}; beside it: {others}{more}"))
    return said


def cost(view: View) -> str | None:
    """Return what this package cost the lead rank, or None where the run has not said."""
    overhead = view.lead.overhead
    if overhead is None:
        return None
    words = []
    if overhead.pulse_ns is not None and overhead.steps:
        of_run = f" ({percent(overhead.pulse_ns / overhead.run_ns)})" if overhead.run_ns else ""
        words.append(f"pulse {format_ns(overhead.pulse_ns / overhead.steps)} a step{of_run}")
    if overhead.windows_ns is not None:
        collectors = sorted(overhead.collectors_ns.items(), key=lambda entry: -entry[1])
        named = ", ".join(f"{name} {format_ns(ns)}" for name, ns in collectors[:MAX_FILES])
        words.append(f"windows {format_ns(overhead.windows_ns)}" + (f" ({named})" if named else ""))
    if overhead.windows_rss_bytes:
        words.append(f"about {format_bytes(overhead.windows_rss_bytes)} of resident memory after its windows")
    return "; ".join(words) or "not counted"


def clean(value: str) -> str:
    """Make control characters visible, since text from outside must not steer the terminal, and cut what is endless."""
    short = value if len(value) <= MAX_TEXT else value[: MAX_TEXT - 1] + "…"
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "backslashreplace").decode("ascii")
        for character in short
    )


def _times(total: NamedSummary) -> str:
    return "once" if total.times == 1 else f"{total.times} times"


def _memory(summary: NamedSummary) -> str:
    if not summary.is_region:
        sizes = dict.fromkeys(summary.rss_bytes[:1] + summary.rss_bytes[-1:])
        return "rss " + (" to ".join(map(format_bytes, sizes)) or "unknown")
    words = []
    if len(summary.changes_bytes) == 1:
        words.append(f"rss {_signed(summary.changes_bytes[0])}")
    elif summary.changes_bytes:
        mean = round(sum(summary.changes_bytes) / len(summary.changes_bytes))
        words.append(f"rss {_signed(mean)} a time, at most {_signed(max(summary.changes_bytes))}")
    if summary.unfinished:
        words.append("did not end" if summary.times == 1 else f"{summary.unfinished} did not end")
    return ", ".join(words) or "rss unknown"


def _signed(value: int) -> str:
    return f"{'+' if value >= 0 else ''}{format_bytes(value)}"


def _by_folder(files: Iterable[Artifact]) -> dict[str, list[Artifact]]:
    folders: dict[str, list[Artifact]] = defaultdict(list)
    for file in files:
        folders[file.path.rpartition("/")[0] or "."].append(file)
    shown = dict(list(folders.items())[:MAX_FILES])
    rest = [file for folder in list(folders)[MAX_FILES:] for file in folders[folder]]
    return {**shown, f"{len(folders) - MAX_FILES} more windows": rest} if rest else shown


def _size(files: Iterable[Artifact]) -> str:
    return format_bytes(sum(file.size_bytes or 0 for file in files))


def _count(value: int) -> str:
    for scale, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if value >= scale:
            return f"{value / scale:.3g}{unit}"
    return str(value)
