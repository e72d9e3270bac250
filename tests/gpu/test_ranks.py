"""Two ranks with a device each, under DDP on gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ranks import trained
from recorded_rows import read_series
from training import only_run, rows_of

pytestmark = pytest.mark.gpu

BLOCK = 512


def test_each_rank_records_its_own_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("the accelerator is not CUDA")
    if "FAKE" not in torch.cuda.get_device_name(0) and torch.cuda.device_count() < 2:
        pytest.skip("two ranks need two devices")
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    recording = "schedule=Schedule(wait=1, warmup=1, active=2), collectors=[ModuleMemory(), 'default']"
    trained(tmp_path / "ours", "ddp", recording, "gpu=yes")
    run = only_run(tmp_path / "ours")
    for rank in (0, 1):
        assert rows_of(run, "error", rank) == rows_of(run, "unavailable", rank) == []
        assert {"allocator", "allocator_history"} <= {row["collector"] for row in rows_of(run, "artifact", rank)}
        rows = read_series(run / f"window000/rank{rank:05d}.module_memory.jsonl")
        assert all(sum(row["categories"].values()) == row["total_bytes"] for row in rows)
        # Adam counts its steps on the host.
        (end,) = [row for row in rows if row["kind"] == "end" and row["device"] == f"cuda:{rank}"]
        # Two weights and two biases; the first weight has the size of one block.
        assert end["categories"]["parameter"] == end["categories"]["gradient"] == 4 * BLOCK
        assert end["categories"]["optimizer_state"] == 8 * BLOCK
