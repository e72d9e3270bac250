"""finetuning-scheduler's ``memprofiler_cfg`` on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from lightning_memprof.compat.fts import MemProfiler, MemProfilerCfg
from training import Perceptron, loader, only_run, rows_of, trainer

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only CUDA's allocator keeps a history")
def test_snapshots_and_the_allocators_statistics_are_there_at_start_and_end(tmp_path: Path) -> None:
    # The allocator counts for the whole process, the failed allocations of other tests included.
    failed_before = torch.cuda.memory_stats().get("num_ooms", 0)
    callback = MemProfiler(MemProfilerCfg(enabled=True, cuda_allocator_history=True))
    trainer(tmp_path, callback, accelerator="gpu").fit(Perceptron(), loader(4))
    run = only_run(tmp_path)
    assert rows_of(run, "error") == []
    for edge in ("start", "end"):
        assert (run / f"cuda_alloc_rank_0.training_step.2.{edge}.pickle").is_file()
    end = yaml.safe_load((run / "rank_0_memory_stats.yaml").read_text())["0.training_step.2.end"]
    assert end["active_bytes.all.allocated"] > 0
    assert end["num_ooms"] == failed_before
    assert end["npp_diff"] > 0
