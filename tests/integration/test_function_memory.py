"""Memory at functions under a real Trainer: what is recorded, and that the program does not notice."""

from __future__ import annotations

import copy
import pickle
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from torch import nn

from lightning_memprof import ConfigError, MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.capture.collectors.functions import CallRange, FunctionMemory
from lightning_memprof.capture.sources.call_memory import UserHooks
from lightning_memprof.capture.sources.methods import memprofilable
from recorded_rows import read_series
from training import Perceptron, loader, manifest, only_run, rows_of, trainer

SCHEDULE = Schedule(wait=1, warmup=1, active=2, repeat=2)
EVERYTHING = ("training_step", "backward", "optimizer_step", "validation_step", "on_train_batch_end", "loss")


def recording(collector: FunctionMemory | None = None, schedule: Schedule = SCHEDULE) -> MemProfilerCallback:
    collector = collector or FunctionMemory(functions=EVERYTHING, saved_tensors_hooks=True)
    return MemProfilerCallback(schedule, [collector], output=OutputOptions(summary=False, on_error="raise"))


def functions(directory: Path, window: int = 0, rank: int = 0) -> list[dict[str, Any]]:
    return read_series(only_run(directory) / f"window{window:03d}/rank{rank:05d}.functions.jsonl")


def stats(directory: Path, rank: int = 0) -> dict[str, dict[str, Any]]:
    loaded: dict[str, dict[str, Any]] = yaml.safe_load(
        (only_run(directory) / f"rank_{rank}_memory_stats.yaml").read_text()
    )
    return loaded


def named(rows: list[dict[str, Any]], step: int) -> list[tuple[str, str, int]]:
    return [(row["function"], row["point"], row["depth"]) for row in rows if row["step"] == step]


def classes(model: pl.LightningModule) -> list[dict[str, Any]]:
    return [dict(vars(base)) for base in type(model).__mro__]


def test_every_function_of_a_step_has_its_start_and_its_end(tmp_path: Path) -> None:
    model = Perceptron()
    before = classes(model)
    trainer(tmp_path, recording(), val_check_interval=3).fit(model, loader(9), loader(2))
    step = [
        ("optimizer_step", "start", 0),
        ("training_step", "start", 1),
        ("loss", "start", 2),
        ("loss", "end", 2),
        ("training_step", "end", 1),
        ("backward", "start", 1),
        ("backward", "end", 1),
        ("optimizer_step", "end", 0),
        ("on_train_batch_end", "start", 0),
        ("on_train_batch_end", "end", 0),
    ]
    rows = functions(tmp_path)
    assert named(rows, 3) == step
    validation = [
        ("validation_step", "start", 0),
        ("loss", "start", 1),
        ("loss", "end", 1),
        ("validation_step", "end", 0),
    ]
    assert named(rows, 2) == step + validation * 2
    assert {key.split(".")[2] for key in stats(tmp_path)} == {"3", "4", "7", "8"}
    assert classes(model) == before
    kinds = {(row["type"], row["path"]) for row in rows_of(only_run(tmp_path), "artifact")}
    assert ("blob", "memprofiler/rank_0_memory_stats.yaml") in kinds


def test_forwards_are_seen_though_the_step_never_calls_the_module_itself(tmp_path: Path) -> None:
    class Wide(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 1024))

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.net(batch.clone()).sum()

    trainer(tmp_path, recording()).fit(Wide(), loader(6))
    end = stats(tmp_path)["0.training_step.3.end"]
    assert end["npp_diff"] == 4 * 8 * 4
    assert end["rss_pre_forward"] > 1 << 20


