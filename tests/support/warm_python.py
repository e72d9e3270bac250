"""Programs in processes of their own, forked from one that has imported Lightning: that takes seconds each time."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

__all__ = ["WarmPython", "share", "shared"]

# Read when torch is loaded: whoever comes later is too late.
EARLY = {"OMP_NUM_THREADS": "1"}
WARM = ("lightning.pytorch.cli", "lightning.pytorch.demos.boring_classes", "torch.distributed.fsdp", "torch.profiler")


class WarmPython(AbstractContextManager["WarmPython"]):
    """A process that imports, at the first request, what every training imports, and waits for programs.

    A program finds arguments, environment, working directory and ``sys.path`` as if Python had just been started; only
    modules are loaded that it may not have asked for.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            env={**environment, **EARLY},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __exit__(self, *args: object) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()

    def start(
        self, arguments: Sequence[str], directory: Path, environment: Mapping[str, str], out: Path, err: Path
    ) -> int:
        """Start a program, a file and its arguments; give its process's number. It prints to the files given."""
        asked = {
            "arguments": list(arguments), "directory": str(directory), "environment": dict(environment),
            "out": str(out), "err": str(err),
        }  # fmt: skip
        return int(self._ask(asked))

    def wait(self, pid: int, seconds: float) -> int | None:
        """Give the exit code of a program as ``subprocess`` does; None where it hangs and was killed."""
        found = self._ask({"wait": pid, "seconds": seconds})
        return None if found is None else int(found)

    def run(
        self, arguments: Sequence[str], directory: Path, environment: Mapping[str, str], seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, as ``subprocess.run`` does.

        Raises:
            subprocess.TimeoutExpired: it took longer, and was killed.

        """
        with tempfile.TemporaryDirectory() as created:
            out, err = Path(created) / "out", Path(created) / "err"
            code = self.wait(self.start(arguments, directory, environment, out, err), seconds)
            if code is None:
                raise subprocess.TimeoutExpired(list(arguments), seconds)
            return subprocess.CompletedProcess(list(arguments), code, out.read_text(), err.read_text())

    def _ask(self, what: dict[str, Any]) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(what) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())


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
        with WarmPython(environment) as python:
            yield python


def serve() -> dict[str, Any] | None:
    """Answer requests until there are no more; in a forked process, return what it is to run."""
    while line := sys.stdin.readline():
        for name in WARM:
            importlib.import_module(name)
        asked: dict[str, Any] = json.loads(line)
        if "wait" in asked:
            told = _waited(asked["wait"], asked["seconds"])
        elif (told := os.fork()) == 0:
            return asked
        sys.stdout.write(f"{json.dumps(told)}\n")
        sys.stdout.flush()
    return None


def _waited(pid: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return None


def become(asked: dict[str, Any]) -> None:
    """Make this process what Python is when it starts with these arguments."""
    os.chdir(asked["directory"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    for number, name in enumerate((os.devnull, asked["out"], asked["err"])):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        opened = os.open(name, flags, 0o666)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = asked["arguments"]
    first = os.path.dirname(os.path.abspath(sys.argv[0]))  # noqa: PTH100, PTH120 as Python does
    before = [path for path in asked["environment"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:1] = [first, *before]
    tempfile.tempdir = None


if __name__ == "__main__":
    work = serve()
    if work is not None:
        become(work)
        # What ends it, an exception or `sys.exit`, ends this process as it would end the program's own.
        runpy.run_path(work["arguments"][0], run_name="__main__")
