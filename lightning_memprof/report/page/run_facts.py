"""What ran and what it left: ranks, the machine, configuration, files, trouble, and our own overhead."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.analysis.run.rows import mapping
from lightning_memprof.report.page.cells import (
    file_command,
    index_cell,
    name_of,
    place,
    share_cell,
    size_cell,
    time_cell,
)
from lightning_memprof.report.page.model import Cell, ChartPlace, Facts, Head, Lines, Part, Section, Table, Words
from lightning_memprof.report.throughput import amount
from lightning_memprof.report.words import cost, trouble
from lightning_memprof.units import format_bytes, format_count, format_ns

if TYPE_CHECKING:
    from lightning_memprof.analysis.run.load import Artifact
    from lightning_memprof.analysis.steps.system import Figure
    from lightning_memprof.report.view import View

__all__ = ["configuration", "files_section", "overhead_section", "system_section", "troubles"]

# More rows are slow to lay out; the manifest lists all.
MAX_FILES: Final = 400
TYPE_ORDER: Final = ("trace", "snapshot", "table", "blob", "pulse", "series")
TROUBLE_STYLES: Final[Mapping[str, str]] = {"failed": "bad", "damaged": "bad", "no data": "warn", "note": ""}
UNITS: Final[tuple[tuple[str, Callable[[float], str]], ...]] = (
    ("_bytes_per_s", lambda value: f"{format_bytes(value)}/s"),
    ("_bytes", format_bytes),
    ("_percent", lambda value: f"{value:.0f}%"),
    ("_per_s", lambda value: f"{amount(value)}/s"),
    ("_ns", format_ns),
    ("_w", lambda value: f"{value:.0f} W"),
    ("_c", lambda value: f"{value:.0f} °C"),
)


def system_section(view: View) -> Section | None:
    """Return what the lead rank's machine did; None where nothing was sampled."""
    found = next((samples for samples in view.system if samples.rank == view.lead.rank), None)
    if found is None:
        return None
    rows = [_figure(name, figure) for name, figure in sorted(found.figures.items())]
    heads = (Head("figure"), Head("mean", "number"), Head("least", "number"), Head("most", "number"))
    rank = f" of rank {found.rank}" if len(view.ranks) > 1 else ""
    lead = f"The machine{rank} in {format_count(found.samples, 'sample')}."
    return Section(
        "system", "System", lead, [ChartPlace("system"), Table("system-figures", "Figures", heads, rows)]
    )  # fmt: skip


def _figure(name: str, figure: Figure) -> tuple[Cell, ...]:
    ending, write = next(((end, form) for end, form in UNITS if name.endswith(end)), ("", amount))
    values = (figure.mean, figure.least, figure.most)
    return (Cell(name_of(name.removesuffix(ending)), sort=name), *(Cell(write(value), sort=value) for value in values))


def configuration(view: View) -> Section:
    """Return the environment and how the run was configured."""
    facts, training = view.facts, view.training or {}
    ran = {
        name: facts.get(name)
        for name in ("stage", "strategy", "accelerator", "device", "world_size", "host", "pid", "root")
    }
    trained = {name: value for name, value in training.items() if not isinstance(value, list) and name not in _ROW}
    parts: list[Part] = [
        Facts("Run", _facts(ran)),
        Facts("Training", _facts(trained)),
        Facts("Schedule", _facts(mapping(facts, "schedule") or {})),
        Facts("Environment", _facts(mapping(facts, "environment") or {})),
    ]
    for name, title in (("optimizers", "Optimizer"), ("dataloaders", "DataLoader")):
        listed = training.get(name)
        for index, environment in enumerate(listed if isinstance(listed, list) else ()):
            if isinstance(environment, Mapping):
                parts.append(Facts(title if len(listed or ()) == 1 else f"{title} {index}", _facts(environment)))
    collectors = facts.get("collectors")
    if isinstance(collectors, list):
        parts.append(
            Facts("Collectors", [(str(collector), _collected(view, str(collector))) for collector in collectors])
        )
    return Section("configuration", "Environment and configuration", parts=[part for part in parts if _has_rows(part)])


_LARGE: Final = frozenset({"parameters"})
_ROW: Final = frozenset({"kind", "time_ns", "schema_version"})


def _has_rows(part: Part) -> bool:
    return not isinstance(part, Facts) or bool(part.rows)


def _facts(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name_of(name), _value(name, value)) for name, value in found.items() if value is not None and value != []]


