"""ModuleMemory in real fits: the closed forms of what a step holds, and what becomes of the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.capture.tracker.collectors import ModuleMemory
from models import Compiled, Mlp, fit
from recorded_rows import read_series
from training import Perceptron, loader, only_run, rows_of, trainer

SERIES = "window000/rank00000.module_memory.jsonl"


class Sized(Perceptron):
    """Layers of a given width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Adversaries(pl.LightningModule):
    """Two optimizers by hand: each with a network of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.other = nn.Linear(8, width), nn.Linear(8, width)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        for optimizer, network in zip(self.optimizers(), (self.one, self.other), strict=True):
            optimizer.zero_grad()
            self.manual_backward(network(batch).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(self.one.parameters()), torch.optim.AdamW(self.other.parameters())]


def tracking(collector: ModuleMemory, schedule: Schedule | None = None) -> MemProfilerCallback:
    schedule = schedule or Schedule(wait=1, warmup=1, active=1)
    return MemProfilerCallback(schedule, [collector], output=OutputOptions(on_error="raise", summary=False))


def record(directory: Path, model: pl.LightningModule, **options: Any) -> Path:
    """Fit with the tracker in step 2, where the optimizer's state is there; give the run directory."""
    ours = tracking(options.pop("collector", ModuleMemory()), options.pop("schedule", None))
    validation = options.pop("validation", None)
    trainer(directory, ours, **options).fit(model, loader(), validation)
    return only_run(directory)


def categories(run: Path, kind: str) -> dict[str, int]:
    (row,) = [row for row in read_series(run / SERIES) if row["kind"] == kind]
    assert sum(row["categories"].values()) == row["total_bytes"]
    return row["categories"]


def parameter_bytes(model: nn.Module) -> int:
    return sum(4 * parameter.numel() for parameter in model.parameters())


def scalars(model: nn.Module) -> int:
    """Bytes of the step counters, one float32 a parameter."""
    return 4 * len(list(model.parameters()))


SETTINGS: dict[str, dict[str, Any]] = {
    "32-bit": {},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "accumulation": {"accumulate_grad_batches": 3},
    "clipping": {"gradient_clip_val": 0.5},
}


@pytest.mark.parametrize(("width", "setting"), zip((16, 64, 160, 64), SETTINGS, strict=True))
def test_the_closed_forms_hold_under_lightnings_closure(tmp_path: Path, width: int, setting: str) -> None:
    model = Sized(width)
    active = 3 if setting == "accumulation" else 1
    schedule = Schedule(wait=2, warmup=1, active=active)
    run = record(tmp_path, model, schedule=schedule, collector=ModuleMemory(step=active - 1), **SETTINGS[setting])
    whole = parameter_bytes(model)
    for kind in ("peak", "end"):
        found = categories(run, kind)
        assert found["parameter"] == whole
        assert found["optimizer_state"] == 2 * whole + scalars(model)
        assert found["input"] == 12 * 4 * 8 * 4  # the batch is a view of the data set's storage
    assert categories(run, "end")["gradient"] == whole
    assert categories(run, "end")["temporary"] == 0


@pytest.mark.parametrize("width", [16, 160])
def test_the_closed_forms_hold_for_two_optimizers_by_hand(tmp_path: Path, width: int) -> None:
    model = Adversaries(width)
    run = record(tmp_path, model)
    found = categories(run, "end")
    assert found["parameter"] == found["gradient"] == parameter_bytes(model)
    assert found["optimizer_state"] == 2 * parameter_bytes(model) + scalars(model)
    assert categories(run, "peak")["optimizer_state"] == found["optimizer_state"]


def test_in_the_first_step_the_state_is_made_and_then_is_exact(tmp_path: Path) -> None:
    model = Sized(32)
    run = record(tmp_path, model, schedule=Schedule(wait=0, warmup=0, active=1))
    whole = 2 * parameter_bytes(model) + scalars(model)
    assert categories(run, "end")["optimizer_state"] == whole
    # The peak lies in the optimizer: what it uses for a moment cannot be told from the state that it is making.
    assert categories(run, "peak")["optimizer_state"] >= whole


def test_a_validation_behind_the_batch_is_not_in_the_step(tmp_path: Path) -> None:
    alone = record(tmp_path / "alone", Sized(16))
    validated = record(tmp_path / "validated", Sized(16), val_check_interval=1, validation=loader(2))
    assert rows_of(validated, "unavailable") == []
    assert categories(validated, "peak") == categories(alone, "peak")


class CalledTwice(Mlp):
    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch).square().mean() + self.net(batch.flip(0)).abs().mean()


class Closures(Mlp):
    """LBFGS calls its closure, and with it the network, several times in a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=1e-2, max_iter=4)


class Averaged(Mlp):
    """A callback of Lightning 2.6 keeps an exponential moving average of the weights."""

    def configure_callbacks(self) -> Any:
        return [pytest.importorskip("lightning.pytorch.callbacks.weight_averaging").EMAWeightAveraging()]


@pytest.mark.parametrize("kind", [CalledTwice, Closures, Averaged])
def test_each_call_of_the_network_is_recorded_and_the_training_is_the_same(tmp_path: Path, kind: type[Mlp]) -> None:
    bare = fit(kind, tmp_path / "bare")
    ours = tracking(ModuleMemory())
    recorded = fit(kind, tmp_path / "ours", ours)
    assert all(torch.equal(expected, other) for expected, other in zip(bare, recorded, strict=True))
    run = only_run(tmp_path / "ours")
    assert rows_of(run, "unavailable") == rows_of(run, "error") == []
    # A call's forward is no work of the optimizer.
    assert categories(run, "peak")["activation"] >= 4 * 16 * 4
    found = categories(run, "end")
    assert found["parameter"] == found["gradient"] == parameter_bytes(kind())


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_the_closed_forms_hold_without_a_backward(tmp_path: Path, stage: str) -> None:
    ours = tracking(ModuleMemory())
    model = Sized(64)
    getattr(trainer(tmp_path, ours), stage)(model, loader())
    found = categories(only_run(tmp_path), "peak")
    # A layer's result and that of its ReLU live side by side, nothing else: no backward needs the earlier ones.
    assert (found["parameter"], found["gradient"]) == (parameter_bytes(model), 0)
    assert found["activation"] == 2 * 4 * 64 * 4


def test_a_model_with_a_compiled_part_has_the_figures_of_the_model_without_it(tmp_path: Path) -> None:
    runs = [record(tmp_path / kind.__name__, kind()) for kind in (Mlp, Compiled)]
    for kind in ("peak", "end"):
        eager, compiled = (categories(run, kind) for run in runs)
        assert compiled == eager


class Fails(Perceptron):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            raise ArithmeticError
        return loss


def test_a_step_that_raises_is_saved_as_far_as_it_came(tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError):
        record(tmp_path, Fails())
    run = only_run(tmp_path)
    assert categories(run, "peak")["activation"] > 0
