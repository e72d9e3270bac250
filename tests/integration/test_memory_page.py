"""The two lines of the README, and what the memory page says of the run."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch.cuda._memory_viz

from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.account.memory.report import NO_OPTIMIZER_STEP
from lightning_memprof.account.snapshot.replay import replay
from lightning_memprof.cli.main import main
from lightning_memprof.collectors import ModuleMemory, Pulse, SavedTensors
from lightning_memprof.read.snapshot.reader import read_snapshot
from training import Perceptron, loader, trainer

if TYPE_CHECKING:
    from pathlib import Path

    import lightning.pytorch as pl

# Two layers, 8 x 16 and 16 x 1, with biases, of 4 bytes a number.
PARAMETER_BYTES = 4 * (8 * 16 + 16 + 16 * 1 + 1)
# AdamW's two moments, and one step counter for each of the four tensors.
STATE_BYTES = 2 * PARAMETER_BYTES + 4 * 4


def memory_of(directory: Path, capsys: pytest.CaptureFixture[str], *callbacks: pl.Callback, **options: Any) -> Any:
    trainer(directory, *callbacks, **options).fit(Perceptron(), loader(8))
    capsys.readouterr()
    assert main(["show", str(directory / "log"), "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)["memory"]


def test_the_two_lines_of_the_readme_fill_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = memory_of(tmp_path, capsys, MemProfilerCallback(), profiler="fts_extended")
    peak = memory["peak_bytes"]
    assert (peak["parameter"], peak["gradient"], peak["optimizer_state"]) == (
        PARAMETER_BYTES, PARAMETER_BYTES, STATE_BYTES,
    )  # fmt: skip
    assert peak["temporary"] is None
    assert "ModuleMemory" in memory["unknown"]["temporary"]
    by_name = {module["name"]: module for module in memory["modules"]}
    assert by_name["net.0"]["parameter_bytes"] == by_name["net.0"]["gradient_bytes"] == 4 * (8 * 16 + 16)
    own = sum(module["own_activation_bytes"] for module in memory["modules"])
    assert own + memory["unattributed_bytes"] == by_name[""]["inclusive_activation_bytes"] == peak["activation"]
    (allocations,) = memory["allocations"]
    assert (
        sum(site["bytes"] for site in memory["sites"]) + allocations["unattributed_bytes"] == allocations["peak_bytes"]
    )
    # The peak of so small a model is in its optimizer; the gradient of the first weight is there.
    found = {(site["operator"], site["module"], site["phase"], site["bytes"]) for site in memory["sites"]}
    assert ("aten::mm", "net.0", "backward", 4 * 8 * 16) in found
    assert memory["functions"]["training_step"]["calls"] == 2
    out = tmp_path / "out.pickle"
    assert main(["export", str(tmp_path / "log"), "--to", "memory_viz", "-o", str(out)]) == 0
    ring = replay(read_snapshot(out))
    assert ring.peak_requested_bytes == allocations["peak_bytes"]
    assert {frame.name for frames in ring.snapshot.stacks for frame in frames} >= {"aten::addmm", "net.0"}
    # What torch itself makes of it.
    with out.open("rb") as stream:
        written = pickle.load(stream)  # noqa: S301 written above
    assert f"{len(written['device_traces'][0])} entries" in torch.cuda._memory_viz.trace(written)
    assert torch.cuda._memory_viz.segsum(written)


def test_a_tracked_step_gives_every_category_of_its_peak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = MemProfilerCallback(
        Schedule(wait=3), [Pulse(), SavedTensors(), ModuleMemory()], output=OutputOptions(summary=False)
    )
    memory = memory_of(tmp_path, capsys, callback)
    assert memory["source"] == "module_memory"
    assert memory["peak_bytes"]["parameter"] == PARAMETER_BYTES
    assert memory["peak_bytes"]["optimizer_state"] == STATE_BYTES
    assert sum(memory["peak_bytes"].values()) == memory["total_bytes"]


@pytest.mark.parametrize("collector", [SavedTensors, ModuleMemory])
def test_before_the_first_optimizer_step_its_state_is_not_available(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], collector: Any
) -> None:
    callback = MemProfilerCallback(collectors=[collector()], output=OutputOptions(summary=False))
    memory = memory_of(tmp_path, capsys, callback, accumulate_grad_batches=8)
    assert memory["peak_bytes"]["parameter"] == PARAMETER_BYTES
    assert memory["peak_bytes"]["optimizer_state"] is None
    assert memory["unknown"]["optimizer_state"] == NO_OPTIMIZER_STEP.format(step=memory["step"])
    known = [size for size in memory["peak_bytes"].values() if size is not None]
    assert sum(known) == memory["total_bytes"]
