from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fake_runs import HEALTHY, FakeRun, add_series, make_run
from kineto import write_trace
from lightning_memprof.account.steps.lines import Spot
from lightning_memprof.judge import Facts, Finding, examine
from lightning_memprof.judge.rules.program.lines import (
    CALLS,
    OF_STEPS,
    OPERATORS,
    fitting,
    of_loop,
    of_samples,
)
from lightning_memprof.read.run.load import load_run
from lightning_memprof.read.trace.report import trace_report

MS = 1_000_000
STEP, MODULE = "Net.training_step", "()"
SVD = {"functions": [STEP, "Net.penalty"], "place": "net.py:9", "source": "return torch.linalg.matrix_norm(w, ord=2)"}
BACKWARD = {"functions": [STEP], "place": "net.py:30", "source": "self.manual_backward(loss, retain_graph=True)"}
OTHER = {"functions": [STEP, MODULE], "place": "net.py:20", "source": "loss = self.net(x).sum()"}


def line(like: dict[str, Any], ms: float, looks: int = 40) -> dict[str, Any]:
    return {**like, "looks": looks, "ns": ms * MS}


def findings_of(tmp_path: Path, *lines: dict[str, Any], **changes: Any) -> dict[str, Finding]:
    directory = make_run(tmp_path, FakeRun(trace=False, memory=None, **changes))
    add_series(directory, "lines", lines)
    return {finding.rule: finding for finding in examine(Facts.of(load_run(directory)))}


@pytest.mark.parametrize(("svd", "looks", "is_found"), [(60, 40, True), (60, 5, False), (10, 40, False)])
def test_a_line_that_costs_much_for_what_can_be_had_for_less_is_named_with_its_source(
    tmp_path: Path, svd: int, looks: int, is_found: bool
) -> None:
    forward = HEALTHY["forward"] / sum(HEALTHY.values())
    found = findings_of(tmp_path, line(SVD, svd, looks), line(OTHER, 100 - svd)).get("costly_line")
    assert (found is not None) == (is_found and 0.6 * forward >= 0.1)
    if found is not None:
        assert found.title.startswith("Net.penalty (net.py:9) takes ")
        assert found.title.endswith(": `return torch.linalg.matrix_norm(w, ord=2)`.")
        assert "power iteration" in found.next_steps[0]
        assert found.recovers is not None
        assert found.recovers.max == pytest.approx(0.95 * 0.6 * HEALTHY["forward"], rel=0.05)


def test_lines_of_one_function_that_do_the_same_are_one_cost(tmp_path: Path) -> None:
    norm = {"functions": [STEP, MODULE, "Norm.forward"]}
    sources = ("low = x.quantile(0.1)", "high = x.quantile(0.9)")
    parts = [line({**norm, "place": f"norm.py:{at}", "source": source}, 30) for at, source in enumerate(sources)]
    found = findings_of(tmp_path, *parts, line(OTHER, 40))["costly_line"]
    assert found.numbers["line_ns"] == pytest.approx(0.6 * HEALTHY["forward"], rel=0.05)


def test_a_line_that_calls_a_module_is_not_blamed_for_it(tmp_path: Path) -> None:
    sorting = {**OTHER, "source": "loss = self.net(x.sort().values).sum()"}
    assert "costly_line" not in findings_of(tmp_path, line(sorting, 90), line(SVD, 10))


@pytest.mark.parametrize(("ms", "is_found"), [(99, True), (80, False)])
@pytest.mark.parametrize("is_helper", [True, False])
def test_a_helper_with_a_third_of_the_step_is_named_whatever_it_does(
    tmp_path: Path, ms: int, is_found: bool, is_helper: bool
) -> None:
    functions = [STEP, "Net.table"] if is_helper else [STEP, MODULE, "Block.forward"]
    table = {"functions": functions, "place": "net.py:4", "source": "return torch.sin(places)"}
    forward = {**HEALTHY, "forward": 7 * MS}
    found = findings_of(tmp_path, line(table, ms), line(OTHER, 100 - ms), phases=lambda *_: forward).get("costly_line")
    assert (found is not None) == (is_found and is_helper)
    if found is not None:
        assert found.next_steps[0].startswith("Make Net.table cheaper, or run it less often")
        assert len(found.next_steps) == 1


