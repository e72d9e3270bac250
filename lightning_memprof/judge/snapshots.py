"""What rules about snapshots share: the words for a line of code, and the remedies that apply to its program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from lightning_memprof.account.ledger.growth import Growth
from lightning_memprof.account.snapshot.frames import is_lightning, is_training
from lightning_memprof.account.snapshot.report import DeviceReport, HeldLine, SnapshotReport
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.out_of_memory import HALF_BATCH
from lightning_memprof.judge.remedies import Need, Remedy, applicable
from lightning_memprof.judge.rule import Found

# Of these, one applies to each program.
SMALLER: Final = (HALF_BATCH, do.SMALLER_INPUT)
FEWER_BYTES: Final = (do.BFLOAT16, do.SMALLER_WEIGHTS)


def on_devices(found_on: Callable[[SnapshotReport, DeviceReport], Found | None], facts: Facts) -> Iterator[Found]:
    """Yield what is found on the devices of snapshots."""
    for snapshot in facts.snapshots:
        yield from filter(None, (found_on(snapshot, device) for device in snapshot.devices))


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
    return do.RELEASE_TENSORS.filled(made=f"the tensors of {growth.owner}")
