"""ModuleMemory in real fits: the closed forms of what a step holds, and what becomes of the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.capture.tracker.collectors import ModuleMemory
from models import Compiled, GradientPenalty, InPlaceCnn, Lstm, Mlp, SharedEmbeddings, fit
from recorded_rows import read_series
from training import Perceptron, loader, only_run, rows_of, trainer

SERIES = "window000/rank00000.module_memory.jsonl"


class Sized(Perceptron):
    """Layers of a given width; ``kind`` is the optimizer."""

    def __init__(self, width: int, kind: Any = torch.optim.AdamW) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )
        self.kind = kind

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(self.parameters(), 1e-3)


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


def record(directory: Path, model: pl.LightningModule, **options: Any) -> Path:
    """Fit with the tracker in step 2, where the optimizer's state is there; give the run directory."""
    collector = options.pop("collector", ModuleMemory())
    schedule = options.pop("schedule", Schedule(wait=1, warmup=1, active=1))
    validation = options.pop("validation", None)
    ours = MemProfilerCallback(
        schedule=schedule, collectors=[collector], output=OutputOptions(on_error="raise", summary=False)
    )
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


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("width", [16, 64, 160])
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


@pytest.mark.parametrize("width", [16, 64, 160])
def test_the_closed_forms_hold_for_two_optimizers_by_hand(tmp_path: Path, width: int) -> None:
    model = Adversaries(width)
    run = record(tmp_path, model)
    found = categories(run, "end")
    assert found["parameter"] == found["gradient"] == parameter_bytes(model)
    assert found["optimizer_state"] == 2 * parameter_bytes(model) + scalars(model)
    assert categories(run, "peak")["optimizer_state"] == found["optimizer_state"]


@pytest.mark.parametrize(
    ("kind", "copies", "counters"), [(torch.optim.SGD, 0, 0), (torch.optim.Adam, 2, 1), (torch.optim.RMSprop, 1, 1)]
)
def test_each_optimizers_state_is_its_own(
    tmp_path: Path, kind: type[torch.optim.Optimizer], copies: int, counters: int
) -> None:
    model = Sized(32, kind)
    run = record(tmp_path, model)
    state = copies * parameter_bytes(model) + counters * scalars(model)
    assert categories(run, "end")["optimizer_state"] == categories(run, "peak")["optimizer_state"] == state


def test_in_the_first_step_the_state_is_made_and_then_is_exact(tmp_path: Path) -> None:
    model = Sized(32)
    run = record(tmp_path, model, schedule=Schedule(wait=0, warmup=0, active=1))
    whole = 2 * parameter_bytes(model) + scalars(model)
    assert categories(run, "end")["optimizer_state"] == whole
    # The peak lies in the optimizer: what it uses for a moment cannot be told from the state that it is making.
    assert categories(run, "peak")["optimizer_state"] >= whole


def test_activations_are_those_of_the_forward_and_temporaries_those_of_the_backward(tmp_path: Path) -> None:
    run = record(tmp_path, Sized(160))
    rows = {(row["module"], row["state"]): row for row in read_series(run / SERIES) if row["kind"] == "module"}
    # Each ReLU keeps what it gives and not what it was given; the last layer gives one column.
    assert rows["net", "post_forward"]["categories"]["activation"] == 4 * 4 * (160 + 160 + 1)
    assert rows["net", "post_forward"]["categories"]["temporary"] == 0
    assert rows["net", "post_backward"]["categories"]["activation"] <= 16
    assert rows["net.2", "peak_backward"]["categories"]["temporary"] > 0
    assert {"pre_forward", "post_forward", "peak_forward", "pre_backward", "post_backward", "peak_backward"} == {
        state for _, state in rows
    }


def test_the_log_holds_the_peak_and_the_modules_to_the_depth_in_the_units(tmp_path: Path) -> None:
    run = record(tmp_path, Sized(16), collector=ModuleMemory(depth=3, units="B"))
    text = (run / "module_mem_rank_0_training_step_3.log").read_text()
    lines = text.splitlines()
    peak = categories(run, "peak")
    assert lines[:2] == ["Device: cpu", f"\tParameter: {peak['parameter']} B"]
    assert f"\tTotal: {sum(peak.values())} B" in lines
    assert [line.split()[-1] for line in lines if line.startswith("Module:")] == [
        "Sized.net", *(f"Sized.net.{index}" for index in range(5)),
    ]  # fmt: skip
    (listed,) = [row for row in rows_of(run, "artifact") if row["path"].endswith(".log")]
    assert (listed["collector"], listed["type"], listed["window"]) == ("module_memory", "blob", 0)


