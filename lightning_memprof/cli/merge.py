"""``lightning-memprof merge``: a run, or trace files, as one timeline in one file."""

from __future__ import annotations

from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jsonargparse import ArgumentParser, Namespace

from lightning_memprof.cli.command import Command, check_output, opened_run, parse_numbers, say, sigterm_as_ctrl_c
from lightning_memprof.cli.progress import merge_progress
from lightning_memprof.errors import ConfigError, ReportError
from lightning_memprof.units import format_count

if TYPE_CHECKING:
    from lightning_memprof.timeline.merge import Merged


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("RUN", nargs="+", help="a run as for show, or trace files and folders of them")
    parser.add_argument("-o", "--output", metavar="FILE", help="the output file; compressed if it ends in .gz")
    parser.add_argument("--window", type=int, metavar="N", help="only this window of the run")
    parser.add_argument("--ranks", metavar="LIST", help="only these global ranks of the run, as in 0,3-5")


def _execute(options: Namespace) -> int:
    if options.output is None:
        raise ArgumentError(None, "merge: -o is required, as in: lightning-memprof merge RUN -o merged.json.gz")
    out = Path(options.output)
    ranks = None if options.ranks is None else parse_numbers("--ranks", options.ranks)
    files = _trace_files(options.RUN)
    if files is None:
        merged = _merge_run(options.RUN[0], out, options.window, ranks)
    elif options.window is not None or ranks is not None:
        raise ConfigError("--window, --ranks: these select parts of a run; trace files are merged whole")
    else:
        merged = _merge_files(files, out)
    for note in merged.notes:
        say(note)
    events = format_count(merged.events, "event")
    say(f"{out}: {events}, {merged.size_bytes / 1e6:.1f} MB; lightning-memprof view opens it")
    return 0


def _trace_files(names: Sequence[str]) -> list[Path] | None:
    """Return the trace files that the targets name, or None for a run.

    Raises:
        ArtifactError: a target is missing, or the targets are of different kinds.
        ReportError: a target is a snapshot, which has no timeline.
    """
    from lightning_memprof.artifacts.remote import is_url
    from lightning_memprof.read.run.targets import find_targets

    paths = [Path(name) for name in names]
    # The trace reader judges files that are named one by one; a file named twice is refused.
    if all(path.is_file() for path in paths):
        return paths
    if len(names) == 1 and is_url(names[0]):
        return None
    targets = find_targets(paths)
    if targets.run is not None:
        return None
    if targets.snapshots:
        raise ReportError(f"{targets.snapshots[0]}: is not a trace; open snapshots with lightning-memprof report")
    return list(targets.traces)


def _merge_files(files: Sequence[Path], out: Path) -> Merged:
    from lightning_memprof.timeline.clocks import align_traces
    from lightning_memprof.timeline.merge import merge_traces
    from lightning_memprof.timeline.sources import file_sources

    with sigterm_as_ctrl_c():
        clocks = align_traces(files)
        sources = file_sources(files, clocks.of_files(files))
        with merge_progress() as progress:
            merged = merge_traces(sources, out, progress)
    for note in clocks.notes("traces"):
        say(note)
    return merged


def _merge_run(target: str, out: Path, window: int | None, ranks: Sequence[int] | None) -> Merged:
    from lightning_memprof.timeline.clocks import align_clocks
    from lightning_memprof.timeline.merge import merge_traces
    from lightning_memprof.timeline.sources import run_sources

    with sigterm_as_ctrl_c(), opened_run(target) as run:
        check_output(out, (artifact.file for artifact in run.artifacts), run.directory)
        clocks = align_clocks(run, window, ranks)
        sources = run_sources(run, window, ranks, clocks=clocks)
        with merge_progress() as progress:
            merged = merge_traces(sources, out, progress)
    for problem in run.problems:
        if ranks is None or problem.rank in ranks:
            say(f"{problem.piece}: {problem.message}; the readable part is on the timeline")
    for note in clocks.notes("hosts"):
        say(note)
    return merged


COMMAND: Final = Command(
    summary="merge a run, or traces, into one file",
    description="Merge all windows of a run, or trace files, into one timeline in one file.",
    add_options=_add_options,
    execute=_execute,
)
