"""The run around its steps: machine, files, configuration, profiler overhead, and notes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from lightning_memprof.artifacts.manifest import TrainingFacts
from lightning_memprof.read.run.locate import shown_place
from lightning_memprof.read.run.model import ArtifactFile
from lightning_memprof.report.document import (
    Cell,
    Chart,
    Facts,
    Item,
    Line,
    Lines,
    Paragraph,
    Section,
    Style,
    Table,
    Words,
    joined,
    phrase,
)
from lightning_memprof.report.sections.labels import MORE, counter, file_command, place
from lightning_memprof.report.sections.tables import Field, filled, ratio
from lightning_memprof.report.view import View
from lightning_memprof.units import format_count

# More rows are slow to lay out; the manifests list all files.
MAX_FILES: Final = 400
MAX_RANKS: Final = 16
MAX_LINES: Final = 6
MAX_OTHERS: Final = 4
MAX_TRACEBACKS: Final = 4
TYPE_ORDER: Final = ("trace", "snapshot", "table", "blob", "pulse", "series")
TROUBLES: Final[Mapping[str, Style]] = {"failed": "bad", "damaged": "bad", "not available": "warn", "note": ""}
RUN_FACTS: Final = ("stage", "strategy", "accelerator", "device", "world_size", "host", "pid", "root")
# The driver measures a GPU's utilization over a sixth of a second to a second: a few samples miss most of a run.
MIN_UTILIZATION_SAMPLES: Final = 10
_ROW: Final = frozenset({"kind", "time_ns", "schema_version"})


def system_section(view: View) -> Section | None:
    """Return the load of the lead rank's machine; None where nothing was sampled."""
    found = next((found for found in view.system if found.rank == view.lead.rank), None)
    if found is None:
        return None
    is_short = found.samples < MIN_UTILIZATION_SAMPLES
    hidden = [name for name in sorted(found.figures) if is_short and name.endswith("_utilization_percent")]
    notes: list[Words] = [
        f"{counter(name).words}: not available, {MIN_UTILIZATION_SAMPLES} samples of at most a second are needed"
        for name in hidden
    ]
    load = filled(
        Table("system-figures", "Load", top=None, notes=notes),
        [(name, figure) for name, figure in sorted(found.figures.items()) if name not in hidden],
        Field("quantity", "text", lambda row: counter(row[0]).words),
        Field("mean", "number", lambda row: _figure(row[0], row[1].mean)),
        Field("min", "number", lambda row: _figure(row[0], row[1].min)),
        Field("max", "number", lambda row: _figure(row[0], row[1].max)),
    )
    rank = f" of rank {found.rank}" if len(view.ranks) > 1 else ""
    lead = f"System counters{rank}: {format_count(found.samples, 'sample')}."
    return Section("system", "System", lead, [Chart("system"), *load])


def _figure(name: str, value: float) -> Cell:
    found = counter(name)
    return Cell(value / found.scale, found.unit)


def configuration_section(view: View) -> Section:
    """Return the environment and the configuration of the run."""
    facts, training = view.run.lead.facts, view.run.lead.training or TrainingFacts()
    trained = {
        name: value for name, value in training.fields.items() if not isinstance(value, list) and name not in _ROW
    }
    parts: list[Facts] = [
        Facts("Run", _facts({name: facts.fields.get(name) for name in RUN_FACTS})),
        Facts("Training", _facts(trained)),
        Facts("Schedule", _facts(facts.schedule)),
        Facts("Environment", _facts(facts.environment)),
    ]
    for name, rows in (("Optimizer", training.optimizers), ("DataLoader", training.dataloaders)):
        for number, row in enumerate(rows):
            parts.append(Facts(name if len(rows) == 1 else f"{name} {number}", _facts(row.fields)))
    parts.append(Facts("Collectors", [(name, _collected(view, name)) for name in facts.collectors]))
    title = "Environment and configuration"
    return Section("configuration", title, parts=[part for part in parts if part.rows])


def _facts(found: Mapping[str, Any]) -> list[tuple[str, Cell | Words]]:
    return [
        (name.replace("_", " "), _value(name, value))
        for name, value in found.items()
        if value is not None and value != []
    ]


def _value(name: str, value: Any) -> Cell | Words:
    if name == "parameter_dtypes" and isinstance(value, Mapping):
        known = [phrase("{} {bytes}", str(dtype), size) for dtype, size in value.items() if isinstance(size, int)]
        return joined(", ", known)
    if isinstance(value, bool):
        return Cell("yes" if value else "no")
    if isinstance(value, int):
        return Cell(value, "bytes" if name.endswith("_bytes") else "count" if name == "parameters" else "index")
    return Cell(", ".join(map(str, value)) if isinstance(value, list) else str(value))


def _collected(view: View, collector: str) -> Words:
    files = [file for file in view.run.artifacts if file.collector == collector and file.rank == view.lead.rank]
    failed = ", disabled after an error" * any(error.collector == collector for error in view.run.errors)
    if not files:
        return f"no file{failed}"
    return phrase("{}, {}{}", format_count(len(files), "file"), _total(files), failed)


def file_ids(view: View) -> dict[str, str]:
    """Return the id of each listed file's row, by its path in the manifest."""
    return {file.path: f"file-{number}" for number, file in enumerate(_ordered(view)[:MAX_FILES])}


def _ordered(view: View) -> list[ArtifactFile]:
    def order(file: ArtifactFile) -> tuple[int, int, int, str]:
        kind = TYPE_ORDER.index(file.type) if file.type in TYPE_ORDER else len(TYPE_ORDER)
        return kind, file.rank, -1 if file.window is None else file.window, file.path

    return sorted(view.run.artifacts, key=order)


