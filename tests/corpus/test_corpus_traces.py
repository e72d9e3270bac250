from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from corpus_files import TRACES, recorded_file, reference_figures
from lightning_memprof.account.parts import BUSY, Part
from lightning_memprof.account.trace.model import GpuTimes, KernelKind, TraceReport
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.artifacts.trace_rewriting import tensorboard_categories

pytestmark = pytest.mark.corpus

NAMES = {
    "window_us": "window_ns",
    "busy_us": "busy_ns",
    "idle_us": "idle_ns",
    "compute_us": "compute_ns",
    "comm_us": "communication_ns",
    "mem_us": "memory_copy_ns",
    "comm_overlapped_us": "communication_overlapped_ns",
    "comm_exposed_us": "communication_exposed_ns",
    "dataloader_us": "data_loading_ns",
    "mean_step_us": "mean_step_ns",
}
# Of the one file whose references lack digits: what its many short copies add up to, and the idle time beside them.
SHORT_OF_DIGITS = {("gpu_window", "idle_us"), ("gpu_window", "mem_us"), ("step_window", "mem_us")}


# The references count a last step in which nothing is computed, and 13 s of a step behind the recording.
CUT_STEPS = {"hta_amd_mi250", "hta_triton"}


@pytest.fixture(params=TRACES, ids=lambda path: path.name[:24])
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


@cache
def report(path: Path) -> TraceReport:
    return trace_report(path)


def reference(path: Path) -> dict[str, Any]:
    (found,) = (each for each in reference_figures("traces")[path.parent.name] if each["file"] == path.name)
    return dict(found)


def tolerance(path: Path, window: str, name: str) -> float:
    """How far a figure may be from the reference.

    The references are made of doubles, which lack digits of the times since 1970 of one file: 0.25 us a time. Its 1,745
    copies of 2 us each come out 0.4% shorter there; the next test computes all of it from the digits.
    """
    return 5e-3 if path.parent.name == "hta_ns_resolution" and (window, name) in SHORT_OF_DIGITS else 1e-3


def early_us(found: TraceReport, window: str, name: str) -> float:
    """The references count the time before the first kernel in which one may run that began before the recording."""
    is_counted = window == "step_window" and name in {"window_us", "idle_us"}
    return 1 + max(kernel.max_ns for kernel in found.kernels) / 1000 if is_counted else 0.002


def figures(part: GpuTimes | None) -> dict[str, float]:
    return {name: getattr(part, ours) / 1000 for name, ours in NAMES.items() if hasattr(part, ours)}


def test_every_recorded_trace_has_the_figures_of_the_references_within_a_thousandth(path):
    wanted, found = reference(path), report(path)
    assert found.events == wanted["events"]
    assert found.rank == wanted["dist"].get("rank")
    assert found.world_size == wanted["dist"].get("world_size")
    for window, ours in (("gpu_window", found.gpu_window), ("step_window", found.step_window)):
        part = wanted[window]
        assert (ours is None) == (part is None)
        if part is not None and (window, path.parent.name) not in {("step_window", folder) for folder in CUT_STEPS}:
            near = {
                name: pytest.approx(value, rel=tolerance(path, window, name), abs=early_us(found, window, name))
                for name, value in part.items()
                if name in NAMES
            }
            assert {name: value for name, value in figures(ours).items() if name in near} == near


def test_what_a_recorded_trace_says_adds_up(path):
    found = report(path)
    assert found.start_ns < found.end_ns
    lacks = found.gpu_window is None or not found.steps or found.rank is None
    assert bool(found.missing) == (lacks or found.is_sample)
    if found.gpu_window is None:
        assert (found.idle, found.kernels, found.copies) == ((), (), ())
        return
    window = found.gpu_window
    assert window.busy_ns + window.idle_ns == window.window_ns
    assert found.window is not None
    assert found.window.busy_ns + found.window.idle_ns == found.window.window_ns
    assert sum(cause.total_ns for cause in found.idle) == found.window.idle_ns
    assert all(0 < cause.longest_ns <= cause.total_ns for cause in found.idle)
    kinds = {kind: sum(each.total_ns for each in found.kernels if each.kind == kind) for kind in get_args(KernelKind)}
    assert kinds["compute"] >= window.compute_ns
    assert kinds["communication"] >= window.communication_ns
    assert kinds["memory_copy"] >= window.memory_copy_ns
    assert sum(each.total_ns for each in found.collectives) == kinds["communication"]
    assert sum(each.exposed_ns for each in found.collectives) >= window.communication_exposed_ns
    assert all(found.start_ns <= step.start_ns < found.end_ns for step in found.steps)


def test_where_the_batches_come_late_the_idle_device_waits_for_them():
    names = ("kineto_resnet50_nw0", "hta_ns_resolution")
    found = {name: report(recorded_file(f"traces/{name}/*.json.gz")) for name in names}
    late, window = found["kineto_resnet50_nw0"], found["kineto_resnet50_nw0"].step_window
    assert window is not None
    assert window.data_loading_ns / window.window_ns == pytest.approx(0.397, abs=0.0005)
    assert late.idle[0].cause == Part.IDLE_DATA
    assert late.idle[0].example.startswith("enumerate(DataLoader)#_SingleProcessDataLoaderIter")
    assert Part.IDLE_DATA not in {cause.cause for cause in found["hta_ns_resolution"].idle}


def test_a_file_that_is_rewritten_for_the_profiler_tab_gives_the_same_report(path: Path, tmp_path: Path) -> None:
    written = tmp_path / path.name.removesuffix(".gz")
    with gzip.open(path) as source, written.open("wb") as target:
        tensorboard_categories(source, target)  # type: ignore[arg-type]  # GzipFile is a binary file in all but its type
    found = trace_report(written)
    assert msgspec.structs.replace(found, file=report(path).file) == report(path)


def test_the_device_ledger_owns_every_ns_of_the_steps(path):
    found, wanted = report(path), reference(path)
    window = "step_window" if wanted["step_window"] else "gpu_window"
    figures = wanted[window]
    ledger = found.device_ledger
    if figures is None:
        assert ledger is None
        return
    assert ledger is not None
    assert sum(line.ns for line in ledger.lines) == pytest.approx(ledger.step_ns, abs=0.01)
    if path.parent.name in CUT_STEPS:
        return
    if (ahead := found.ahead_window) is not None:
        # The references know the steps of the host only.
        assert ahead.window_ns >= figures["window_us"] * 1000
        assert ledger.step_ns * ledger.steps == ahead.window_ns
        return
    whole_ns = figures["window_us"] * 1000
    early_ns = 1000 * early_us(found, window, "window_us")
    assert ledger.step_ns * ledger.steps == pytest.approx(whole_ns, rel=1e-3, abs=early_ns)
    parts: dict[str, tuple[Part, ...]] = {
        "busy_us": BUSY,
        "compute_us": (Part.COMPUTE,),
        "comm_exposed_us": (Part.COLLECTIVE,),
    }
    for name, of in parts.items():
        assert ledger.ns(*of) * ledger.steps == pytest.approx(figures[name] * 1000, abs=whole_ns * 1e-3)
