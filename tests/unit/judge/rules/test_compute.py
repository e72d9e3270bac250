from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fake_runs import HEALTHY, FakeRun, add_series, make_run
from findings import action, found, optimizer, phases, recovery
from kineto import write_trace
from lightning_memprof.account.ledger.model import TimeLedger, TimeLine
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.model import Program, TraceReport
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.judge import Facts, Finding, Severity, examine
from lightning_memprof.read.run.load import load_run
from lightning_memprof.units import GIB, MIB
from passes import event
from passes import found as found_in_step
from trace_reports import MS, STEP_NS, found_in, gpu_times, trace

DENSE = {"name": "table.weight", "module": "Embedding", "bytes": 900, "sparse": False}


@pytest.mark.parametrize(
    ("dtypes", "is_found"),
    [
        ({"float64": 800}, True),
        ({"float64": 400, "float32": 400}, True),
        ({"float64": 8, "float32": 800}, False),
        ({"float32": 800, "int64": 8000}, False),
        ({}, False),
    ],
)
def test_float64_is_found_by_its_share_of_the_floating_point_bytes(
    tmp_path: Path, dtypes: dict[str, int], is_found: bool
) -> None:
    rules = found(tmp_path, FakeRun(memory=None, training={"parameter_dtypes": dtypes}))
    assert ("double_precision" in rules) == is_found


@pytest.mark.parametrize(("threads", "is_found"), [(1, False), (8, False), (16, True), (64, True)])
def test_twice_as_many_threads_as_cores_are_found(tmp_path: Path, threads: int, is_found: bool) -> None:
    rules = found(tmp_path, FakeRun(training={"threads": threads}))
    assert ("thread_oversubscription" in rules) == is_found


def test_the_threads_of_all_ranks_of_a_host_share_its_cores(tmp_path: Path) -> None:
    finding = found(tmp_path, FakeRun(world_size=4, training={"threads": 8}))["thread_oversubscription"]
    assert "8 threads in each of 4 ranks on 8 cores" in finding.title
    assert "torch.set_num_threads(2)" in finding.next_steps[0]


def test_anomaly_detection_is_found_where_it_is_on(tmp_path: Path) -> None:
    on: dict[str, Any] = {"detect_anomaly": True}
    assert "detect_anomaly=False" in found(tmp_path / "on", FakeRun(training=on))["anomaly_detection"].next_steps[0]
    assert "anomaly_detection" not in found(tmp_path / "off", FakeRun(training={"detect_anomaly": False}))


@pytest.mark.parametrize(
    ("largest", "is_found"),
    [
        (DENSE, True),
        ({**DENSE, "sparse": True}, False),
        ({**DENSE, "module": "Linear"}, False),
        ({**DENSE, "bytes": 100}, False),
    ],
)
def test_a_dense_embedding_that_the_optimizer_updates_is_named(
    tmp_path: Path, largest: dict[str, Any], is_found: bool
) -> None:
    training = {"largest_parameters": [largest], "parameter_dtypes": {"float32": 1000}}
    rules = found(tmp_path, FakeRun(phases=phases(optimizer=10_000_000), training=training))
    assert ("dense_embedding" in rules) == is_found
    if is_found:
        assert "all rows of the embedding table.weight" in rules["dense_embedding"].title
        assert rules["dense_embedding"].remedies[0].id == "sparse_embedding"


