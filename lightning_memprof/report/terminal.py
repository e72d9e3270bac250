"""A run as a page for the terminal: at most 80 columns wide, names of files at most 120."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final, TextIO

from rich.console import Console
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from lightning_memprof.analysis.findings import NOTHING_FOUND, Severity
from lightning_memprof.artifacts.series import PHASES
from lightning_memprof.report.columns import Column, step_columns
from lightning_memprof.report.events import events_lines
from lightning_memprof.report.files_lines import device_sections, file_sections, files_rows
from lightning_memprof.report.labels import PEAKS, called
from lightning_memprof.report.memory import memory_sections
from lightning_memprof.report.oom import view_lines
from lightning_memprof.report.peaks import peaks_lines
from lightning_memprof.report.ranks import ranks_lines
from lightning_memprof.report.system import system_lines
from lightning_memprof.report.throughput import throughput_lines
from lightning_memprof.report.words import about, clean, cost, ending, file_rows, named_lines, trouble
from lightning_memprof.units import format_bytes, format_ns, percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import ConsoleOptions, RenderableType

    from lightning_memprof.report.files_view import FilesView
    from lightning_memprof.report.view import RankView, View

__all__ = ["print_files", "print_view", "render", "render_files"]

WIDTH: Final = 80
# Names of files are long, and a name on one line can be copied.
FILES_WIDTH: Final = 120
LABEL_WIDTH: Final = 8
NAME_WIDTH: Final = 17
COLUMN_WIDTH: Final = 21
BAR_WIDTH: Final = 5
EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
ASCII: Final = str.maketrans({"·": ",", "…": "~", "─": "-"})
NONE: Final = "-"

VERDICT_STYLES: Final = {
    Severity.NONE: "bold green",
    Severity.INFO: "bold cyan",
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
STATUS_STYLES: Final = {"finished": "green", "exception": "red"}
UNFINISHED: Final = "yellow"
TROUBLE_STYLES: Final = {"failed": "red", "damaged": "red", "no data": "yellow", "note": "cyan"}
SHORT_STATUS: Final = {"running or killed": "no end", "exception": "failed"}
MAX_RANKS: Final = 16
# A page of findings hides what they are about.
MAX_FINDINGS: Final = 8


def print_view(view: View, file: TextIO | None = None) -> None:
    """Print a view to ``file``, standard output where it is None; without colours where that is no terminal."""
    render(view, _console(file))


def print_files(view: FilesView, file: TextIO | None = None) -> None:
    """Print a view of traces and snapshots, as :func:`print_view` does a run's."""
    render_files(view, _console(file))


def render(view: View, console: Console) -> None:
    """Print a view.

    Text from outside (names of modules, paths, messages) is shown as it is: it is never read as markup, and its control
    characters are made visible.
    """
    _write(console, _page(view, console))


def render_files(view: FilesView, console: Console) -> None:
    """Print a view of traces and snapshots; text from outside as in :func:`render`."""
    _write(console, _files_page(view, console))


def _console(file: TextIO | None) -> Console:
    console = Console(file=file or sys.stdout)
    # Otherwise rich asks the environment for it hundreds of times a page, a fifth of the time that the page takes.
    console.size = console.size
    return console


def _write(console: Console, page: Iterable[Segment]) -> None:
    # Written by us: where the reader of a pipe has gone, rich would end the process. Printed at once: a print of each
    # line takes half as long again as making them.
    with console.capture() as captured:
        console.print(Segments(page), end="", soft_wrap=True)
    text = captured.get()
    if console.options.ascii_only:
        # Rich would raise on the first character that the terminal's encoding does not have.
        encoding = console.encoding
        text = text.translate(ASCII).encode(encoding, "backslashreplace").decode(encoding)
    console.file.write(text)
    console.file.flush()


def _page(view: View, console: Console) -> Iterator[Segment]:
    width = min(console.width, WIDTH)
    narrow = _options(console, width)
    parts: list[RenderableType] = [_verdict(view), Text(), _about(view), Text(), *_ooms(view)]
    parts += _steps(view, console, width)
    if len(view.ranks) > 1:
        parts += [Text(), *_ranks(view), *(Text.assemble(*line) for line in ranks_lines(view, width))]
    for lines in (
        *filter(None, [peaks_lines(view, width)]),
        *memory_sections(view, width, ascii_only=console.options.ascii_only),
        *device_sections(view, width, ascii_only=console.options.ascii_only),
    ):
        parts += [Text(), *(Text.assemble(*line) for line in lines)]
    for lines in filter(None, (events_lines(view, width), throughput_lines(view, width), system_lines(view, width))):
        parts += [Text(), *(Text.assemble(*line) for line in lines)]
    yield from _lines(console, narrow, *parts, Text())
    yield from _lines(console, _options(console, FILES_WIDTH), _files(view))
    for section in (_named(view), _trouble(view), _cost(view)):
        if section is not None:
            yield from _lines(console, narrow, Text(), section)
    yield from _lines(console, narrow, Text())
    yield from _commands(view, console, width)


