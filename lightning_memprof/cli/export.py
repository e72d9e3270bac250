"""``lightning-memprof export``: what was recorded, in a form that other tools read."""

from __future__ import annotations

from argparse import ArgumentError
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from jsonargparse import Namespace

from lightning_memprof.cli.own_files import is_one_of
from lightning_memprof.errors import ConfigError, ReportError
from lightning_memprof.units import format_count

if TYPE_CHECKING:
    from lightning_memprof.analysis.run.load import Run
    from lightning_memprof.analysis.run.targets import Targets
    from lightning_memprof.report.export.stacks import Stack
    from lightning_memprof.report.export.tables import Table

__all__ = ["FORMS", "ExportOptions", "export"]

Form = Literal["csv", "parquet", "speedscope", "flamegraph", "memory_viz"]
Quantity = Literal["time", "memory"]
FORMS: Final[tuple[Form, ...]] = get_args(Form)
_SUFFIXES: Final = {
    "csv": "-csv",
    "parquet": "-parquet",
    "speedscope": ".speedscope.json",
    "flamegraph": ".folded.txt",
    "memory_viz": ".memory_viz.pickle",
}
_OPENS: Final = {
    "speedscope": "https://www.speedscope.app opens it (it stays on your machine)",
    "flamegraph": "flamegraph.pl, inferno-flamegraph or speedscope draws it",
    "memory_viz": "https://pytorch.org/memory_viz opens it (it stays on your machine)",
}


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What is written and where. ``out`` is a directory for tables; ``of`` is what a flame graph is of."""

    form: Form
    out: Path | None = None
    of: Quantity | None = None

    @classmethod
    def of_command(cls, options: Namespace) -> ExportOptions:
        """Take them from the command line.

        Raises:
            ArgumentError: no form is named.

        """
        if options.to is None:
            raise ArgumentError(None, f"export: name the form with --to: {', '.join(FORMS)}")
        return cls(form=options.to, out=None if options.output is None else Path(options.output), of=options.of)


@dataclass(frozen=True)
class _Source:
    """What is exported: a run with its files, or files alone. ``stem`` begins the result's name."""

    run: Run | None
    traces: tuple[Path, ...]
    snapshots: tuple[Path, ...]
    stem: str


def export(target: str, options: ExportOptions) -> int:
    """Write what was recorded in a form that other tools read.

    Args:
        target: a run, a trace, a snapshot, or a directory of traces or snapshots; a run also by URL.
        options: what is written, and where.

    Returns:
        The exit code, 0.

    Raises:
        ArtifactError: the target is missing or cannot be read.
        ConfigError: the form needs a package that is not installed.
        ReportError: the target has nothing of that form, or the result cannot be written.

    """
    if options.form == "parquet":
        from lightning_memprof.report.export.write import require_parquet

        require_parquet()
    with _source(target) as source:
        out = options.out or Path(f"{source.stem}{_suffix(source, options)}")
        _spare(source, out)
        if options.form in {"csv", "parquet"}:
            _write_tables(source, options.form, out)
        elif options.form == "memory_viz":
            _write_snapshot(source, out)
        else:
            _write_stacks(source, options, out)
    return 0


def _suffix(source: _Source, options: ExportOptions) -> str:
    of = f".{_of(source, options)}" if options.form in {"speedscope", "flamegraph"} else ""
    return of + _SUFFIXES[options.form]


def _of(source: _Source, options: ExportOptions) -> Quantity:
    """Return what a flame graph is of: where there are traces, of time."""
    return options.of or ("time" if source.traces else "memory")


@contextmanager
def _source(target: str) -> Iterator[_Source]:
    from lightning_memprof.analysis.run.fetch import local_run
    from lightning_memprof.analysis.run.load import load_run
    from lightning_memprof.analysis.run.targets import find_targets

    if "://" not in target:
        targets: Targets = find_targets([Path(target)])
        if targets.run is None:
            yield _Source(None, targets.traces, targets.snapshots, _stem(Path(target)))
            return
    with local_run(target) as found:
        run = replace(load_run(found.path), url=found.url)
        present = [
            artifact for artifact in run.artifacts if artifact.state == "present" and artifact.rank == run.lead.rank
        ]
        yield _Source(
            run,
            tuple(artifact.file for artifact in present if artifact.type == "trace"),
            tuple(artifact.file for artifact in present if artifact.type == "snapshot"),
            _stem(run.root),
        )


def _stem(path: Path) -> str:
    name = path.resolve().name
    for suffix in (".gz", ".json", ".trace", ".pt", ".pickle"):
        name = name.removesuffix(suffix)
    return name or "export"


def _spare(source: _Source, out: Path) -> None:
    """Refuse to write over what is read.

    Raises:
        ConfigError: the result would be a file of the target.

    """
    artifacts = [artifact.file for artifact in source.run.artifacts] if source.run is not None else []
    if is_one_of(out, (*source.traces, *source.snapshots, *artifacts)):
        raise ConfigError(f"{out}: is what is read; give the result another name with -o")


