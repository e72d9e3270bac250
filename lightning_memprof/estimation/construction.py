"""Modules whose large tensors are made without memory, and batches with other tensors."""

from __future__ import annotations

import copy
import math
import sys
import traceback
from collections.abc import Callable, Collection
from typing import Any, Final

import torch
from lightning.fabric.utilities.apply_func import _TransferableDataType
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

# Constructors read values of small tensors, such as the rates of stochastic depth.
_MIN_NUMEL: Final = 4096
_HOLDERS: Final = (torch.Tensor, list, tuple, dict)
_FACTORIES: Final = frozenset({torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full})


class LargeOnMeta(TorchFunctionMode):
    """Puts large tensors that constructors of modules make on torch's device ``meta``, which has no data.

    Attributes:
        is_active: whether it does.

    Args:
        everywhere: not only in constructors.
        is_active: whether it does at first.
    """

    def __init__(self, *, everywhere: bool = False, is_active: bool = True) -> None:
        super().__init__()
        self.is_active = is_active
        self._everywhere = everywhere

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_large = (
            self.is_active
            and func in _FACTORIES
            and kwargs.get("device") is None
            and _numel(args, kwargs) >= _MIN_NUMEL
        )
        if is_large and (self._everywhere or _in_constructor()):
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


class OnMeta(TorchFunctionMode):
    """Puts tensors that are made on a device, which has no data yet, on ``meta``.

    Args:
        kind: type of the device.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == self._kind:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _numel(args: Any, kwargs: Any) -> int:
    size = kwargs.get("size", args[0] if args and isinstance(args[0], (tuple, list)) else args)
    if isinstance(size, int):
        return size
    return math.prod(size) if size and all(isinstance(length, int) for length in size) else 0


def _in_constructor() -> bool:
    frames = traceback.walk_stack(sys._getframe(2))  # noqa: SLF001 inspect.stack() reads source files
    makers = (frame for frame, _ in frames if frame.f_code.co_name == "__init__")
    return any(isinstance(frame.f_locals.get("self"), nn.Module) for frame in makers)


def without_data(model: nn.Module, device: torch.device, offloaded: Collection[int] = ()) -> None:
    """Replace parameters and buffers by ones without data on a device; tied ones stay tied.

    ``Module.to`` cannot: it swaps tensors in place, which fakes refuse.

    Args:
        model: on any device.
        device: of the new tensors.
        offloaded: numbers, by ``id``, of parameters whose new tensors are in host memory.
    """
    made: dict[int, tuple[Any, Any]] = {}

    def replaced(tensor: Any) -> Any:
        if id(tensor) not in made:
            place = torch.device("cpu") if id(tensor) in offloaded else device
            fake = _shard(tensor, place) if isinstance(tensor, DTensor) else empty_like(tensor, place)
            if isinstance(tensor, torch.nn.Parameter):
                fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
            # The original is kept: its number must not be given to another tensor.
            made[id(tensor)] = (fake, tensor)
        return made[id(tensor)][0]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):  # noqa: SLF001 setattr would run the user's code
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = replaced(tensor)
        # The states of torchmetrics' Metric are neither, and move with it.
        for name in getattr(module, "_defaults", ()):
            setattr(module, name, apply_to_collection(getattr(module, name), Tensor, replaced))


def empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the same shape, strides and dtype on a device, without values."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _shard(tensor: DTensor, device: torch.device) -> Tensor:
    # DTensor.from_local would move it to the mesh's device.
    make: Any = DTensor
    found: Tensor = make(empty_like(tensor.to_local().detach(), device), tensor._spec, requires_grad=False)  # noqa: SLF001
    return found


def with_tensors(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a batch with other tensors: what ``function`` returns for each of them."""

    def replaced(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return function(part)
        found = copy.copy(part)
        for name, value in getattr(found, "__dict__", {}).items():
            if isinstance(value, _HOLDERS):
                found.__dict__[name] = with_tensors(value, function)
        return found

    # What Lightning moves to a device by its own method; its tensors are attributes.
    return apply_to_collection(batch, _TransferableDataType, replaced)


def batch_tensors(batch: Any) -> list[torch.Tensor]:
    """Return the tensors in a batch, in their order."""
    found: list[torch.Tensor] = []

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    with_tensors(batch, kept)
    return found