@pytest.mark.parametrize(
    ("ms", "operator", "function"),
    [
        pytest.param(20, "aten::sum", "Net.squares", id="called there"),
        pytest.param(20, "aten::su", None, id="another operator"),
        pytest.param(8, "aten::sum", None, id="little time"),
        pytest.param(30, "aten::mm", "Net.squares", id="most time"),
    ],
)
def test_a_loop_is_in_the_line_that_calls_its_operator_also_where_that_has_less_of_the_time(
    tmp_path: Path, ms: int, operator: str, function: str | None
) -> None:
    squares = {"functions": [STEP, "Net.squares"], "place": "net.py:9", "source": "[w.pow(2).sum() for w in self.w]"}
    directory = make_run(tmp_path, FakeRun(trace=False, memory=None))
    add_series(directory, "lines", [line(squares, ms), line(OTHER, 100 - ms)])
    at = of_loop(load_run(directory).ranks[0], operator)
    assert (at.function if at else None) == function


def test_a_run_without_looks_has_no_such_finding(tmp_path: Path) -> None:
    assert "costly_line" not in findings_of(tmp_path)


CALLED = {
    "new iterator": ("(x,) = next(iter(self.more))", None, "Keep the iterator"),
    "kept iterator": ("(x,) = next(self.batches)", "_BaseDataLoaderIter.__next__", "CombinedLoader"),
    "loop over a loader": ("for x in self.loader:", "DataLoader.__iter__", "Keep the iterator"),
    "copy": ("self.best = deepcopy(self.net)", "deepcopy", "Copy less in f"),
    "one hot": ("return F.one_hot(i, n).float() @ self.table", None, "Look up rows"),
    "inverse": ("w = torch.linalg.inv(cov)", None, "Decompose"),
    "cheap norm": ("n = torch.linalg.vector_norm(w)", None, None),
    "label of a class": ("y = F.one_hot(labels, 10)", None, None),
    "draw": ("i = np.random.choice(n, 8, replace=False)", None, "Draw only"),
    "write": ("json.dump(row, self.file)", "dump", "Write less often in f"),
    "open to write": ("with open(self.path, 'w') as file:", None, "Write less often in f"),
    "open to read": ("with open(path, 'rb') as file:", None, "Open and parse a file"),
    "read": ("row = pd.read_csv(path)", "read_csv", "Open and parse a file"),
    "image": ("return Image.open(path)", None, None),
    "retained": ("self.manual_backward(loss, retain_graph=True)", None, "Run one backward for the sum"),
    "profiler": ("self.profiler.step()", "profile.step", "Record fewer steps with the profiler in f"),
    "sort": ("top = x.sort(descending=True)", None, "Sort less"),
    "sort for a metric": ("order = np.argsort(-scores)", None, "Compute metrics less often in f"),
    "metric of scikit-learn": (
        "auc = roc_auc_score(y.numpy(), p.numpy())",
        "roc_auc_score",
        "Compute metrics less often in f",
    ),
    "tensor for each value": ("token = torch.tensor(number)", None, "Make the array first"),
    "tensor of a list": ("return torch.tensor(rows)", None, "Make the array first"),
    "tensors of parts": ("return torch.tensor([step.state for step in steps])", None, "Make the array first"),
    "parse": ('return torch.tensor(ast.literal_eval(row["heights"]))', "literal_eval", "Parse each text once"),
    "one tensor of a loop": ("return torch.tensor([index.get(word, 0) for word in words])", None, None),
    "one tensor of a call": ("return user, torch.tensor([product, *self.draw(user)])", None, None),
    "diagonal covariance": (
        "return MultivariateNormal(mean, torch.diag_embed(var))",
        None,
        "Use torch.distributions.I",
    ),
    "one tensor of a part": ("return torch.tensor(numbers[: self.length])", None, None),
    "work of a test": ("time.sleep(0.1)", None, None),
    "penalty": ("squares = [w.pow(2).sum() for w in self.parameters()]", None, "Let the optimizer decay the weights"),
    "norms of gradients": ("norms = [w.grad.norm() for w in self.parameters()]", None, None),
    "power": ("squares = [layer.weight.pow(2).sum() for layer in self.layers]", None, None),
    "arithmetic": ("y = (x - low) / (high - low)", None, None),
}


@pytest.mark.parametrize("case", CALLED)
def test_the_next_step_fits_what_a_line_calls(case: str) -> None:
    source, called, expected = CALLED[case]
    at = Spot(function="f", share=0.5, depth=0, place="a.py:1", source=source, called=called)
    steps = fitting("aten::mul", at)
    assert expected is None or expected in steps[0]
    assert bool(steps) == (expected is not None)


@pytest.mark.parametrize(
    ("operator", "step"),
    [
        ("aten::_linalg_svd", "Decompose"),
        ("aten::linalg_eigh", "Decompose"),
        ("aten::sort", "Sort less"),
        ("aten::bernoulli_", "Draw fewer"),
        ("aten::cat", "Copy less"),
        ("attention without the fused kernel", "Use the fused kernel"),
        ("matrix multiplication", None),
        ("aten::mul", None),
        ("aten::softmax", None),
    ],
)
def test_the_next_step_fits_an_operator(operator: str, step: str | None) -> None:
    steps = fitting(operator, None)
    assert len(steps) == (step is not None)
    assert step is None or steps[0].startswith(step)