def test_of_two_optimizers_each_has_its_own_time(tmp_path: Path) -> None:
    looping = {"name": "SGD", "foreach": None, "fused": None, "parameters": 900, "device": "cpu", "modules": ["net"]}
    of_table = {**looping, "name": "Adam", "parameters": 1, "modules": ["table"]}
    training = {
        "optimizers": [of_table, looping],
        "largest_parameters": [DENSE],
        "parameter_dtypes": {"float32": 1500},
    }
    lines = (
        TimeLine(part=Part.OPTIMIZER, name="Adam", operator="aten::addcdiv_", ns=9e6, count=1),
        TimeLine(part=Part.OPTIMIZER, name="SGD", operator="aten::add_", ns=1e6, count=900),
    )
    host = TimeLedger(step_ns=10e6, median_ns=10e6, steps=2, basis="", lines=lines)
    trace = replace(trace_report(write_trace(tmp_path / "made.json", [])), host_ledger=host)
    fake = FakeRun(phases=phases(optimizer=20_000_000), training=training)
    findings = examine(Facts.of(load_run(make_run(tmp_path, fake)), (trace,)))
    recovers = {finding.rule: finding.recovers for finding in findings}
    assert findings[0].rule == "dense_embedding"
    assert recovers["dense_embedding"] is not None
    assert recovers["dense_embedding"].max == pytest.approx(0.9 * 20e6)
    assert "optimizer_bound" not in recovers


@pytest.mark.parametrize("is_sparse", [True, False])
def test_the_fused_kernels_are_for_dense_gradients(tmp_path: Path, is_sparse: bool) -> None:
    training = {
        "largest_parameters": [{**DENSE, "sparse": is_sparse, "module": "Linear"}],
        "optimizers": [{"name": "Adagrad", "foreach": None, "fused": None, "parameters": 900, "device": "cpu"}],
    }
    step = found(tmp_path, FakeRun(phases=phases(optimizer=30_000_000), training=training))["optimizer_bound"]
    assert f"torch.optim.Adagrad(..., {'foreach' if is_sparse else 'fused'}=True)" in step.next_steps[0]


def with_ledger(
    tmp_path: Path, fake: FakeRun, *, count: float = 1.0, load: Mapping[str, float] | None = None, **changes: Any
) -> dict[str, Finding]:
    """The findings of a run whose trace has one operator of 10 ms in backward, in ``count`` calls."""
    line = TimeLine(part=Part.BACKWARD, module="", operator="aten::mm", ns=10e6, count=count, called=count)
    host = TimeLedger(step_ns=10e6, median_ns=10e6, steps=2, basis="", lines=(line,), **changes)
    directory = make_run(tmp_path, fake)
    if load:
        add_series(directory, "system", [{"step": 2, "recorded": True, "time_ns": 1, **load}])
    run = load_run(directory)
    trace = replace(trace_report(write_trace(tmp_path / "made.json", [])), host_ledger=host)
    return {finding.rule: finding for finding in examine(Facts.of(run, (trace,)))}


FREE = {"process_cpu_percent": 100.0, "machine_cpu_percent": 12.5}


@pytest.mark.parametrize(
    ("threads", "count", "workers", "load", "is_found"),
    [
        pytest.param(1, 1.0, 0, FREE, True, id="one thread"),
        pytest.param(2, 1.0, 0, FREE, True, id="half of the cores"),
        pytest.param(4, 1.0, 0, FREE, False, id="the cores without hyperthreads"),
        pytest.param(1, 500.0, 0, FREE, False, id="short calls"),
        pytest.param(1, 1.0, 3, FREE, False, id="workers have the cores"),
        pytest.param(1, 1.0, 0, {**FREE, "machine_cpu_percent": 100.0}, False, id="other programs have the cores"),
        pytest.param(1, 1.0, 0, None, False, id="who has the cores was not recorded"),
    ],
)
def test_long_operators_on_few_of_the_free_cores_are_found(
    tmp_path: Path, *, threads: int, count: float, workers: int, load: dict[str, float] | None, is_found: bool
) -> None:
    loaders = [{"num_workers": workers, "persistent_workers": True}]
    fake = FakeRun(training={"threads": threads, "dataloaders": loaders})
    rules = with_ledger(tmp_path, fake, count=count, load=load)
    assert ("idle_cores" in rules) == is_found
    if is_found:
        finding = rules["idle_cores"]
        assert f"Operators use {threads} thread{'s' if threads > 1 else ''} on 4 free cores" in finding.title
        assert finding.remedies[0].change == "threads=4"
        assert recovery(finding).max == pytest.approx(10e6 * (1 - threads / 4), rel=0.1)


