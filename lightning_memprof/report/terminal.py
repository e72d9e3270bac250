"""A run as a page for the terminal, at most 80 columns wide."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_memprof.analysis.findings import Severity, percent, shown_path
from lightning_memprof.analysis.rows import text, whole
from lightning_memprof.artifacts.series import PHASES
from lightning_memprof.report.columns import Column, step_columns
from lightning_memprof.units import format_bytes, format_ns

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import RenderableType

    from lightning_memprof.analysis.run import Artifact
    from lightning_memprof.report.view import RankView, View

__all__ = ["print_view", "render"]

WIDTH: Final = 80
LABEL_WIDTH: Final = 8
NAME_WIDTH: Final = 17
COLUMN_WIDTH: Final = 21
BAR_WIDTH: Final = 5
EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
ASCII: Final = str.maketrans({"·": ",", "…": "~", "─": "-"})
NONE: Final = "-"

VERDICT_STYLES: Final = {
    Severity.NONE: "bold green",
    Severity.NOTICE: "bold cyan",
    Severity.WARNING: "bold yellow",
    Severity.CRITICAL: "bold red",
}
PHASE_STYLES: Final = {
    "data_wait": "yellow",
    "forward": "cyan",
    "backward": "blue",
    "optimizer": "magenta",
    "callbacks": "green",
    "other": "bright_black",
}
STATUS_WORDS: Final = {
    "finished": "finished",
    "exception": "ended by an exception",
    "running or killed": "still running, or killed",
}
STATUS_STYLES: Final = {"finished": "green", "exception": "red", "running or killed": "yellow"}
TYPE_ORDER: Final = ("trace", "table", "snapshot", "blob", "pulse", "series")
# Longer lists hide the page; the whole list is in the manifest and in --format json.
MAX_FILES: Final = 4
MAX_RANKS: Final = 16
MAX_LINES: Final = 6
MAX_TEXT: Final = 600


def print_view(view: View) -> None:
    """Print a view to standard output; without colours where that is no terminal."""
    render(view, Console(file=sys.stdout))


def render(view: View, console: Console) -> None:
    """Print a view.

    Text from outside (names of modules, paths, messages) is shown as it is: it is never read as markup, and its control
    characters are made visible.
    """
    if console.options.ascii_only:
        # Rich would raise on the first character that the terminal's encoding does not have.
        with console.capture() as page:
            _print_page(view, console)
        plain = page.get().translate(ASCII)
        encoding = console.encoding
        console.file.write(plain.encode(encoding, "backslashreplace").decode(encoding))
    else:
        _print_page(view, console)


def _print_page(view: View, console: Console) -> None:
    width = min(console.width, WIDTH)
    parts: list[RenderableType] = [_verdict(view), "", _about(view), "", *_steps(view, console, width)]
    if len(view.ranks) > 1:
        parts += ["", *_ranks(view)]
    for section in (_files(view), _trouble(view), _cost(view)):
        if section is not None:
            parts += ["", section]
    for part in (*parts, ""):
        console.print(part, width=width, highlight=False, markup=False, emoji=False)
    _print_commands(view, console, width)


def _verdict(view: View) -> Table:
    lines = _labelled()
    lines.add_row(Text("verdict", "bold"), Text(_clean(view.verdict.sentence), VERDICT_STYLES[view.verdict.severity]))
    lines.add_row(Text("why", "bold"), Text(_clean(view.verdict.why)))
    lines.add_row(Text("next", "bold"), Text(_clean(view.verdict.next)))
    for finding in view.findings[1:]:
        lines.add_row(Text("also", "bold"), Text(_clean(f"{finding.sentence} {finding.next_steps[0]}")))
    return lines


def _about(view: View) -> Text:
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
    about = Text(_clean(" · ".join(word for word in words if word)) + " · ", "bright_black")
    about.append(STATUS_WORDS[view.status], STATUS_STYLES[view.status])
    if view.exception:
        about.append(f": {_clean(view.exception)}", "red")
    return about


def _steps(view: View, console: Console, width: int) -> Iterable[RenderableType]:
    columns, left_out = step_columns(view)
    if not columns:
        yield Text("No step was timed.", "bright_black")
        return
    most = max((ns or 0) / (one.duration_ns or 1) for one in columns for ns in (one.breakdown_ns or {"": 0}).values())
    per_row = max(1, (width - NAME_WIDTH) // COLUMN_WIDTH)
    drawn = "#" if console.options.ascii_only else EIGHTHS
    for start in range(0, len(columns), per_row):
        if start:
            yield ""
        yield from _block(view, columns[start : start + per_row], drawn, most)
    if (pulse := view.lead.statistics) is not None:
        yield Text(f"whole run: {pulse.basis}", "bright_black")
        figures = (("median", pulse.median_ns), ("p90", pulse.p90_ns), ("slowest", pulse.max_ns))
        named = [f"{name} {format_ns(ns)}" for name, ns in figures]
        yield Text(" · ".join([*named, f"{pulse.clock} clock"]), "bright_black")
        if pulse.breakdown_ns["callbacks"] is None:
            yield Text("the device's clock counts callbacks to the phase around them", "bright_black")
    if left_out:
        yield Text(left_out, "bright_black")


def _block(view: View, columns: Sequence[Column], drawn: str, most: float) -> Iterable[Text]:
    """Yield the lines of up to three columns: time by phase, their sum, memory."""
    rule = Text("─" * (NAME_WIDTH + COLUMN_WIDTH * len(columns) - 1), "bright_black")
    yield _line("", [Text(f" {one.title:<{COLUMN_WIDTH - 1}}", "bold") for one in columns])
    yield _line("", [Text(f" {one.subtitle:<{COLUMN_WIDTH - 1}}", "bright_black") for one in columns])
    yield rule
    for phase in PHASES:
        yield _line(phase.replace("_", " "), [_time(one, phase, drawn, most) for one in columns])
    yield rule
    yield _line("a step", [_total(one) for one in columns], "bold")
    yield _line("host rss", [_memory(one.host.rss_bytes) for one in columns])
    yield _line("host rss peak", [_memory(one.host.peak_rss_bytes or one.host.max_rss_bytes) for one in columns])
    if view.device_note is not None:
        note = _clean(view.device_note)
        room = COLUMN_WIDTH * len(columns) - 2
        yield _line("device", [Text(f" {note[: room - 1] + '…' if len(note) > room else note}", "bright_black")])
        return
    for name, attribute in (
        ("allocated", "allocated_bytes"),
        ("reserved", "reserved_bytes"),
        ("peak", "peak_allocated_bytes"),
    ):
        cells = [_memory(getattr(one.device, attribute) if one.device else None) for one in columns]
        yield _line(f"device {name}", cells)


def _line(name: str, cells: Iterable[Text], style: str = "") -> Text:
    line = Text(f"{name:<{NAME_WIDTH}}", style)
    for cell in cells:
        line.append_text(cell)
    line.rstrip()
    return line


def _time(column: Column, phase: str, drawn: str, most: float) -> Text:
    ns = column.breakdown_ns[phase] if column.breakdown_ns is not None else None
    if ns is None or not column.duration_ns:
        return Text(f"{NONE:>9}{'':<{COLUMN_WIDTH - 9}}", "bright_black")
    share = ns / column.duration_ns
    cell = Text(f"{format_ns(ns):>9} {percent(share):>5} ")
    cell.append(f"{_bar(share / most if most else 0, drawn):<{COLUMN_WIDTH - 16}}", PHASE_STYLES[phase])
    return cell


def _total(column: Column) -> Text:
    if column.duration_ns is None:
        return Text(f"{NONE:>9}{'':<{COLUMN_WIDTH - 9}}", "bright_black")
    return Text(f"{format_ns(column.duration_ns):>9} {'100 %':>5} {'':<{COLUMN_WIDTH - 16}}", "bold")


def _memory(value: int | None) -> Text:
    return Text(f"{NONE if value is None else format_bytes(value):>9}{'':<{COLUMN_WIDTH - 9}}")


def _ranks(view: View) -> Iterable[RenderableType]:
    ranks: Sequence[RankView] = view.ranks
    if len(ranks) > MAX_RANKS:
        ranks = sorted(ranks, key=lambda one: one.statistics.median_ns if one.statistics else 0, reverse=True)[
            :MAX_RANKS
        ]
    with_device = any(one.device is not None for one in ranks)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", show_edge=False)
    table.add_column("rank", justify="right")
    table.add_column("host", max_width=14, overflow="ellipsis", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for name in ("steps", "median", "data wait", "rss peak", *(["device peak"] if with_device else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for one in ranks:
        pulse = one.statistics
        cells = [
            Text(str(one.rank)),
            Text(_clean(one.host_name or NONE)),
            Text(
                {"running or killed": "no end", "exception": "failed"}.get(one.status, one.status),
                STATUS_STYLES[one.status],
            ),
            Text(str(one.steps)),
            Text(format_ns(pulse.median_ns) if pulse else NONE),
            Text(
                f"{format_ns(pulse.breakdown_ns['data_wait'] or 0)} {percent(pulse.share('data_wait')):>5}"
                if pulse
                else NONE
            ),
            Text(_bytes(one.host.peak_rss_bytes)),
        ]
        table.add_row(
            *cells, *([Text(_bytes(one.device.peak_allocated_bytes if one.device else None))] if with_device else [])
        )
    yield table
    if len(ranks) < len(view.ranks):
        yield Text(f"the {len(ranks)} slowest of {len(view.ranks)} ranks; all of them: --format json", "bright_black")


def _files(view: View) -> Table:
    lines = Table.grid(padding=(0, 2, 0, 0))
    lines.add_column(width=LABEL_WIDTH, no_wrap=True)
    lines.add_column(justify="right", width=LABEL_WIDTH, no_wrap=True)
    lines.add_column(overflow="fold")
    lines.add_row(Text("files", "bold"), Text("in"), Text(_clean(shown_path(view.root))))
    by_type: dict[str, list[Artifact]] = defaultdict(list)
    for one in view.artifacts:
        by_type[one.type].append(one)
    for kind in sorted(by_type, key=lambda one: TYPE_ORDER.index(one) if one in TYPE_ORDER else len(TYPE_ORDER)):
        files = by_type[kind]
        if kind == "series":
            for folder, inside in _by_folder(files).items():
                names = ", ".join(sorted({one.collector for one in inside}))
                lines.add_row(Text(kind, "bright_black"), Text(_size(inside)), Text(_clean(f"{folder}/ ({names})")))
            continue
        for one in files[:MAX_FILES]:
            size = Text(one.state, "red") if one.state == "missing" else Text(_size([one]))
            lines.add_row(Text(_clean(kind), "bright_black"), size, Text(_clean(one.path)))
        if len(files) > MAX_FILES:
            rest = files[MAX_FILES:]
            lines.add_row(Text(_clean(kind), "bright_black"), Text(_size(rest)), Text(f"{len(rest)} more"))
    return lines


def _by_folder(files: Iterable[Artifact]) -> dict[str, list[Artifact]]:
    folders: dict[str, list[Artifact]] = defaultdict(list)
    for one in files:
        folders[one.path.rpartition("/")[0] or "."].append(one)
    shown = dict(list(folders.items())[:MAX_FILES])
    rest = [one for folder in list(folders)[MAX_FILES:] for one in folders[folder]]
    return {**shown, f"{len(folders) - MAX_FILES} more windows": rest} if rest else shown


def _trouble(view: View) -> Table | None:
    """Return what failed, what is damaged and what could not be measured, each with its reason."""
    lines: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for error in view.errors:
        window = f" in window {error.window}" if error.window is not None else ""
        lines["failed", "red", f"{error.collector} on {error.where}{window}: {error.message}"].append(error.rank)
    for problem in view.problems:
        lines["damaged", "red", f"{problem.piece}: {problem.message}"].append(problem.rank or 0)
    for one in view.unavailable:
        lines["no data", "yellow", f"{one.collector}: {one.reason}"].append(one.rank)
    for note in view.notes:
        lines["note", "cyan", f"{note.collector}: {note.message}"].append(note.rank)
    for cut in view.lead.windows:
        if cut.truncated and cut.reason:
            lines["note", "cyan", f"window {cut.index} was cut short: {cut.reason}"].append(cut.rank)
    if view.others:
        others = ", ".join(shown_path(path) for path in view.others[:MAX_FILES])
        lines["note", "cyan", f"this is {view.directory.name}; beside it: {others}"].append(view.lead.rank)
    if not lines:
        return None
    table = _labelled()
    for label in ("failed", "damaged", "no data", "note"):
        chosen = [(message, style, ranks) for (kind, style, message), ranks in lines.items() if kind == label]
        for message, style, ranks in chosen[:MAX_LINES]:
            where = f" (rank {', '.join(map(str, ranks[:MAX_RANKS]))})" if len(view.ranks) > 1 else ""
            table.add_row(Text(label, style), Text(_clean(message + where)))
        if len(chosen) > MAX_LINES:
            table.add_row(Text(label, chosen[0][1]), Text(f"{len(chosen) - MAX_LINES} more: --format json"))
    return table


def _cost(view: View) -> Table | None:
    overhead = view.lead.overhead
    if overhead is None:
        return None
    words = []
    if overhead.pulse_ns is not None and overhead.steps:
        of_run = f" ({percent(overhead.pulse_ns / overhead.run_ns)})" if overhead.run_ns else ""
        words.append(f"pulse {format_ns(overhead.pulse_ns / overhead.steps)} a step{of_run}")
    if overhead.windows_ns is not None:
        collectors = sorted(overhead.collectors_ns.items(), key=lambda one: -one[1])
        named = ", ".join(f"{name} {format_ns(ns)}" for name, ns in collectors[:MAX_FILES])
        words.append(f"windows {format_ns(overhead.windows_ns)}" + (f" ({named})" if named else ""))
    table = _labelled()
    table.add_row(Text("our cost", "bold"), Text(_clean("; ".join(words) or "not counted")))
    return table


def _print_commands(view: View, console: Console, width: int) -> None:
    """Print what to type next; a path is never broken, so that it can be copied."""
    for index, command in enumerate(view.commands):
        line = Text.assemble((f"{'' if index else 'type':<{LABEL_WIDTH + 2}}", "bold"))
        whole_line = _clean(str(command))
        if len(line) + len(whole_line) > width:
            whole_line = f"{_clean(command.program)} \\\n{'':<{LABEL_WIDTH + 4}}{_clean(command.arguments)}"
        console.print(line.append(whole_line, "cyan"), soft_wrap=True)


def _labelled() -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=LABEL_WIDTH, no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _bar(share: float, drawn: str) -> str:
    eighths = round(max(0.0, min(1.0, share)) * BAR_WIDTH * 8)
    if drawn == "#":
        return "#" * round(eighths / 8)
    return drawn[8] * (eighths // 8) + (drawn[eighths % 8] if eighths % 8 else "")


def _bytes(value: int | None) -> str:
    return NONE if value is None else format_bytes(value)


def _size(files: Iterable[Artifact]) -> str:
    return format_bytes(sum(one.size_bytes or 0 for one in files))


def _count(value: int) -> str:
    for scale, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if value >= scale:
            return f"{value / scale:.3g}{unit}"
    return str(value)


def _clean(value: str) -> str:
    """Make control characters visible, since text from outside must not steer the terminal, and cut what is endless."""
    short = value if len(value) <= MAX_TEXT else value[: MAX_TEXT - 1] + "…"
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape", "backslashreplace").decode("ascii") for one in short
    )
