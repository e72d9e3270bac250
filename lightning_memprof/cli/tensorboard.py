"""TensorBoard on the directory of a run or of traces, until Ctrl-C."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings import shown_path, trace_directory
from lightning_memprof.analysis.findings.model import log_directory
from lightning_memprof.analysis.run import load_run
from lightning_memprof.analysis.targets import find_targets
from lightning_memprof.cli.signals import ended_by_sigterm
from lightning_memprof.errors import ConfigError, ReportError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["tensorboard", "tensorboard_directory"]

# What its profiler tab looks for.
_NAMED: Final = re.compile(r".*\.pt\.trace\.json(\.gz)?")
_ADDRESS: Final = re.compile(r"https?://\S+")
_SECONDS_TO_END: Final = 5


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
    directory = tensorboard_directory([Path(one) for one in what])
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", os.fspath(directory), "--port", str(port)]
    print(f"tensorboard --logdir {shlex.quote(shown_path(directory))}", flush=True)
    with ended_by_sigterm():
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            return _follow(process, browser=browser)
        except KeyboardInterrupt:
            return 0
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_SECONDS_TO_END)
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def tensorboard_directory(paths: Sequence[Path]) -> Path:
    """Return the directory in which TensorBoard finds the traces that paths mean.

    Raises:
        ArtifactError: there is neither a run nor a trace.
        ReportError: there is no trace for it.

    """
    targets = find_targets(paths)
    if targets.run is not None:
        run = load_run(targets.run)
        traces = [one.file for one in run.artifacts if one.type == "trace" and one.state == "present"]
        return trace_directory(run, traces[0]) if traces else log_directory(run)
    named = [path for path in targets.traces if _NAMED.fullmatch(path.name)]
    if not named:
        first = next(iter((*targets.traces, *targets.snapshots)))
        raise ReportError(f"{first}: TensorBoard reads files named *.pt.trace.json or *.pt.trace.json.gz; rename it")
    return Path(os.path.commonpath([path.absolute().parent for path in named]))


def _follow(process: subprocess.Popen[str], *, browser: bool) -> int:
    for line in process.stdout or ():
        print(line, end="", flush=True)
        if browser and (address := _ADDRESS.search(line)) is not None and "Press CTRL+C" in line:
            webbrowser.open(address[0])
    return process.wait()
