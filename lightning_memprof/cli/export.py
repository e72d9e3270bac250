"""``lightning-memprof export``: tables, a flame graph or a snapshot for other tools."""

from __future__ import annotations

from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from jsonargparse import ArgumentParser, Namespace

from lightning_memprof import __version__
from lightning_memprof.cli.command import Command, check_output, opened_target, say
from lightning_memprof.errors import ConfigError, ReportError
from lightning_memprof.units import format_count

if TYPE_CHECKING:
    from collections import Counter

    from lightning_memprof.read.run.model import Run
    from lightning_memprof.report.export.stacks import Stack
    from lightning_memprof.report.export.tables import Table

Quantity = Literal["time", "memory"]
_FORMS: Final = ("csv", "speedscope", "memory_viz")
_SPEEDSCOPE: Final = "https://www.speedscope.app opens it (the file stays on your machine)"
_MEMORY_VIZ: Final = "https://pytorch.org/memory_viz opens it (the file stays on your machine)"


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("TARGET", help="a run as for show, a trace, a snapshot, or a directory of traces or snapshots")
    parser.add_argument("--to", metavar="FORM", choices=list(_FORMS), help=f"one of {', '.join(_FORMS)}")
    parser.add_argument(
        "-o", "--output", metavar="OUT", help="the file, or the directory for tables (default: a name made from TARGET)"
    )
    parser.add_argument("--of", choices=["time", "memory"], help="quantity for speedscope (default: time, else memory)")


@dataclass(frozen=True, kw_only=True)
class _Source:
    """The run with its files, or the files alone; ``stem`` begins the name of the output."""

    run: Run | None
    traces: tuple[Path, ...]
    snapshots: tuple[Path, ...]
    stem: str


def _execute(options: Namespace) -> int:
    if options.to is None:
        raise ArgumentError(None, f"export: --to is required: {', '.join(_FORMS)}")
    with _source(options.TARGET) as source:
        of: Quantity = options.of or ("time" if source.traces else "memory")
        suffixes = {"csv": "-csv", "speedscope": f".{of}.speedscope.json", "memory_viz": ".memory_viz.pickle"}
        out = Path(f"{source.stem}{suffixes[options.to]}" if options.output is None else options.output)
        artifacts = [] if source.run is None else [artifact.file for artifact in source.run.artifacts]
        check_output(out, (*source.traces, *source.snapshots, *artifacts))
        if options.to == "csv":
            _write_tables(source, out)
        elif options.to == "memory_viz":
            _write_snapshot(source, out)
        else:
            _write_stacks(source, of, out)
    return 0


@contextmanager
def _source(target: str) -> Iterator[_Source]:
    from lightning_memprof.read.run.targets import Targets
    from lightning_memprof.timeline.sources import bare_name

    with opened_target(target) as found:
        place = Path(target) if isinstance(found, Targets) else found.root
        stem = bare_name(place.resolve().name) or "export"
        if isinstance(found, Targets):
            yield _Source(run=None, traces=found.traces, snapshots=found.snapshots, stem=stem)
            return
        lead = found.lead.rank
        yield _Source(
            run=found,
            traces=tuple(trace.file for trace in found.files("trace", rank=lead)),
            snapshots=tuple(snapshot.file for snapshot in found.files("snapshot", rank=lead)),
            stem=stem,
        )


def _write_tables(source: _Source, out: Path) -> None:
    from lightning_memprof.report.export.write import write_csv

    for path, rows in write_csv(_tables(source), out):
        say(f"{path}: {format_count(rows, 'row')}")


def _tables(source: _Source) -> Iterator[Table]:
    from lightning_memprof.report.export.tables import run_tables, snapshot_tables, trace_tables

    if source.run is not None:
        yield from run_tables(source.run)
        return
    if source.traces and source.snapshots:
        raise ConfigError("the tables of traces and snapshots have the same names: export one kind of file at a time")
    if source.traces:
        from lightning_memprof.account.trace.report import trace_report

        yield from trace_tables([trace_report(path) for path in source.traces])
    if source.snapshots:
        from lightning_memprof.account.snapshot.report import snapshot_report

        yield from snapshot_tables([snapshot_report(path) for path in source.snapshots])


def _write_snapshot(source: _Source, out: Path) -> None:
    """Write the last snapshot, or the allocations of the last trace."""
    from lightning_memprof.read.snapshot.reader import load_snapshot
    from lightning_memprof.report.export.memory_viz import history_of_trace, viewable, write_snapshot
    from lightning_memprof.report.export.write import whole_file

    if source.snapshots:
        data: Any = load_snapshot(source.snapshots[-1])
        file = source.snapshots[-1]
    elif source.traces:
        file = source.traces[-1]
        data = history_of_trace(file)
    else:
        raise ReportError("there is no snapshot and no trace: record one with AllocatorHistory or OperatorTrace")
    snapshot = viewable(data, str(file))
    if not snapshot["segments"] and not any(snapshot["device_traces"]):
        raise ReportError(f"{file}: has no blocks with addresses; torch 1.11 and later write them")
    with whole_file(out, "wb") as stream:
        write_snapshot(snapshot, stream)
    events = sum(map(len, snapshot["device_traces"]))
    say(f"{out}: {format_count(events, 'event')} of {file.name}; {_MEMORY_VIZ}")


def _write_stacks(source: _Source, of: Quantity, out: Path) -> None:
    from lightning_memprof.account.trace.lanes import read_lanes
    from lightning_memprof.report.export.stacks import Speedscope
    from lightning_memprof.report.export.write import whole_file

    if of == "time" and not source.traces:
        raise ReportError(
            "there is no trace, and times come from traces only: use --of memory, or record OperatorTrace"
        )
    scope = Speedscope(name=source.stem, exporter=f"lightning-memprof {__version__}")
    if of == "time":
        for path in source.traces:
            scope.add_lanes(path.name if len(source.traces) > 1 else "", read_lanes(path))
    else:
        for title, stacks in _memory_stacks(source):
            scope.add_stacks(title, stacks)
    if not scope.profiles:
        raise ReportError(f"no {of} is recorded: a trace needs events, and profile_memory=True for memory")
    with whole_file(out) as stream:
        scope.write(stream)
    say(f"{out}: {format_count(len(scope.profiles), 'profile')} of {of}; {_SPEEDSCOPE}")


def _memory_stacks(source: _Source) -> Iterator[tuple[str, Counter[Stack]]]:
    """Yield the stacks of live bytes at the peak, by device of each snapshot, else of each trace."""
    from lightning_memprof.account.memory.allocations import window_allocations
    from lightning_memprof.account.snapshot.report import snapshot_report
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


COMMAND: Final = Command(
    summary="write tables, a flame graph or a snapshot for other tools",
    description="Write a run, traces or snapshots in a format of another tool.",
    add_options=_add_options,
    execute=_execute,
)
