from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_memory import START_NS
from fake_runs import HEALTHY, FakeRun, add_series, make_run
from findings import recovery
from lightning_memprof.judge import Facts, examine
from lightning_memprof.read.run.load import load_run
from passes import event, found

OPTIMIZERS = [{"name": "SGD", "parameters": 2, "device": "cpu"}]


def saved(step: int, *forwards: int) -> list[dict[str, Any]]:
    """A row per backward pass of a step: how often the model ran since the pass before."""
    row = {"step": step, "global_step": step, "point": "before_backward", "recorded": True, "time_ns": START_NS}
    return [{**row, "activation_bytes": 100, "modules": {"trunk": [100, 100, count, 1, 1]}} for count in forwards]


@pytest.mark.parametrize(
    ("forwards", "optimizers", "others"),
    [
        pytest.param((1, 0), OPTIMIZERS, 1 / 2, id="two losses of one graph"),
        pytest.param((1, 0, 0), OPTIMIZERS, 2 / 3, id="three losses of one graph"),
        pytest.param((1, 1), OPTIMIZERS, 0.0, id="a forward before each"),
        pytest.param((1,), OPTIMIZERS, 0.0, id="one loss"),
        pytest.param((1, 0), OPTIMIZERS * 2, 0.0, id="an optimizer for each"),
    ],
)
def test_passes_through_one_graph_are_found_by_the_forwards_between_them(
    tmp_path: Path, forwards: tuple[int, ...], optimizers: list[dict[str, Any]], others: float
) -> None:
    directory = make_run(tmp_path, FakeRun(trace=False, training={"optimizers": optimizers}))
    (directory / "window000/rank00000.saved_tensors.jsonl").write_text("")
    add_series(directory, "saved_tensors", [row for step in (2, 3) for row in saved(step, *forwards)])
    found = {finding.rule: finding for finding in examine(Facts.of(load_run(directory)))}.get("repeated_backward")
    assert (found is not None) == (others > 0)
    if found is not None:
        assert (found.numbers["passes"], found.numbers["repeated"]) == (2 * len(forwards), 2 * forwards.count(0))
        assert recovery(found).max == pytest.approx(others * HEALTHY["backward"], rel=0.05)


def half_trained(**training: Any) -> FakeRun:
    return FakeRun(phases=lambda _rank, _step: {**HEALTHY, "backward": 40_000_000}, training=training)


def gradients(count: int) -> list[dict[str, Any]]:
    return [event("torch::autograd::AccumulateGrad", 2905 + 5 * at, 2908 + 5 * at) for at in range(count)]


def node(module: str, at: int) -> list[dict[str, Any]]:
    """An operator in a module's forward at ``at``, and its node in backward 2 ms later, of 600 us."""
    made = event("aten::relu", at, at + 10)
    made["args"] = {"Sequence number": at, "Fwd thread id": 0}
    ran = event("autograd::engine::evaluate_function: ReluBackward0", at + 2000, at + 2600)
    ran["args"] = {"Sequence number": at, "Fwd thread id": 1}
    return [event(f"[pl][module]Net: {module}", at, at + 20), made, ran]


def test_a_module_in_no_optimizer_whose_gradients_are_computed_is_named(tmp_path: Path) -> None:
    fake = half_trained(not_optimized=["head", "backbone"])
    finding = found(tmp_path, *node("backbone.0", 100), fake=fake)["unused_gradients"]
    assert "backbone, which is in no optimizer" in finding.title
    assert "self.backbone.requires_grad_(False)" in finding.next_steps[0]
    assert recovery(finding).min == pytest.approx(recovery(finding).max * 0.4)
    assert recovery(finding).max == pytest.approx(40e6 * 0.6, rel=0.05)


def test_a_module_whose_learning_rate_is_0_is_named_as_one_in_no_optimizer(tmp_path: Path) -> None:
    finding = found(tmp_path, *node("backbone.0", 100), fake=half_trained(zero_lr=["backbone"]))["unused_gradients"]
    assert "backbone, whose learning rate is 0" in finding.title
    assert "self.backbone.requires_grad_(False)" in finding.next_steps[0]


def test_a_module_in_no_optimizer_without_backward_costs_nothing(tmp_path: Path) -> None:
    assert "unused_gradients" not in found(tmp_path, *node("net", 100), fake=half_trained(not_optimized=["backbone"]))


TWO_OPTIMIZERS = [
    {"name": "Adam", "parameters": 4, "modules": ["generator"], "fused": True},
    {"name": "SGD", "parameters": 2, "modules": ["critic"], "fused": True},
]


@pytest.mark.parametrize(("count", "passes", "is_found"), [(18, 3, True), (14, 3, False), (6, 1, False)])
def test_passes_that_all_reach_two_optimizers_compute_gradients_in_vain(
    tmp_path: Path, count: int, passes: int, is_found: bool
) -> None:
    fake = replace(
        half_trained(optimizers=TWO_OPTIMIZERS), actions=("[Precision]Half.backward", "[Optimizer]SGD.step") * passes
    )
    events = [*node("generator.0", 100), *gradients(count)]
    findings = found(tmp_path, *events, fake=fake)
    assert ("unused_gradients" in findings) == is_found
    if is_found:
        assert "3 backward passes per step reach all optimizers" in findings["unused_gradients"].title
        assert findings["unused_gradients"].remedies[0].id == "detach_parts"


@pytest.mark.parametrize(
    ("count", "passes", "detached", "named"),
    [
        (10, 2, False, "generator"),
        (8, 2, False, "critic"),
        (6, 2, False, None),
        # Its samples are detached for the critic: the graph is freed before that pass.
        (10, 2, True, None),
        (10, 3, False, None),
    ],
)
def test_gradients_that_the_pass_for_another_optimizer_computes_too_are_named(
    tmp_path: Path, count: int, passes: int, detached: bool, named: str | None
) -> None:
    fake = replace(
        half_trained(optimizers=TWO_OPTIMIZERS),
        actions=("[Precision]Half.backward", "[Optimizer]SGD.step") * passes,
        memory=None,
    )
    row = {"step": 2, "recorded": True, "time_ns": 1}
    first, second = ({"generator": [0, size, 1, 9, 9], "critic": [0, 9, 2, 9, 9]} for size in (0 if detached else 9, 9))
    findings = found(
        tmp_path,
        *node("generator.0", 100),
        *node("critic.0", 1000),
        *gradients(count),
        fake=fake,
        saved_tensors=[row | {"modules": first}, row | {"modules": second}],
    )
    assert ("unused_gradients" in findings) == (named is not None)
    if named:
        finding = findings["unused_gradients"]
        assert f"both backward passes of each step reach {named}: " in finding.title
        assert finding.remedies[0].id == "detach_parts"
        # 15 ms of backward for each part: one of its two passes.
        assert "15.0 ms of" in finding.why
        assert recovery(finding).max == pytest.approx(7.5e6)
        assert recovery(finding).min == pytest.approx(0.4 * recovery(finding).max)
