"""Programs in processes of their own, forked from one that has imported Lightning: that takes seconds each time."""

from __future__ import annotations

import ctypes
import importlib
import inspect
import json
import multiprocessing.process
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

# Read when torch is loaded: whoever comes later is too late.
EARLY = {"OMP_NUM_THREADS": "1"}
WARM = (
    "lightning.pytorch.cli", "lightning.pytorch.demos.boring_classes", "torch.distributed.fsdp", "torch.profiler",
    # The profiler imports it late.
    "torch._inductor.config",
)  # fmt: skip
LONGEST = 1 << 20
# What could change what a helper process imports or records.
OURS = ("PYTHONPATH", "LIGHTNING_MEMPROF", "PL_TRAINER_PROFILER")
# prctl(2): a process whose parent ends becomes a child of this one.
SET_CHILD_SUBREAPER = 36
_COLD = subprocess.Popen


def without_ours(*more: str) -> dict[str, str]:
    """Return this process's variables without those of this package, and without ``more``."""
    return {name: value for name, value in os.environ.items() if name not in (*OURS, *more)}


class WarmPython(AbstractContextManager["WarmPython"]):
    """A process that imports, at the first request, what every training imports, and forks programs.

    A program finds arguments, environment, working directory and ``sys.path`` as if Python had just been started; only
    modules are loaded that it may not have asked for. Its parent is the process that asked for it.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._asks, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = _COLD(
                [sys.executable, __file__, str(theirs.fileno())],
                env={**environment, **EARLY},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def __exit__(self, *args: object) -> None:
        self._asks.close()
        # A worker that a failed test has left has the socket too: the server would wait for its end.
        self._server.kill()
        self._server.wait()

    def fork(self, asked: Mapping[str, Any], files: Sequence[int]) -> int:
        """Start a program with these standard files; give its process's number."""
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._asks, [json.dumps(asked).encode()], files)
                return int(self._asks.recv(LONGEST))
            finally:
                prctl(SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def run(
        self, arguments: Sequence[str], directory: Path, environment: Mapping[str, str], seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, as ``subprocess.run`` does.

        Raises:
            subprocess.TimeoutExpired: it took longer, and was killed.

        """
        command, pipe = [sys.executable, *arguments], subprocess.PIPE
        with Popen(
            command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
        ) as process:
            try:
                out, err = process.communicate(timeout=seconds)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)


_shared: list[WarmPython] = []


@contextmanager
def share(environment: Mapping[str, str]) -> Iterator[WarmPython]:
    """Start the process that all tests of this one share."""
    with WarmPython(environment) as python:
        _shared.append(python)
        yield python
        _shared.clear()


@contextmanager
def shared(environment: Mapping[str, str]) -> Iterator[WarmPython]:
    """Give the shared process; outside of pytest, one for this context."""
    if _shared:
        yield _shared[0]
    else:
        with share(environment) as python:
            yield python


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen`` whose Python programs, files or ``-m`` modules, are forked from the shared process.

    Other commands, and all where the system has no adopted children, are started as ever.
    """

    def _execute_child(self, *given: Any) -> None:
        named = inspect.signature(_COLD._execute_child).bind(self, *given).arguments  # type: ignore[attr-defined]
        args, unusual = named["args"], ("executable", "preexec_fn", "pass_fds", "shell")
        if sys.platform != "linux" or any(named[name] for name in unusual) or not is_program(args):
            super()._execute_child(*given)  # type: ignore[misc]  # it has no public name
            return
        environment = os.environ if named["env"] is None else named["env"]
        asked = {
            "arguments": [os.fspath(argument) for argument in args[1:]],
            "directory": os.path.abspath(named["cwd"] or ""),  # noqa: PTH100 it need not exist any more
            "environment": dict(environment),
            "is_session": named["start_new_session"],
        }
        pipes = [named[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        files = [own if file == -1 else file for own, file in enumerate((pipes[0], pipes[3], pipes[5]))]
        self.pid = _shared[0].fork(asked, files)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def is_program(args: Any) -> bool:
    """Whether a command is this Python with a file or a module."""
    return not isinstance(args, str) and args[0] == sys.executable and (args[1] == "-m" or args[1][0] != "-")


def serve(asks: socket.socket) -> dict[str, Any] | None:
    """Answer requests until there are no more; in a forked process, return what it is to run."""
    while True:
        message, files, _, _ = socket.recv_fds(asks, LONGEST, 3)
        if not message:
            return None
        for name in WARM:
            importlib.import_module(name)
        read, write = os.pipe()
        asked: dict[str, Any] = json.loads(message)
        if (between := os.fork()) == 0:
            _become_adopted()
            if asked["is_session"]:
                os.setsid()
            # After it can be ended by its group, as a process that subprocess has started.
            os.write(write, str(os.getpid()).encode())
            asks.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
        else:
            os.waitpid(between, 0)
            asks.send(os.read(read, LONGEST))
        for file in (read, write, *files):
            os.close(file)
        if between == 0:
            return asked


def _become_adopted() -> None:
    """Fork once more and end: the fork is adopted by the process that asked for it."""
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.001)


def become(asked: dict[str, Any]) -> None:
    """Make this process what Python is when it starts with these arguments, and run them."""
    os.chdir(asked["directory"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.dont_write_bytecode = bool(asked["environment"].get("PYTHONDONTWRITEBYTECODE"))
    tempfile.tempdir = None
    # Where a spawned process looks for the program.
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]  # noqa: PTH109
    arguments: list[str] = asked["arguments"]
    is_module = arguments[0] == "-m"
    sys.argv = arguments[1:] if is_module else arguments
    first = os.getcwd() if is_module else os.path.dirname(os.path.abspath(arguments[0]))  # noqa: PTH100, PTH109, PTH120
    before = [path for path in asked["environment"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:1] = [first, *before]
    # What ends it, an exception or `sys.exit`, ends this process as it would end the program's own.
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    work = serve(socket.socket(fileno=int(sys.argv[1])))
    if work is not None:
        become(work)
