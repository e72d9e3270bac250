"""Training loops without a Trainer, for ``record``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, Adam, AdamW
from torch.utils.data import DataLoader

from lightning_memprof import OutputOptions, Run, Schedule, record

QUIET = OutputOptions(summary=False, on_error="raise")
EVERY = Schedule(wait=1, warmup=1, active=2, repeat=2)


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.last = nn.Sequential(nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.last(self.first(batch)).square().mean()
        return loss


class Data(torch.utils.data.Dataset[torch.Tensor]):
    """Random samples: their numbers depend on the order in which loop and model draw."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, _: int) -> torch.Tensor:
        return torch.randn(8)


def batches() -> DataLoader[torch.Tensor]:
    return DataLoader(Data(), batch_size=2)


Loop = Callable[[Any, nn.Module], None]


def plain(steps: Callable[[Any], Any], model: nn.Module) -> None:
    optimizer = AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        for batch in steps(batches()):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()


def accumulated(steps: Callable[[Any], Any], model: nn.Module) -> None:
    optimizer = SGD(model.parameters(), lr=0.01)
    for number, batch in enumerate(steps(batches())):
        model(batch).backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def closure(steps: Callable[[Any], Any], model: nn.Module) -> None:
    optimizer = LBFGS(model.parameters(), max_iter=3)
    for batch in steps(batches()):

        def compute(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(compute)  # type: ignore[no-untyped-call]


def two_optimizers(steps: Callable[[Any], Any], model: nn.Module) -> None:
    first, last = (Adam(part.parameters()) for part in model.children())
    for batch in steps(batches()):
        for optimizer in (first, last):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()


def scaled(steps: Callable[[Any], Any], model: nn.Module) -> None:
    optimizer, scaler = SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu")
    for batch in steps(batches()):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def compiled(steps: Callable[[Any], Any], model: nn.Module) -> None:
    optimizer, faster = SGD(model.parameters(), lr=0.01), torch.compile(model, backend="eager")
    for batch in steps(batches()):
        faster(batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(loop: Loop, recording: record | None, model: nn.Module) -> tuple[list[torch.Tensor], torch.Tensor]:
    loop(iter if recording is None else recording.steps, model)
    return [parameter.detach().clone() for parameter in model.parameters()], torch.get_rng_state()


def seeded() -> Net:
    torch.manual_seed(7)
    return Net()


def facts(run: Run) -> dict[str, Any]:
    rows = (json.loads(line) for line in (run.directory / "manifest.rank00000.jsonl").read_text().splitlines())
    return next(row for row in rows if row["kind"] == "training")


def plain_epoch(recording: record, model: nn.Module) -> None:
    optimizer = SGD(model.parameters(), lr=0.01)
    for batch in recording.steps(batches()):
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def a_rank(rank: int, port: int, place: str) -> None:
    """Train on one of two ranks."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    model = DistributedDataParallel(seeded())
    with record(model, dirpath=place, schedule=EVERY, output=QUIET) as recording:
        plain(recording.steps, model)
    torch.distributed.destroy_process_group()
