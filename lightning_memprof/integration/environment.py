"""What the manifest says of the process, the Trainer and its configuration. An allow-list: nothing is dumped whole."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import lightning
import torch

import lightning_memprof
from lightning_memprof.artifacts.manifest import SCHEMA_VERSION
from lightning_memprof.schedule import Schedule, no_window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning.pytorch import Trainer

    from lightning_memprof.capture.base import Collector

__all__ = ["run_facts", "training_facts"]


def run_facts(
    trainer: Trainer, stage: str, root: str, schedule: Any, collectors: Sequence[Collector]
) -> dict[str, Any]:
    """Return the manifest's ``run`` row."""
    device = trainer.strategy.root_device
    return {
        "schema_version": SCHEMA_VERSION,
        "stage": stage,
        "rank": trainer.global_rank,
        "local_rank": trainer.local_rank,
        "node_rank": trainer.node_rank,
        "world_size": trainer.world_size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "strategy": type(trainer.strategy).__name__,
        "accelerator": type(trainer.accelerator).__name__,
        "device": str(device),
        "root": root,
        "schedule": _schedule_facts(schedule),
        "collectors": [collector.name for collector in collectors],
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "lightning_memprof": lightning_memprof.__version__,
            "platform": platform.platform(),
            "cpu_count": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        },
    }


def _schedule_facts(schedule: Any) -> dict[str, Any] | None:
    if schedule is no_window:
        return None
    return asdict(schedule) if isinstance(schedule, Schedule) else {"callable": _name(schedule)}


def _name(schedule: Any) -> str:
    # Not its `repr`, which has the arguments of a `functools.partial`.
    called = schedule if hasattr(schedule, "__qualname__") else type(schedule)
    return f"{called.__module__}.{called.__qualname__}"


def training_facts(trainer: Trainer) -> dict[str, Any]:
    """Return the manifest's ``training`` row: what of the Trainer's configuration the findings speak about."""
    module = trainer.lightning_module
    lazy = any(torch.nn.parameter.is_lazy(parameter) for parameter in module.parameters())
    parameters = None if lazy else list(module.parameters())
    return {
        "num_batches": _finite(trainer.num_training_batches),
        "max_steps": trainer.max_steps,
        "max_epochs": trainer.max_epochs,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "precision": str(trainer.precision),
        "model": type(module).__name__,
        "parameters": None if parameters is None else sum(parameter.numel() for parameter in parameters),
        "parameter_bytes": None
        if parameters is None
        else sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        "optimizers": [_optimizer_facts(optimizer) for optimizer in trainer.optimizers],
        "dataloaders": [_loader_facts(loader) for loader in _loaders(trainer)],
    }


def _optimizer_facts(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    return {
        "name": type(optimizer).__name__,
        "foreach": groups[0].get("foreach") if groups else None,
        "fused": groups[0].get("fused") if groups else None,
        "parameters": len(parameters),
        "device": str(parameters[0].device) if parameters else None,
    }


def _loaders(trainer: Trainer) -> list[Any]:
    combined = trainer.fit_loop._combined_loader
    return list(combined.flattened) if combined is not None else []


def _loader_facts(loader: Any) -> dict[str, Any]:
    names = ("num_workers", "batch_size", "pin_memory", "prefetch_factor", "persistent_workers")
    return {name: getattr(loader, name, None) for name in names}


def _finite(number: float) -> int | None:
    return None if number == float("inf") else int(number)