class Kept(Perceptron):
    """Keeps its losses and gradients, and differentiates twice."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        batch = batch.clone().requires_grad_()
        value = self.net(batch).square().mean()
        (slope,) = torch.autograd.grad(value, batch, create_graph=True)
        loss = value + slope.square().sum()
        self.seen.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None: ...

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.extend(parameter.grad.clone() for parameter in self.parameters())


@pytest.mark.parametrize("calls", [None, CallRange(2, 5)])
def test_a_double_backward_is_the_same_bit_for_bit_with_saved_tensor_hooks(
    tmp_path: Path, calls: CallRange | None
) -> None:
    def outcome(directory: Path, *callbacks: pl.Callback) -> tuple[list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(11)
        model = Kept()
        trainer(directory, *callbacks).fit(model, loader(10))
        return [*model.seen, *model.state_dict().values()], torch.get_rng_state()

    bare, bare_state = outcome(tmp_path / "bare")
    collector = FunctionMemory(functions=EVERYTHING, saved_tensors_hooks=True, calls=calls)
    ours, our_state = outcome(tmp_path / "ours", recording(collector))
    assert len(bare) == len(ours) > 50
    assert all(torch.equal(a, b) for a, b in zip(bare, ours, strict=True))
    assert torch.equal(bare_state, our_state)
    assert stats(tmp_path / "ours")["0.training_step.3.end"]["npp_diff"] > 0


def test_an_in_place_error_is_still_raised(tmp_path: Path) -> None:
    class InPlace(Perceptron):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            value = self.net(batch).exp()
            loss = value.sum()
            if batch_idx == 2:
                value.add_(1)
            return loss

    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        trainer(tmp_path, recording()).fit(InPlace(), loader(6))
    rows = functions(tmp_path)
    assert [row.get("raised") for row in rows if row["function"] == "backward" and row["point"] == "end"] == [
        "RuntimeError"
    ]
    assert stats(tmp_path)["0.training_step.3.end"]


@pytest.mark.parametrize("where", ["training_step", "backward", "on_train_batch_end"])
@pytest.mark.parametrize("calls", [None, CallRange(1, 5)])
def test_an_exception_arrives_as_the_same_object_and_every_start_has_its_end(
    tmp_path: Path, where: str, calls: CallRange | None
) -> None:
    error = ArithmeticError("mine")

    class Failing(Perceptron):
        def maybe(self, place: str, step: int) -> None:
            if place == where and step == 2:
                raise error

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.maybe("training_step", batch_idx)
            return self.loss(batch)

        def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self.maybe("backward", self.trainer.global_step)
            loss.backward()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.maybe("on_train_batch_end", batch_idx)

    model = Failing()
    before = classes(model)
    collector = FunctionMemory(functions=EVERYTHING, calls=calls, saved_tensors_hooks=True)
    with pytest.raises(ArithmeticError) as caught:
        trainer(tmp_path, recording(collector)).fit(model, loader(6))
    assert caught.value is error
    assert classes(model) == before
    run = only_run(tmp_path)
    rows = functions(tmp_path) if calls is None else read_series(run / "functions.rank00000.jsonl")
    starts = sorted((row["function"], row["number"]) for row in rows if row["point"] == "start")
    assert starts == sorted((row["function"], row["number"]) for row in rows if row["point"] == "end")
    raised = {row["function"] for row in rows if row.get("raised")}
    assert where in raised
    assert manifest(run)[-1]["exception"] == "ArithmeticError: mine"
    # The next fit of the process records anew.
    trainer(tmp_path / "again", recording()).fit(Perceptron(), loader(6))
    assert len(functions(tmp_path / "again")) > 10


def test_the_model_is_pickled_and_copied_inside_a_window(tmp_path: Path) -> None:
    class Copied(Perceptron):
        copies = 0

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            attached, self.trainer = self.trainer, None
            twin, thawed = copy.deepcopy(self), pickle.loads(pickle.dumps(self))  # noqa: S301 our own
            self.trainer = attached
            for module in (twin, thawed):
                assert set(vars(module)) == set(vars(self))
                assert torch.equal(module.eval().loss(batch), twin.loss(batch))
                Copied.copies += 1
            return self.loss(batch)

    globals()["Copied"] = Copied
    Copied.__qualname__ = "Copied"
    try:
        trainer(tmp_path, recording()).fit(Copied(), loader(6))
    finally:
        del globals()["Copied"]
    assert Copied.copies == 12
    # What the copies did is not the model's.
    assert [row["function"] for row in functions(tmp_path) if row["step"] == 2].count("loss") == 2


def test_fits_one_after_another_with_one_callback_leave_nothing_and_record_each(tmp_path: Path) -> None:
    model, callback = Perceptron(), recording(schedule=Schedule())
    trainer(tmp_path / "bare").fit(model, loader(6))
    before = classes(model), set(vars(model))
    for _ in range(3):
        trainer(tmp_path, callback).fit(model, loader(6))
    runs = sorted(path.name for path in (tmp_path / "log").iterdir() if path.is_dir())
    assert runs == ["memprofiler", "memprofiler-2", "memprofiler-3"]
    texts = [(tmp_path / "log" / run / "rank_0_memory_stats.yaml").read_text() for run in runs]
    assert [list(yaml.safe_load(text)) for text in texts] == [list(yaml.safe_load(texts[0]))] * 3
    assert (classes(model), set(vars(model))) == before


def test_gradient_accumulation_has_a_training_step_for_each_batch(tmp_path: Path) -> None:
    trainer(tmp_path, recording(), accumulate_grad_batches=2).fit(Perceptron(), loader(6))
    ends = [row for row in functions(tmp_path) if row["function"] == "training_step" and row["point"] == "end"]
    assert [row["number"] for row in ends] == [3, 4]


def test_by_count_the_second_call_is_number_2(tmp_path: Path) -> None:
    collector = FunctionMemory(functions=["training_step", "validation_step"], calls=CallRange(2, 2))
    trainer(tmp_path, recording(collector), val_check_interval=3).fit(Perceptron(), loader(6), loader(2))
    assert sorted(stats(tmp_path)) == [
        f"0.{function}.2.{edge}" for function in ("training_step", "validation_step") for edge in ("end", "start")
    ]


def test_other_stages_record_their_own_step(tmp_path: Path) -> None:
    for stage in ("validate", "test", "predict"):
        getattr(trainer(tmp_path / stage, recording(FunctionMemory())), stage)(Perceptron(), loader(6))
        found = {row["function"] for row in functions(tmp_path / stage)}
        assert found == {{"validate": "validation", "test": "test", "predict": "predict"}[stage] + "_step"}


def test_manual_optimization_and_a_marked_method_of_another_object(tmp_path: Path) -> None:
    class Tokenizer:
        @memprofilable
        def encode(self, batch: torch.Tensor) -> torch.Tensor:
            return batch * 2

    class Manual(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.tokenizer = Tokenizer()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            for _ in range(2):
                loss = self.loss(self.tokenizer.encode(batch))
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()

    trainer(tmp_path, recording()).fit(Manual(), loader(6))
    rows = functions(tmp_path)
    assert [row["function"] for row in rows if row["step"] == 2].count("encode") == 4
    ends = [row for row in rows if row["function"] == "loss" and row["point"] == "end" and row["step"] == 2]
    assert ends[0]["npp_diff"] == ends[1]["npp_diff"] > 0


def test_a_name_that_the_module_does_not_have_is_an_error_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"FunctionMemory \(functions holds 'nothing': Perceptron.nothing"):
        trainer(tmp_path, recording(FunctionMemory(functions=["nothing"]))).fit(Perceptron(), loader(3))


def test_a_users_hooks_leave_no_attribute(tmp_path: Path) -> None:
    def before(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        module.seen = 1 + getattr(module, "seen", 0)  # type: ignore[assignment]

    class Called(Perceptron):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.net(batch)

        def loss(self, batch: torch.Tensor) -> torch.Tensor:
            return self(batch).square().mean()

    model = Called()
    hooks = UserHooks(pre_forward=[before], save_attributes=["seen"])
    trainer(tmp_path, recording(FunctionMemory(user_hooks=hooks))).fit(model, loader(10))
    # Two windows, each of a warm-up step and two that are recorded; each begins anew.
    assert [value["seen"] for value in stats(tmp_path).values()] == [1, 2, 2, 3] * 2
    assert not any({"seen", "mem_info_handle"} & {*vars(module)} for module in model.modules())


@pytest.fixture
def compilations() -> Iterator[Callable[[], int]]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def test_a_compiled_model_is_recorded_from_outside_and_is_not_compiled_again(
    tmp_path: Path, compilations: Callable[[], int]
) -> None:
    def fit(directory: Path, *callbacks: pl.Callback) -> tuple[int, list[torch.Tensor], set[str]]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(11)
        model = Perceptron()
        model.net[2] = nn.Identity()
        compiled: Any = torch.compile(model, backend="eager")
        trainer(directory, *callbacks).fit(compiled, loader(10))
        return compilations(), list(model.state_dict().values()), set(vars(model))

    graphs, weights, names = fit(tmp_path / "bare")
    our_graphs, our_weights, our_names = fit(tmp_path / "ours", recording())
    assert graphs == our_graphs >= 1
    assert names == our_names
    assert all(torch.equal(a, b) for a, b in zip(weights, our_weights, strict=True))
    rows = functions(tmp_path / "ours")
    assert {row["function"] for row in rows} == {*EVERYTHING} - {"loss", "validation_step"}
    assert {row["npp_diff"] for row in rows} == {None}
    reasons = [row["reason"] for row in rows_of(only_run(tmp_path / "ours"), "unavailable")]
    assert any(reason.startswith("Perceptron.loss: a compiled part of the model may call it") for reason in reasons)
    assert any(reason.startswith("memory at forwards: a part of the model is compiled") for reason in reasons)


@pytest.mark.parametrize("start", [0, 2])
def test_what_ddp_leaves_on_the_instance_is_left_as_ddp_leaves_it(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]], start: int
) -> None:
    program = tmp_path / "ddp.py"
    program.write_text(
        dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
        from pathlib import Path
        import torch
        from lightning.pytorch.strategies import DDPStrategy
        from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
        from lightning_memprof.capture.collectors.functions import FunctionMemory
        from training import Perceptron, loader, trainer

        class Called(Perceptron):
            def forward(self, batch):
                return self.net(batch)

            def loss(self, batch):
                return self(batch).square().mean()

        def fit(directory, *callbacks):
            model = Called()
            strategy = DDPStrategy(process_group_backend="gloo")
            trainer(directory, *callbacks, strategy=strategy).fit(model, loader(8))
            left = vars(model).get("forward")
            return list(model.parameters()), left is not None and left.__func__ is Called.forward

        own = dict(vars(Called))
        collector = FunctionMemory(functions=["forward", "training_step", "backward"])
        schedule = Schedule(wait={start}, warmup=0, active=2, repeat=2)
        bare, left = fit(Path("bare"))
        recorder = MemProfilerCallback(schedule, [collector], output=OutputOptions(summary=False, on_error="raise"))
        ours, our_left = fit(Path("ours"), recorder)
        assert left and our_left
        assert all(torch.equal(a, b) for a, b in zip(bare, ours))
        assert dict(vars(Called)) == own
        """)
    )
    result = run_python(str(program), OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr[-3000:]
    rows = functions(tmp_path / "ours", window=1)
    step = rows[-1]["step"]
    assert named(rows, step) == [
        ("training_step", "start", 0), ("forward", "start", 1), ("forward", "end", 1), ("training_step", "end", 0),
        ("backward", "start", 0), ("backward", "end", 0),
    ]  # fmt: skip