def _files_page(view: FilesView, console: Console) -> Iterator[Segment]:
    width = min(console.width, WIDTH)
    narrow = _options(console, width)
    parts: list[RenderableType] = [_verdict(view)]
    for lines in file_sections(view, width, ascii_only=console.options.ascii_only):
        parts += [Text(), *(Text.assemble(*line) for line in lines)]
    yield from _lines(console, narrow, *parts, Text())
    yield from _lines(console, _options(console, FILES_WIDTH), _file_rows(files_rows(view)))
    if view.problems:
        table = _labelled()
        for problem in view.problems:
            table.add_row(
                Text("damaged", TROUBLE_STYLES["damaged"]), Text(clean(f"{problem.piece}: {problem.message}"))
            )
        yield from _lines(console, narrow, Text(), table)
    yield from _lines(console, narrow, Text())
    yield from _commands(view, console, width)


def _options(console: Console, width: int) -> ConsoleOptions:
    return console.options.update(width=min(console.width, width), highlight=False, markup=False)


def _lines(console: Console, options: ConsoleOptions, *parts: RenderableType) -> Iterator[Segment]:
    """Yield lines without the blanks with which tables fill them."""
    for line in (line for part in parts for line in console.render_lines(part, options, pad=False)):
        while line and not line[-1].text.rstrip():
            line.pop()
        if line:
            line[-1] = Segment(line[-1].text.rstrip(), line[-1].style)
        yield from line
        yield Segment.line()


def _verdict(view: View | FilesView) -> Table:
    lines = _labelled()
    sentence = Text(clean(view.verdict.sentence), VERDICT_STYLES[view.verdict.severity])
    lines.add_row(Text("verdict", "bold"), sentence.append_text(_rule(view.verdict.rule)))
    lines.add_row(Text("why", "bold"), Text(clean(view.verdict.why)))
    lines.add_row(Text("next", "bold"), Text(clean(view.verdict.next)))
    for finding in view.findings[1 : MAX_FINDINGS + 1]:
        said = Text(clean(f"{finding.sentence} {finding.next_steps[0]}"))
        lines.add_row(Text("also", "bold"), said.append_text(_rule(finding.rule)))
    if (more := len(view.findings) - MAX_FINDINGS - 1) > 0:
        lines.add_row("", Text(f"{more} more findings: --format json", "bright_black"))
    return lines


def _rule(name: str) -> Text:
    """Return the name under which the documentation has more on a finding."""
    return Text("" if name == NOTHING_FOUND else f" ({name})", "bright_black")


def _about(view: View) -> Text:
    known = Text(clean(f"{about(view)} · "), "bright_black")
    status, exception = ending(view)
    known.append(status, STATUS_STYLES.get(view.status, UNFINISHED))
    if exception:
        known.append(f": {clean(exception)}", "red")
    return known


def _ooms(view: View) -> Iterable[RenderableType]:
    for lines in view_lines(view):
        table = _labelled()
        for label, line in lines:
            table.add_row(Text(label, "bold"), Text(clean(line), "bold red" if label == "memory" else ""))
        yield table
        yield Text()


def _steps(view: View, console: Console, width: int) -> Iterable[RenderableType]:
    columns, left_out = step_columns(view)
    if not columns:
        yield Text("No step was timed.", "bright_black")
        return
    times = [(column.duration_ns or 1, column.breakdown_ns or {"": 0}) for column in columns]
    most = max((ns or 0) / duration_ns for duration_ns, phases_ns in times for ns in phases_ns.values())
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
        if len(columns) > 1:
            yield Text("steps in windows include the cost of recording them", "bright_black")
        if pulse.breakdown_ns["callbacks"] is None:
            yield Text("the device's clock counts callbacks to the phase around them", "bright_black")
    if left_out:
        yield Text(left_out, "bright_black")


def _block(view: View, columns: Sequence[Column], drawn: str, most: float) -> Iterable[Text]:
    """Yield the lines of up to three columns: time by phase, their sum, memory."""
    rule = Text("─" * (NAME_WIDTH + COLUMN_WIDTH * len(columns) - 1), "bright_black")
    yield _line("", [Text(f" {column.title:<{COLUMN_WIDTH - 1}}", "bold") for column in columns])
    yield _line("", [Text(f" {column.subtitle:<{COLUMN_WIDTH - 1}}", "bright_black") for column in columns])
    yield rule
    for phase in PHASES:
        yield _line(called(phase), [_time(column, phase, drawn, most) for column in columns])
    yield rule
    yield _line("a step", [_total(column) for column in columns], "bold")
    yield _line("host rss", [_memory(column.host.rss_bytes, column.rss_moment) for column in columns])
    peaks = [PEAKS["rss"].label, PEAKS["device"].label]
    yield _line(peaks[0], [_memory(column.host.peak_rss_bytes or column.host.max_rss_bytes) for column in columns])
    if view.device_note is not None:
        note = clean(view.device_note)
        room = COLUMN_WIDTH * len(columns) - 2
        yield _line("device", [Text(f" {note[: room - 1] + '…' if len(note) > room else note}", "bright_black")])
        return
    for name, attribute in (
        ("device allocated", "allocated_bytes"),
        ("device reserved", "reserved_bytes"),
        (peaks[1], "peak_allocated_bytes"),
    ):
        cells = [
            _memory(getattr(column.device, attribute, None), "" if name == peaks[1] else column.device_moment)
            for column in columns
        ]
        yield _line(name, cells)


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
    return Text(f"{format_ns(column.duration_ns):>9} {'100%':>5} {'':<{COLUMN_WIDTH - 16}}", "bold")


