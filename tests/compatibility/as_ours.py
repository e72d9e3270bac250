"""A plug-in for pytest: Lightning's tests of its PyTorchProfiler meet our subclass under that name.

    python -m pytest -p as_ours test_profiler.py

``MEMPROF_TESTED_CLASS`` is ``ours`` or ``lightning``; ``MEMPROF_TESTS_SAID`` is the file that gets one JSON row a test.
The test module is imported as it is; it needs ``tests_pytorch.helpers.runif`` of Lightning's repository, of which the
part that this module needs is stood in for where it is not importable.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Put the class in its place before the tests are imported."""
    config.addinivalue_line("markers", "flaky: Lightning's own")
    if os.environ["MEMPROF_TESTED_CLASS"] == "ours":
        import lightning.pytorch.profilers
        import lightning.pytorch.trainer.setup as trainer_setup

        from lightning_memprof import ExtendedPyTorchProfiler

        ours: Any = ExtendedPyTorchProfiler
        lightning.pytorch.profilers.PyTorchProfiler = ours  # type: ignore[misc]
        trainer_setup.PyTorchProfiler = ours
    try:
        importlib.import_module("tests_pytorch.helpers.runif")
    except ImportError:
        _stand_in_for_runif()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that know the PyTorchProfiler, by its name, by the fixture, or as ``"pytorch"``."""
    kept = [item for item in items if _concerns(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down what became of a test."""
    if report.when == "call" or report.outcome != "passed":
        last = str(report.longrepr).strip().splitlines()[-1:] if report.failed else []
        reason = str(report.longrepr[2]) if report.skipped and isinstance(report.longrepr, tuple) else ""
        expected = hasattr(report, "wasxfail")
        outcome = "failed as expected" if expected and report.skipped else report.outcome
        row = {"test": report.nodeid.rpartition("::")[2], "when": report.when, "outcome": outcome}
        with Path(os.environ["MEMPROF_TESTS_SAID"]).open("a", encoding="utf-8") as out:
            out.write(json.dumps(row | {"said": " ".join(last) or reason}) + "\n")


def _concerns(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return False
    code = item.function.__code__
    names = {*code.co_names, *code.co_varnames, *item.fixturenames, *map(str, code.co_consts)}
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    tested = {getattr(value, "__name__", str(value)) for value in given}
    known = {"PyTorchProfiler", "ExtendedPyTorchProfiler", "pytorch_profiler", "pytorch"}
    return bool(names & known or tested & known)


def _stand_in_for_runif() -> None:
    def run_if(min_cuda_gpus: int = 0, min_python: str = "3", **needs: bool) -> pytest.MarkDecorator:
        import torch

        missing = [f"{min_cuda_gpus} GPUs"] if torch.cuda.device_count() < min_cuda_gpus else []
        if tuple(map(int, min_python.split("."))) > sys.version_info:
            missing.append(f"Python {min_python}")
        missing += [name for name, needed in needs.items() if needed and name != "skip_windows"]
        return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")

    runif = ModuleType("tests_pytorch.helpers.runif")
    runif.RunIf = run_if
    for name in ("tests_pytorch", "tests_pytorch.helpers"):
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules[runif.__name__] = runif
