"""Running out of memory on a real device."""

from __future__ import annotations

import gc
import json
import os
import pickle
import pickletools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_memprof import MemProfilerCallback, OutputOptions
from lightning_memprof.account.oom.autopsy import Autopsy, autopsies
from lightning_memprof.capture.base import RunContext
from lightning_memprof.capture.collectors.oom import OOMAutopsy, OomWatch
from lightning_memprof.capture.session import Session
from lightning_memprof.collectors import Pulse
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.out_of_memory import remedies_for
from lightning_memprof.read.run.load import load_run
from lightning_memprof.schedule import Action
from lightning_memprof.units import MIB
from recorded_rows import read_pulse
from sessions import context, session
from training import Perceptron, loader, only_run, rows_of, trainer

pytestmark = pytest.mark.gpu


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.skip("the accelerator is not CUDA")
    device = torch.device("cuda", 0)
    torch.empty(1, device=device)
    yield device
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def run(cuda: torch.device, tmp_path: Path) -> Iterator[RunContext]:
    with context(tmp_path, "cuda:0") as made:
        yield replace(made, model=nn.Linear(1024, 1024).to(cuda))


@contextmanager
def watched(run: RunContext, **options: Any) -> Iterator[tuple[Session, OomWatch]]:
    with session(run, lambda _: Action.NONE, []) as made, OOMAutopsy(**options).watch(run) as watch:
        yield made, watch


def runs_out(call: Callable[[], object]) -> BaseException:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        call()
    return caught.value


def fails_with_a_local(device: torch.device, total: int) -> None:
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    with suppress(torch.OutOfMemoryError):
        kept.new_empty(2 * total)


def event(run: RunContext) -> dict[str, Any]:
    document = json.loads((run.sink.place.directory / "oom.rank00000.json").read_text())
    return dict(document["events"][-1])


def understood(root: Path) -> Autopsy:
    return autopsies(load_run(root))[-1]


def test_the_observers_numbers_are_the_devices(cuda: torch.device, run: RunContext) -> None:
    free, total = torch.cuda.mem_get_info(cuda)
    with watched(run):
        runs_out(lambda: torch.empty(2 * total, dtype=torch.uint8, device=cuda))
    found = event(run)
    assert found["device"] == "cuda:0"
    assert found["asked_bytes"] >= 2 * total
    # The argument that torch's stub calls `device_alloc` is the size of the device.
    assert found["limit_bytes"] == found["total_bytes"] == total
    assert abs(found["free_bytes"] - free) < 64 * MIB
    assert found["statistics"]["num_ooms"] >= 1
    assert found["statistics"]["allocated_bytes.all.current"] >= run.model.weight.nbytes
    assert found["unavailable"] == {}


def test_the_ring_has_python_stacks_and_ends_with_the_failed_request(cuda: torch.device, run: RunContext) -> None:
    _, total = torch.cuda.mem_get_info(cuda)
    with watched(run, history="always"):
        kept = torch.empty(64 * MIB, dtype=torch.uint8, device=cuda)
        runs_out(lambda: torch.empty(2 * total, dtype=torch.uint8, device=cuda))
    data = (run.sink.place.directory / "cuda_oom_rank_0.pickle").read_bytes()
    assert next(iter(pickletools.genops(data)))[1] == 4
    ring = pickle.loads(data)["device_traces"][0]  # noqa: S301 our own
    assert any(entry["action"] == "oom" and entry["size"] == 2 * total for entry in ring)
    (made,) = [entry for entry in ring if entry["action"] == "alloc" and entry["size"] == kept.nbytes]
    assert any(frame["filename"] == __file__ for frame in made["frames"])
    torch.empty(MIB, device=cuda)
    assert not any(torch.cuda.memory._snapshot(cuda)["device_traces"])


def test_recording_allocates_nothing_on_the_device_and_keeps_nothing_alive(cuda: torch.device, run: RunContext) -> None:
    _, total = torch.cuda.mem_get_info(cuda)
    with watched(run):
        before = torch.cuda.memory_stats(cuda)["allocation.all.allocated"]
        runs_out(lambda: torch.empty(2 * total, dtype=torch.uint8, device=cuda))
        assert torch.cuda.memory_stats(cuda)["allocation.all.allocated"] == before
        gc.disable()
        try:
            held = torch.cuda.memory_allocated(cuda)
            fails_with_a_local(cuda, total)
            assert torch.cuda.memory_allocated(cuda) == held
        finally:
            gc.enable()


def test_too_large_and_limited_are_told_apart(cuda: torch.device, run: RunContext, tmp_path: Path) -> None:
    _, total = torch.cuda.mem_get_info(cuda)
    with watched(run):
        runs_out(lambda: torch.empty(2 * total, dtype=torch.uint8, device=cuda))
        torch.cuda.set_per_process_memory_fraction(1024 * MIB / total, cuda)
        kept = torch.empty(600 * MIB, dtype=torch.uint8, device=cuda)
        runs_out(lambda: torch.empty(600 * MIB, dtype=torch.uint8, device=cuda))
        del kept
    run.sink.manifest.append("run", schema_version=1)
    assert [autopsy.cause for autopsy in autopsies(load_run(tmp_path))] == ["too large", "limited"]


