"""TensorBoard's profiler tab, asked over HTTP as its page asks: every view's numbers are ours."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from corpus_files import CORPUS, needs_corpus
from lightning_memprof.account.trace.key_averages import collect_rows
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.artifacts.naming import TraceName
from lightning_memprof.read.trace.communication import collectives
from profiler_tab import GPU_TRACES, Tab, fetches_us, made_runs, profiler_tab
from recorded_rows import read_events, read_pulse

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lightning_memprof.account.trace.key_averages import OperatorRow

WORKER = "fit-fts_extended_pytorch_profiler-{}[Strategy]{}.training_step"


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_runs(tmp_path_factory)


@pytest.fixture(scope="module")
def tab(logdir: Path) -> Iterator[Tab]:
    with profiler_tab(logdir) as tab:
        yield tab


def traces(logdir: Path, run: str, rank: int = 0) -> list[Path]:
    """A rank's traces, window by window."""
    found = [(TraceName.parse(path.name), path) for path in (logdir / run).glob("*.pt.trace.json.gz")]
    return [path for name, path in sorted(found, key=str) if name is None or name.rank == rank]


def operators(trace: Path) -> dict[str, OperatorRow]:
    rows = collect_rows([trace], group_by_input_shapes=False).rows
    return {row.name: row for row in rows if not row.on_device and not row.is_annotation}


def table(answer: dict[str, Any]) -> list[dict[str, Any]]:
    # Tooltips are columns without a name.
    names = [column.get("name") for column in answer["columns"]]
    return [{name: value for name, value in zip(names, row, strict=True) if name} for row in answer["rows"]]


def test_every_run_is_listed_with_stages_of_their_own(tab: Tab) -> None:
    gpu = [f"gpu/{name}" for name in GPU_TRACES] if CORPUS.is_dir() else []
    assert tab.runs() == sorted(["plain/log", "plain/log/validate", "stacks/log", "ranks/log", *gpu])


def test_a_worker_is_a_rank_and_its_strategy_and_a_span_is_a_window(tab: Tab, logdir: Path) -> None:
    assert tab.ask("workers", run="plain/log", view="Overview") == [WORKER.format(0, "SingleDeviceStrategy")]
    assert tab.ask("spans", run="plain/log", worker=WORKER.format(0, "SingleDeviceStrategy")) == ["1", "2"]
    assert tab.ask("workers", run="ranks/log", view="Overview") == [WORKER.format(r, "DDPStrategy") for r in (0, 1)]
    assert len(traces(logdir, "plain/log")) == 2


@pytest.mark.parametrize(
    ("run", "views"),
    [
        ("plain/log", ["Overview", "Operator", "Trace", "Memory", "Lightning"]),
        ("stacks/log", ["Overview", "Operator", "Trace", "Memory", "Module"]),
        ("ranks/log", ["Overview", "Operator", "Trace", "Distributed", "Lightning"]),
    ],
)
def test_a_run_has_every_view_that_its_data_can_fill(tab: Tab, run: str, views: list[str]) -> None:
    assert tab.ask("views", run=run) == views


@pytest.mark.parametrize("span", ["1", "2"])
def test_the_overview_has_our_steps_and_our_share_of_data_loading(tab: Tab, logdir: Path, span: str) -> None:
    trace = traces(logdir, "plain/log")[int(span) - 1]
    steps = trace_report(trace).steps
    rows = table(tab.ask("overview", **tab.window("plain/log", span))["steps"])
    assert [row["Step"] for row in rows] == [str(step.number) for step in steps]
    for row, step in zip(rows, steps, strict=True):
        total = sum(row[name] for name in ("DataLoader", "CPU Exec", "Other"))
        assert total == pytest.approx(step.duration_ns / 1000, abs=1)
        assert row["DataLoader"] == pytest.approx(fetches_us(trace, step), abs=1)
        assert 0 < row["DataLoader"] <= step.data_loading_ns / 1000