def _value(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return (
            format_bytes(value)
            if name.endswith("_bytes")
            else f"{value:,}".replace(",", " ")
            if name in _LARGE
            else str(value)
        )
    return str(value)


def _collected(view: View, collector: str) -> str:
    files = [
        artifact for artifact in view.artifacts if artifact.collector == collector and artifact.rank == view.lead.rank
    ]
    failed = sum(error.collector == collector for error in view.errors)
    counted = f"{len(files)} file{'s' * (len(files) != 1)}"
    words = f"{counted}, {format_bytes(sum(file.size_bytes or 0 for file in files))}" if files else "no file"
    return f"{words}, failed" if failed else words


def files_section(view: View) -> tuple[Section, dict[str, str]]:
    """Return the files of a run, and the id of each one's row by its path in the manifest."""
    ordered = sorted(view.artifacts, key=_order)
    shown, rest = ordered[:MAX_FILES], ordered[MAX_FILES:]
    places = {file.path: f"file-{number}" for number, file in enumerate(shown)}
    rows = [_file(file, places[file.path], view) for file in shown]
    heads = (
        Head("file", "code"), Head("type"), Head("size", "number"), Head("rank", "number"), Head("window", "number"),
        Head("collector"),
    )  # fmt: skip
    notes = [f"{len(rest)} more, {_total(rest)}: the manifests list them all"] if rest else []
    table = Table("file-table", "Files", heads, rows, notes=notes)
    lead = f"{format_count(len(ordered), 'file')} with {_total(ordered)} in {place(view.root, view.root, view.url)}."
    return Section("files", "Files", lead, [_commands(view), *([table] if rows else [])]), places


def _order(artifact: Artifact) -> tuple[int, int, int, str]:
    kind = TYPE_ORDER.index(artifact.type) if artifact.type in TYPE_ORDER else len(TYPE_ORDER)
    return kind, artifact.rank, -1 if artifact.window is None else artifact.window, artifact.path


def _file(artifact: Artifact, row_id: str, view: View) -> tuple[Cell, ...]:
    where = place(artifact.file, view.root, view.url)
    size = size_cell(artifact.size_bytes) if artifact.state == "present" else Cell(artifact.state, sort=-1, style="bad")
    command = file_command(where, artifact.type) if artifact.state != "missing" else ""
    return (
        Cell(artifact.path, id=row_id, command=command), Cell(artifact.type), size, index_cell(artifact.rank),
        index_cell(artifact.window), Cell(artifact.collector),
    )  # fmt: skip


def _total(files: Sequence[Artifact]) -> str:
    return format_bytes(sum(file.size_bytes or 0 for file in files))


def _commands(view: View) -> Table:
    where = shlex.quote(place(view.directory, view.root, view.url))
    rows = [
        ("this page again, with what came since", f"lightning-memprof report {where}"),
        ("the same in the terminal", f"lightning-memprof show {where}"),
        ("every number, for programs", f"lightning-memprof show {where} --format json"),
    ]
    if any(artifact.type == "trace" and artifact.state == "present" for artifact in view.artifacts):
        logs = next((command.arguments for command in view.commands if command.program.startswith("tensorboard")), None)
        rows.append(("all ranks on one time line, in the Perfetto UI", f"lightning-memprof view {where}"))
        if logs is not None:
            rows.append(("the traces in TensorBoard", f"tensorboard --logdir {logs}"))
    heads = (Head("to see"), Head("type", "command"))
    return Table("commands", "Commands", heads, [(Cell(what), Cell(type_)) for what, type_ in rows], is_sortable=False)


def overhead_section(view: View) -> Section:
    """Return what this package itself cost, rank by rank."""
    words = cost(view)
    if words is None:
        return Section("overhead", "Our own overhead", "The run has not said what recording it cost.")
    found = [(rank.rank, rank.overhead) for rank in view.ranks if rank.overhead is not None]
    rows = [
        (
            index_cell(rank),
            time_cell(overhead.pulse_ns / overhead.steps if overhead.pulse_ns is not None and overhead.steps else None),
            share_cell(
                overhead.pulse_ns / overhead.run_ns if overhead.pulse_ns is not None and overhead.run_ns else None
            ),
            time_cell(overhead.windows_ns),
            share_cell(
                overhead.windows_ns / overhead.run_ns if overhead.windows_ns is not None and overhead.run_ns else None
            ),
            size_cell(overhead.windows_rss_bytes),
        )
        for rank, overhead in found[:MAX_FILES]
    ]
    heads = (
        Head("rank", "number"), Head("pulse a step", "number"), Head("of the run", "number"),
        Head("windows", "number", "all of them together"), Head("of the run", "number"),
        Head("left in memory", "number", "resident memory that the windows left, about"),
    )  # fmt: skip
    parts: list[Part] = [Table("overhead-ranks", "By rank", heads, rows, is_sortable=len(rows) > 1)]
    lead = view.lead.overhead
    if lead is not None and lead.collectors_ns:
        most = max(lead.collectors_ns.values())
        by_name = sorted(lead.collectors_ns.items(), key=lambda entry: -entry[1])
        cells = [(Cell(name), time_cell(ns, most)) for name, ns in by_name]
        title = "In windows, by collector"
        parts.append(Table("overhead-collectors", title, (Head("collector"), Head("time", "number")), cells))
    return Section("overhead", "Our own overhead", f"{words[0].upper()}{words[1:]}.", parts)


def troubles(view: View) -> Section | None:
    """Return what failed, is damaged or could not be measured; None where there is nothing of it."""
    rows = [(label, message, TROUBLE_STYLES.get(label, "")) for label, message in trouble(view)]
    if not rows:
        return None
    parts: list[Part] = [Lines("", rows)]
    parts += [
        Words(f"{error.collector} on {error.where}: {error.traceback}") for error in view.errors[:4] if error.traceback
    ]
    return Section("notes", "Notes", "What could not be measured, failed, or is worth knowing.", parts)