def test_the_ranks_of_a_host_share_its_cores(tmp_path: Path) -> None:
    assert "idle_cores" not in with_ledger(tmp_path, FakeRun(world_size=4, training={"threads": 1}), load=FREE)


@pytest.mark.parametrize(("memory_bytes", "severity"), [(64 * GIB, Severity.CRITICAL), (GIB, Severity.INFO)])
def test_recomputed_forwards_are_a_fault_where_memory_is_ample(
    tmp_path: Path, memory_bytes: int, severity: Severity
) -> None:
    directory = make_run(tmp_path, FakeRun(training={"threads": 8}))
    manifest = directory / "manifest.rank00000.jsonl"
    known = f'"memory_bytes":{memory_bytes},"cpu_count":'
    manifest.write_text(manifest.read_text().replace('"cpu_count":', known, 1))
    host = TimeLedger(
        step_ns=10e6,
        median_ns=10e6,
        steps=2,
        basis="",
        lines=(TimeLine(part=Part.BACKWARD, module="", operator="aten::mm", ns=10e6, count=1, called=1),),
        recomputed_ns=5e6,
    )
    trace = replace(trace_report(write_trace(tmp_path / "made.json", [])), host_ledger=host)
    finding = next(each for each in examine(Facts.of(load_run(directory), (trace,))) if each.rule == "recomputation")
    assert finding.title == "Activation checkpointing: backward runs forwards again: 44% of each step."
    assert finding.severity is severity
    assert recovery(finding).max == pytest.approx((6e6 + 10e6) / 2, rel=0.05)


@pytest.mark.parametrize(
    ("groups", "settings", "fused", "first"),
    [
        (120, 2, True, "Merge the parameter groups that have the same settings: 2 instead of 120"),
        (120, 120, False, "Update all parameters at once"),
        (2, 2, True, "Step less often"),
    ],
)
def test_groups_with_the_same_settings_are_needless(
    tmp_path: Path, groups: int, settings: int, fused: bool, first: str
) -> None:
    optimizer = {"name": "AdamW", "fused": fused, "parameters": 120, "device": "cpu"}
    fake = FakeRun(
        training={"optimizers": [{**optimizer, "groups": groups, "settings": settings}]},
        phases=lambda _rank, _step: {**HEALTHY, "optimizer": 20_000_000},
    )
    found = {finding.rule: finding for finding in examine(Facts.of(load_run(make_run(tmp_path, fake))))}
    assert found["optimizer_bound"].next_steps[0].startswith(first)


def own_optimizer(tmp_path: Path, *operators: tuple[str, float, int], share: float = 0.6) -> dict[str, Finding]:
    """The findings about an optimizer of the program with these operators: name, ms and calls of 60 tensors."""
    lines = tuple(
        TimeLine(part=Part.OPTIMIZER, name="Shampoo", operator=operator, ns=ms * 1e6, count=calls, called=calls)
        for operator, ms, calls in operators
    )
    host = TimeLedger(step_ns=40e6, median_ns=40e6, steps=2, basis="", lines=lines)
    tmp_path.mkdir(exist_ok=True)
    trace = replace(trace_report(write_trace(tmp_path / "made.json", [])), host_ledger=host)
    training = {"optimizers": [{"name": "Shampoo", "parameters": 60, "device": "cpu"}]}
    fake = FakeRun(phases=phases(optimizer=round(17e6 * share / (1 - share))), training=training)
    return {finding.rule: finding for finding in examine(Facts.of(load_run(make_run(tmp_path, fake)), (trace,)))}


def test_of_an_optimizer_of_the_program_the_operators_that_have_a_form_for_lists_are_saved(tmp_path: Path) -> None:
    loop = own_optimizer(tmp_path / "loop", ("aten::mul_", 20, 240), ("", 4, 0))["optimizer_bound"]
    assert recovery(loop).max / recovery(loop).whole == pytest.approx(0.6 * 2 / 3, rel=0.02)
    assert loop.remedies[0].id == "foreach_in_step"
    products = own_optimizer(tmp_path / "products", ("aten::mm", 23, 120), ("aten::mul_", 0.9, 240))["optimizer_bound"]
    assert [remedy.id for remedy in products.remedies] == ["accumulate"]
    short = own_optimizer(tmp_path / "short", ("aten::mm", 23, 120), ("aten::mul_", 0.9, 240), share=0.4)
    assert "optimizer_bound" not in short