def test_each_window_has_its_own_step_and_its_own_peak(tmp_path: Path) -> None:
    schedule = Schedule(wait=1, warmup=1, active=2, repeat=2)
    run = record(tmp_path, Sized(16), schedule=schedule, collector=ModuleMemory(step=1))
    for window, step in ((0, 3), (1, 7)):
        rows = read_series(run / f"window{window:03d}/rank00000.module_memory.jsonl")
        assert {(row["step"], row["point"], row["recorded"]) for row in rows} == {(step, "step_end", True)}
        assert sum(row["kind"] == "peak" for row in rows) == 1
        assert (run / f"module_mem_rank_0_training_step_{step + 1}.log").is_file()


def test_a_validation_behind_the_batch_is_not_in_the_step(tmp_path: Path) -> None:
    alone = record(tmp_path / "alone", Sized(16))
    validated = record(tmp_path / "validated", Sized(16), val_check_interval=1, validation=loader(2))
    assert rows_of(validated, "unavailable") == []
    assert categories(validated, "peak") == categories(alone, "peak")


class CalledTwice(Mlp):
    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch).square().mean() + self.net(batch.flip(0)).abs().mean()


def test_a_network_that_the_step_calls_twice_has_both_calls_and_the_training_is_the_same(tmp_path: Path) -> None:
    bare = fit(CalledTwice, tmp_path / "bare")
    ours = MemProfilerCallback(
        schedule=Schedule(wait=1, warmup=0, active=1, repeat=2),
        collectors=[ModuleMemory()],
        output=OutputOptions(on_error="raise", summary=False),
    )
    recorded = fit(CalledTwice, tmp_path / "ours", ours)
    assert all(torch.equal(expected, other) for expected, other in zip(bare, recorded, strict=True))
    run = only_run(tmp_path / "ours")
    assert rows_of(run, "unavailable") == rows_of(run, "error") == []
    rows = [row for row in read_series(run / SERIES) if row.get("module") == "net" and row["state"] == "pre_forward"]
    first, second = (row["categories"]["activation"] for row in sorted(rows, key=lambda row: row["call"]))
    assert first == 0 < second


class TwoLoaders(Mlp):
    """Its batch is a mapping of what two loaders yield; one network sees both."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU())

    def loss(self, batch: Any) -> torch.Tensor:
        return self.net(batch["a"]).sum() + self.net(batch["b"]).sum()

    def train_dataloader(self) -> Any:
        return {"a": loader(6), "b": loader(6)}


class Gan(Adversaries):
    """The discriminator judges real and made values, and the made ones again for the generator."""

    def __init__(self) -> None:
        super().__init__(16)
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        generator, discriminator = self.optimizers()
        made = self.one(batch)
        for optimizer, loss in (
            (discriminator, lambda: self.other(made.detach()).mean() - self.other(batch).mean()),
            (generator, lambda: -self.other(made).mean()),
        ):
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()


class CheckpointedSized(Sized):
    """Computes its network again in the backward."""

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.net, batch, use_reentrant=False).square().mean()


def module_rows(run: Path, module: str, state: str) -> list[dict[str, int]]:
    """Return the bytes by category at each call."""
    rows = [row for row in read_series(run / SERIES) if row.get("module") == module and row["state"] == state]
    return [row["categories"] for row in sorted(rows, key=lambda row: row["call"])]


def test_a_network_that_sees_two_loaders_has_a_call_for_each(tmp_path: Path) -> None:
    ours = MemProfilerCallback(
        schedule=Schedule(wait=1, warmup=1, active=1),
        collectors=[ModuleMemory()],
        output=OutputOptions(on_error="raise", summary=False),
    )
    trainer(tmp_path, ours).fit(TwoLoaders())
    run = only_run(tmp_path)
    # The second call finds what the first left: the result of its ReLU, and a sum.
    relu = 4 * 16 * 4
    assert [found["activation"] for found in module_rows(run, "net", "pre_forward")] == [0, relu + 4]
    assert [found["activation"] for found in module_rows(run, "net", "post_forward")] == [relu, 2 * relu + 4]
    assert categories(run, "peak")["input"] == 2 * 6 * 4 * 8 * 4  # each batch is a view of its data set's storage


def test_a_discriminator_is_called_three_times_and_its_gradients_count_once(tmp_path: Path) -> None:
    model = Gan()
    run = record(tmp_path, model)
    assert [len(module_rows(run, "other", state)) for state in ("pre_forward", "post_forward")] == [3, 3]
    assert len(module_rows(run, "one", "pre_forward")) == 1
    found = categories(run, "end")
    assert found["parameter"] == found["gradient"] == parameter_bytes(model)
    assert found["optimizer_state"] == 2 * parameter_bytes(model) + scalars(model)


def test_a_checkpointed_network_saves_its_result_alone(tmp_path: Path) -> None:
    run = record(tmp_path, CheckpointedSized(160))
    (after,) = module_rows(run, "net", "post_forward")
    assert after["activation"] == 4 * 4
    # Its backward begins with the results of both ReLUs, made again.
    before, after = (module_rows(run, "net", f"{moment}_forward_ac")[0] for moment in ("pre", "post"))
    assert after["activation"] - before["activation"] == 2 * 4 * 160 * 4


class Closures(Mlp):
    """LBFGS calls its closure, and with it the network, several times in a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=1e-2, max_iter=4)