def test_unused_pieces_between_blocks_are_fragmentation(cuda: torch.device, run: RunContext, tmp_path: Path) -> None:
    _, total = torch.cuda.mem_get_info(cuda)
    torch.cuda.empty_cache()
    segment = torch.empty(960 * MIB, dtype=torch.uint8, device=cuda)
    del segment
    # One segment of 960 MiB is cut into 24 pieces, of which every other one is given back.
    pieces = [torch.empty(40 * MIB, dtype=torch.uint8, device=cuda) for _ in range(24)]
    del pieces[::2]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(cuda) + 64 * MIB) / total, cuda)
    with watched(run):
        runs_out(lambda: torch.empty(300 * MIB, dtype=torch.uint8, device=cuda))
    run.sink.manifest.append("run", schema_version=1)
    found = understood(tmp_path)
    if event(run)["statistics"]["inactive_split_bytes.all.current"] < 300 * MIB:
        pytest.skip("the allocator did not cut one segment: it is set up otherwise")
    assert (found.memory.unused_bytes or 0) >= 300 * MIB
    assert (found.memory.largest_free_bytes or 0) < 300 * MIB
    assert found.cause == "fragmented"


class Grows(Perceptron):
    """Keeps more in each step until the device is full."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.kept: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.kept.append(torch.empty(self.size, dtype=torch.uint8, device=self.device))
        return super().training_step(batch, batch_idx)


def fit(tmp_path: Path, model: pl.LightningModule) -> BaseException:
    collectors = [Pulse(), OOMAutopsy(history="always")]
    callback = MemProfilerCallback(collectors=collectors, output=OutputOptions(on_error="raise"))
    return runs_out(lambda: trainer(tmp_path, callback, accelerator="gpu").fit(model, loader(40)))


def test_a_training_that_fills_the_device_is_explained(
    cuda: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, total = torch.cuda.mem_get_info(cuda)
    torch.cuda.set_per_process_memory_fraction(1024 * MIB / total, cuda)
    error = fit(tmp_path, Grows(100 * MIB))
    assert "Tried to allocate" in str(error)
    row = rows_of(only_run(tmp_path), "oom")[-1]
    assert (row["seen"], row["phase"], row["module_class"], row["ended_run"]) == (
        "observer",
        "forward",
        "Grows",
        True,
    )
    assert row["step"] is not None
    assert row["step"] >= 8
    step = read_pulse(only_run(tmp_path) / "pulse.rank00000.csv")[-1]
    # Writing the report takes some 100 ms, which are no part of the step on either clock.
    assert (step["device_duration_ns"] or 0) < (step["duration_ns"] or 0) + 50_000_000
    found = understood(tmp_path)
    assert found.by_stack[0].name.startswith(f"{__file__}(")
    assert found.by_stack[0].bytes >= 9 * 100 * MIB
    assert "out of memory on cuda:0" in capsys.readouterr().err


def test_backward_is_named_although_its_threads_have_no_python_stack(cuda: torch.device, tmp_path: Path) -> None:
    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
            return values.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            torch.empty(2 * torch.cuda.mem_get_info(cuda)[1], dtype=torch.uint8, device=cuda)
            return gradient

    class Backward(Perceptron):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = Doubles.apply(super().training_step(batch, batch_idx))
            return loss

    fit(tmp_path, Backward())
    row = rows_of(only_run(tmp_path), "oom")[-1]
    assert (row["phase"], row["point"]) == ("backward", "before_backward")


FILLS = """
import lightning, torch
from torch import nn
from torch.utils.data import DataLoader
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(512, 512)
    def forward(self, values):
        return values + self.inner(values).relu()
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(200)))
    def training_step(self, batch):
        return self.blocks(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())
if __name__ == "__main__":
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    data = DataLoader(torch.randn(65536, 512), batch_size=8192)
    lightning.Trainer(accelerator="gpu", devices=1, max_steps=4, **quiet).fit(Model(), data)
"""


@pytest.mark.parametrize(
    ("others", "cause", "first"),
    [
        (300, "full", "Checkpoint each of blocks.* (Block)"),
        (1500, "other process", "Run nvidia-smi"),
    ],
)
def test_only_a_notable_other_process_is_the_cause_of_a_full_device(
    cuda: torch.device, tmp_path: Path, others: int, cause: str, first: str
) -> None:
    if "FAKE" not in torch.cuda.get_device_name(cuda):
        pytest.skip("takes all memory of the device")
    (tmp_path / "fills.py").write_text(FILLS)
    environment = os.environ | {"FAKE_CUDA_BYTES": str(2048 * MIB), "FAKE_CUDA_OTHERS_BYTES": str(others * MIB)}
    command = [sys.executable, "-m", "lightning_memprof", "run", "fills.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
    assert "OutOfMemoryError" in ran.stderr
    found = understood(tmp_path)
    assert found.cause == cause
    assert remedies_for(found)[0].text.startswith(first)
    assert abs((found.memory.process_bytes or 0) - others * MIB) < 16 * MIB
    ledger = Facts.of(load_run(tmp_path)).byte_ledgers[0]
    assert ledger.bytes("activation_and_temporary") > 0.4 * ledger.peak_bytes
    assert ledger.bytes("unattributed") == 0