def test_a_step_of_the_overview_is_at_the_time_of_the_pulses_step_with_its_number(tab: Tab, logdir: Path) -> None:
    pulse = read_pulse(logdir / "plain/log/memprofiler/pulse.rank00000.csv")
    begun = [(row.step, row.start_ns or 0, row.duration_ns or 0) for row in pulse]
    for span, trace in enumerate(traces(logdir, "plain/log"), start=1):
        listed = [row["Step"] for row in table(tab.ask("overview", **tab.window("plain/log", str(span)))["steps"])]
        for name, step in zip(listed, trace_report(trace).steps, strict=True):
            end_ns = step.start_ns + step.duration_ns
            shared = {number: min(at + ns, end_ns) - max(at, step.start_ns) for number, at, ns in begun}
            assert str(max(shared, key=lambda number: shared[number])) == name


@pytest.mark.parametrize("run", ["plain/log", "stacks/log", "ranks/log"])
def test_the_operator_view_has_our_calls_and_times_of_operators_and_nothing_else(
    tab: Tab, logdir: Path, run: str
) -> None:
    ours = operators(traces(logdir, run)[0])
    theirs = tab.ask("operation/table", **tab.window(run), group_by="Operation")["data"]
    assert len(theirs) > 40
    assert not [row["name"] for row in theirs if row["name"].startswith(("[pl]", "enumerate", "ProfilerStep"))]
    for row in theirs:
        operator = ours[row["name"]]
        assert row["calls"] == operator.count
        assert row["host_total_duration"] == pytest.approx(operator.cpu_ns / 1000, abs=2)
        assert row["host_self_duration"] == pytest.approx(operator.self_cpu_ns / 1000, abs=2)


def test_the_memory_view_has_our_peak_and_our_allocations(tab: Tab, logdir: Path) -> None:
    (trace, _), window = traces(logdir, "plain/log"), tab.window("plain/log")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    peak = max(event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]")
    curve = tab.ask("memory_curve", **window, memory_metric="KB")["metadata"]
    assert curve["peaks"] == {"CPU": f"Peak Memory Usage: {peak / 1024:.1f}KB"}
    stats = tab.ask("memory", **window)
    rows = {row["Operator Name"]: row for row in table({"columns": stats["columns"], "rows": stats["rows"]["CPU"]})}
    # Two steps of two linear layers: outputs of 4 x 16 and 4 x 1 floats.
    assert rows["aten::addmm"]["Calls"] == 4
    assert rows["aten::addmm"]["Self Allocation Size (KB)"] == pytest.approx(2 * (4 * 16 + 4 * 1) * 4 / 1024, abs=0.01)
    assert rows["aten::addmm"]["Size Increase (KB)"] == pytest.approx(
        operators(trace)["aten::addmm"].cpu_bytes / 1024, abs=0.01
    )


def modules(rows: list[dict[str, Any]], inside: str = "") -> Iterator[tuple[str, dict[str, Any], str]]:
    for row in rows:
        yield row["name"], row, inside
        yield from modules(row["children"], row["name"])


def test_without_stacks_the_view_of_modules_has_lightnings_by_their_paths(tab: Tab, logdir: Path) -> None:
    counts, times = Counter[str](), Counter[str]()
    for event in read_events(traces(logdir, "plain/log")[0]):
        if event.name.startswith("[pl][module]"):
            path = event.name.rpartition(": ")[2]
            counts[path] += 1
            times[path] += event.duration_ns
    found = list(modules(tab.ask("module", **tab.window("plain/log"))["data"]))
    assert [(name, inside) for name, _, inside in found] == [
        ("net", ""), ("net.0", "net"), ("net.1", "net"), ("net.2", "net"), ("net.3", "net")
    ]  # fmt: skip
    for name, row, _ in found:
        assert row["occurences"] == counts[name] == 2
        assert row["host_duration"] == pytest.approx(times[name] / 1000, abs=2)
    tree = tab.ask("tree", **tab.window("plain/log"))
    assert "run_training_batch" in {child["name"] for child in tree["children"]}


