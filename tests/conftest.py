from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

import leaks
from warm_python import Popen, WarmPython, share, without_ours

if TYPE_CHECKING:
    from training import Package

# Read when torch is loaded. Threads that are out of work sleep: by default they spin, on cores that other tests need,
# and on a busy machine some trainings take ten times the CPU.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

INTEGRATION = Path(__file__).with_name("integration")

# An example that waits for a busy machine is no failure; the timeout of a test ends what hangs.
hypothesis.settings.register_profile("busy machines", deadline=None)
hypothesis.settings.load_profile("busy machines")

# A job in the background starts with SIGINT ignored, one under nohup with SIGHUP; so would every process of a test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="session")
def own_temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give this process and its children a directory for temporary files in which no other test process writes."""
    directory = str(tmp_path_factory.mktemp("tmp", numbered=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", directory)
        patch.setattr(tempfile, "tempdir", directory)
        yield


FROZEN = gc.get_freeze_count


def _freeze() -> None:
    """Exempt what is loaded, millions of objects, from collections and from searches for tensors and holders."""
    gc.collect()
    gc.freeze()
    own = FROZEN()
    # A search thaws what a program has frozen; this is not the program's.
    pytest.MonkeyPatch().setattr(gc, "get_freeze_count", lambda: max(FROZEN() - own, 0))


@pytest.fixture
def thawed() -> Iterator[None]:
    """Show the garbage collector all objects, for tests whose own module is the holder or that freeze objects."""
    gc.unfreeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", FROZEN)
        yield
    _freeze()


@pytest.fixture(autouse=True, scope="module")
def clean_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail, naming the culprit, if what a module's shared fixtures took is not given back."""
    _freeze()
    before = leaks.state()
    yield
    _report(before, None, request.node.nodeid)


@pytest.fixture(autouse=True)
def clean_test(request: pytest.FixtureRequest, clean_module: None) -> Iterator[None]:
    """Fail, naming the culprit, if the test leaves anything behind.

    It is set up before the test's other fixtures and torn down after them, so that what they undo is undone.
    """
    directory = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    before = leaks.state(directory)
    yield
    _report(before, directory, request.node.nodeid)


def _report(before: leaks.State, directory: Path | None, name: str) -> None:
    found = leaks.leftovers(before, directory)
    leaks.restore(before)
    if found:
        pytest.fail("\n  - ".join([f"{name} left behind:", *found]), pytrace=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A browser draws and stores in its own time, and other programs' pages do not say when they are done. What fails
    # twice is a defect; pytest's summary counts the second runs.
    for item in items:
        if item.get_closest_marker("browser") is not None:
            item.add_marker(pytest.mark.flaky(reruns=1))
        # One of Lightning's two packages is enough daily, but where both are the question.
        is_of_one = item.path.parent == INTEGRATION and item.path.stem != "test_both_packages"
        if is_of_one and "pytorch_lightning" in item.name:
            item.add_marker(pytest.mark.extended)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.accelerator.is_available():
            pytest.skip("no accelerator")


@pytest.fixture(scope="session")
def environment(own_temporary_files: None) -> dict[str, str]:
    """The variables for a helper process: this process's, less what could change what it imports or records."""
    return without_ours()


@pytest.fixture
def run_python(tmp_path: Path, environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run this Python with the given arguments in ``tmp_path``, where the installed package is the one to import."""

    def run(*arguments: str, timeout: float = 240, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture(autouse=True, scope="session")
def warm_python(environment: dict[str, str]) -> Iterator[WarmPython]:
    """A process that has imported Lightning, for the programs and ranks of all tests; it imports when first needed."""
    with share(environment) as found:
        yield found


@pytest.fixture
def run_program(
    tmp_path: Path, environment: dict[str, str], warm_python: WarmPython
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a file with the given arguments as ``run_python`` does, without the seconds that importing takes.

    For programs that train; what is said of Python's start or of what is imported wants ``run_python``.
    """

    def run(*arguments: str, timeout: float = 240, **variables: str) -> subprocess.CompletedProcess[str]:
        return warm_python.run(arguments, tmp_path, environment | variables, timeout)

    return run


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, warm_python: WarmPython) -> None:
    """Fork each Python program that the test, or the package in its process, starts: see ``run_program``."""
    monkeypatch.setattr(subprocess, "Popen", Popen)


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def package(request: pytest.FixtureRequest) -> Package:
    """Each of Lightning's two packages: for tests whose result depends on its types, enums, loggers or states."""
    from training import Package

    return Package(request.param)
