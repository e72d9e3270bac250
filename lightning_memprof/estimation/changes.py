"""Changes of a training run whose memory is estimated beside it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import msgspec
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from lightning_memprof.errors import ConfigError

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


_CONTAINERS: Final = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_OPTIMIZERS: Final[Mapping[str, Callable[[Any], Optimizer]]] = MappingProxyType(
    {
        "sgd": partial(torch.optim.SGD, lr=0.1),
        "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "adagrad": torch.optim.Adagrad,
        "rmsprop": torch.optim.RMSprop,
        "adafactor": torch.optim.Adafactor,
        "adamw8bit": _AdamW8bit,
    }
)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change.

    Attributes:
        name: as on the command line.
        costs: what is lost for it.
        trainer: arguments of the Trainer that it replaces.
        optimizer: a name of :func:`parse_change`; None keeps the program's.
        is_checkpointed: whether repeated blocks recompute their activations.
        offloaded: what is in host memory: FSDP's ``parameters`` with their gradients and the optimizer's state, or the
            saved ``activations`` of repeated blocks; empty for nothing.
        batch_divisor: by which the samples of a batch are divided, and batches per step multiplied.
    """

    name: str
    costs: str
    trainer: Mapping[str, Any] = msgspec.field(default_factory=dict)
    optimizer: str | None = None
    is_checkpointed: bool = False
    offloaded: frozenset[str] = frozenset()
    batch_divisor: int = 1

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a Trainer's arguments with the change."""
        accumulated = (given.get("accumulate_grad_batches") or 1) * self.batch_divisor
        return {**given, **self.trainer, "accumulate_grad_batches": accumulated}

    def optimizers(self, found: Iterable[Optimizer]) -> list[Optimizer]:
        """Return optimizers of the change's kind for the parameters of those of the program."""
        if self.optimizer is None:
            return list(found)
        groups = ([each for group in optimizer.param_groups for each in group["params"]] for optimizer in found)
        return [_OPTIMIZERS[self.optimizer](parameters) for parameters in groups]

    def prepare(self, model: nn.Module) -> None:
        """Change a model's repeated blocks.

        Raises:
            ConfigError: it has none, and the change needs them.
        """
        found = [checkpoint_blocks(model)] if self.is_checkpointed else []
        found += [_wrap_blocks(model, _offloading)] if "activations" in self.offloaded else []
        if 0 in found:
            raise ConfigError("estimate: the model has no blocks that repeat")


_PLAIN: Final = MappingProxyType(
    {
        "checkpointing": Change(name="checkpointing", costs="each block's forward runs twice", is_checkpointed=True),
        "offload": Change(name="offload", costs="the CPU runs the optimizer", offloaded=frozenset({"parameters"})),
        "offload=activations": Change(name="offload=activations", costs="", offloaded=frozenset({"activations"})),
    }
)


def parse_change(text: str) -> Change:
    """Return a change such as ``precision=bf16-mixed``, or several at once: ``checkpointing+accumulate=4``.

    Raises:
        ConfigError: there is no such change, or its value is invalid.
    """
    return combined([_one_change(part, text) for part in text.split("+")])


def combined(changes: Sequence[Change]) -> Change:
    """Return one change for several."""
    optimizers = [change.optimizer for change in changes if change.optimizer]
    return Change(
        name="+".join(change.name for change in changes),
        costs=", ".join(change.costs for change in changes if change.costs),
        trainer={name: value for change in changes for name, value in change.trainer.items()},
        optimizer=optimizers[-1] if optimizers else None,
        is_checkpointed=any(change.is_checkpointed for change in changes),
        offloaded=frozenset().union(*(change.offloaded for change in changes)),
        batch_divisor=math.prod(change.batch_divisor for change in changes),
    )


def _one_change(part: str, text: str) -> Change:
    name, _, value = part.partition("=")
    if part in _PLAIN:
        return _PLAIN[part]
    if name == "precision":
        if value not in _PRECISIONS:
            raise ConfigError(f"--what-if {text}: the precision must be one of {', '.join(_PRECISIONS)}")
        costs = "" if value in {"32-true", "64-true"} else "less precise arithmetic"
        return Change(name=part, costs=costs, trainer={"precision": value, "plugins": None})
    if name == "optimizer":
        if value not in _OPTIMIZERS:
            raise ConfigError(f"--what-if {text}: the optimizer must be one of {', '.join(_OPTIMIZERS)}")
        return Change(name=part, costs="another optimizer's updates", optimizer=value)
    if name in {"accumulate", "devices"}:
        if not value.isdecimal() or int(value) < 1:
            raise ConfigError(f"--what-if {text}: must be a number, as in {name}=4")
        if name == "devices":
            return Change(name=part, costs="communication", trainer={"devices": value})
        return Change(name=part, costs=f"{value} passes per step", batch_divisor=int(value))
    if name == "strategy" and value:
        return Change(name=part, costs="communication", trainer={"strategy": value})
    known = "checkpointing, offload, offload=activations, precision=, optimizer=, accumulate=, devices= and strategy="
    raise ConfigError(f"--what-if {text}: unknown change; known are {known}, several at once joined by +")


def checkpoint_blocks(model: nn.Module) -> int:
    """Let the blocks of the model that repeat recompute their activations in backward; return how many there are."""
    return _wrap_blocks(model, partial(checkpoint, use_reentrant=False))


def _wrap_blocks(model: nn.Module, wrapper: Callable[..., Any]) -> int:
    blocks = repeated_blocks(model)
    for block in blocks:
        block.forward = partial(wrapper, block.forward)
    return len(blocks)


def _offloading(forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
    with save_on_cpu():
        return forward(*args, **named)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules of the classes of which a module has several, each with parameters and children.

    Of these classes, those in containers such as ``ModuleList`` come first: two encoders as attributes are not blocks,
    and their layers are.
    """
    siblings = list(_siblings(model))
    own = [(parent, child) for parent, child in siblings if type(child) not in _CONTAINERS]
    contained = {type(child) for parent, child in own if type(parent) in _CONTAINERS}
    classes = contained or {type(child) for _, child in own}
    if classes:
        return list(_outermost(model, lambda module: type(module) in classes))
    return list(_outermost(model, {child for _, child in siblings}.__contains__))


def _siblings(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each module beside another one of its class, after its parent."""
    for parent in model.modules():
        children = [child for child in parent.children() if _has_parts(child)]
        counts = Counter(map(type, children))
        yield from ((parent, child) for child in children if counts[type(child)] > 1)


def _has_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and next(module.parameters(), None) is not None


def _outermost(model: nn.Module, is_block: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    for child in model.children():
        if is_block(child) and _has_parts(child):
            yield child
        else:
            yield from _outermost(child, is_block)