def test_a_data_set_that_reads_a_loader_gets_no_advice_about_the_step() -> None:
    at = Spot(function="Joined.__iter__", share=0.9, depth=0, source="next(it)", called="_BaseDataLoaderIter.__next__")
    assert of_samples(at) == ()
    assert fitting("aten::mul", at)[0].startswith("Let the Trainer load both")


def test_a_data_set_that_sorts_each_sample_is_not_a_metric() -> None:
    at = Spot(function="Ranked.__getitem__", share=0.9, depth=0, source="order = np.argsort(self.rows[index])")
    assert of_samples(at)[0].startswith("Sort less")


def test_a_data_set_that_decomposes_the_same_matrix_for_each_sample_does_it_once() -> None:
    at = Spot(function="Spectra.solver", share=0.9, depth=1, source="return bumps, np.linalg.pinv(bumps)")
    assert of_samples(at)[0].startswith("Decompose matrices once, in __init__ of the data set")
    assert fitting("aten::mul", at)[0].startswith("Decompose matrices less often")


def test_a_helper_of_unknown_work_is_to_run_less_often() -> None:
    helper = Spot(function="Net.table", share=0.5, depth=1)
    assert fitting("aten::mul", helper)[0].startswith("Make Net.table cheaper, or run it less often")
    assert fitting("aten::mul", Spot(function="Block.forward", share=0.5, depth=2)) == ()


def test_all_next_steps_have_their_names() -> None:
    assert all("{" not in step.format(name="f") for step, _ in (*OF_STEPS, *CALLS, *OPERATORS))


def test_the_page_of_a_healthy_run_has_the_function_with_much_of_the_forward(tmp_path: Path) -> None:
    events = [
        ("ProfilerStep#2", 0, 4000),
        ("[pl][profile][Strategy]SingleDeviceStrategy.training_step", 0, 2000),
        ("aten::mul", 10, 1990),
        ("[pl][profile][Strategy]SingleDeviceStrategy.backward", 2000, 4000),
        ("aten::mul", 2000, 3990),
    ]
    rows = [
        {"ph": "X", "cat": "user_annotation" if "#" in name else "cpu_op", "name": name, "pid": 9, "tid": 9}
        | {"ts": start, "dur": end - start, "args": {}}
        for name, start, end in events
    ]
    directory = make_run(tmp_path / "log", FakeRun())
    table = {"functions": [STEP, "Net.table"], "place": "net.py:4", "source": "return torch.sin(self.places())"}
    add_series(directory, "lines", [line(table, 30), line(OTHER, 70)])
    trace = trace_report(write_trace(tmp_path / "made.json", rows))
    first, *_ = examine(Facts.of(load_run(directory), (trace,)))
    assert "; Net.table (net.py:4) has 30% of the forward: `return torch.sin(self.places())`." in first.title
    assert first.next_steps[0].startswith("Make Net.table cheaper")


def test_a_backward_in_training_step_is_not_in_the_forward(tmp_path: Path) -> None:
    found = findings_of(tmp_path, line(BACKWARD, 80), line(SVD, 20))
    backward = HEALTHY["backward"]
    assert found["costly_line"].numbers["line_ns"] == pytest.approx(backward, rel=0.05)
    assert "one backward for the sum of the losses" in found["costly_line"].next_steps[0]
    plain = line({**BACKWARD, "source": "self.manual_backward(loss)"}, 80)
    alone = findings_of(tmp_path / "plain", plain, line(SVD, 20))["costly_line"]
    assert alone.numbers["line_ns"] == pytest.approx(HEALTHY["forward"], rel=0.05)
    helper = {**BACKWARD, "functions": [STEP, "Net.learn"], "source": "self.manual_backward(loss)"}
    assert "costly_line" not in findings_of(tmp_path / "helper", line(helper, 80), line(OTHER, 20))


@pytest.mark.parametrize(
    ("function", "fused"),
    [
        ("LayerNorm.forward", "torch.nn.LayerNorm instead of LayerNorm"),
        ("blocks.RMS_Norm.forward", "torch.nn.RMSNorm instead of blocks.RMS_Norm"),
        ("LayerNorm.statistics", None),
        ("AdaptiveLayerNorm.forward", None),
        ("Mixer.forward", None),
    ],
)
def test_a_module_that_a_program_writes_itself_is_to_be_torchs(function: str, fused: str | None) -> None:
    steps = fitting("aten::std", Spot(function=function, share=0.5, depth=2))
    assert any(f"Use {fused}" in step for step in steps) is (fused is not None)
