"""``lightning-memprof view``: a run, or traces, in the Perfetto UI on this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
import webbrowser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jsonargparse import Namespace

from lightning_memprof.cli.numbers import numbers
from lightning_memprof.cli.signals import ended_by_sigterm
from lightning_memprof.errors import ConfigError, ReportError
from lightning_memprof.report.perfetto import TRACE_PROCESSOR_PAGE_PORT, TRACE_PROCESSOR_PORT, Served, serve_trace

if TYPE_CHECKING:
    from lightning_memprof.analysis.run.targets import Targets

__all__ = ["ViewOptions", "view"]

# What a browser holds as one string; beyond it the page fails without a word.
_LARGE_BYTES: Final = 400_000_000
# A gigabyte takes a native trace processor some ten seconds.
_LOADING_SECONDS: Final = 600


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """How to view.

    ``steps`` are the only ones to be opened, None opens all; ``trace_processor`` is a native trace processor's program;
    ``port`` 0 takes a free one; ``tensorboard`` starts TensorBoard instead of the Perfetto UI.
    """

    steps: Sequence[int] | None = None
    trace_processor: Path | None = None
    port: int = 0
    browser: bool = True
    tensorboard: bool = False

    @classmethod
    def of(cls, options: Namespace) -> ViewOptions:
        """Take them from the command line.

        Raises:
            ConfigError: the steps are no numbers, the port is none, or options do not go together.

        """
        if options.tensorboard and (options.steps is not None or options.trace_processor is not None):
            raise ConfigError("--tensorboard: reads whole traces; leave --steps and --trace-processor out")
        if not 0 <= options.port < 1 << 16:
            raise ConfigError(f"--port {options.port}: no port has this number; name a free one from 1024 to 65535")
        return cls(
            steps=None if options.steps is None else numbers("--steps", options.steps),
            trace_processor=None if options.trace_processor is None else Path(options.trace_processor),
            port=options.port,
            browser=not options.no_browser,
            tensorboard=options.tensorboard,
        )


def view(what: str | Sequence[str], options: ViewOptions = ViewOptions()) -> int:
    """Open a run's timeline, merged now, or traces, and serve it until Ctrl-C.

    Args:
        what: a run as for ``show``, or trace files, plain or gzip-compressed, and directories of them: several are
            merged.
        options: how.

    Returns:
        The exit code, 0.

    Raises:
        ArtifactError: there is no run, or a trace cannot be read.
        ConfigError: the port is taken, or the trace processor is no program.
        ReportError: there is nothing to view.

    """
    names = [what] if isinstance(what, str) else list(what)
    if options.tensorboard:
        from lightning_memprof.cli.tensorboard import tensorboard

        return tensorboard(names, port=options.port, browser=options.browser)
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="lightning-memprof-") as folder:
        trace = _prepare(names, options, Path(folder))
        with contextlib.suppress(KeyboardInterrupt), _served(trace, options) as served:
            print(f"{trace.name} is open at {served.url}", flush=True)
            print("Ctrl-C ends it.", flush=True)
            if options.browser and not webbrowser.open(served.url):
                print("No browser could be started here; open the address yourself.", flush=True)
            while True:
                time.sleep(3600)
    return 0


def _prepare(names: Sequence[str], options: ViewOptions, folder: Path) -> Path:
    """Return one file that can be opened, in ``folder`` where it has to be made."""
    from lightning_memprof.analysis.run.targets import find_targets
    from lightning_memprof.artifacts.upload import is_url

    given = [Path(name) for name in names]
    targets = None if len(names) == 1 and (is_url(names[0]) or given[0].is_file()) else find_targets(given)
    if targets is None and given[0].is_file():
        trace = _one_trace(given[0], options, folder)
    elif targets is not None and targets.run is None:
        trace = _several(targets, options, folder)
    else:
        trace = _merged(names[0], options, folder)
    if options.trace_processor is None and (size := _unpacked_bytes(trace)) > _LARGE_BYTES:
        print(
            f"{trace.name} has {size / 1e6:.0f} MB: a browser may fail on it. "
            "Open a slice with --steps 2-3, or all of it with --trace-processor PATH.",
            flush=True,
        )
    return trace


def _one_trace(given: Path, options: ViewOptions, folder: Path) -> Path:
    from lightning_memprof.analysis.run.targets import file_kind
    from lightning_memprof.analysis.trace.reader import read_trace

    if file_kind(given) == "snapshot":
        raise ReportError(f"{given}: is a snapshot, which has no timeline; look at it with lightning-memprof report")
    trace = given.absolute()
    # Refuses at once what is no trace, where the browser would only say that it cannot open it.
    next(iter(read_trace(trace).batches()), None)
    return trace if options.steps is None else _cut(trace, options.steps, folder)


def _cut(trace: Path, steps: Sequence[int], folder: Path) -> Path:
    from lightning_memprof.analysis.timeline.cut import cut

    # Plain, because the page gets it over loopback and would only have to unpack it.
    part = folder / f"{trace.name.removesuffix('.gz').removesuffix('.json')}.steps.json"
    cut(trace, steps, part)
    return part


def _several(targets: Targets, options: ViewOptions, folder: Path) -> Path:
    """Merge traces into one file."""
    from lightning_memprof.analysis.timeline.merge import merge_traces
    from lightning_memprof.cli.merge import file_sources

    traces = list(targets.traces)
    if not traces:
        raise ReportError(f"{targets.snapshots[0]}: is no trace; look at snapshots with lightning-memprof report")
    if len(traces) == 1:
        return _one_trace(traces[0], options, folder)
    if options.steps is not None:
        places = [folder / str(index) for index in range(len(traces))]
        for place in places:
            place.mkdir()
        traces = [_cut(trace, options.steps, place) for trace, place in zip(traces, places, strict=True)]
    out = folder / "traces.json"
    for note in merge_traces(file_sources(traces), out).notes:
        print(note, flush=True)
    return out


def _merged(what: str, options: ViewOptions, folder: Path) -> Path:
    from lightning_memprof.analysis.run.fetch import local_run
    from lightning_memprof.analysis.run.load import load_run
    from lightning_memprof.analysis.timeline.clocks import align_clocks
    from lightning_memprof.analysis.timeline.merge import merge_traces
    from lightning_memprof.analysis.timeline.sources import run_sources

    with local_run(what) as local:
        run = load_run(local.path)
        clocks = align_clocks(run)
        out = folder / f"{run.root.name or 'run'}.json"
        merge_traces(run_sources(run, steps=options.steps, clocks=clocks), out)
    for problem in run.problems:
        print(f"{problem.piece}: {problem.message}; what of it can be read is on the timeline", flush=True)
    return out


def _unpacked_bytes(trace: Path) -> int:
    """Size of a trace's text; of gzip data what its last four bytes say, which is right below 4 GiB."""
    with trace.open("rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
        end = stream.seek(0, os.SEEK_END)
        if not packed or end < 4:
            return end
        stream.seek(-4, os.SEEK_END)
        return int.from_bytes(stream.read(4), "little")


@contextlib.contextmanager
def _served(trace: Path, options: ViewOptions) -> Iterator[Served]:
    if options.trace_processor is None:
        with serve_trace(trace, port=options.port) as served:
            yield served
        return
    with (
        _trace_processor(options.trace_processor, trace),
        serve_trace(trace, port=options.port or TRACE_PROCESSOR_PAGE_PORT, native=True) as served,
    ):
        yield served


@contextlib.contextmanager
def _trace_processor(program: Path, trace: Path) -> Iterator[None]:
    """Run a native trace processor on the whole trace; it is ended with the context.

    Raises:
        ConfigError: it cannot be started, or ends before it has loaded the trace.
    """
    if _answers():
        raise ConfigError(
            f"port {TRACE_PROCESSOR_PORT} is taken, and the page looks for the trace processor there; end what uses it"
        )
    command = [str(program.absolute()), "--httpd", "--http-port", str(TRACE_PROCESSOR_PORT), str(trace)]
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise ConfigError(
            f"--trace-processor {program}: {error.strerror}; name Perfetto's trace_processor_shell"
        ) from error
    try:
        deadline = time.monotonic() + _LOADING_SECONDS
        while not _answers():
            if process.poll() is not None:
                raise ConfigError(
                    f"--trace-processor {program}: ended with {process.returncode} before it had loaded {trace.name}; "
                    "see what it wrote above"
                )
            if time.monotonic() > deadline:
                raise ReportError(f"{program} did not load {trace.name} in {_LOADING_SECONDS} s; open it with --steps")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers() -> bool:
    import socket

    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", TRACE_PROCESSOR_PORT), timeout=1):
        return True
    return False