class Averaged(Mlp):
    """A callback of Lightning 2.6 keeps an exponential moving average of the weights."""

    def configure_callbacks(self) -> Any:
        return [pytest.importorskip("lightning.pytorch.callbacks.weight_averaging").EMAWeightAveraging()]


@pytest.mark.parametrize(("kind", "calls"), [(Closures, 4), (Averaged, 1)])
def test_each_call_of_the_closure_is_recorded_and_the_training_is_the_same(
    tmp_path: Path, kind: type[Mlp], calls: int
) -> None:
    bare = fit(kind, tmp_path / "bare")
    ours = MemProfilerCallback(
        schedule=Schedule(wait=1, warmup=1, active=1),
        collectors=[ModuleMemory()],
        output=OutputOptions(on_error="raise", summary=False),
    )
    recorded = fit(kind, tmp_path / "ours", ours)
    assert all(torch.equal(expected, other) for expected, other in zip(bare, recorded, strict=True))
    run = only_run(tmp_path / "ours")
    assert rows_of(run, "unavailable") == rows_of(run, "error") == []
    before = module_rows(run, "net", "pre_forward")
    # The backward of the call before has freed its activations; the result of a ReLU would be 256 bytes, a loss is 4.
    assert len(before) == calls
    assert all(found["activation"] < 4 * 16 * 4 for found in before)
    found = categories(run, "end")
    assert found["parameter"] == found["gradient"] == parameter_bytes(kind())


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_the_closed_forms_hold_without_a_backward(tmp_path: Path, stage: str) -> None:
    ours = MemProfilerCallback(
        schedule=Schedule(wait=1, warmup=1, active=1),
        collectors=[ModuleMemory()],
        output=OutputOptions(on_error="raise", summary=False),
    )
    model = Sized(64)
    getattr(trainer(tmp_path, ours), stage)(model, loader())
    found = categories(only_run(tmp_path), "peak")
    # A layer's result and that of its ReLU live side by side, nothing else: no backward needs the earlier ones.
    assert (found["parameter"], found["gradient"]) == (parameter_bytes(model), 0)
    assert found["activation"] == 2 * 4 * 64 * 4


@pytest.mark.parametrize("kind", [Mlp, InPlaceCnn, SharedEmbeddings, Lstm, GradientPenalty])
def test_training_is_the_same_to_the_last_bit(tmp_path: Path, kind: Any) -> None:
    ours = MemProfilerCallback(
        schedule=Schedule(wait=0, warmup=0, active=1, repeat=0),
        collectors=[ModuleMemory()],
        output=OutputOptions(on_error="raise"),
    )
    bare, recorded = fit(kind, tmp_path / "bare"), fit(kind, tmp_path / "ours", ours)
    assert all(torch.equal(expected, other) for expected, other in zip(bare, recorded, strict=True))
    assert rows_of(only_run(tmp_path / "ours"), "unavailable") == []


def test_shared_parameters_count_once(tmp_path: Path) -> None:
    model = SharedEmbeddings()
    run = record(tmp_path, model)
    assert categories(run, "end")["parameter"] == categories(run, "end")["gradient"] == parameter_bytes(model)


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
    assert (run / "module_mem_rank_0_training_step_3.log").is_file()
