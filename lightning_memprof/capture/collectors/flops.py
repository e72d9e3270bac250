"""Floating-point operations of a step, counted by torch's formulas while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import flop_registry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["FlopCount", "other_modes"]

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def other_modes() -> bool:
    """Whether torch's operators go through somebody's dispatch mode now."""
    return bool(_get_current_dispatch_mode_stack())


def _formulas() -> dict[Any, Callable[..., int]]:
    """Return torch's formulas, and those of attention on a CPU, which torch's counter leaves out."""
    aten = torch.ops.aten
    formulas: dict[Any, Callable[..., int]] = dict(flop_registry)
    for known, cpu in (
        ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        ("_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_flash_attention_for_cpu_backward"),
    ):
        if (formula := formulas.get(getattr(aten, known, None))) is not None and hasattr(aten, cpu):
            formulas.setdefault(getattr(aten, cpu), formula)
    return formulas


class FlopCount(TorchDispatchMode):
    """Counts matrix products, convolutions and attention, of forward and of backward; values are not touched.

    Every operator runs as it would without: torch's own ``FlopCounterMode`` also hooks modules and gradients, which
    this does not. What the formulas do not know counts nothing. Source of the formulas:
    ``torch.utils.flop_counter.flop_registry``; a multiplication with an addition is two operations.

    Attributes:
        flops: operations so far.
        counting: whether operators are counted; where not, they only pass.
        failure: what a formula raised first; counting ended there.

    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.counting = True
        self.failure: Exception | None = None
        self._formulas = _formulas()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operator, and count it."""
        kwargs = kwargs or {}
        if not self.counting:
            return func(*args, **kwargs)
        if any(issubclass(kind, FakeTensor) for kind in types):
            # A sharded tensor tries an operator with shapes alone. Left to others it would fail: the fake mode, which
            # torch asks after every other mode, is the only one that can run it.
            return func(*args, **kwargs)
        if not _PLAIN.issuperset(types):
            # A subclass, a sharded tensor for instance: what it runs inside is this process's part, and comes by.
            return NotImplemented
        formula = self._formulas.get(getattr(func, "overloadpacket", func))
        if formula is None and torch.is_inference_mode_enabled():
            # Only there composite operators come whole; these are the parts that they would run anyway.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        if formula is not None and active_fake_mode() is None:
            try:
                self.flops += formula(*args, **kwargs, out_val=result)
            except Exception as error:  # noqa: BLE001 nothing of ours may raise into the user's code
                self.failure, self.counting = error, False
        return result
