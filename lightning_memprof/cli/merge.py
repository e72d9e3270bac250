"""``lightning-memprof merge``: a run, or trace files, as one timeline in one file."""

from __future__ import annotations

from argparse import ArgumentError
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jsonargparse import ArgumentParser, Namespace

from lightning_memprof.cli.command import Command, check_output, opened_target, parse_numbers, say, sigterm_as_ctrl_c
from lightning_memprof.cli.progress import reading
from lightning_memprof.errors import ConfigError, ReportError
from lightning_memprof.units import format_count

if TYPE_CHECKING:
    from lightning_memprof.read.run.model import Run
    from lightning_memprof.read.run.problems import Problem
    from lightning_memprof.read.run.targets import Targets
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
    with sigterm_as_ctrl_c(), opened_target(*options.RUN) as found:
        merged = merge(found, out, window=options.window, ranks=ranks)
    events = format_count(merged.events, "event")
    say(f"{out}: {events}, {merged.size_bytes / 1e6:.1f} MB; lightning-memprof view opens it")
    return 0


def merge(
    found: Run | Targets,
    out: Path,
    *,
    window: int | None = None,
    ranks: Collection[int] | None = None,
    steps: Collection[int] | None = None,
) -> Merged:
    """Merge a run or traces, or parts of them, into one file, and print what a reader has to know."""
    from lightning_memprof.read.run.targets import Targets
    from lightning_memprof.timeline.clocks import align_clocks, align_traces
    from lightning_memprof.timeline.merge import merge_traces
    from lightning_memprof.timeline.sources import file_sources, run_sources

    problems: list[Problem] = []
    if not isinstance(found, Targets):
        check_output(out, (artifact.file for artifact in found.artifacts), found.directory)
        clocks = align_clocks(found, window, ranks)
        sources = run_sources(found, window, ranks, steps=steps, clocks=clocks)
        problems = [problem for problem in found.problems if ranks is None or problem.rank in ranks]
    elif found.snapshots:
        raise ReportError(f"{found.snapshots[0]}: is not a trace; open snapshots with lightning-memprof report")
    elif window is not None or ranks is not None:
        raise ConfigError("--window, --ranks: these select parts of a run; trace files are merged whole")
    else:
        clocks = align_traces(found.traces)
        sources = file_sources(found.traces, clocks.of_files(found.traces), steps)
    with reading() as progress:
        merged = merge_traces(sources, out, partial(progress.read, Path("merging")))
    for problem in problems:
        say(f"{problem.piece}: {problem.message}; the readable part is on the timeline")
    for note in (*clocks.notes("traces" if isinstance(found, Targets) else "hosts"), *merged.notes):
        say(note)
    return merged


COMMAND: Final = Command(
    summary="merge a run, or traces, into one file",
    description="Merge all windows of a run, or trace files, into one timeline in one file.",
    add_options=_add_options,
    execute=_execute,
)
