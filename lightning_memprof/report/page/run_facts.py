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
    ("_percent", lambda value: f"{value:.0f} %"),
    ("_per_s", lambda value: f"{amount(value)}/s"),
    ("_ns", format_ns),
    ("_w", lambda value: f"{value:.0f} W"),
    ("_c", lambda value: f"{value:.0f} °C"),
)


def system_section(view: View) -> Section | None:
    """Return what the lead rank's machine did; None where nothing was sampled."""
    found = next((one for one in view.system if one.rank == view.lead.rank), None)
    if found is None:
        return None
    rows = [_figure(name, one) for name, one in sorted(found.figures.items())]
    heads = (Head("figure"), Head("mean", "number"), Head("least", "number"), Head("most", "number"))
    rank = f" of rank {found.rank}" if len(view.ranks) > 1 else ""
    lead = f"The machine{rank} in {format_count(found.samples, 'sample')}."
    return Section(
        "system", "System", lead, [ChartPlace("system"), Table("system-figures", "Figures", heads, rows)]
    )  # fmt: skip


def _figure(name: str, one: Figure) -> tuple[Cell, ...]:
    ending, write = next(((end, form) for end, form in UNITS if name.endswith(end)), ("", amount))
    values = (one.mean, one.least, one.most)
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
        for index, one in enumerate(listed if isinstance(listed, list) else ()):
            if isinstance(one, Mapping):
                parts.append(Facts(title if len(listed or ()) == 1 else f"{title} {index}", _facts(one)))
    collectors = facts.get("collectors")
    if isinstance(collectors, list):
        parts.append(Facts("Collectors", [(str(one), _collected(view, str(one))) for one in collectors]))
    return Section("configuration", "Environment and configuration", parts=[one for one in parts if _has_rows(one)])


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
    files = [one for one in view.artifacts if one.collector == collector and one.rank == view.lead.rank]
    failed = sum(one.collector == collector for one in view.errors)
    counted = f"{len(files)} file{'s' * (len(files) != 1)}"
    words = f"{counted}, {format_bytes(sum(one.size_bytes or 0 for one in files))}" if files else "no file"
    return f"{words}, failed" if failed else words


def files_section(view: View) -> tuple[Section, dict[str, str]]:
    """Return the files of a run, and the id of each one's row by its path in the manifest."""
    ordered = sorted(view.artifacts, key=_order)
    shown, rest = ordered[:MAX_FILES], ordered[MAX_FILES:]
    places = {one.path: f"file-{number}" for number, one in enumerate(shown)}
    rows = [_file(one, places[one.path], view) for one in shown]
    heads = (
        Head("file", "code"), Head("type"), Head("size", "number"), Head("rank", "number"), Head("window", "number"),
        Head("collector"),
    )  # fmt: skip
    notes = [f"{len(rest)} more, {_total(rest)}: the manifests list them all"] if rest else []
    table = Table("file-table", "Files", heads, rows, notes=notes)
    lead = f"{format_count(len(ordered), 'file')} with {_total(ordered)} in {place(view.root, view.root, view.url)}."
    return Section("files", "Files", lead, [_commands(view), *([table] if rows else [])]), places


def _order(one: Artifact) -> tuple[int, int, int, str]:
    kind = TYPE_ORDER.index(one.type) if one.type in TYPE_ORDER else len(TYPE_ORDER)
    return kind, one.rank, -1 if one.window is None else one.window, one.path


def _file(one: Artifact, row_id: str, view: View) -> tuple[Cell, ...]:
    where = place(one.file, view.root, view.url)
    size = size_cell(one.size_bytes) if one.state == "present" else Cell(one.state, sort=-1, style="bad")
    command = file_command(where, one.type) if one.state != "missing" else ""
    return (
        Cell(one.path, id=row_id, command=command), Cell(one.type), size, index_cell(one.rank),
        index_cell(one.window), Cell(one.collector),
    )  # fmt: skip


def _total(files: Sequence[Artifact]) -> str:
    return format_bytes(sum(one.size_bytes or 0 for one in files))


def _commands(view: View) -> Table:
    where = shlex.quote(place(view.directory, view.root, view.url))
    rows = [
        ("this page again, with what came since", f"lightning-memprof report {where}"),
        ("the same in the terminal", f"lightning-memprof show {where}"),
        ("every number, for programs", f"lightning-memprof show {where} --format json"),
    ]
    if any(one.type == "trace" and one.state == "present" for one in view.artifacts):
        logs = next((one.arguments for one in view.commands if one.program.startswith("tensorboard")), None)
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
    found = [(one.rank, one.overhead) for one in view.ranks if one.overhead is not None]
    rows = [
        (
            index_cell(rank),
            time_cell(one.pulse_ns / one.steps if one.pulse_ns is not None and one.steps else None),
            share_cell(one.pulse_ns / one.run_ns if one.pulse_ns is not None and one.run_ns else None),
            time_cell(one.windows_ns),
            share_cell(one.windows_ns / one.run_ns if one.windows_ns is not None and one.run_ns else None),
            size_cell(one.windows_rss_bytes),
        )
        for rank, one in found[:MAX_FILES]
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
        by_name = sorted(lead.collectors_ns.items(), key=lambda one: -one[1])
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
    parts += [Words(f"{one.collector} on {one.where}: {one.traceback}") for one in view.errors[:4] if one.traceback]
    return Section("notes", "Notes", "What could not be measured, failed, or is worth knowing.", parts)
