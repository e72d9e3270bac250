"""Fits with a gradient scaler, by Lightning's plugin and by hand: the same training, and memory that sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.collectors import ModuleMemory, SavedTensors
from models import Mlp, Outcome, fit
from recorded_rows import read_series
from training import only_run, rows_of

# Layers of 8, 16 and 1 columns. Autocast saves inputs and the last weight as copies in float16.
ROWS, PARAMETERS = 4, 8 * 16 + 16 + 16 + 1
# Steps are skipped until the scale has fallen far enough.
SCALES = {"steps": 2.0**8, "skipped steps": 2.0**60}


class ByHand(Mlp):
    """Scales its loss and steps its optimizer itself; half of the losses that it keeps are scales."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.scaler = torch.amp.GradScaler("cpu", init_scale=self.scale)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = self.loss(batch)
        self.manual_backward(self.scaler.scale(loss))
        self.scaler.step(optimizer.optimizer)
        self.scaler.update()
        self.seen += [loss.detach().clone(), torch.tensor(self.scaler.get_scale())]


def train(directory: Path, kind: str, scale: float, *callbacks: MemProfilerCallback) -> Outcome:
    """Train; each fit has a scaler of its own, which learns its scale."""
    if kind == "plugin":
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))
        return fit(Mlp, directory, *callbacks, plugins=[plugin])

    class Scaled(ByHand):
        pass

    Scaled.scale = scale
    return fit(Scaled, directory, *callbacks)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", ["plugin", "by hand"])
def test_the_training_is_the_same_and_the_categories_of_a_step_sum(tmp_path: Path, kind: str, scale: str) -> None:
    ours = MemProfilerCallback(
        Schedule(wait=1, warmup=1, active=2),
        [SavedTensors(), ModuleMemory(step=1)],
        output=OutputOptions(on_error="raise", summary=False),
    )
    bare = train(tmp_path / "bare", kind, SCALES[scale])
    recorded = train(tmp_path / "ours", kind, SCALES[scale], ours)
    assert [value.tolist() for value in bare if not value.isnan().any()] == [
        value.tolist() for value in recorded if not value.isnan().any()
    ]
    run = only_run(tmp_path / "ours")
    assert rows_of(run, "error") == rows_of(run, "unavailable") == []
    rows = read_series(run / "window000/rank00000.module_memory.jsonl")
    assert all(sum(row["categories"].values()) == row["total_bytes"] for row in rows)
    (end,) = [row["categories"] for row in rows if row["kind"] == "end"]
    assert end["parameter"] == end["gradient"] == 4 * PARAMETERS
    # Adam's two states and the counts of four tensors, once a step is not skipped.
    assert end["optimizer_state"] == (8 * PARAMETERS + 16 if scale == "steps" else 0)
    saved = [
        row["modules"]
        for row in read_series(run / "window000/rank00000.saved_tensors.jsonl")
        if row["point"] == "before_backward"
    ]
    for modules in saved:
        found = {path: values[0] for path, values in modules.items()}
        assert found == {
            "net.0": 2 * ROWS * 8, "net.1": 2 * ROWS * 16, "net.2": 2 * ROWS * 16, "net.3": 2 * (ROWS + 1) * 16,
            "net": 0, "": found[""],
        }  # fmt: skip
