"""Documents of a run, of files, and of a comparison: the only place that names rows, columns and labels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lightning_memprof.account.parts import phase_label
from lightning_memprof.artifacts.manifest import TrainingFacts
from lightning_memprof.artifacts.series import PHASES
from lightning_memprof.judge.device_bound import busy
from lightning_memprof.report.document import (
    Cell,
    Document,
    Findings,
    Item,
    Line,
    Lines,
    Section,
    Table,
    Words,
    joined,
    phrase,
)
from lightning_memprof.report.files_view import FilesView
from lightning_memprof.report.sections.labels import BADGES, STATUS_STYLES, file_command, place
from lightning_memprof.report.sections.live import live_section
from lightning_memprof.report.sections.memory import memory_section, modules_section, sites_section
from lightning_memprof.report.sections.oom import holders_section, oom_section
from lightning_memprof.report.sections.overview import finding_cards, first_file, overview_section
from lightning_memprof.report.sections.ranks import ranks_section
from lightning_memprof.report.sections.run import (
    configuration_section,
    file_ids,
    files_section,
    notes_section,
    overhead_section,
    system_section,
)
from lightning_memprof.report.sections.snapshots import reserved_stack, snapshots_section
from lightning_memprof.report.sections.steps import hangs_section, steps_section
from lightning_memprof.report.sections.tables import Field, filled
from lightning_memprof.report.sections.traces import device_stack, traces_section
from lightning_memprof.report.sections.trial import trial_section
from lightning_memprof.report.sections.workers import workers_section
from lightning_memprof.report.view import View
from lightning_memprof.units import format_count, format_list, format_ns, quoted

MAX_NAMED: Final = 16
# A damaged manifest may name any number of ranks.
MOST_RANKS: Final = 1 << 20
STANDS_NS: Final = 10_000_000_000


def document_of(view: View | FilesView) -> Document:
    """Return the document of a run, or of files."""
    return files_document(view) if isinstance(view, FilesView) else run_document(view)


def run_document(view: View) -> Document:
    """Return the document of a run."""
    sections = [section for section in _sections(view) if section is not None]
    overview = overview_section(view, file_ids(view), [section.id for section in sections])
    incomplete, live = _incomplete(view), live_section(view.live)
    where = place(view.run.directory, view.run)
    return Document(
        title=_title(view),
        kind="run",
        about=_about(view),
        status="ended by an exception" if view.status == "exception" else view.status,
        status_style=STATUS_STYLES.get(view.status, "warn"),
        exception=view.exception,
        badge=BADGES[view.verdict.severity],
        rule=view.verdict.rule,
        verdict=view.verdict.title,
        why=view.verdict.why,
        next=view.verdict.next,
        saves=view.verdict.saves,
        sections=[*([] if live is None else [live]), overview, *sections],
        location=where,
        commands=view.commands,
        incomplete=incomplete,
        update=f"To update it: lightning-memprof report {quoted(where)}" if incomplete else "",
    )


def _sections(view: View) -> Iterator[Section | None]:
    yield oom_section(view.ooms)
    yield hangs_section(view)
    yield holders_section(view)
    yield trial_section(view.trial)
    yield steps_section(view)
    yield memory_section(view)
    yield sites_section(view)
    yield modules_section(view)
    yield ranks_section(view)
    yield workers_section(view)
    yield traces_section(view.traces)
    yield snapshots_section(view.snapshots)
    yield system_section(view)
    yield files_section(view)
    yield configuration_section(view)
    yield overhead_section(view)
    yield notes_section(view)


def _title(view: View) -> str:
    training = view.run.lead.training
    named = f"{training.model} · " if training and training.model else ""
    return f"{named}{view.run.directory.parent.name}/{view.run.directory.name}"


def _about(view: View) -> Words:
    """Return the stage, the model, the device and the number of steps."""
    facts, training = view.run.lead.facts, view.run.lead.training or TrainingFacts()
    parts: list[Words | None] = [
        facts.stage + (f" of {training.model}" if training.model else ""),
        phrase("{parameters}", training.parameters) if training.parameters is not None else None,
        training.precision,
        f"on {facts.device or '?'}" + (f" with {facts.strategy}" if facts.strategy else ""),
        f"{len(view.ranks)} ranks" if len(view.ranks) > 1 else None,
        format_count(view.lead.steps, "step"),
        None if view.verdict.rule == "hang" else _standing(view),
    ]
    return joined(" · ", [part for part in parts if part])


def _standing(view: View) -> str | None:
    """Return the step that has not ended for a while when its rank was last seen, of several the first."""
    found = [(row, rank.rank) for rank in view.run.ranks if (row := rank.last_place()) is not None]
    standing = [(row, rank) for row, rank in found if (row.waited_ns or 0) >= STANDS_NS]
    if not standing:
        return None
    row, rank = min(standing, key=lambda entry: (entry[0].step or 0, _order(entry[0].phase)))
    where = f" on rank {rank}" if len(view.ranks) > 1 else ""
    return f"in {phase_label(row.phase)} of step {row.step} for {format_ns(row.waited_ns or 0)}{where}"


def _order(phase: str | None) -> int:
    return PHASES.index(phase) if phase in PHASES else len(PHASES)


def _incomplete(view: View) -> str:
    """Name the ranks that have not ended, not started, or written nothing yet, where not all are alike."""
    statuses = {rank.status for rank in view.ranks}
    if statuses == {"running or killed"}:
        return ""
    late = [rank.rank for rank in view.ranks if rank.status == "running or killed"]
    unstarted = [rank.rank for rank in view.ranks if rank.status == "did not start" and len(statuses) > 1]
    there = {rank.rank for rank in view.ranks}
    world_size = min(view.run.lead.facts.world_size or 0, MOST_RANKS)
    absent = [rank for rank in range(world_size) if rank not in there]
    found = [
        *_ranks("had not ended (running or killed)", late),
        *_ranks("had not started", unstarted),
        *_ranks("had written nothing", absent),
    ]
    return f"{'; '.join(found)} when this report was made" if found else ""


def _ranks(state: str, ranks: list[int]) -> Iterator[str]:
    if ranks:
        yield f"rank{'s' * (len(ranks) > 1)} {format_list(ranks, MAX_NAMED)} {state}"


def files_document(view: FilesView) -> Document:
    """Return the document of traces and snapshots without a run."""
    ids = {os.fspath(path): f"file-{number}" for number, path in enumerate(view.sizes)}
    found = (traces_section(view.traces), snapshots_section(view.snapshots), _files(view, ids), _unread(view))
    sections = [section for section in found if section is not None]
    names = [path.name for path in view.sizes]
    counted = [
        format_count(number, name)
        for number, name in ((len(view.traces), "trace"), (len(view.snapshots), "snapshot"))
        if number
    ]
    with_files = not view.is_one_program
    cards = finding_cards(view.findings, ids, [section.id for section in sections], with_files=with_files)
    file = first_file(view.verdict) if with_files else ""
    return Document(
        title=names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more",
        kind="files",
        about=" and ".join(counted),
        status=f"{len(view.problems)} cannot be read" if view.problems else "",
        status_style="bad" if view.problems else "",
        badge=BADGES[view.verdict.severity],
        rule=view.verdict.rule,
        verdict=f"{file}: {view.verdict.title}" if file else view.verdict.title,
        why=view.verdict.why,
        next=view.verdict.next,
        saves=view.verdict.saves,
        sections=[Section("overview", "Overview", parts=[*_stacks(view), Findings(cards)], summary=True), *sections],
        location=os.fspath(next(iter(view.sizes))) if len(names) == 1 else "",
        commands=view.commands,
    )


def _stacks(view: FilesView) -> Iterator[Item]:
    """Yield the device of the verdict's trace or the least busy one, and of snapshots the verdict's or the largest."""
    number, seen = view.verdict.numbers.get("device"), {evidence.artifact for evidence in view.verdict.evidence[:1]}
    for trace in sorted(view.traces, key=lambda trace: (str(trace.file) not in seen, busy(trace)))[:1]:
        if trace.window is not None:
            yield device_stack(trace.window, f"Device time, {trace.file.name}")
    devices = [(snapshot.file, device) for snapshot in view.snapshots for device in snapshot.devices]
    if devices:
        file, device = max(
            devices, key=lambda x: (str(x[0]) in seen and x[1].device == number, x[1].peak_requested_bytes)
        )
        yield reserved_stack(device, f", {file.name}, cuda:{device.device}")


def _files(view: FilesView, ids: dict[str, str]) -> Section:
    traces = {trace.file for trace in view.traces}
    notes = [phrase("{} more files of the directory were not read", view.left_out)] if view.left_out else []
    parts = filled(
        Table("file-table", "Files", notes=notes, top=MAX_NAMED),
        [(path, "trace" if path in traces else "snapshot", size_bytes) for path, size_bytes in view.sizes.items()],
        Field("file", "path", lambda row: _file(row[0], row[1], ids[os.fspath(row[0])])),
        Field("type", "text", lambda row: row[1]),
        Field("size", "bytes", lambda row: row[2]),
        most=None,
    )
    return Section("files", "Files", parts=list(parts))


def _file(path: Path, kind: str, row_id: str) -> Cell:
    return Cell(os.fspath(path), "path", id=row_id, command=file_command(os.fspath(path.absolute()), kind))


def _unread(view: FilesView) -> Section | None:
    if not view.problems:
        return None
    lines = Lines("", [Line("damaged", f"{problem.piece}: {problem.message}", "bad") for problem in view.problems])
    return Section("notes", "Notes", "These files cannot be read.", [lines], summary=True)
