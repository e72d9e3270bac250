"""What is asked of an estimate, in the words of the command line; wrong values are found before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from lightning_memprof.account.estimate import Device, device_named, device_of, parse_bytes
from lightning_memprof.errors import ConfigError
from lightning_memprof.estimation.allocator_settings import environment_settings
from lightning_memprof.units import format_bytes

if TYPE_CHECKING:
    from lightning_memprof.estimation.changes import Change

_USUAL: Final = ("precision=bf16-mixed", "checkpointing", "accumulate=2", "optimizer=adamw8bit")
_FULL: Final = (None, "32", "32-true")


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked, in the words of the command line.

    Attributes:
        device: name of the device; None takes this machine's GPU, and otherwise gives no limit.
        device_memory: its memory, as in ``24GiB``.
        batch_size: samples in a batch, ``max`` for as many as fit; None keeps the program's.
        seq_len: tokens in a sample, several as in ``512,1024``; None keeps the program's.
        batch_shape: shapes of the batch's tensors, as in ``8x3x64x64,8``; None keeps the program's.
        devices: GPUs of a machine that train together; None keeps the program's.
        strategy: ``ddp``, ``fsdp``, ``fsdp2``, or another name of Lightning's; None keeps the program's.
        rank: the rank to simulate, ``all`` for each: stages of a pipeline differ.
        what_if: changes; empty for the usual ones, ``none`` alone for none.
        progress: gets, before each simulation, its name, how many are done, and how many there are; 0 is unknown.

    Raises:
        ConfigError: a value is invalid.
    """

    device: str | None = None
    device_memory: str | None = None
    batch_size: str | int | None = None
    seq_len: str | int | None = None
    batch_shape: str | None = None
    devices: str | int | None = None
    strategy: str | None = None
    rank: str | int = 0
    what_if: str | Sequence[str] = ()
    progress: Callable[[str, int, int], None] = lambda _name, _done, _total: None

    def __post_init__(self) -> None:
        """Validate the values before the program runs."""
        self.samples()
        self.lengths()
        self.shapes()
        if self.rank != "all" and not str(self.rank).isdecimal():
            raise ConfigError(f"--rank {self.rank}: must be the number of a rank, or all")
        self.target()
        from lightning_memprof.estimation.ranks import ranks_of

        for arguments in ({}, *(change.trainer for change in self.changes())):
            ranks_of({**self.trainer(), **arguments})
        environment_settings(os.environ)
        if self.batch_size == "max" and self.target().usable_bytes is None:
            raise ConfigError("--batch-size max: needs --device or --device-memory")

    def target(self) -> Device:
        """Return the device."""
        if self.device_memory is None:
            return device_named(self.device) if self.device is not None else _here()
        total = parse_bytes("--device-memory", self.device_memory)
        name = self.device or "GPU"
        if name.lower() == "cpu":
            return replace(device_named("cpu"), total_bytes=total, usable_bytes=total, source="--device-memory")
        return device_of(f"{name} with {format_bytes(total)}", total, "--device-memory")

    def changes(self, precision: str | None = None) -> list[Change]:
        """Return the changes; of the usual ones those that change a training run of a precision."""
        from lightning_memprof.estimation.changes import parse_change

        given = (self.what_if,) if isinstance(self.what_if, str) else self.what_if
        names = given or (_USUAL if precision in _FULL else _USUAL[1:])
        if "none" in names and len(names) > 1:
            raise ConfigError("--what-if none: no other change can be given with it")
        return [] if "none" in names else [parse_change(name) for name in names]

    def trainer(self) -> dict[str, Any]:
        """Return the arguments of the Trainer that replace the program's."""
        given = {"devices": self.devices, "strategy": self.strategy}
        return {name: value for name, value in given.items() if value is not None}

    def samples(self) -> int | None:
        """Return the samples in a batch; None for the program's, or as many as fit."""
        if self.batch_size is None or self.batch_size == "max":
            return None
        text = str(self.batch_size)
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"--batch-size {text}: must be a number of at least 1, or max")
        return int(text)

    def lengths(self) -> list[int]:
        """Return the tokens in a sample, for each estimate; empty for the program's."""
        texts = [] if self.seq_len is None else str(self.seq_len).split(",")
        if not all(text.isdecimal() and int(text) > 0 for text in texts):
            raise ConfigError(f"--seq-len {self.seq_len}: must be one or several numbers, as in 512,1024")
        return [int(text) for text in texts]

    def shapes(self) -> list[list[int]]:
        """Return the shapes of the batch's tensors; empty for the program's."""
        if self.batch_shape is None:
            return []
        found = [shape.split("x") for shape in self.batch_shape.split(",")]
        if not all(length.isdecimal() and int(length) > 0 for shape in found for length in shape):
            raise ConfigError(f"--batch-shape {self.batch_shape}: must be a shape for each tensor, as in 8x3x64x64,8")
        return [[int(length) for length in shape] for shape in found]


def _here() -> Device:
    """Return this machine's first GPU, or an unlimited one."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return device_of(properties.name, properties.total_memory, "this machine")
    return replace(device_of("a GPU", 0, "none was named"), total_bytes=None, usable_bytes=None)