def _memory(value: int | None, moment: str = "") -> Text:
    cell = Text(f"{_bytes(value):>9} ")
    return cell.append(f"{'' if value is None else moment:<{COLUMN_WIDTH - 10}}", "bright_black")


def _ranks(view: View) -> Iterable[RenderableType]:
    ranks: Sequence[RankView] = view.ranks
    if len(ranks) > MAX_RANKS:
        ranks = sorted(ranks, key=lambda rank: -rank.statistics.median_ns if rank.statistics else 0)[:MAX_RANKS]
    with_device = any(rank.device is not None for rank in ranks)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", show_edge=False)
    table.add_column("rank", justify="right")
    table.add_column("host", max_width=14, overflow="ellipsis", no_wrap=True)
    table.add_column("status", no_wrap=True)
    rss, device = PEAKS["rss"].label.removeprefix("host "), PEAKS["device"].label
    for name in ("steps", "median", called("data_wait"), rss, *([device] if with_device else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in ranks:
        pulse = rank.statistics
        cells = [
            Text(str(rank.rank)),
            Text(clean(rank.host_name or NONE)),
            Text(SHORT_STATUS.get(rank.status, rank.status), STATUS_STYLES.get(rank.status, UNFINISHED)),
            Text(str(rank.steps)),
            Text(format_ns(pulse.median_ns) if pulse else NONE),
            Text(
                f"{format_ns(pulse.breakdown_ns['data_wait'] or 0)} {percent(pulse.share('data_wait')):>5}"
                if pulse
                else NONE
            ),
            Text(_bytes(rank.host.peak_rss_bytes)),
        ]
        table.add_row(
            *cells, *([Text(_bytes(rank.device.peak_allocated_bytes if rank.device else None))] if with_device else [])
        )
    yield table
    if len(ranks) < len(view.ranks):
        yield Text(f"the {len(ranks)} slowest of {len(view.ranks)} ranks; all of them: --format json", "bright_black")


def _files(view: View) -> Table:
    return _file_rows(file_rows(view))


def _file_rows(rows: Iterable[tuple[str, str, str]]) -> Table:
    lines = Table.grid(padding=(0, 2, 0, 0))
    lines.add_column(width=LABEL_WIDTH, no_wrap=True)
    lines.add_column(justify="right", width=LABEL_WIDTH, no_wrap=True)
    lines.add_column(overflow="fold")
    for index, (kind, size, name) in enumerate(rows):
        style = "red" if size == "missing" else ""
        lines.add_row(Text(clean(kind), "bright_black" if index else "bold"), Text(size, style), Text(clean(name)))
    return lines


def _named(view: View) -> Table | None:
    lines = named_lines(view)
    table = _labelled()
    for index, line in enumerate(lines):
        table.add_row(Text("" if index else "named", "bold"), Text(clean(line)))
    return table if lines else None


def _trouble(view: View) -> Table | None:
    """Return what failed, what is damaged and what could not be measured, each with its reason."""
    lines = trouble(view)
    table = _labelled()
    for label, message in lines:
        table.add_row(Text(label, TROUBLE_STYLES[label]), Text(clean(message)))
    return table if lines else None


def _cost(view: View) -> Table | None:
    words = cost(view)
    if words is None:
        return None
    table = _labelled()
    table.add_row(Text("our cost", "bold"), Text(clean(words)))
    return table


def _commands(view: View | FilesView, console: Console, width: int) -> Iterator[Segment]:
    """Yield what to type next; a path is never broken, so that it can be copied."""
    whole = console.options.update(no_wrap=True, overflow="ignore")
    for index, command in enumerate(view.commands):
        line = Text.assemble((f"{'' if index else 'type':<{LABEL_WIDTH + 2}}", "bold"))
        whole_line = clean(str(command))
        if len(line) + len(whole_line) > width:
            whole_line = f"{clean(command.program)} \\\n{'':<{LABEL_WIDTH + 4}}{clean(command.arguments)}"
        yield from console.render(line.append(whole_line, "cyan"), whole)


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
