"""``lightning-memprof view``: a run, or traces, in the Perfetto UI on this machine, or in TensorBoard."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jsonargparse import ArgumentParser, Namespace

from lightning_memprof.artifacts.own_program import uninterrupted
from lightning_memprof.cli.command import (
    Command,
    named_or_newest,
    open_in_browser,
    opened_run,
    parse_numbers,
    say,
    sigterm_as_ctrl_c,
)
from lightning_memprof.errors import ConfigError, ReportError
from lightning_memprof.units import quoted

if TYPE_CHECKING:
    from lightning_memprof.read.run.targets import Targets
    from lightning_memprof.report.perfetto import Served

# A browser holds a trace as one string; beyond this size the page fails without a message.
_LARGE_BYTES: Final = 400_000_000
# A native trace processor needs about ten seconds for a gigabyte.
_LOADING_SECONDS: Final = 600

_LOOPBACK: Final = "127.0.0.1"
# Files that TensorBoard's profiler tab finds.
_TRACE_NAME: Final = re.compile(r".*\.pt\.trace\.json(\.gz)?")
_ADDRESS: Final = re.compile(r"https?://\S+")
# INFO lines of TensorBoard's plug-ins.
_INFO_LINE: Final = re.compile(r"I[0-9]{4} ")
_SECONDS_TO_END: Final = 5
# By the tab's name in the address of the page, what it shows of a run.
_TABS: Final = (
    ("memprof", "the report of each run, and two side by side"),
    ("pytorch_profiler", "the traces"),
    ("timeseries", "your metrics; with OutputOptions(curves=True) also curves of the run"),
    ("custom_scalars", "the curves of the per-rank event files as one dashboard"),
)


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "TARGET",
        nargs="*",
        help="a run as for show, or trace files and folders of them (default: the newest run in this directory)",
    )
    parser.add_argument("--steps", metavar="A-B", help="open only these steps, as in 2-3 or 2,5-7")
    parser.add_argument("--trace-processor", metavar="PATH", help="start this trace_processor_shell, for large traces")
    parser.add_argument(
        "--host", metavar="NAME", default=_LOOPBACK, help="serve at this address or host name (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, metavar="N", default=0, help="port of the page (default: a free one)")
    parser.add_argument("--no-browser", action="store_true", help="only serve the page and print its address")
    parser.add_argument("--tensorboard", action="store_true", help="start TensorBoard on the log directory instead")


def _execute(options: Namespace) -> int:
    """Serve the timeline of a run, or traces, until Ctrl-C; traces are plain or gzip-compressed, several are merged."""
    if not 0 <= options.port < 1 << 16:
        raise ConfigError(f"--port {options.port}: not a port number; choose a free one from 1024 to 65535")
    if options.tensorboard:
        if options.steps is not None or options.trace_processor is not None:
            raise ConfigError("--tensorboard: reads whole traces; omit --steps and --trace-processor")
        return _tensorboard(options)
    steps = None if options.steps is None else parse_numbers("--steps", options.steps)
    processor = None if options.trace_processor is None else Path(options.trace_processor)
    with sigterm_as_ctrl_c(), tempfile.TemporaryDirectory(prefix="lightning-memprof-") as folder:
        trace = _prepare(named_or_newest(options.TARGET), steps, Path(folder))
        if processor is None and (size := _uncompressed_bytes(trace)) > _LARGE_BYTES:
            say(
                f"{trace.name} has {size / 1e6:.0f} MB: a browser may fail to open it. "
                "Open a few steps with --steps 2-3, or the whole trace with --trace-processor PATH."
            )
        with contextlib.suppress(KeyboardInterrupt), _served(trace, processor, options) as served:
            say(f"Serving {trace.name} at {served.url}")
            if served.is_public:
                say("Anyone who can reach this machine can open the page: it has no password.")
            print("Press Ctrl-C to stop.", flush=True)
            if not options.no_browser:
                open_in_browser(served.url)
            while True:
                time.sleep(3600)
    return 0


def _prepare(names: Sequence[str], steps: Sequence[int] | None, folder: Path) -> Path:
    """Return one trace file to open; a new one is written to ``folder``."""
    from lightning_memprof.artifacts.remote import is_url
    from lightning_memprof.read.run.targets import find_targets

    paths = [Path(name) for name in names]
    targets = None if len(names) == 1 and (is_url(names[0]) or paths[0].is_file()) else find_targets(paths)
    if targets is None and paths[0].is_file():
        trace = _trace_file(paths[0], steps, folder)
    elif targets is not None and targets.run is None:
        trace = _merged_files(targets, steps, folder)
    else:
        trace = _merged_run(names[0], steps, folder)
    return trace


def _trace_file(path: Path, steps: Sequence[int] | None, folder: Path) -> Path:
    from lightning_memprof.read.run.targets import file_kind
    from lightning_memprof.read.trace.events import read_trace

    if file_kind(path) == "snapshot":
        raise ReportError(f"{path}: is a snapshot, which has no timeline; open it with lightning-memprof report")
    trace = path.absolute()
    # Refuses other files here: the browser would only report that it cannot open them.
    next(iter(read_trace(trace).batches()), None)
    return trace if steps is None else _cut(trace, steps, folder)


def _cut(trace: Path, steps: Sequence[int], folder: Path) -> Path:
    from lightning_memprof.timeline.merge import cut

    # Uncompressed: the page reads it over loopback.
    part = folder / f"{trace.name.removesuffix('.gz').removesuffix('.json')}.steps.json"
    cut(trace, steps, part)
    return part


def _merged_files(targets: Targets, steps: Sequence[int] | None, folder: Path) -> Path:
    """Merge trace files into one file."""
    from lightning_memprof.timeline.clocks import align_traces
    from lightning_memprof.timeline.merge import merge_traces
    from lightning_memprof.timeline.sources import file_sources

    traces = list(targets.traces)
    if not traces:
        raise ReportError(f"{targets.snapshots[0]}: is not a trace; open snapshots with lightning-memprof report")
    if len(traces) == 1:
        return _trace_file(traces[0], steps, folder)
    clocks = align_traces(traces)
    offsets_ns = clocks.of_files(traces)
    if steps is not None:
        places = [folder / str(index) for index in range(len(traces))]
        for place in places:
            place.mkdir()
        traces = [_cut(trace, steps, place) for trace, place in zip(traces, places, strict=True)]
    out = folder / "traces.json"
    merged = merge_traces(file_sources(traces, offsets_ns), out)
    for note in (*clocks.notes("traces"), *merged.notes):
        say(note)
    return out


def _merged_run(target: str, steps: Sequence[int] | None, folder: Path) -> Path:
    from lightning_memprof.timeline.clocks import align_clocks
    from lightning_memprof.timeline.merge import merge_traces
    from lightning_memprof.timeline.sources import run_sources

    with opened_run(target) as run:
        clocks = align_clocks(run)
        out = folder / f"{run.root.name or 'run'}.json"
        merge_traces(run_sources(run, steps=steps, clocks=clocks), out)
    for problem in run.problems:
        say(f"{problem.piece}: {problem.message}; the readable part is on the timeline")
    return out


def _uncompressed_bytes(trace: Path) -> int:
    """Return the uncompressed size of a trace; for gzip data from its last four bytes, exact below 4 GiB."""
    with trace.open("rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
        end = stream.seek(0, os.SEEK_END)
        if not packed or end < 4:
            return end
        stream.seek(-4, os.SEEK_END)
        return int.from_bytes(stream.read(4), "little")


@contextlib.contextmanager
def _served(trace: Path, processor: Path | None, options: Namespace) -> Iterator[Served]:
    from lightning_memprof.report.perfetto import TRACE_PROCESSOR_PAGE_PORT, serve_trace

    if processor is None:
        with serve_trace(trace, host=options.host, port=options.port) as served:
            yield served
        return
    with (
        _trace_processor(processor, trace),
        serve_trace(trace, host=options.host, port=options.port or TRACE_PROCESSOR_PAGE_PORT, native=True) as served,
    ):
        yield served


@contextlib.contextmanager
def _trace_processor(program: Path, trace: Path) -> Iterator[None]:
    """Run a native trace processor on the whole trace while the context is open.

    Raises:
        ConfigError: it cannot be started, or ends before it has loaded the trace.
    """
    from lightning_memprof.report.perfetto import TRACE_PROCESSOR_PORT as PORT

    if _answers(PORT):
        raise ConfigError(
            f"port {PORT} is taken, and the page expects the trace processor there; stop the other program"
        )
    command = [str(program.absolute()), "--httpd", "--http-port", str(PORT), str(trace)]
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise ConfigError(
            f"--trace-processor {program}: {error.strerror}; name Perfetto's trace_processor_shell"
        ) from error
    try:
        deadline = time.monotonic() + _LOADING_SECONDS
        while not _answers(PORT):
            if process.poll() is not None:
                raise ConfigError(
                    f"--trace-processor {program}: ended with {process.returncode} before it had loaded {trace.name}; "
                    "see its output above"
                )
            if time.monotonic() > deadline:
                raise ReportError(
                    f"{program} did not load {trace.name} in {_LOADING_SECONDS} s; select steps with --steps"
                )
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    import socket

    with contextlib.suppress(OSError), socket.create_connection((_LOOPBACK, port), timeout=1):
        return True
    return False


def _tensorboard(options: Namespace) -> int:
    """Start TensorBoard on one run, or on traces, and wait until it ends or until Ctrl-C; return its exit code.

    Raises:
        ArtifactError: there is neither a run nor a trace.
        ConfigError: TensorBoard is not installed.
        ReportError: TensorBoard cannot show any of the files.
    """
    from lightning_memprof.read.run.locate import shown_path

    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("--tensorboard: TensorBoard is not installed; pip install tensorboard torch-tb-profiler")
    with sigterm_as_ctrl_c(), _local(options.TARGET or ["."]) as paths:
        directory = tensorboard_directory(paths)
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", os.fspath(directory)]
        command += ["--host", options.host, "--port", str(options.port)]
        say(f"tensorboard --logdir {quoted(shown_path(directory))}")
        # A new session, to end all its processes together: the profiler tab reads each run in a process that outlives
        # TensorBoard.
        process: subprocess.Popen[str] | None = None
        try:
            with uninterrupted():
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            return _follow(process, browser=not options.no_browser)
        except KeyboardInterrupt:
            return 0
        finally:
            if process is not None:
                _end(process)


def tensorboard_directory(paths: Sequence[Path]) -> Path:
    """Return the directory in which TensorBoard finds the curves, the report and the traces of a run.

    A directory with several runs is returned unchanged. Where the traces of a run have a directory of their own, that
    one: no other tab of TensorBoard shows them.

    Raises:
        ArtifactError: there is neither a run nor a trace.
        ReportError: TensorBoard cannot show any of the files.
    """
    from lightning_memprof.read.run.load import load_run
    from lightning_memprof.read.run.locate import has_several_runs, log_directory, trace_directory
    from lightning_memprof.read.run.targets import find_targets

    if len(paths) == 1 and paths[0].is_dir() and has_several_runs(paths[0]):
        return paths[0].absolute()
    targets = find_targets(paths)
    if targets.run is not None:
        run = load_run(targets.run)
        traces = run.files("trace")
        return trace_directory(run, traces[0].file) if traces else log_directory(run)
    named = [path for path in targets.traces if _TRACE_NAME.fullmatch(path.name)]
    if not named:
        first = next(iter((*targets.traces, *targets.snapshots)))
        raise ReportError(f"{first}: TensorBoard reads files named *.pt.trace.json or *.pt.trace.json.gz; rename it")
    return Path(os.path.commonpath([path.absolute().parent for path in named]))


@contextlib.contextmanager
def _local(names: Sequence[str]) -> Iterator[list[Path]]:
    from lightning_memprof.read.run.fetch import local_run

    if len(names) > 1:
        yield [Path(name) for name in names]
    else:
        with local_run(names[0]) as local:
            yield [local.path]


def _follow(process: subprocess.Popen[str], *, browser: bool) -> int:
    before: list[str] | None = []
    for line in process.stdout or ():
        address = _ADDRESS.search(line) if "Press CTRL+C" in line else None
        if address is None and before is not None:
            before.append(line)
        elif not _INFO_LINE.match(line):
            print(line, end="", flush=True)
        if address is not None:
            before = None
            for tab, shown in _TABS:
                print(f"  {address[0].rstrip('/')}/#{tab:<17} {shown}", flush=True)
            if browser:
                open_in_browser(address[0])
    # TensorBoard ended before it served a page: its output has the reason.
    print(*(before or ()), sep="", end="", flush=True)
    return process.wait()


def _end(process: subprocess.Popen[str]) -> None:
    """End TensorBoard and its processes: SIGTERM, and SIGKILL after some seconds."""
    try:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(_SECONDS_TO_END)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


COMMAND: Final = Command(
    summary="open a run's timeline, or traces, in a browser",
    description="Open the timeline of a run, or traces, in the Perfetto UI; it works offline.",
    add_options=_add_options,
    execute=_execute,
)
