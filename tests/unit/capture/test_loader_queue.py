from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_memprof import MemProfilerCallback, OutputOptions
from lightning_memprof.account.steps.workers import calls, pinning_ns, ready_batches
from lightning_memprof.capture.collectors.host import HostMemory
from lightning_memprof.capture.torch_internals import _utils
from lightning_memprof.read.run.load import load_run
from lightning_memprof.read.run.model import Rank
from loading import MS, Chain, Decode, Images
from training import only_run, trainer

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")]


class Net(pl.LightningModule):
    """Calls a function in each step."""

    def __init__(self, each: Callable[[], object]) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.each = each

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.each()
        loss: torch.Tensor = self.net(batch.sum().reshape(1, 1)).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


def recorded(place: Path, loader: Any, each: Callable[[], object] = int) -> Rank:
    """Train 16 steps, of which 2 and 3 are recorded."""
    output = OutputOptions(summary=False, on_error="raise", report=False, curves=False)
    callback = MemProfilerCallback(collectors=[HostMemory()], output=output)
    trainer(place, callback, max_steps=16).fit(Net(each), loader)
    return load_run(only_run(place)).lead


def test_the_queue_is_full_where_the_loop_is_slow_and_empty_where_it_is_fast(tmp_path: Path) -> None:
    def ready(seconds: float, place: str, batch: int) -> list[int]:
        samples = Images()
        samples.transform = Chain()
        loader = DataLoader(samples, batch_size=batch, num_workers=1, prefetch_factor=3, multiprocessing_context="fork")
        return ready_batches(recorded(tmp_path / place, loader, lambda: time.sleep(seconds)))

    assert ready(0.3, "slow", 10)[-1] >= 2
    assert ready(0.0, "fast", 40)[-1] == 0


def test_the_page_has_the_functions_that_workers_were_seen_in(tmp_path: Path) -> None:
    samples = Images()
    samples.transform = Chain(Decode())
    loader = DataLoader(samples, batch_size=8, num_workers=1, multiprocessing_context="fork", persistent_workers=True)
    found = {call.function: call for call in calls(recorded(tmp_path, loader))}
    # 8 ms of 11 and some.
    assert 0.5 < found["Decode.__call__"].share < 0.85
    assert sum(call.share for call in found.values()) == pytest.approx(1, abs=0.01)


class Pinned:
    """A batch whose copy into pinned memory takes 5 ms; real pinned memory needs an accelerator."""

    def pin_memory(self) -> Pinned:
        time.sleep(0.005)
        return self


def test_pinning_is_timed_once_per_batch_in_its_thread(tmp_path: Path) -> None:
    work: SimpleQueue[Any] = SimpleQueue()

    def pin() -> None:
        work.put({"a": Pinned(), "b": [Pinned()]})
        done.acquire()

    def loop() -> None:
        while (batch := work.get()) is not None:
            began = time.perf_counter_ns()
            _utils.pin_memory.pin_memory(batch)
            spent.append(time.perf_counter_ns() - began)
            done.release()

    spent: list[int] = []
    done = threading.Semaphore(0)
    thread = threading.Thread(target=loop)
    thread.start()
    before = _utils.pin_memory.pin_memory
    try:
        lead = recorded(tmp_path, DataLoader(torch.zeros(32, 2), batch_size=2), pin)  # type: ignore[arg-type]
    finally:
        work.put(None)
        thread.join()
    assert _utils.pin_memory.pin_memory is before
    assert 10 * MS <= (pinning_ns(lead) or 0) <= max(spent)