def files_section(view: View) -> Section:
    """Return the files of a run, and the commands that open them."""
    ordered = _ordered(view)
    others = ordered[MAX_FILES:]
    ids = file_ids(view)
    notes = [phrase("{} more files, {}: the manifests list all", len(others), _total(others))] if others else []
    table = filled(
        Table("file-table", "Files", notes=notes, top=24),
        ordered[:MAX_FILES],
        Field("file", "path", lambda file: _file(file, ids[file.path], view)),
        Field("type", "text", lambda file: file.type),
        Field("size", "bytes", _file_size),
        Field("rank", "index", lambda file: file.rank, priority=1),
        Field("window", "index", lambda file: file.window, priority=2),
        Field("collector", "text", lambda file: file.collector, priority=3),
        most=MAX_FILES,
    )
    lead = phrase("{} files, {}, in {}.", len(ordered), _total(ordered), place(view.run.root, view.run))
    return Section("files", "Files", lead, list(table))


def _file(file: ArtifactFile, row_id: str, view: View) -> Cell:
    where = place(file.file, view.run)
    command = file_command(where, file.type) if file.state != "missing" else ""
    return Cell(file.path, "path", id=row_id, command=command)


def _file_size(file: ArtifactFile) -> Cell:
    return Cell(file.size_bytes, "bytes") if file.state == "present" else Cell(file.state, sort=-1, style="bad")


def _total(files: Sequence[ArtifactFile]) -> Cell:
    return Cell(sum(file.size_bytes or 0 for file in files), "bytes")


def overhead_section(view: View) -> Section:
    """Return the cost of this package, rank by rank."""
    found = [(rank.rank, rank.overhead) for rank in view.ranks if rank.overhead is not None]
    if not found:
        missing = "Profiler overhead is not available: the run did not record it."
        return Section("overhead", "Profiler overhead", missing)
    ranks = filled(
        Table("overhead-ranks", "Profiler overhead by rank", is_sortable=len(found) > 1, top=MAX_RANKS),
        found[:MAX_FILES],
        Field("rank", "index", lambda row: row[0]),
        Field("pulse/step", "ns", lambda row: ratio(row[1].pulse_ns, row[1].steps), "wall time"),
        Field("pulse CPU/step", "ns", lambda row: ratio(row[1].pulse_cpu_ns, row[1].steps), "CPU time of the thread"),
        Field("pulse share", "share", lambda row: ratio(row[1].net_pulse_ns, row[1].run_ns), "of all steps"),
        Field("windows", "ns", lambda row: row[1].windows_ns, "sum over all windows"),
        Field(
            "windows share", "share", lambda row: ratio(row[1].windows_ns, row[1].whole_ns), "of all steps and windows"
        ),
        most=MAX_FILES,
    )
    parts: list[Item] = list(ranks)
    lead: Words = ""
    if (cost := view.lead.overhead) is not None:
        costs = (ratio(cost.net_pulse_ns, cost.steps), cost.windows_ns)
        lead = phrase("Profiler overhead of rank {index}: pulse {ns} per step, windows {ns}.", cost.rank, *costs)
        parts += filled(
            Table("overhead-collectors", "Windows by collector", top=None),
            sorted(cost.collectors_ns.items(), key=lambda row: -row[1]),
            Field("collector", "text", lambda row: row[0]),
            Field("total", "ns", lambda row: row[1], bar=True),
        )
    return Section("overhead", "Profiler overhead", lead, parts)


def notes_section(view: View) -> Section | None:
    """Return failures, damage, and data that is not available; None where there is nothing to report."""
    rows = list(_notes(view))
    if not rows:
        return None
    parts: list[Item] = [Lines("", rows)]
    parts += [
        Paragraph(f"{error.collector} at {error.where}: {error.traceback}")
        for error in view.run.errors[:MAX_TRACEBACKS]
        if error.traceback
    ]
    return Section("notes", "Notes", "Failures, damaged files, and data that is not available.", parts)


def _notes(view: View) -> Iterator[Line]:
    lines: dict[tuple[str, str], list[int]] = defaultdict(list)
    for error in view.run.errors:
        window = f" in window {error.window}" if error.window is not None else ""
        lines["failed", f"{error.collector} at {error.where}{window}: {error.message}"].append(error.rank)
    for problem in view.problems:
        lines["damaged", f"{problem.piece}: {problem.message}"].append(problem.rank or 0)
    for absent in view.run.unavailable:
        lines["not available", f"{absent.collector}: {absent.reason}"].append(absent.rank)
    for note in view.notes:
        lines["note", f"{note.collector}: {note.message}"].append(note.rank)
    for window_view in view.lead.windows:
        if window_view.truncated and window_view.reason:
            message = f"window {window_view.index} is truncated: {window_view.reason}"
            lines["note", message].append(window_view.rank)
    for label, style in TROUBLES.items():
        chosen = [(message, ranks) for (kind, message), ranks in lines.items() if kind == label]
        for message, ranks in chosen[:MAX_LINES]:
            where = f" (rank {', '.join(map(str, ranks[:MAX_RANKS]))})" if len(view.ranks) > 1 else ""
            yield Line(label, message + where, style)
        if len(chosen) > MAX_LINES:
            yield Line(label, f"{len(chosen) - MAX_LINES} more: {MORE}", style)
    if view.others:
        others = ", ".join(shown_place(path, view.run.root, view.run.url) for path in view.others[-MAX_OTHERS:])
        rest = f" and {len(view.others) - MAX_OTHERS} more" if len(view.others) > MAX_OTHERS else ""
        yield Line("note", f"this page shows {view.run.directory.name}; other runs: {others}{rest}")