def test_an_optimizer_that_decomposes_is_to_do_that_less_often(tmp_path: Path) -> None:
    finding = own_optimizer(tmp_path, ("aten::linalg_eigh", 23, 60), ("aten::mul_", 0.9, 60))["optimizer_bound"]
    assert [remedy.id for remedy in finding.remedies] == ["decompose_less", "accumulate"]


@pytest.mark.parametrize(("optimizer_ms", "is_bound"), [(6, False), (30, True)])
def test_a_step_is_bound_by_an_optimizer_that_takes_half_of_it(
    tmp_path: Path, optimizer_ms: int, is_bound: bool
) -> None:
    training = {"optimizers": [{"name": "AdamW", "parameters": 64, "device": "cpu"}]}
    rules = found(tmp_path, FakeRun(phases=phases(optimizer=optimizer_ms * 1_000_000), training=training))
    assert rules["optimizer_bound"].title.startswith("Optimizer-bound: ") is is_bound
    assert [remedy.id for remedy in rules["optimizer_bound"].remedies] == ["fused_optimizer"]


def optimizer_loop(optimizer: str, ms_per_step: int) -> TraceReport:
    """Five busy steps with kernels of an optimizer's loop."""
    lines = (TimeLine(part=Part.COMPUTE, operator="aten::mm", ns=STEP_NS),)
    return trace(
        gpu_window=gpu_times(5 * STEP_NS),
        program=Program(is_lightning=False, loop_optimizer=optimizer, loop_ns=5 * ms_per_step * MS),
        device_ledger=TimeLedger(step_ns=STEP_NS, median_ns=STEP_NS, steps=5, basis="", lines=lines),
    )


def test_an_optimizer_that_updates_parameters_one_by_one_on_a_busy_device_is_worth_a_fused_one() -> None:
    finding = found_in(optimizer_loop("AdamW", 20))["optimizer_bound"]
    assert finding.severity is Severity.WARNING
    assert finding.title == ("AdamW, one parameter at a time, takes 20% of each step.")
    assert finding.next_steps == ("Update all parameters at once: torch.optim.AdamW(..., fused=True).",)
    assert recovery(finding).min == pytest.approx(8 * MS)
    assert recovery(finding).max == pytest.approx(18 * MS)


@pytest.mark.parametrize(("optimizer", "ms_per_step"), [("AdamW", 4), ("Shampoo", 20), ("", 0)])
def test_an_optimizer_of_little_time_or_without_another_form_is_no_loop(optimizer: str, ms_per_step: int) -> None:
    assert "optimizer_bound" not in found_in(optimizer_loop(optimizer, ms_per_step))


def loss(*inside: str, operator: str = "aten::mse_loss") -> list[dict[str, Any]]:
    """A loss of 900 us in forward after the call that broadcasts, with what that calls, and its backward."""
    return [
        event("aten::broadcast_tensors", 100, 120),
        *(event(name, 101 + 5 * at, 104 + 5 * at) for at, name in enumerate(inside)),
        event(operator, 200, 1_100),
        event(f"{operator}_backward", 2_910, 2_990),
    ]


@pytest.mark.parametrize("operator", ["aten::mse_loss", "aten::l1_loss", "aten::huber_loss"])
def test_a_loss_of_two_shapes_is_named(tmp_path: Path, operator: str) -> None:
    finding = found_in_step(tmp_path, *loss("aten::expand", "aten::expand", operator=operator))["broadcast_loss"]
    assert finding.title.startswith(f"The loss broadcasts: {operator.removeprefix('aten::')} gets")
    assert "squeeze(-1)" in finding.next_steps[0]
    # What is computed is wrong, whatever it costs.
    assert finding.severity is Severity.WARNING
    spent = finding.numbers["ns"]
    assert recovery(finding).min == pytest.approx(spent / 2, rel=0.01)
    assert recovery(finding).max == pytest.approx(spent, rel=0.01)


