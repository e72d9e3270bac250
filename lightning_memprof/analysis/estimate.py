"""What the estimate of a training's memory says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Alternative", "Device", "Estimate", "Fit", "Reserved"]

Fit = Literal["fits", "does not fit", "too close to call", "no limit"]


@dataclass(frozen=True, kw_only=True)
class Device:
    """The memory of a kind of device.

    Attributes:
        name: as PyTorch names it, or ``CPU``.
        total_bytes: of its memory; None where it is not known.
        usable_bytes: what PyTorch's allocator can reserve of it: without the CUDA context and what the driver keeps.
        workspace_bytes: what cuBLAS keeps for each thread that multiplies matrices.
        source: of these figures.

    """

    name: str
    total_bytes: int | None = None
    usable_bytes: int | None = None
    workspace_bytes: int = 0
    source: str = ""


@dataclass(frozen=True)
class Reserved:
    """The peak of the memory that the allocator reserves, in bytes: its likely value and a band."""

    low_bytes: int
    likely_bytes: int
    high_bytes: int


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The same training with one change.

    Attributes:
        change: as on the command line.
        allocated_bytes: peak of the tensors' memory; None where it could not be estimated.
        reserved: peak of the allocator's memory.
        costs: what is lost for it.
        problem: why there are no figures.

    """

    change: str
    allocated_bytes: int | None = None
    reserved: Reserved | None = None
    costs: str = ""
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The memory of a training on one device.

    Attributes:
        program: what is estimated, in words.
        device: the device.
        allocated_bytes: peak of the tensors' memory, in the allocator's steps of 512 bytes.
        reserved: peak of the memory that the allocator reserves for it.
        step: number of the step with the peak, from 0.
        part: ``forward``, ``backward``, ``optimizer``, or ``setup`` before the first step.
        operator: the operator that reaches the peak.
        categories: bytes at the peak by category; they add up to ``allocated_bytes``.
        modules: bytes at the peak by module and category.
        dtypes: bytes at the peak by dtype.
        live: bytes of tensors during the last step, in the order of its requests.
        batch: shapes and dtypes of a batch.
        batch_size: samples in a batch; None where the batch does not say.
        parameters: number of parameters.
        steps: how many steps were simulated.
        assumptions: what the figures rest on, a sentence each.
        alternatives: the same training with changes.
        seconds: how long the simulation took.

    """

    program: str
    device: Device
    allocated_bytes: int
    reserved: Reserved
    step: int
    part: str
    operator: str
    categories: Mapping[str, int]
    modules: Sequence[tuple[str, str, int]]
    dtypes: Mapping[str, int]
    live: Sequence[int]
    batch: Sequence[str]
    batch_size: int | None
    parameters: int
    steps: int
    assumptions: Sequence[str] = ()
    alternatives: Sequence[Alternative] = ()
    seconds: float = 0.0

    @property
    def fit(self) -> Fit:
        """Whether the training fits into the device."""
        limit = self.device.usable_bytes
        if limit is None:
            return "no limit"
        if self.reserved.high_bytes <= limit:
            return "fits"
        return "does not fit" if self.reserved.low_bytes > limit else "too close to call"
