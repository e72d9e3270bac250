"""A program that is forked finds what it would find if Python had just been started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from warm_python import Popen, WarmPython

pytestmark = pytest.mark.slow

# Settings of the interpreter, of the process and of the module that runs.
PROGRAM = """
    import json, multiprocessing.process, os, signal, sys, tempfile, threading
    main = sys.modules["__main__"]
    print(json.dumps({
        "name": __name__, "file": os.path.abspath(__file__), "package": __package__ or "",
        "spec": getattr(__spec__, "name", None),
        "main": main.__dict__ is globals(), "argv": sys.argv, "path": sys.path, "cwd": os.getcwd(),
        "environment": dict(os.environ), "parent": os.getppid(), "is_session": os.getsid(0) == os.getpid(),
        "group": os.getpgid(0) == os.getpid(), "input": sys.stdin.read(), "tmp": tempfile.gettempdir(),
        "threads": threading.active_count(), "bytecode": sys.dont_write_bytecode, "umask": os.umask(0),
        "signals": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
        "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
        "files": sorted(number for number in range(3, 500) if os.path.exists(f"/proc/self/fd/{number}")),
        "thread": threading.current_thread() is threading.main_thread(),
        "spawned": multiprocessing.process.ORIGINAL_DIR,
    }))
    print("told", file=sys.stderr)
    sys.exit(7)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    for path in (tmp_path / "program.py", tmp_path / "package/__init__.py", tmp_path / "package/__main__.py"):
        path.write_text(dedent(PROGRAM) if path.name != "__init__.py" else "")
    return tmp_path


def told(start: Any, arguments: Sequence[str], place: Path, **options: Any) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": "/first:/second", "HERE": "ü", "PYTHONDONTWRITEBYTECODE": "1"}
    process = start(
        [sys.executable, *arguments], cwd=place, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip
    out, err = process.communicate("asked", timeout=120)
    assert (process.returncode, err) == (7, "told\n")
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")
@pytest.mark.parametrize("arguments", [("program.py", "--one", "two words"), ("-m", "package", "x")])
@pytest.mark.parametrize("options", [{}, {"start_new_session": True}])
def test_it_finds_what_a_started_one_finds(
    arguments: Sequence[str], options: dict[str, Any], place: Path, warm_python: object
) -> None:
    warm = told(Popen, arguments, place, **options)
    cold = told(subprocess.Popen, arguments, place, **options)
    assert warm["parent"] == os.getpid()
    assert warm == cold


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")
def test_it_is_a_child_that_can_be_stopped_and_killed(tmp_path: Path, warm_python: object) -> None:
    (tmp_path / "waits.py").write_text("import sys, time\nprint('torch' in sys.modules, flush=True)\ntime.sleep(600)\n")
    with Popen([sys.executable, "waits.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        process.send_signal(signal.SIGSTOP)
        assert os.waitid(os.P_PID, process.pid, os.WSTOPPED) is not None
        process.kill()
    assert process.returncode == -9


def test_its_end_does_not_wait_for_a_worker_that_a_test_has_left() -> None:
    with WarmPython(os.environ):
        worker = os.fork()
        if worker == 0:
            time.sleep(60)
            os._exit(0)
    assert os.waitpid(worker, os.WNOHANG) == (0, 0)
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
