from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

import leaks
from lightning_memprof.capture.sources.module_calls import module_calls


@pytest.fixture
def before(tmp_path):
    return leaks.state(tmp_path)


def found(before, tmp_path):
    return leaks.leftovers(before, tmp_path, patience=0)


def test_nothing_changed_is_no_leak(before, tmp_path):
    assert found(before, tmp_path) == []


def forgotten(*_):
    pass


@contextmanager
def running_thread():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def signal_handler():
    old = signal.signal(signal.SIGUSR1, forgotten)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, old)


@contextmanager
def module_hook():
    handle = torch.nn.modules.module.register_module_forward_pre_hook(forgotten)
    try:
        yield
    finally:
        handle.remove()


LEFT = {
    r"thread still running: forgotten \(Thread, .*Event\.wait.*": running_thread,
    r"signal handler changed: SIGUSR1.*forgotten.*": signal_handler,
    r"hook changed: sys\.excepthook.*": lambda: mock.patch.object(sys, "excepthook", forgotten),
    r"torch profiler still running": torch.autograd.profiler.profile,
    r"global hook still there: _global_forward_pre_hooks\[.*forgotten.*": module_hook,
    r"global hook still there: torch\.nn\.Module\._call_impl.*": lambda: module_calls(
        torch.nn.Identity(), forgotten, forgotten
    ),
    r".*saved-tensor hooks.*": lambda: torch.autograd.graph.saved_tensors_hooks(forgotten, forgotten),
}


@pytest.mark.slow
@pytest.mark.parametrize("line", LEFT)
def test_what_is_left_behind_is_a_line_until_it_is_taken_back(before, tmp_path, line):
    with LEFT[line]():
        (told,) = found(before, tmp_path)
        assert re.fullmatch(line, told)
    assert found(before, tmp_path) == []


@pytest.mark.slow
def test_thread_that_is_already_ending_is_waited_for(before, tmp_path):
    thread = threading.Timer(0.2, lambda: None)
    thread.start()
    assert leaks.leftovers(before, tmp_path, patience=5) == []


@pytest.mark.slow
def test_child_process_and_zombie(before, tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "print(); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        # It has begun: before, its command line is this process's.
        child.stdout.readline()
        (line,) = found(before, tmp_path)
        assert line.startswith(f"child process still there: {child.pid}")
        assert "input()" in line
        assert child.stdin is not None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        (line,) = found(before, tmp_path)
        assert "never waited for" in line
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert found(before, tmp_path) == []


@pytest.mark.slow
def test_a_daemon_of_open_mpi_is_no_leak_of_ours(before, tmp_path):
    daemon = tmp_path / "orted"
    daemon.write_text(f"#!{sys.executable}\ninput()\n")
    daemon.chmod(0o755)
    with subprocess.Popen([daemon, "--hnp", "--set-sid"], stdin=subprocess.PIPE) as child:
        try:
            assert found(before, tmp_path) == []
        finally:
            child.kill()


@pytest.mark.slow
def test_environment_names_the_variable_and_not_its_value(before, tmp_path, monkeypatch):
    monkeypatch.setenv("FORGOTTEN", "a secret")
    monkeypatch.delenv("PATH")
    assert found(before, tmp_path) == ["environment variable set: FORGOTTEN", "environment variable removed: PATH"]


@pytest.mark.slow
def test_working_directory(before, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (line,) = found(before, tmp_path)
    assert line.startswith("working directory changed: ")
    assert line.endswith(f" -> {tmp_path}")


@pytest.mark.slow
def test_temporary_and_unfinished_files(before, tmp_path):
    partial = tmp_path / "deep" / "trace.json.partial"
    partial.parent.mkdir()
    partial.touch()
    with tempfile.NamedTemporaryFile(prefix="lightning_memprof") as file:
        lines = found(before, tmp_path)
        assert sorted(lines) == sorted(f"file still there: {path}" for path in (partial, file.name))
    partial.unlink()


def test_restore_puts_back_what_the_next_test_would_inherit(before, tmp_path):
    os.environ["FORGOTTEN"] = "1"
    os.chdir(tmp_path)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    sys.excepthook = lambda *_: None
    gc.disable()
    assert "automatic garbage collection still disabled" in found(before, tmp_path)
    leaks.restore(before)
    assert found(before, tmp_path) == []


LEAKING = """
import os, sys, threading, pytest

def test_leaks():
    os.environ["FORGOTTEN"] = "1"
    threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()

def test_next():
    assert "FORGOTTEN" not in os.environ
    assert "torch" not in sys.modules

@pytest.fixture
def borrowed(monkeypatch, tmp_path):
    monkeypatch.setenv("BORROWED", "1")
    monkeypatch.chdir(tmp_path)

def test_fixtures_undo_first(borrowed):
    pass
"""


@pytest.mark.slow
def test_the_fixture_fails_the_leaking_test_by_name(tmp_path, run_python):
    here = Path(__file__).resolve().parents[1]
    shutil.copy(here / "conftest.py", tmp_path)
    for name in ("leaks.py", "warm_python.py"):
        shutil.copy(here / "support" / name, tmp_path)
    (tmp_path / "test_leaking.py").write_text(LEAKING)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\naddopts = --import-mode=importlib\n")
    result = run_python("-m", "pytest", "-p", "no:cacheprovider", str(tmp_path))
    assert result.returncode == 1
    assert "test_leaking.py::test_leaks left behind:" in result.stdout
    assert "  - thread still running: forgotten" in result.stdout
    assert "  - environment variable set: FORGOTTEN" in result.stdout
    # Two complaints: the thread outlives the module too.
    assert "3 passed, 2 errors" in result.stdout
