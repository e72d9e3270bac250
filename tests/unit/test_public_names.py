"""The public names: each is pinned here, and has one home."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest

import lightning_memprof
from fake_runs import FakeRun, make_run
from lightning_memprof.capture.base import Collector
from lightning_memprof.capture.triggers.anomalies import Anomaly
from lightning_memprof.integration.settings import default_collectors

ROOT = {
    "ArtifactError", "Budget", "Collector", "ConfigError", "ExtendedPyTorchProfiler", "Finding", "Mark",
    "MemProfilerCallback", "MemprofError", "SkipWindow", "OnMark", "OutputOptions", "Point", "ReportError", "Run",
    "Estimate", "RunContext", "Schedule", "Severity", "StageSchedules", "Triggers", "estimate", "load_run",
    "memprofilable", "record", "start_memory_history",
}  # fmt: skip
NAMESPACES = {
    "collectors": {
        "AllocatorHistory", "AllocatorStats", "CallRange", "FSDPMemory", "FunctionMemory", "GarbageCollection",
        "Hangs", "Holders", "HookTimings", "HostMemory", "ModuleMemory", "OOMAutopsy", "OperatorTrace",
        "Pulse", "SavedTensors", "SystemStats", "Throughput", "UserHooks", "Window",
    },
    "triggers": {"AllocatorRetries", "Anomaly", "NearOOM", "SlowStep"},
    "compat.fts": {
        "MemProfiler", "MemProfilerCLI", "MemProfilerCfg", "MemProfilerFuncs", "MemProfilerHooks",
        "MemProfilerSchedule", "add_memprofiler_arguments",
    },
}  # fmt: skip


def reexported(module: ModuleType) -> set[str]:
    """The names of ``from x import A as A``, which type checkers take as public."""
    tree = ast.parse(Path(module.__file__ or "").read_text(encoding="utf-8"))
    return {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }


def test_the_root_has_these_names_and_type_checkers_see_the_same() -> None:
    assert set(lightning_memprof.__all__) == ROOT
    assert len(lightning_memprof.__all__) == len(ROOT)
    assert reexported(lightning_memprof) == ROOT
    assert set(dir(lightning_memprof)) >= ROOT


@pytest.mark.parametrize("name", sorted(ROOT))
def test_a_name_of_the_root_is_the_object_that_type_checkers_see(name: str) -> None:
    source = ast.parse(Path(lightning_memprof.__file__).read_text(encoding="utf-8"))
    (home,) = [
        node.module
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and any(alias.asname == name for alias in node.names)
    ]
    assert getattr(lightning_memprof, name) is getattr(importlib.import_module(home or ""), name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'lightning_memprof' has no attribute 'Nonsense'"):
        _ = lightning_memprof.Nonsense


@pytest.mark.parametrize("namespace", sorted(NAMESPACES))
def test_a_namespace_has_these_names_and_none_is_in_two_places(namespace: str) -> None:
    module = importlib.import_module(f"lightning_memprof.{namespace}")
    defined = {name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    own = {name for name in defined if not name.startswith("_")}
    public = reexported(module) | (own & set(getattr(module, "__all__", own)))
    assert public == NAMESPACES[namespace], f"NAMESPACES in {Path(__file__).name} lists the public names"
    assert all(hasattr(module, name) for name in public)
    others = [names for other, names in NAMESPACES.items() if other != namespace]
    assert public.isdisjoint(ROOT.union(*others))


def test_every_collector_and_every_anomaly_of_the_package_is_public() -> None:
    for base, namespace in ((Collector, "collectors"), (Anomaly, "triggers")):
        module = importlib.import_module(f"lightning_memprof.{namespace}")
        for found in base.__subclasses__():
            if found.__module__.startswith("lightning_memprof.capture.") and not inspect.isabstract(found):
                assert found.__name__ == "NvtxRanges" or getattr(module, found.__name__) is found


def test_the_callback_documents_every_collector_of_the_default_set() -> None:
    text = inspect.getdoc(lightning_memprof.MemProfilerCallback) or ""
    missing = {type(collector).__name__ for collector in default_collectors()} - set(text.replace("`", " ").split())
    assert missing == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Schedule", "load_run", "Finding", "ConfigError"])
def test_reading_and_configuring_load_neither_torch_nor_lightning(name: str, run_python) -> None:
    program = (
        f"import sys, lightning_memprof as m; m.{name}; print(sorted({{'torch', 'lightning'}} & set(sys.modules)))"
    )
    done = run_python("-c", program)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.slow
def test_a_run_has_findings_a_document_and_a_page_for_notebooks(tmp_path: Path) -> None:
    make_run(tmp_path, FakeRun())
    run = lightning_memprof.load_run(tmp_path)
    assert run.lead.steps == 30
    (finding, *_) = run.findings()
    assert isinstance(finding, lightning_memprof.Finding)
    assert "steps" in {section.id for section in run.document().sections}
    assert repr(finding) == f"Finding({finding.rule}, {finding.severity.name.lower()}: {finding.title!r})"
    assert repr(run.document()).startswith(f"Document({run.document().title!r}, sections=['overview', ")
    assert repr(run) == f"Run({str(run.directory)!r}: fit, 30 steps, finished)"
    page = run._repr_html_()
    assert page.startswith('<iframe srcdoc="&lt;!doctype html')
    assert page.count('"') == 6
