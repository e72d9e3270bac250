"""TensorBoard on a log directory in which all its tabs find a run, or on traces, until Ctrl-C."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings import shown_path, trace_directory
from lightning_memprof.analysis.findings.model import log_directory
from lightning_memprof.analysis.run.fetch import local_run
from lightning_memprof.analysis.run.load import load_run
from lightning_memprof.analysis.run.locate import has_several_runs
from lightning_memprof.analysis.run.targets import find_targets
from lightning_memprof.cli.signals import ended_by_sigterm
from lightning_memprof.errors import ConfigError, ReportError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["tensorboard", "tensorboard_directory"]

# What its profiler tab looks for.
_NAMED: Final = re.compile(r".*\.pt\.trace\.json(\.gz)?")
_ADDRESS: Final = re.compile(r"https?://\S+")
# What its plug-ins log of their work.
_INFORMATION: Final = re.compile(r"I[0-9]{4} ")
_SECONDS_TO_END: Final = 5
# By the tab's name in the page's address, what is there of a run.
_LOOPBACK: Final = "127.0.0.1"
_TABS: Final = (
    ("memprof", "the report of each run, and two beside each other"),
    ("pytorch_profiler", "the traces"),
    ("timeseries", "the run's curves, and each rank's"),
    ("custom_scalars", "the same as one dashboard"),
)


def tensorboard(what: Sequence[str], *, port: int = 0, browser: bool = True) -> int:
    """Start TensorBoard and wait until it ends, or until Ctrl-C.

    Args:
        what: one run, or traces and directories of them.
        port: its port; 0 takes a free one.
        browser: whether to open it there.

    Returns:
        The exit code: TensorBoard's own, 0 after Ctrl-C.

    Raises:
        ArtifactError: there is neither a run nor a trace.
        ConfigError: TensorBoard is not installed.
        ReportError: there is no trace for it.

    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("--tensorboard: TensorBoard is not installed; pip install tensorboard torch-tb-profiler")
    with ended_by_sigterm(), _here(what) as paths:
        directory = tensorboard_directory(paths)
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", os.fspath(directory)]
        command += ["--host", _LOOPBACK, "--port", str(port)]
        print(f"tensorboard --logdir {shlex.quote(shown_path(directory))}", flush=True)
        # In a session of its own, whose processes end together: the profiler tab reads each run in a process that
        # outlives TensorBoard.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            return _follow(process, browser=browser)
        except KeyboardInterrupt:
            return 0
        finally:
            _end(process)


def tensorboard_directory(paths: Sequence[Path]) -> Path:
    """Return the directory in which TensorBoard finds what paths mean: a run's curves, its report and its traces.

    A directory with several runs is one. Where the user sent a run's traces elsewhere, that place: nothing else of
    TensorBoard's shows them.

    Raises:
        ArtifactError: there is neither a run nor a trace.
        ReportError: there is no trace for it.

    """
    if len(paths) == 1 and paths[0].is_dir() and has_several_runs(paths[0]):
        return paths[0].absolute()
    targets = find_targets(paths)
    if targets.run is not None:
        run = load_run(targets.run)
        traces = [
            artifact.file for artifact in run.artifacts if artifact.type == "trace" and artifact.state == "present"
        ]
        return trace_directory(run, traces[0]) if traces else log_directory(run)
    named = [path for path in targets.traces if _NAMED.fullmatch(path.name)]
    if not named:
        first = next(iter((*targets.traces, *targets.snapshots)))
        raise ReportError(f"{first}: TensorBoard reads files named *.pt.trace.json or *.pt.trace.json.gz; rename it")
    return Path(os.path.commonpath([path.absolute().parent for path in named]))


@contextlib.contextmanager
def _here(what: Sequence[str]) -> Iterator[list[Path]]:
    if len(what) > 1:
        yield [Path(name) for name in what]
    else:
        with local_run(what[0]) as local:
            yield [local.path]


def _follow(process: subprocess.Popen[str], *, browser: bool) -> int:
    before: list[str] | None = []
    for line in process.stdout or ():
        address = _ADDRESS.search(line) if "Press CTRL+C" in line else None
        if address is None and before is not None:
            before.append(line)
        elif not _INFORMATION.match(line):
            print(line, end="", flush=True)
        if address is not None:
            before = None
            for tab, shown in _TABS:
                print(f"  {address[0].rstrip('/')}/#{tab:<17} {shown}", flush=True)
            if browser and not webbrowser.open(address[0]):
                print("No browser could be started here; open the address yourself.", flush=True)
    # Why it did not come so far.
    print(*(before or ()), sep="", end="", flush=True)
    return process.wait()


def _end(process: subprocess.Popen[str]) -> None:
    """End TensorBoard and every process that it started; once told to, they may tidy up for some seconds."""
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