def test_with_stacks_it_has_torchs_modules(tab: Tab) -> None:
    found = list(modules(tab.ask("module", **tab.window("stacks/log"))["data"]))
    inside = {(re.sub(r"_\d+$", "", name), re.sub(r"_\d+$", "", parent)) for name, _, parent in found}
    assert {("Linear", "Sequential"), ("ReLU", "Sequential"), ("Dropout", "Sequential")} <= inside
    assert {row["occurences"] for _, row, _ in found} == {2}


def test_the_distributed_view_has_both_ranks_collectives(tab: Tab, logdir: Path) -> None:
    query = {"run": "ranks/log", "worker": "All", "span": "1"}
    assert tab.ask("workers", run="ranks/log", view="Distributed") == ["All"]
    answer = tab.ask("distributed/commops", **query)["data"]
    for rank in (0, 1):
        found = list(collectives(traces(logdir, "ranks/log", rank)[0]))
        ours, times = Counter(collective.name for collective in found), Counter[str]()
        for collective in found:
            times[collective.name] += collective.end_ns - collective.start_ns
        rows = {row["Name"]: row for row in table(answer[WORKER.format(rank, "DDPStrategy")])}
        assert {name.removeprefix("gloo:"): row["Calls"] for name, row in rows.items()} == ours
        for name, row in rows.items():
            total = times[name.removeprefix("gloo:")] / 1000
            assert 0 < row["Total Latency (us)"] <= total + 2
    overlap = tab.ask("distributed/overlap", **query)["data"]
    for rank in (0, 1):
        for step in trace_report(traces(logdir, "ranks/log", rank)[0]).steps:
            parts = overlap[str(step.number)][WORKER.format(rank, "DDPStrategy")]
            assert sum(parts) == pytest.approx(step.duration_ns / 1000, abs=2)


@needs_corpus
@pytest.mark.corpus
@pytest.mark.parametrize("name", GPU_TRACES)
def test_the_kernel_view_has_our_kernels(tab: Tab, logdir: Path, name: str) -> None:
    report = trace_report(next((logdir / "gpu" / name).glob("*.gz")))
    ours = {kernel.name: kernel for kernel in report.kernels if kernel.kind != "memory_copy"}
    theirs = table(tab.ask("kernel/table", **tab.window(f"gpu/{name}"), group_by="Kernel")["data"])
    assert {row["Name"] for row in theirs} == set(ours)
    for row in theirs:
        assert row["Calls"] == ours[row["Name"]].count
        assert row["Total Duration (us)"] == pytest.approx(ours[row["Name"]].total_ns / 1000, abs=1)


@needs_corpus
@pytest.mark.corpus
@pytest.mark.parametrize("name", GPU_TRACES)
def test_the_operator_view_has_our_device_times(tab: Tab, logdir: Path, name: str) -> None:
    ours = operators(next((logdir / "gpu" / name).glob("*.gz")))
    theirs = tab.ask("operation/table", **tab.window(f"gpu/{name}"), group_by="Operation")["data"]
    by_name = {row["name"]: row["device_self_duration"] for row in theirs}
    assert sum(by_name.values()) > 0
    for found, time_us in by_name.items():
        assert time_us == pytest.approx(ours[found].self_device_ns / 1000, abs=2)


@needs_corpus
@pytest.mark.corpus
@pytest.mark.parametrize("name", GPU_TRACES)
def test_a_step_that_the_device_has_a_range_of_is_one_step(tab: Tab, logdir: Path, name: str) -> None:
    report = trace_report(next((logdir / "gpu" / name).glob("*.gz")))
    rows = table(tab.ask("overview", **tab.window(f"gpu/{name}"))["steps"])
    numbers = [row["Step"] for row in rows]
    assert numbers == [str(step.number) for step in report.steps][: len(numbers)]
    assert sum(row["Runtime"] for row in rows) > 0
