"""Fits of compiled models: time and memory of a compiled part by its path, and nothing is compiled again."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from lightning_memprof import ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.collectors import ModuleMemory, SavedTensors
from ranks import trained
from recorded_rows import read_series
from training import loader, manifest, only_run, rows_of, trainer

ROWS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.down(torch.tanh(self.up(value)))


class Blocks(nn.Sequential):
    """Two blocks. Of torch's own class torch compiles the blocks alone before 2.14."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self:
            value = block(value)
        return value


class Net(pl.LightningModule):
    """Two blocks between two layers; ``kind`` says which part is compiled, and how."""

    def __init__(self, kind: str, backend: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.pre, self.post = nn.Linear(8, 8), nn.Linear(8, 1)
        self.net: Any = Blocks(Block(), Block())
        if kind == "wrapped":
            self.net = torch.compile(self.net, backend=backend)
        elif kind == "wrapped blocks":
            for index, block in enumerate(self.net):
                self.net[index] = torch.compile(block, backend=backend)  # type: ignore[assignment]
        elif kind == "blocks":
            for block in self.net:
                block.compile(backend=backend)
        elif kind == "part":
            self.net.compile(backend=backend)
        elif kind == "model":
            self.compile(backend=backend)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.post(self.net(self.pre(batch)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.values.append(outputs["loss"].item())


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def fit(directory: Path, kind: str, *callbacks: pl.Callback, backend: str = "aot_eager", **options: Any) -> list[Any]:
    """Train; give the counts of compiled frames and graphs, the losses and the weights."""
    torch._dynamo.reset()
    counters.clear()
    model, losses = Net(kind, backend), Losses()
    fitted: Any = torch.compile(model, backend=backend) if kind == "step" else model
    trainer(directory, losses, *callbacks, **options).fit(fitted, loader(8))
    counts = [dict(counters[name]) for name in ("frames", "stats", "graph_break")]
    return [counts, losses.values, [weight.tolist() for weight in model.parameters()]]


def record(directory: Path, kind: str, schedule: Schedule, **options: Any) -> list[Any]:
    callback = MemProfilerCallback(
        schedule, [SavedTensors(), ModuleMemory()], output=OutputOptions(on_error="raise", summary=False)
    )
    return fit(directory, kind, callback, profiler=ExtendedPyTorchProfiler(), **options)


# Saved bytes by module. All batches are slices of one tensor, which does not count; the loss saves what it squares,
# outside of the modules.
VALUE, WIDER, LOSS = ROWS * 8 * 4, ROWS * 16 * 4, ROWS * 4
OUTSIDE = {"post": VALUE, "": LOSS}
BLOCKS = {**OUTSIDE, "net.0": VALUE + WIDER, "net.1": VALUE + WIDER}
ALL = {"": 3 * VALUE + 2 * WIDER + LOSS}
KNOWN: dict[str, dict[str, int]] = {
    "wrapped": {**OUTSIDE, "net": 2 * (VALUE + WIDER)},
    "wrapped blocks": BLOCKS,
    "blocks": BLOCKS,
    "part": {**OUTSIDE, "net": 2 * (VALUE + WIDER)},
    "model": ALL,
    "step": ALL,
}
COMPILED = {
    "wrapped": ["net"], "wrapped blocks": ["net.0", "net.1"], "blocks": ["net.0", "net.1"], "part": ["net"],
    "model": [""], "step": [""],
}  # fmt: skip


@pytest.mark.parametrize("kind", KNOWN)
def test_a_compiled_part_has_its_memory_and_time_and_nothing_is_compiled_again(tmp_path: Path, kind: str) -> None:
    bare = fit(tmp_path / "bare", kind)
    # The first window is open when torch compiles, the second opens later.
    assert record(tmp_path / "ours", kind, Schedule(wait=0, warmup=0, active=2, repeat=2)) == bare
    run = only_run(tmp_path / "ours")
    assert rows_of(run, "error") == []
    assert {row["collector"] for row in rows_of(run, "unavailable")} <= {"allocator_history"}
    (training,) = [row for row in manifest(run) if row["kind"] == "training"]
    assert training["compiled"] == COMPILED[kind]
    for window in (0, 1):
        place = run / f"window{window:03d}"
        saved = [row for row in read_series(place / "rank00000.saved_tensors.jsonl") if row["point"] != "step_end"]
        for row in saved:
            found = {path: values[0] for path, values in row["modules"].items() if values[0]}
            assert found == KNOWN[kind]
            assert sum(values[0] for values in row["modules"].values()) == row["activation_bytes"]
        tracked = read_series(place / "rank00000.module_memory.jsonl")
        assert all(sum(row["categories"].values()) == row["total_bytes"] for row in tracked)


@pytest.mark.slow
def test_a_compiled_model_whose_forward_ddp_replaces_by_the_step_is_compiled_once(tmp_path: Path) -> None:
    bare = trained(tmp_path / "bare", "ddp-compiled")
    ours = trained(
        tmp_path / "ours", "ddp-compiled",
        "schedule=Schedule(wait=1, warmup=1, active=2), collectors=[ModuleMemory(), 'default']",
    )  # fmt: skip
    assert ours == bare
    assert ours[0]["graphs"] > 0
    for rank in (0, 1):
        assert rows_of(only_run(tmp_path), "error", rank) == []


def events(directory: Path) -> list[dict[str, Any]]:
    """Give the events of the first trace."""
    found: list[dict[str, Any]] = json.loads(gzip.decompress(min(directory.rglob("*.pt.trace.json.gz")).read_bytes()))[
        "traceEvents"
    ]
    return found


def ranges(directory: Path) -> set[str]:
    """Give the names of the modules' ranges in the first trace."""
    return {event["name"] for event in events(directory) if event.get("name", "").startswith("[pl][module]")}


def test_ranges_of_the_trace_name_the_compiled_part(tmp_path: Path) -> None:
    record(tmp_path, "wrapped", Schedule(wait=1, warmup=1, active=1))
    assert ranges(tmp_path) == {
        "[pl][module]torch.nn.modules.linear.Linear: pre",
        f"[pl][module]{Blocks.__module__}.Blocks (compiled): net",
        "[pl][module]torch.nn.modules.linear.Linear: post",
    }


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++")
def test_inductors_kernels_are_in_the_range_of_the_compiled_part_and_are_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Inductor sets it.
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")
    # Where its cache has no kernels yet, it would start threads that stay.
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    bare = fit(tmp_path / "bare", "wrapped", backend="inductor")
    assert record(tmp_path / "ours", "wrapped", Schedule(wait=1, warmup=1, active=2), backend="inductor") == bare
    run = only_run(tmp_path / "ours")
    (row, _) = [
        row
        for row in read_series(run / "window000/rank00000.saved_tensors.jsonl")
        if row["point"] != "step_end" and row["recorded"]
    ]
    # At least the input of each block; inductor computes other values again.
    assert row["modules"]["net"][0] >= 2 * VALUE
    spans = [
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events(tmp_path / "ours")
        if event.get("name", "").endswith(": net") or event.get("name", "").startswith("## Call CompiledFxGraph")
    ]
    parts = sorted(spans)
    assert [name.endswith(": net") for *_, name in parts] == [True, False, False] * 2
    for (begin, end, _), (start, stop, _) in zip(parts[::3], parts[1::3], strict=True):
        assert begin <= start < stop <= end
