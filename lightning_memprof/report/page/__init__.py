"""The page of a run, or of files, as plain data: sections of tables, bars and figures, and where the charts stand."""

from __future__ import annotations

import datetime as dt
import os
import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from lightning_memprof.report.oom import view_lines
from lightning_memprof.report.page.cells import file_command, place, size_cell
from lightning_memprof.report.page.files import snapshots_section, traces_section
from lightning_memprof.report.page.memory import holders_section, memory_section, modules_section
from lightning_memprof.report.page.model import Cell, Findings, Head, Lines, Page, Section, Table
from lightning_memprof.report.page.overview import badge, finding_cards, overview
from lightning_memprof.report.page.ranks import ranks_section
from lightning_memprof.report.page.run_facts import (
    configuration,
    files_section,
    overhead_section,
    system_section,
    troubles,
)
from lightning_memprof.report.page.steps import steps_section
from lightning_memprof.report.words import about, ending

if TYPE_CHECKING:
    from pathlib import Path

    from lightning_memprof.report.files_view import FilesView
    from lightning_memprof.report.view import View

__all__ = ["Page", "files_page", "made_now", "run_page"]

MAX_NAMED: Final = 16
# A damaged manifest may name any number of ranks.
MOST_RANKS: Final = 1 << 20
STATUS_STYLES: Final[Mapping[str, str]] = {"finished": "good", "exception": "bad"}


def run_page(view: View) -> Page:
    """Return the page of a run."""
    files, places = files_section(view)
    found = (*_sections(view), files, configuration(view), overhead_section(view), troubles(view))
    sections = [section for section in found if section is not None]
    known = [section.id for section in sections]
    status, exception = ending(view)
    return Page(
        title=_title(view),
        kind="run",
        about=about(view),
        status=status,
        status_style=STATUS_STYLES.get(view.status, "warn"),
        exception=exception,
        badge=badge(view.verdict.severity),
        verdict=(view.verdict.sentence, view.verdict.why, view.verdict.next),
        sections=[overview(view, places, known), *sections],
        made=made_now(),
        incomplete=_incomplete(view),
    )


def files_page(view: FilesView) -> Page:
    """Return the page of traces and snapshots by themselves."""
    files, places = _files(view)
    found = (traces_section(view.traces), snapshots_section(view.snapshots), files, _unread(view))
    sections = [section for section in found if section is not None]
    cards = finding_cards(view.findings, places, [section.id for section in sections])
    names = [path.name for path in view.sizes]
    counted = [
        f"{count} {name}{'s' * (count > 1)}"
        for count, name in ((len(view.traces), "trace"), (len(view.snapshots), "snapshot"))
        if count
    ]
    return Page(
        title=names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more",
        kind="files",
        about=" and ".join(counted),
        status=f"{len(view.problems)} cannot be read" if view.problems else "",
        status_style="bad" if view.problems else "",
        exception=None,
        badge=badge(view.verdict.severity),
        verdict=(view.verdict.sentence, view.verdict.why, view.verdict.next),
        sections=[Section("overview", "Overview", parts=[Findings(cards)]), *sections],
        made=made_now(),
    )


def _files(view: FilesView) -> tuple[Section, dict[str, str]]:
    places = {os.fspath(path): f"file-{number}" for number, path in enumerate(view.sizes)}
    traces = {trace.file for trace in view.traces}
    rows = [_file(path, size, path in traces, places[os.fspath(path)]) for path, size in view.sizes.items()]
    heads = (Head("file", "code"), Head("type"), Head("size", "number"))
    notes = [f"{view.left_out} more files of the directory were not looked at"] if view.left_out else []
    return Section("files", "Files", parts=[Table("file-table", "Files", heads, rows, notes=notes)]), places


def _file(path: Path, size: int, is_trace: bool, row_id: str) -> tuple[Cell, ...]:  # noqa: FBT001 a kind, of two
    kind = "trace" if is_trace else "snapshot"
    where = os.fspath(path.absolute())
    return Cell(os.fspath(path), id=row_id, command=file_command(where, kind)), Cell(kind), size_cell(size)


def _unread(view: FilesView) -> Section | None:
    if not view.problems:
        return None
    lines = Lines("", [("damaged", f"{problem.piece}: {problem.message}", "bad") for problem in view.problems])
    return Section("notes", "Notes", "These cannot be read.", [lines])


def made_now() -> str:
    """Return the time at which the page is made, with its offset from UTC."""
    return dt.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %z")


def _incomplete(view: View) -> str | None:
    """Name the ranks that had not ended, or had written nothing yet, where others have ended."""
    if all(rank.status == "running or killed" for rank in view.ranks):
        return None
    late = [rank.rank for rank in view.ranks if rank.status == "running or killed"]
    there = {rank.rank for rank in view.ranks}
    world_size = view.facts.get("world_size")
    absent = (
        [rank for rank in range(min(world_size, MOST_RANKS)) if rank not in there]
        if isinstance(world_size, int)
        else []
    )
    found = [*_ranks("had not ended", late), *_ranks("had left nothing", absent)]
    if not found:
        return None
    where = shlex.quote(place(view.directory, view.root, view.url))
    return f"{'; '.join(found)} when this page was made. To make it again: lightning-memprof report {where}"


def _ranks(what: str, ranks: list[int]) -> Iterator[str]:
    if ranks:
        named = ", ".join(map(str, ranks[:MAX_NAMED])) + (
            f" and {len(ranks) - MAX_NAMED} more" * (len(ranks) > MAX_NAMED)
        )
        yield f"rank{'s' * (len(ranks) > 1)} {named} {what}"


def _sections(view: View) -> Iterator[Section | None]:
    if view.ooms:
        yield Section("oom", "Out of memory", parts=[_oom(lines) for lines in view_lines(view)])
    yield steps_section(view)
    yield memory_section(view)
    yield holders_section(view)
    yield modules_section(view)
    yield ranks_section(view)
    yield traces_section(view.traces)
    yield snapshots_section(view.snapshots)
    yield system_section(view)


def _oom(lines: list[tuple[str, str]]) -> Lines:
    return Lines("", [(label, text, "bad" if label == "memory" else "") for label, text in lines])


def _title(view: View) -> str:
    model = (view.training or {}).get("model")
    named = f"{model} · " if isinstance(model, str) else ""
    return f"{named}{view.directory.parent.name}/{view.directory.name}"
