"""Changes of a training whose memory is estimated beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from lightning_memprof.errors import ConfigError

__all__ = ["Change", "checkpoint_blocks", "parse_change", "repeated_blocks"]

_PRECISIONS: Final = ("32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed", "64-true")
# Source: block size of bitsandbytes' AdamW8bit, which keeps small tensors in float32.
_BLOCK: Final = 256
_MIN_QUANTIZED: Final = 4096


class _AdamW8bit(Optimizer):
    """Optimizer state of bitsandbytes' AdamW8bit: two bytes per element, and two scales per block."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = self._state(parameter)
        return loss

    @staticmethod
    def _state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        if parameter.numel() < _MIN_QUANTIZED:
            return {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("state1", "state2")}
        blocks = -(-parameter.numel() // _BLOCK)
        moments = {name: torch.zeros_like(parameter, dtype=torch.uint8) for name in ("state1", "state2")}
        scales = {name: torch.zeros(blocks, device=parameter.device) for name in ("absmax1", "absmax2")}
        return {**moments, **scales}


_OPTIMIZERS: Final = ("sgd", "momentum", "adam", "adamw", "adagrad", "rmsprop", "adafactor", "adamw8bit")


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change.

    Attributes:
        name: as on the command line.
        costs: what is lost for it.
        trainer: arguments of the Trainer that it replaces.
        optimizer: a name of :func:`parse_change`; None keeps the program's.
        is_checkpointed: whether repeated blocks recompute their activations.
        batch_divisor: by which the samples of a batch are divided, and batches per step multiplied.

    """

    name: str
    costs: str
    trainer: dict[str, Any] | None = None
    optimizer: str | None = None
    is_checkpointed: bool = False
    batch_divisor: int = 1

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a Trainer's arguments with the change."""
        accumulated = (given.get("accumulate_grad_batches") or 1) * self.batch_divisor
        return {**given, **(self.trainer or {}), "accumulate_grad_batches": accumulated}

    def optimizers(self, found: Iterable[Optimizer]) -> list[Optimizer]:
        """Return optimizers of the change's kind for the parameters of those of the program."""
        return [_optimizer(self.optimizer, optimizer) if self.optimizer else optimizer for optimizer in found]


def parse_change(text: str) -> Change:
    """Return a change such as ``precision=bf16-mixed``, ``checkpointing``, ``accumulate=4`` or ``optimizer=sgd``.

    Raises:
        ConfigError: there is no such change, or its value is invalid.

    """
    name, _, value = text.partition("=")
    if text == "checkpointing":
        costs = "a second forward of the blocks"
        return Change(name=text, costs=costs, is_checkpointed=True)
    if name == "precision":
        if value not in _PRECISIONS:
            raise ConfigError(f"--what-if {text}: the precision must be one of {', '.join(_PRECISIONS)}")
        costs = "memory" if value == "64-true" else "" if value == "32-true" else "precision"
        return Change(name=text, costs=costs, trainer={"precision": value, "plugins": None})
    if name == "optimizer":
        if value not in _OPTIMIZERS:
            raise ConfigError(f"--what-if {text}: the optimizer must be one of {', '.join(_OPTIMIZERS)}")
        return Change(name=text, costs="different updates", optimizer=value)
    if name == "accumulate":
        if not value.isdecimal() or int(value) < 1:
            raise ConfigError(f"--what-if {text}: must be a number of batches, as in accumulate=4")
        return Change(
            name=text, costs=f"{value} passes per step",
            batch_divisor=int(value),
        )  # fmt: skip
    known = "checkpointing, precision=, optimizer= and accumulate="
    raise ConfigError(f"--what-if {text}: unknown change; known are {known}")


def _optimizer(name: str, like: Optimizer) -> Optimizer:
    parameters = [parameter for group in like.param_groups for parameter in group["params"]]
    optim = torch.optim
    makers: dict[str, Callable[[Any], Optimizer]] = {
        "sgd": partial(optim.SGD, lr=0.1),
        "momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
        "adam": optim.Adam,
        "adamw": optim.AdamW,
        "adagrad": optim.Adagrad,
        "rmsprop": optim.RMSprop,
        "adafactor": optim.Adafactor,
        "adamw8bit": _AdamW8bit,
    }
    return makers[name](parameters)


def checkpoint_blocks(model: nn.Module) -> int:
    """Let the blocks of the model that repeat recompute their activations in backward; return how many there are."""
    blocks = repeated_blocks(model)
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return len(blocks)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules of one class among the children of one module that have parameters and children."""
    groups: dict[type, list[nn.Module]] = {}
    for child in model.children():
        if next(child.children(), None) is not None and next(child.parameters(), None) is not None:
            groups.setdefault(type(child), []).append(child)
    found = [block for group in groups.values() if len(group) > 1 for block in group]
    repeated = set(map(id, found))
    for child in model.children():
        if id(child) not in repeated:
            found += repeated_blocks(child)
    return found
