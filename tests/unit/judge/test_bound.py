"""What traces without a fault, and without a device, are bound by."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from device_traces import Recording
from fake_runs import FakeRun, make_run
from findings import action, bound, found, loader, optimizer, phases
from lightning_memprof.account.ledger.model import TimeLedger, TimeLine
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.judge import Facts, Finding, Severity, nothing_in_files, verdict_of
from lightning_memprof.judge.bound import nothing_found
from lightning_memprof.read.run.load import load_run
from lightning_memprof.read.run.locate import shown_path


def test_a_trace_of_a_host_names_the_operators_that_take_most_of_a_step(tmp_path: Path) -> None:
    made = Recording()
    for step in range(3):
        with made.inside(f"ProfilerStep#{step}"):
            made.work(7_500, "aten::addmm")
            made.work(1_500, "aten::relu")
            made.python(1_000)
    finding = bound(made, tmp_path)
    assert finding.title == (
        "Compute-bound on the host: matrix multiplication takes 75% of each step (7.50 ms of 10.0 ms)."
    )
    assert "75% of the time in the model is matrix multiplication" in finding.why


@pytest.mark.parametrize(
    ("operator", "words"),
    [
        ("aten::_slow_conv2d_forward", "oneDNN"),
        ("aten::slow_conv_dilated3d", "oneDNN"),
        ("aten::mkldnn_convolution", "less work"),
        ("aten::addmm", "less work"),
        ("aten::relu", "torch.compile"),
        ("aten::linalg_svd", "Decompose"),
    ],
)
def test_a_program_on_a_cpu_is_told_what_makes_its_operators_faster(operator: str, words: str, tmp_path: Path) -> None:
    made = Recording()
    with made.inside("ProfilerStep#1"):
        made.work(9_000, operator)
        made.work(1_000, "aten::add")
    assert words in bound(made, tmp_path).next_steps[0]


def test_a_step_in_python_is_not_called_compute_bound(tmp_path: Path) -> None:
    made = Recording()
    with made.inside("ProfilerStep#1"):
        made.work(1_500, "aten::relu")
        made.python(8_500)
    assert bound(made, tmp_path).title == "Host-bound: Python takes 85% of each step (8.50 ms of 10.0 ms)."


def test_a_model_that_is_mostly_python_is_not_called_compute_bound(tmp_path: Path) -> None:
    made = Recording()
    for _ in range(6):
        made.work(250, "aten::mm")
        made.work(200, "aten::relu")
        made.python(400)
    assert bound(made, tmp_path).title == "Host-bound: the model takes 100% of the recorded time, Python 43%."


FUNCTION = "shop/run.py(12): train_step"


@pytest.mark.parametrize(
    ("called", "us", "title", "step"),
    [
        pytest.param(
            "<built-in function sleep>",
            8_000,
            "Host-bound: Python takes 90% of each step, mostly sleep in train_step (shop/run.py:12).",
            "Move this out of the step: sleep in train_step (shop/run.py:12).",
            id="a call of the function",
        ),
        pytest.param(
            "numpy/core/fromnumeric.py(1015): argsort",
            100,
            "Host-bound: Python takes 90% of each step, mostly train_step (shop/run.py:12).",
            "Move this out of the step: train_step (shop/run.py:12).",
            id="the function itself",
        ),
        pytest.param(
            "<built-in function collect>",
            8_000,
            "Host-bound: GC pauses take 80% of each step, mostly collect in train_step (shop/run.py:12).",
            "Call gc.collect(); gc.freeze()",
            id="a forced collection",
        ),
        pytest.param(
            "torch/serialization.py(944): save",
            8_000,
            "Host-bound: checkpoints take 80% of each step, mostly save in train_step (shop/run.py:12).",
            "Save checkpoints less often",
            id="a checkpoint",
        ),
    ],
)
def test_python_of_a_step_is_named_by_the_programs_function_and_its_call(
    tmp_path: Path, called: str, us: int, title: str, step: str
) -> None:
    made = Recording()
    with made.inside("ProfilerStep#1"):
        made.work(1_000, "aten::relu")
        with made.inside("torch/utils/_contextlib.py(116): decorate_context", "python_function"):
            made.python(100)
            with made.inside(FUNCTION, "python_function"):
                made.python(100)
                with made.inside(called, "python_function"):
                    made.python(us)
                made.python(8_800 - us)
    finding = bound(made, tmp_path)
    assert finding.title == title
    assert finding.next_steps[0].startswith(step)


def test_without_stacks_python_asks_for_them(tmp_path: Path) -> None:
    made = Recording()
    with made.inside("ProfilerStep#1"):
        made.work(1_000, "aten::relu")
        made.python(9_000)
    assert "with_stack=True" in bound(made, tmp_path).next_steps[0]


def test_python_of_a_lightning_trace_belongs_to_its_actions(tmp_path: Path) -> None:
    made = Recording()
    with made.inside("ProfilerStep#1"), made.inside("[pl][profile]run_training_batch"):
        made.work(1_000, "aten::relu")
        with made.inside(FUNCTION, "python_function"):
            made.python(9_000)
    ledger = trace_report(made.write(tmp_path / "trace.pt.trace.json")).host_ledger
    assert ledger is not None
    assert not any("train_step" in line.name for line in ledger.lines)


@pytest.mark.parametrize(("node", "is_recorded"), [("torch::autograd::AccumulateGrad", False), ("ReluBackward0", True)])
def test_a_training_whose_backward_is_in_no_recorded_thread_is_not_called_host_bound(
    node: str, is_recorded: bool, tmp_path: Path
) -> None:
    made = Recording()
    with made.inside("ProfilerStep#1"):
        made.work(1_000, "aten::relu")
        made.work(50, f"autograd::engine::evaluate_function: {node}")
        made.python(8_950)
        with made.inside("Optimizer.step#SGD.step"):
            made.python(1)
    finding = bound(made, tmp_path)
    if is_recorded:
        assert finding.title == "Host-bound: Python takes 89% of each step (8.95 ms of 10.0 ms)."
    else:
        assert finding.title == (
            "Backward was not recorded: 89% of each step is outside operators, in backward or in Python."
        )
        assert finding.remedies[0].id == "record_device"


def test_a_trace_with_launches_and_no_kernel_asks_for_the_devices_activity(tmp_path: Path) -> None:
    made = Recording()
    for _ in range(5):
        made.work(20, "aten::addmm")
        made.call("cudaLaunchKernel", 5)
    finding = bound(made, tmp_path)
    assert finding.title.startswith("Device activity was not recorded: the host calls cudaLaunchKernel")
    assert finding.remedies[0].id == "record_device"


def test_collectives_of_a_host_that_overlap_count_once(tmp_path: Path) -> None:
    made = Recording()
    with made.inside("ProfilerStep#1"):
        with made.inside("gloo:all_reduce"), made.inside("gloo:all_reduce"):
            made.python(8_000)
        made.work(2_000, "aten::relu")
    finding = bound(made, tmp_path)
    assert finding.title == "Communication-bound on the host: collectives take 80% of each step, mostly all_reduce."
    assert finding.why.startswith("The trace has 2 calls of all_reduce; the longest takes 8.00 ms, ")
    assert len(finding.next_steps) == 1
    rank = replace(trace_report(tmp_path / "trace.pt.trace.json"), rank=0, world_size=2)
    assert nothing_in_files([rank], []).next_steps[0].startswith("Record the other ranks too")
    assert len(nothing_in_files([rank, replace(rank, rank=1)], []).next_steps) == 1


def test_the_call_of_a_collective_computes_nothing(tmp_path: Path) -> None:
    made = Recording()
    with made.inside("ProfilerStep#1"):
        made.work(3_000, "aten::relu")
        with made.inside("c10d::allreduce_", "cpu_op"), made.inside("gloo:all_reduce"):
            made.python(4_000)
        made.work(2_500, "aten::sin")
    assert bound(made, tmp_path).title == (
        "Compute-bound on the host: the model takes 58% of each step (5.50 ms of 9.50 ms)."
    )


@pytest.mark.parametrize(
    ("optimizer_ms", "says"), [(6, "Optimizer-bound on the host: optimizer takes 60%"), (3, "Compute-bound")]
)
def test_an_optimizer_that_takes_more_than_the_model_is_what_a_host_is_bound_by(
    optimizer_ms: int, says: str, tmp_path: Path
) -> None:
    made = Recording()
    for step in range(3):
        with made.inside(f"ProfilerStep#{step}"):
            made.work(10_000 - 1_000 * optimizer_ms, "aten::addmm")
            with made.inside("Optimizer.step#AdamW.step"):
                made.work(1_000 * optimizer_ms, "aten::_foreach_add_")
    assert bound(made, tmp_path).title.startswith(says)


def test_waiting_for_a_late_rank_is_not_called_the_backward_pass(tmp_path: Path) -> None:
    usual = {"data_wait": 1, "forward": 5, "backward": 10, "optimizer": 2, "callbacks": 1, "other": 1}

    def phases(rank: int, _step: int) -> dict[str, int]:
        late = {"forward": 30 * (rank == 1), "backward": 30 * (rank == 0)}
        return {name: (ms + late.get(name, 0)) * 1_000_000 for name, ms in usual.items()}

    run = load_run(make_run(tmp_path, FakeRun(world_size=2, phases=phases, trace=False)))
    found = nothing_found(Facts.of(run))
    assert found.title == (
        "Communication-bound: waiting for other ranks takes 60% of each step (30.0 ms of 50.0 ms) on rank 0."
    )
    assert "forward and backward take 30%" in found.why


@pytest.mark.parametrize(
    ("wait_ms", "apart_ms", "work"),
    [
        (40, 0, "100% of the time in the model is"),
        (5, 0, "60% of the time in the model is"),
        (40, 40, "60% of the time in the model is"),
    ],
)
def test_backward_outside_operators_is_no_computation_where_its_collectives_wait(
    wait_ms: int, apart_ms: int, work: str, tmp_path: Path
) -> None:
    def line(part: Part, ms: int, module: str = "", operator: str = "") -> TimeLine:
        return TimeLine(part=part, module=module, operator=operator, ns=ms * 1e6)

    passes = (*(line(Part.FORWARD, 20, module, "aten::addmm") for module in ("a", "b", "c")), line(Part.BACKWARD, 40))
    met = (line(Part.RANK_WAIT, wait_ms), line(Part.COLLECTIVE, 2))
    lines = (*passes, line(Part.RANK_WAIT, apart_ms))
    ledger = TimeLedger(step_ns=1e8, median_ns=1e8, steps=20, basis="", lines=lines, communication=met)
    facts = Facts.of(load_run(make_run(tmp_path, FakeRun(world_size=2))))
    vars(facts)["ledgers"] = {0: ledger, 1: ledger}
    assert nothing_found(facts).why.startswith(work)


def of_lines(tmp_path: Path, *lines: TimeLine, double_backward_ns: float = 0.0) -> Finding:
    """What a run is bound by whose ledger has these lines, of 100 ms together."""
    ledger = TimeLedger(
        step_ns=1e8, median_ns=1e8, steps=20, basis="", lines=lines, double_backward_ns=double_backward_ns
    )
    facts = Facts.of(load_run(make_run(tmp_path, FakeRun())))
    vars(facts)["ledgers"] = {0: ledger}
    return nothing_found(facts)


def own(part: Part, ms: float, module: str | None = None, operator: str | None = None) -> TimeLine:
    return TimeLine(part=part, module=module, operator=operator, ns=ms * 1e6)


@pytest.mark.parametrize(
    ("first", "second", "optimizer", "title"),
    [
        (58, 30, 6, "Compute-bound: mixer takes 58% of each step (58.0 ms of 100 ms)."),
        (48, 30, 10, "Compute-bound: forward and backward take 78% of each step, mixer 48%."),
        (30, 10, 20, "No bottleneck: forward and backward take 40% of each step, mixer 30%."),
        (8, 4, 44, "No bottleneck: optimizer takes 44% of each step."),
        (8, 4, 50, "Optimizer-bound: optimizer takes 50% of each step (50.0 ms of 100 ms)."),
    ],
)
def test_a_step_is_bound_by_what_takes_half_of_it(
    tmp_path: Path, first: int, second: int, optimizer: int, title: str
) -> None:
    lines = (own(Part.FORWARD, first, "mixer", "aten::mm"), own(Part.BACKWARD, second, "head", "aten::mul"))
    rest = (100 - first - second - optimizer) / 4
    others = [own(part, rest) for part in (Part.DATA_WAIT, Part.VALIDATION, Part.CORE_WAIT, Part.GC_PAUSES)]
    assert of_lines(tmp_path, *lines, own(Part.OPTIMIZER, optimizer), *others).title == title


def test_gradients_of_gradients_are_not_called_a_fault_and_not_to_be_compiled(tmp_path: Path) -> None:
    lines = (
        own(Part.FORWARD, 40, "net", "aten::tanh"),
        own(Part.BACKWARD, 50, "net", "aten::mul"),
        own(Part.OPTIMIZER, 10),
    )
    finding = of_lines(tmp_path, *lines, double_backward_ns=7e7)
    assert finding.title == "Compute-bound: double backward takes 70% of each step (70.0 ms of 100 ms)."
    assert "compile" not in {remedy if isinstance(remedy, str) else remedy.id for remedy in finding.remedies}
    (tmp_path / "plain").mkdir()
    assert "compile" in {
        step if isinstance(step, str) else step.id for step in of_lines(tmp_path / "plain", *lines).remedies
    }


@pytest.mark.parametrize(("ms", "is_offered"), [(20, True), (9, False)])
def test_gradients_of_gradients_of_a_tenth_of_a_step_may_be_a_penalty(
    tmp_path: Path, ms: int, is_offered: bool
) -> None:
    lines = own(Part.FORWARD, 30, "net", "aten::mm"), own(Part.BACKWARD, 60, "net", "aten::mm")
    finding = of_lines(tmp_path, *lines, double_backward_ns=ms * 1e6)
    assert (finding.remedies[0].id == "lazy_penalty") == is_offered
    assert finding.title.startswith("Compute-bound: net takes 90%")


def test_few_batches_of_a_validation_are_not_told_to_train(tmp_path: Path) -> None:
    said = verdict_of(load_run(make_run(tmp_path, FakeRun(stage="validate", steps=2, windows=()))))
    assert said.next.startswith("Run at least 20 steps")


TINY = {"forward": 300_000, "backward": 400_000, "callbacks": 100_000, "other": 200_000}


@pytest.mark.parametrize(
    ("costly", "rule"), [({"optimizer": 800_000}, "optimizer_bound"), ({"data_wait": 900_000}, "input_bound")]
)
def test_the_overhead_of_tiny_steps_is_no_finding(tmp_path: Path, costly: dict[str, int], rule: str) -> None:
    training = {**optimizer(), **loader()}
    tiny = {"data_wait": 100_000, "optimizer": 100_000, **TINY, **costly}
    assert rule not in found(tmp_path / "tiny", FakeRun(phases=lambda *_: tiny, training=training))
    scaled = {phase: 20 * ns for phase, ns in tiny.items()}
    assert rule in found(tmp_path / "large", FakeRun(phases=lambda *_: scaled, training=training))


@pytest.mark.parametrize("other", [500_000, 3_000_000])
def test_what_the_trainer_does_between_phases_is_no_finding(tmp_path: Path, other: int) -> None:
    assert list(found(tmp_path, FakeRun(phases=phases(other=other)))) == ["nothing_found"]


@pytest.mark.parametrize("around", [{"callbacks": 1_500_000}, {"other": 1_500_000}])
def test_the_verdict_is_never_green_where_much_of_the_step_is_not_the_models(
    tmp_path: Path, around: dict[str, int]
) -> None:
    tiny = {"data_wait": 100_000, "optimizer": 200_000, **TINY, **around}
    said = verdict_of(load_run(make_run(tmp_path, FakeRun(phases=lambda *_: tiny))))
    assert (said.rule, said.severity) == ("nothing_found", Severity.INFO)
    assert said.title.startswith("Host-bound: callbacks, hooks and untracked time take 6")


def test_a_healthy_run_says_what_it_is_bound_by_and_how_to_look_further(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path))
    said = verdict_of(run)
    assert said.rule == "nothing_found"
    assert said.title.startswith("Compute-bound: forward and backward take 88% of each step (16.")
    assert f"lightning-memprof view {shown_path(run.directory)}" in said.next


def test_validation_that_runs_once_and_takes_most_of_the_run_is_not_called_untracked(tmp_path: Path) -> None:
    row = action("run_validation", 30_000_000, count=1)
    findings = found(tmp_path, FakeRun(phases=phases(other=31_000_000)), row)
    assert findings["nothing_found"].title.startswith("Host-bound: validation takes 6")
    assert findings["validation_bound"].severity is Severity.INFO


def test_a_recording_of_a_graph_without_a_kernel_asks_for_its_replay(tmp_path: Path) -> None:
    made = Recording()
    made.call("hipStreamBeginCapture", 5)
    for _ in range(5):
        made.work(20, "aten::addmm")
        made.call("hipLaunchKernel", 5)
    made.call("hipStreamEndCapture", 5)
    made.call("hipGraphInstantiate", 400)
    finding = bound(made, tmp_path)
    assert finding.title == "No kernel was recorded: the host records a HIP graph."
    assert finding.remedies[0].id == "record_later"


def test_a_name_is_whole_where_the_size_is_what_makes_a_title_too_long(tmp_path: Path) -> None:
    made = Recording()
    made.work(8_000, "aten::addmm")
    made.work(100, "aten::add")
    title = bound(made, tmp_path).title
    assert title == "Compute-bound on the host: matrix multiplication takes 99% of the recorded time."
