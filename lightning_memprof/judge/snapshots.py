"""What rules about snapshots share: the words for a line of code, and the remedies that apply to its program."""

from __future__ import annotations

from typing import Final

from lightning_memprof.account.snapshot.frames import is_lightning, is_training
from lightning_memprof.account.snapshot.growth import Growth
from lightning_memprof.account.snapshot.report import DeviceReport, HeldLine
from lightning_memprof.judge.remedies import (
    HALF_PRECISION,
    NAME_HOLDER,
    RELEASE_TENSORS,
    SMALLER_BATCH,
    SMALLER_INPUT,
    SMALLER_WEIGHTS_OR_CACHE,
    Need,
    Remedy,
    applicable,
)

# Of these, one applies to each program.
SMALLER: Final = (SMALLER_BATCH, SMALLER_INPUT)
FEWER_BYTES: Final = (HALF_PRECISION, SMALLER_WEIGHTS_OR_CACHE)


def calls(line: HeldLine) -> str:
    """Return the function that a line of code called for most of its bytes, and whether it called others."""
    others = " and others" if len(line.called) > 1 else ""
    return f" (in {line.called[0]}{others})" if line.called else ""


def fitting(device: DeviceReport, *choices: Remedy) -> tuple[Remedy, ...]:
    """Return the remedies that apply to the program of a snapshot."""
    lightning: Need = "lightning" if is_lightning(device.snapshot) else "other program"
    training: Need = "training" if is_training(device.snapshot) else "inference"
    return applicable({lightning, training}, *choices)


def released(growth: Growth) -> Remedy:
    """Return how to free blocks that pile up."""
    return RELEASE_TENSORS.filled(made=f"the tensors of {growth.site}", record="")


def freed_growth(device: DeviceReport, growth: Growth) -> tuple[Remedy, ...]:
    """Return the same for the program of a snapshot."""
    return fitting(device, released(growth), NAME_HOLDER)