def _write_tables(source: _Source, form: Form, out: Path) -> None:
    from lightning_memprof.report.export.write import write_csv, write_parquet

    written = (write_csv if form == "csv" else write_parquet)(_tables(source), out)
    for path, rows in written:
        print(f"{path}: {rows} row{'s' * (rows != 1)}")


def _tables(source: _Source) -> Iterator[Table]:
    from lightning_memprof.report.export.tables import run_tables, snapshot_tables, trace_tables

    if source.run is not None:
        yield from run_tables(source.run)
        return
    if source.traces and source.snapshots:
        raise ConfigError("traces and snapshots have tables of the same names: export the files of one kind at a time")
    if source.traces:
        from lightning_memprof.analysis.trace.report import trace_report

        yield from trace_tables([trace_report(path) for path in source.traces])
    if source.snapshots:
        from lightning_memprof.analysis.snapshot.report import snapshot_report

        yield from snapshot_tables([snapshot_report(path) for path in source.snapshots])


def _write_snapshot(source: _Source, out: Path) -> None:
    """Write the last snapshot, or what the last trace with allocations knows of them."""
    from lightning_memprof.analysis.memory.history import history_of_trace
    from lightning_memprof.analysis.snapshot.reader import load_snapshot
    from lightning_memprof.report.export.memory_viz import viewable, write_snapshot
    from lightning_memprof.report.export.write import whole_file

    if source.snapshots:
        data: Any = load_snapshot(source.snapshots[-1])
        file = source.snapshots[-1]
    elif source.traces:
        file = source.traces[-1]
        data = history_of_trace(file)
    else:
        raise ReportError("there is neither a snapshot nor a trace: record one with AllocatorHistory or OperatorTrace")
    snapshot = viewable(data, str(file))
    if not snapshot["segments"] and not any(snapshot["device_traces"]):
        raise ReportError(f"{file}: has no blocks with addresses; torch writes them since 1.11")
    with whole_file(out, "wb") as stream:
        write_snapshot(snapshot, stream)
    events = sum(map(len, snapshot["device_traces"]))
    print(f"{out}: {format_count(events, 'event')} of {file.name}; {_OPENS['memory_viz']}")


def _write_stacks(source: _Source, options: ExportOptions, out: Path) -> None:
    from lightning_memprof.analysis.trace.lanes import read_lanes
    from lightning_memprof.report.export.stacks import Speedscope, write_folded
    from lightning_memprof.report.export.write import whole_file

    of = _of(source, options)
    if of == "time" and not source.traces:
        raise ReportError("there is no trace, and only traces know times: take --of memory, or record OperatorTrace")
    counts: Counter[Stack] = Counter()
    scope = Speedscope(source.stem, f"lightning-memprof {_version()}")
    if of == "time":
        for path in source.traces:
            lanes = read_lanes(path)
            if options.form == "flamegraph":
                counts.update(lanes.own_times())
            else:
                scope.add_lanes(path.name if len(source.traces) > 1 else "", lanes)
    else:
        for title, stacks in _memory_stacks(source):
            counts.update(stacks)
            scope.add_stacks(title, stacks)
    if not counts and not scope.profiles:
        raise ReportError(f"nothing of {of} was recorded: traces need events, and profile_memory=True for memory")
    with whole_file(out) as stream:
        if options.form == "flamegraph":
            write_folded(counts, stream)
        else:
            scope.write(stream)
    what = (
        format_count(len(counts), "stack")
        if options.form == "flamegraph"
        else f"{scope.profiles} profile{'s' * (scope.profiles != 1)}"
    )
    print(f"{out}: {what} of {of}; {_OPENS[options.form]}")


def _memory_stacks(source: _Source) -> Iterator[tuple[str, Counter[Stack]]]:
    """Yield what was held at the peak: of each device of each snapshot, else of each trace."""
    from lightning_memprof.analysis.memory.allocations import window_allocations
    from lightning_memprof.analysis.snapshot.report import snapshot_report
    from lightning_memprof.report.export.stacks import holder_stacks, site_stacks

    for path in source.snapshots:
        for device in snapshot_report(path).devices:
            title = _title(path, source.snapshots, f"cuda:{device.device}")
            if device.holders_at_peak:
                yield title, holder_stacks(device.holders_at_peak, title)
    if source.snapshots:
        return
    for path in source.traces:
        for memory in window_allocations(path):
            title = _title(path, source.traces, memory.device)
            if memory.sites:
                yield title, site_stacks(memory.sites, title)


def _title(path: Path, paths: Sequence[Path], device: str) -> str:
    return device if len(paths) == 1 else f"{path.name} {device}"


def _version() -> str:
    from lightning_memprof import __version__

    return __version__
