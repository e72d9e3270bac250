"""Real trainings side by side, on the CPU: one with itself, and with a model twice as wide."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.cuda._memory_viz
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_memprof import MemProfilerCallback, Schedule
from lightning_memprof.account.memory.allocations import window_allocations
from lightning_memprof.account.snapshot.replay import replay
from lightning_memprof.cli.main import main
from lightning_memprof.read.snapshot.reader import read_snapshot
from training import trainer


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64 * 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64,), index / len(self))


class Stack(pl.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.head(self.encoder(batch)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    found = []
    for width in (256, 512):
        directory: Path = tmp_path_factory.mktemp(f"width{width}")
        callback = MemProfilerCallback(schedule=Schedule(wait=4, warmup=1, active=2, repeat=2))
        fit = trainer(directory, callback, profiler="fts_extended", max_steps=20)
        fit.fit(Stack(width), DataLoader(Rows(), batch_size=64))
        found.append(str(directory))
    return found[0], found[1]


def test_a_training_compared_with_itself_has_no_difference(runs, capsys) -> None:
    narrow, _ = runs
    assert main(["compare", narrow, narrow, "--fail-on", "peak_allocated_bytes>1%", "step_ns>1%"]) == 0
    assert "no difference above noise" in capsys.readouterr().out


def test_a_model_twice_as_wide_breaks_the_limit_and_is_named_by_peak_and_modules(runs, capsys) -> None:
    narrow, wide = runs
    assert main(["compare", narrow, wide, "--fail-on", "peak_allocated_bytes>5%", "--format", "json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [limit["status"] for limit in document["limits"]] == ["fail"]
    above = {
        difference["name"]: difference["relative"]
        for difference in document["differences"]
        if difference["is_above_noise"]
    }
    assert above["peak_allocated_bytes"] > 0.9
    assert above["activation_bytes"] == pytest.approx(0.9, abs=0.2)
    modules = {
        change["name"]: (change["a"], change["b"]) for change in document["changes"] if change["group"] == "modules"
    }
    assert modules["encoder.1"] == (64 * 256 * 4, 64 * 512 * 4)
    parameters = {
        change["name"]: (change["a"], change["b"]) for change in document["changes"] if change["group"] == "parameters"
    }
    assert parameters["encoder.2"] == ((256 * 256 + 256) * 4, (512 * 512 + 512) * 4)
    assert main(["compare", narrow, wide]) == 0
    page = capsys.readouterr().out
    assert "peak_allocated_bytes" in page
    assert "encoder.2" in page


def test_a_narrower_model_keeps_a_limit_on_growth(runs, capsys) -> None:
    narrow, wide = runs
    assert main(["compare", wide, narrow, "--fail-on", "peak_allocated_bytes>5%"]) == 0
    assert "verdict   pass: " in capsys.readouterr().out


def test_the_allocations_of_a_training_become_a_snapshot_with_their_peak(runs, tmp_path: Path) -> None:
    out = tmp_path / "out.pickle"
    assert main(["export", runs[0], "--to", "memory_viz", "-o", str(out)]) == 0
    *_, trace = sorted(Path(runs[0]).rglob("*.pt.trace.json.gz"))
    (memory,) = window_allocations(trace)
    ring = replay(read_snapshot(out))
    assert ring.peak_requested_bytes == memory.peak_bytes > 500_000
    assert {frame.name for frames in ring.snapshot.stacks for frame in frames} >= {"aten::addmm", "encoder.0"}
    # What torch itself makes of it.
    with out.open("rb") as stream:
        written = pickle.load(stream)  # noqa: S301 written above
    assert f"{len(written['device_traces'][0])} entries" in torch.cuda._memory_viz.trace(written)
    assert torch.cuda._memory_viz.segsum(written)
