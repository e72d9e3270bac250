"""``lightning-memprof merge``: a run, or trace files, as one timeline in one file."""

from __future__ import annotations

import sys
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from lightning_memprof.artifacts.naming import parse_manifest_name, parse_pulse_name
from lightning_memprof.cli.numbers import numbers
from lightning_memprof.cli.own_files import is_one_of
from lightning_memprof.cli.signals import ended_by_sigterm
from lightning_memprof.errors import ConfigError, ReportError
from lightning_memprof.units import format_count

if TYPE_CHECKING:
    from lightning_memprof.analysis.run.load import Run
    from lightning_memprof.analysis.timeline.merge import Merged, Progress
    from lightning_memprof.analysis.timeline.model import Source

__all__ = ["MergeOptions", "file_sources", "merge"]


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """What is merged, and where it goes. ``window`` and ``ranks`` choose within a run; None takes all."""

    out: Path
    window: int | None = None
    ranks: Sequence[int] | None = None

    @classmethod
    def of(cls, options: Namespace) -> MergeOptions:
        """Take them from the command line.

        Raises:
            ArgumentError: no result is named.
            ConfigError: the ranks are no numbers.

        """
        if options.output is None:
            raise ArgumentError(None, "merge: name the result, as in: lightning-memprof merge RUN -o merged.json.gz")
        return cls(
            out=Path(options.output),
            window=options.window,
            ranks=None if options.ranks is None else numbers("--ranks", options.ranks),
        )


def merge(what: Sequence[str], options: MergeOptions) -> int:
    """Merge all that a run recorded in its windows, or trace files of any origin.

    Args:
        what: one run as for ``show``, or trace files, plain or gzip-compressed, and directories of them.
        options: where the result goes, and what of a run is wanted.

    Returns:
        The exit code, 0.

    Raises:
        ArtifactError: there is no run, or a trace cannot be read.
        ConfigError: the arguments do not go together.
        ReportError: the run has no such window or rank.

    """
    from lightning_memprof.analysis.timeline.merge import merge_traces

    files = _trace_files(what)
    if files is not None:
        if options.window is not None or options.ranks is not None:
            raise ConfigError("--window, --ranks: choose within a run; trace files are merged whole")
        with ended_by_sigterm(), _progress() as progress:
            merged = merge_traces(file_sources(files), options.out, progress)
    else:
        merged = _merge_run(what[0], options)
    for note in merged.notes:
        print(note)
    events = format_count(merged.events, "event")
    print(f"{options.out}: {events}, {merged.size_bytes / 1e6:.1f} MB; lightning-memprof view opens it")
    return 0


def _trace_files(what: Sequence[str]) -> list[Path] | None:
    """Return the traces that are meant, None for a run.

    Raises:
        ArtifactError: there is no such thing, or it does not go together.
        ReportError: there are snapshots, which have no timeline.

    """
    from lightning_memprof.analysis.run.targets import find_targets
    from lightning_memprof.artifacts.upload import is_url

    given = [Path(name) for name in what]
    # What is named by itself is left to the reader of traces, and named twice it is refused.
    if all(path.is_file() for path in given):
        return given
    if len(what) == 1 and is_url(what[0]):
        return None
    targets = find_targets(given)
    if targets.run is not None:
        return None
    if targets.snapshots:
        raise ReportError(f"{targets.snapshots[0]}: is no trace; look at snapshots with lightning-memprof report")
    return list(targets.traces)


def _merge_run(what: str, options: MergeOptions) -> Merged:
    from lightning_memprof.analysis.run.fetch import local_run
    from lightning_memprof.analysis.run.load import load_run
    from lightning_memprof.analysis.timeline.clocks import align_clocks
    from lightning_memprof.analysis.timeline.merge import merge_traces
    from lightning_memprof.analysis.timeline.sources import run_sources
    from lightning_memprof.units import format_ns

    with ended_by_sigterm(), local_run(what) as local:
        run = load_run(local.path)
        _spare(run, options.out)
        clocks = align_clocks(run, options.window, options.ranks)
        sources = run_sources(run, options.window, options.ranks, clocks=clocks)
        with _progress() as progress:
            merged = merge_traces(sources, options.out, progress)
    for problem in run.problems:
        if options.ranks is None or problem.rank in options.ranks:
            print(f"{problem.piece}: {problem.message}; what of it can be read is on the timeline")
    if clocks.residual_ns is not None:
        print(
            f"The clocks of {len(clocks.offsets_ns)} hosts were aligned by {clocks.matched} collectives; "
            f"they agree to {format_ns(clocks.residual_ns)}."
        )
    if clocks.unaligned:
        print(f"No collective aligns the clock of {', '.join(clocks.unaligned)}: it was taken as it is.")
    return merged


def _spare(run: Run, out: Path) -> None:
    """Refuse to write over a file of the run.

    Raises:
        ConfigError: the result would be one.

    """
    own = parse_manifest_name(out.name) is not None or parse_pulse_name(out.name) is not None
    of_the_run = [run.directory / out.name] if own else []
    if is_one_of(out, (*of_the_run, *(artifact.file for artifact in run.artifacts))):
        raise ConfigError(f"{out}: is a file of this run; give the result another name")


def file_sources(files: Sequence[Path]) -> list[Source]:
    """Name each file by what parts it from the others."""
    from lightning_memprof.analysis.timeline.model import Source

    names = [file.name for file in files]
    labels = [name if names.count(name) == 1 else str(file) for name, file in zip(names, files, strict=True)]
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise ConfigError(f"{twice}: is named twice; name each trace once")
    return [
        Source(label="" if len(files) == 1 else _short(label), sort=at, trace=file)
        for at, (label, file) in enumerate(zip(labels, files, strict=True))
    ]


def _short(label: str) -> str:
    for suffix in (".gz", ".json", ".trace", ".pt"):
        label = label.removesuffix(suffix)
    return label


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """A bar on stderr where a person sees it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("merging"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("merging")
        yield lambda done, total: bar.update(task, completed=done, total=total)
