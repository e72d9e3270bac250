"""What a device could do at best, as Lightning's table has it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Final

import torch
from lightning.fabric.utilities.throughput import get_available_flops

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["peak_flops"]

_DTYPES: Final = (
    ("bf16", torch.bfloat16),
    ("16", torch.float16),
    ("32", torch.float32),
)


def peak_flops(trainer: Trainer) -> float | None:
    """Return floating-point operations per second of the rank's device in the Trainer's precision.

    None where Lightning does not know the device, as for every CPU, or the precision. Source:
    ``lightning.fabric.utilities.throughput.get_available_flops``, the vendors' figures for dense matrices.
    """
    precision = str(trainer.precision)
    dtype = next((dtype for prefix, dtype in _DTYPES if precision.startswith(prefix)), None)
    if dtype is None or trainer.strategy.root_device.type != "cuda":
        return None
    try:
        with warnings.catch_warnings():
            # It warns of a device that it does not know; the page says so.
            warnings.simplefilter("ignore")
            peak = get_available_flops(trainer.strategy.root_device, dtype)
    except Exception:  # noqa: BLE001 a table that lacks a precision may raise anything; the run continues without it
        return None
    return None if peak is None else float(peak)