def test_a_loss_of_equal_shapes_is_not(tmp_path: Path) -> None:
    assert "broadcast_loss" not in found_in_step(tmp_path, *loss())


def test_nor_is_what_else_broadcasts_beside_a_loss(tmp_path: Path) -> None:
    normal = [event("aten::broadcast_tensors", 1_200, 1_250), event("aten::expand", 1_210, 1_215)]
    assert "broadcast_loss" not in found_in_step(tmp_path / "both", *loss(), *normal)
    assert "broadcast_loss" not in found_in_step(tmp_path / "alone", *normal)


@pytest.mark.parametrize(
    ("name", "tensors", "size", "is_found"),
    [("SGD", 4, 64, False), ("SGD", 400, 64, True), ("AdamW", 4, 64, True), ("AdamW", 4, 1, False)],
)
def test_a_loop_over_few_tensors_costs_where_each_operator_reads_them_again(
    tmp_path: Path, name: str, tensors: int, size: int, *, is_found: bool
) -> None:
    optimizer = {"name": name, "foreach": None, "fused": None, "parameters": tensors, "device": "cpu"}
    training = {"optimizers": [optimizer], "largest_parameters": [{"name": "head.weight", "bytes": size * MIB}]}
    fake = FakeRun(phases=lambda *_: {**HEALTHY, "optimizer": 8 * MS}, training=training)
    assert ("optimizer_bound" in found(tmp_path, fake)) is is_found


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({"fused": True}, "Step less often"),
        ({"foreach": True}, "Step less often"),
        ({"device": "cuda:0"}, "Step less often"),
        ({"name": "SparseAdam"}, "Step less often"),
        ({"parameters": 4}, "Step less often"),
        ({"name": "Lion"}, "Step less often"),
    ],
)
def test_an_optimizer_without_a_faster_way_is_to_step_less_often_if_it_bounds_the_step(
    tmp_path: Path, settings: dict[str, Any], first: str
) -> None:
    much = FakeRun(phases=phases(optimizer=20_000_000), training=optimizer(**settings))
    finding = found(tmp_path / "much", much)["optimizer_bound"]
    assert finding.title.startswith("Optimizer-bound: ")
    assert finding.next_steps[0].startswith(first)
    assert recovery(finding).max == pytest.approx(0.75 * 20_000_000, rel=0.1)
    less = FakeRun(phases=phases(optimizer=12_000_000), training=optimizer(**settings))
    assert "optimizer_bound" not in found(tmp_path / "less", less)


def test_foreach_switched_off_on_cuda_is_found(tmp_path: Path) -> None:
    fake = FakeRun(phases=phases(optimizer=6_000_000), training=optimizer(device="cuda:0", foreach=False))
    assert "optimizer_bound" in found(tmp_path, fake)


def test_an_optimizer_without_a_fused_kernel_gets_foreach(tmp_path: Path) -> None:
    fake = FakeRun(phases=phases(optimizer=6_000_000), training=optimizer(name="RMSprop"))
    assert found(tmp_path, fake)["optimizer_bound"].next_steps == (
        "Update all parameters at once: torch.optim.RMSprop(..., foreach=True).",
    )


def test_a_hook_inside_the_optimizer_step_is_not_the_optimizer(tmp_path: Path) -> None:
    row = action("[LightningModule]LitGPT.on_before_optimizer_step", 20_000_000, "optimizer")
    loops = {"optimizers": [{"name": "SGD", "foreach": None, "fused": None, "parameters": 900, "device": "cpu"}]}
    rules = found(tmp_path, FakeRun(phases=phases(optimizer=21_000_000), training=loops), row)
    assert rules["hook_bound"].title.startswith("The hook LitGPT.on_before_optimizer_step of the module takes 5")
    assert "all gradients in one call" in rules["hook_bound"].next_steps[0]
    assert "optimizer_bound" not in rules
