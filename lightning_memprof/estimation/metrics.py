"""Results of operators whose shape depends on values, as metrics use them: such a size decides little memory."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor

_PACKAGE: Final = "torchmetrics"
_MASKABLE: Final = frozenset({"aten.index.Tensor", "aten.index_put.default", "aten.index_put_.default"})


def is_in_metric() -> bool:
    """Return whether code of a metric runs: that of torchmetrics, or what it calls, as an update of the program's."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 inspect.stack() reads source files
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE:
            return True
        frame = frame.f_back
    return False


def likely_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operator in a size that a metric expects; None for other operators.

    Masks keep all rows, classes have the declared number of bins, and all values are the same: metrics refuse more
    different values than they have classes.
    """
    name = str(func)
    if name in _MASKABLE:
        indices = [index for mask in args[1] for index in _kept(mask)]
        return func(args[0], indices, *args[2:], **kwargs)
    given = {argument.name: argument.default_value for argument in func._schema.arguments}  # noqa: SLF001 no public one
    given |= dict(zip(given, args, strict=False))
    given |= kwargs
    tensor = given["self"]
    if name == "aten.nonzero.default":
        return tensor.new_empty((tensor.numel(), tensor.ndim), dtype=torch.long)
    if name == "aten.masked_select.default":
        return tensor.new_empty(torch.broadcast_shapes(tensor.shape, given["mask"].shape).numel())
    if name == "aten.bincount.default":
        weights = given["weights"]
        kind = torch.long if weights is None else torch.float if weights.dtype == torch.float else torch.double
        return tensor.new_empty(max(given["minlength"], 1), dtype=kind)
    if name in {"aten._unique2.default", "aten.unique_consecutive.default"} and given.get("dim") is None:
        inverse = tensor.shape if given["return_inverse"] else (0,)
        counts = (1 if given["return_counts"] else 0,)
        numbers = (tensor.new_empty(shape, dtype=torch.long) for shape in (inverse, counts))
        return (tensor.new_empty(min(tensor.numel(), 1)), *numbers)
    return None


def _kept(index: Tensor | None) -> list[Tensor | None]:
    """Return the indices of all rows for a mask, one for each of its dimensions; another index as it is."""
    if index is None or index.dtype not in {torch.bool, torch.uint8}:
        return [index]
    return [index.new_zeros(index.numel(), dtype=torch.long) for _ in range(index.ndim)]
