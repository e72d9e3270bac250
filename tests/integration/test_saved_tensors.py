"""Saved tensors of real fits, against what saved-tensor hooks are handed in another fit of the same."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.capture.collectors.saved_tensors import SavedTensors
from models import MODELS, TracedModel, fit
from ranks import trained
from recorded_rows import read_series
from training import Perceptron, loader, only_run, rows_of, trainer

MANUAL = "manual optimization with two optimizers"


def callback() -> MemProfilerCallback:
    output = OutputOptions(summary=False, on_error="raise")
    return MemProfilerCallback(Schedule(wait=1, warmup=1, active=3), [SavedTensors()], output=output)


def rows(directory: Path, rank: int = 0) -> list[dict[str, Any]]:
    found = read_series(only_run(directory) / f"window000/rank{rank:05d}.saved_tensors.jsonl")
    return [row for row in found if row["recorded"]]


def hooked(kind: type[TracedModel]) -> tuple[type[TracedModel], list[int]]:
    """Give the model with hooks around its loss, and the bytes that they were handed in each."""
    counts: list[int] = []

    class Hooked(kind):  # type: ignore[misc, valid-type]
        def loss(self, batch: torch.Tensor) -> torch.Tensor:
            # The batch is a slice of the data set.
            left_out = {given.untyped_storage().data_ptr() for given in (*self.parameters(), *self.buffers(), batch)}
            kept: dict[int, torch.UntypedStorage] = {}

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in left_out:
                    kept[storage.data_ptr()] = storage
                return tensor.detach()

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = super().loss(batch)
            counts.append(sum(storage.nbytes() for storage in kept.values()))
            return loss

    return Hooked, counts


def assert_held(directory: Path, model: TracedModel) -> None:
    """Each recorded step has the bytes that the model holds."""
    parameters, buffers = (sum(tensor.nbytes for tensor in given) for given in (model.parameters(), model.buffers()))
    found = [row for row in rows(directory) if row["point"] == "step_end"]
    assert [row["step"] for row in found] == [2, 3, 4]
    for row in found:
        assert row["held"]["parameter_bytes"] == row["held"]["gradient_bytes"] == parameters
        assert row["held"]["buffer_bytes"] == buffers
        assert row["held"]["input_bytes"] == 4 * 8 * 4
        assert row["parameters"][""] == [parameters, parameters]
        assert "note" not in row
        if model.automatic_optimization:
            assert row["held"]["optimizer_state_bytes"] == 2 * parameters + 4 * len(list(model.parameters()))


@pytest.mark.parametrize("name", [name for name in MODELS if name != MANUAL])
def test_the_bytes_of_every_backward_are_those_that_hooks_are_handed(tmp_path: Path, name: str) -> None:
    reference, counts = hooked(MODELS[name])
    fit(reference, tmp_path / "hooks")
    fit(MODELS[name], tmp_path / "ours", callback())
    found = [row for row in rows(tmp_path / "ours") if row["point"] == "before_backward"]
    assert [row["step"] for row in found] == [2, 3, 4]
    assert [row["activation_bytes"] for row in found] == counts[2:5]
    for row in found:
        assert (row["unattributed_bytes"], row["uncounted"], row.get("attribution")) == (0, 0, None)
        assert sum(values[0] for values in row["modules"].values()) == row["activation_bytes"]
        assert row["modules"][""][1] == row["activation_bytes"]
        assert sum(row["dtypes"].values()) == row["activation_bytes"]
    assert_held(tmp_path / "ours", MODELS[name]())


def test_manual_optimization_has_a_row_for_each_backward_that_goes_through_lightning(tmp_path: Path) -> None:
    fit(MODELS[MANUAL], tmp_path, callback())
    points = [(row["step"], row["point"]) for row in rows(tmp_path)]
    assert points[:3] == [(2, "before_backward"), (2, "before_backward"), (2, "step_end")]
    first, second = rows(tmp_path)[:2]
    assert "other" not in first["modules"]
    assert second["modules"]["other"][2] == 1
    assert "net.0" not in second["modules"]
    assert_held(tmp_path, MODELS[MANUAL]())


def test_a_batch_that_is_a_slice_of_the_data_set_does_not_count_the_data_set(tmp_path: Path) -> None:
    data = torch.randn(12, 4, 8)
    sliced: DataLoader[Any] = DataLoader(data, batch_size=None)  # type: ignore[arg-type]
    trainer(tmp_path / "sliced", callback()).fit(Perceptron(), sliced)
    copied: DataLoader[Any] = DataLoader([batch.clone() for batch in data], batch_size=None)  # type: ignore[arg-type]
    trainer(tmp_path / "copied", callback()).fit(Perceptron(), copied)
    batch = 4 * 8 * 4
    for found, reference in zip(rows(tmp_path / "sliced"), rows(tmp_path / "copied"), strict=True):
        if reference.get("activation_bytes") is not None:
            assert found["activation_bytes"] == reference["activation_bytes"] - batch


def test_functorch_disabled_hooks_and_deep_copies_go_on_working_in_a_window(tmp_path: Path) -> None:
    class Odd(Perceptron):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            slope = torch.func.grad(lambda rows: self.net[0](rows).sum())(batch)
            with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
                loss = self.loss(batch)
            copy.deepcopy(self.net)
            pickle.dumps(self.net)
            return loss + slope.sum()

    trainer(tmp_path, callback()).fit(Odd(), loader())
    assert len(rows(tmp_path)) == 6
    assert rows_of(only_run(tmp_path), "error") == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_count_their_own_activations_and_their_share_of_the_parameters(tmp_path: Path, kind: str) -> None:
    recording = "schedule=Schedule(wait=0, warmup=1, active=2), collectors=[SavedTensors()]"
    trained(tmp_path / "run", f"{kind}-blocks", recording)
    layer, numbers = 4 * 8 * 4, 3 * (64 + 8)
    share = 1 if kind == "ddp" else 2
    for rank in range(2):
        found = rows(tmp_path / "run", rank)
        backward = next(row for row in found if row["point"] == "before_backward")
        # Each of three layers keeps its input, each GELU its own, and the loss what it squares.
        assert backward["activation_bytes"] == 7 * layer
        assert backward["modules"]["net.1"][:3] == [0, 2 * layer, 1]
        end = next(row for row in found if row["point"] == "step_end")
        assert end["held"]["parameter_bytes"] == 4 * numbers // share
        assert end["parameters"]["net.1"] == [4 * 72 // share] * 2
        assert end["held"]["gradient_bytes"] == 4 * numbers // share
        assert end["held"]["optimizer_state_bytes"] == 2 * 4 * numbers // share + 6 * 4
