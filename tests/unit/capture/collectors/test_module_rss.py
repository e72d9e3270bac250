"""The resident size grows over the forward that allocates."""

from __future__ import annotations

import mmap
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_memprof import Schedule
from lightning_memprof.collectors import ModuleRss
from lightning_memprof.units import MIB
from recorded_rows import read_series
from sessions import context, drive, session

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

EVERY_STEP = Schedule(wait=0, warmup=0, active=2)


class Keeps(nn.Module):
    """Allocates and touches 32 MiB more at each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[mmap.mmap] = []

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        # Not from the heap, which may have room.
        self.kept.append(mmap.mmap(-1, 32 * MIB))
        for _ in range(32):
            self.kept[-1].write(bytes(MIB))
        return value


def recorded(directory: Path, model: nn.Module, work: Any) -> list[dict[str, Any]]:
    with (
        context(directory, on_error="raise") as run,
        session(replace(run, model=model), EVERY_STEP, [ModuleRss()]) as made,
    ):
        drive(made, range(2), work)
    return read_series(directory / "memprofiler/window000/rank00000.module_rss.jsonl")


def test_growth_is_told_by_module_and_by_step(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Identity(), Keeps())
    rows = recorded(tmp_path, model, lambda _: (model(torch.ones(1)), model(torch.ones(1))))
    assert [row["point"] for row in rows] == ["step_end", "step_end"]
    for row in rows:
        assert {path: calls for path, (_, calls) in row["modules"].items()} == {"0": 2, "1": 2, "": 2}
        assert row["modules"]["1"][0] == pytest.approx(64 * MIB, rel=0.1)
        assert row["modules"][""][0] == pytest.approx(64 * MIB, rel=0.1)
        assert abs(row["modules"]["0"][0]) < 4 * MIB


def test_what_a_checkpoint_runs_again_does_not_count(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def work(_: int) -> None:
        checkpoint(model, torch.ones(1, 2, requires_grad=True), use_reentrant=False).sum().backward()

    rows = recorded(tmp_path, model, work)
    assert [calls for _, calls in rows[0]["modules"].values()] == [1, 1, 1]


def test_a_compiled_model_is_one_forward(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.compile(backend="eager")
    rows = recorded(tmp_path, model, lambda _: model(torch.ones(1, 2)))
    assert [calls for _, calls in rows[0]["modules"].values()] == [1]
