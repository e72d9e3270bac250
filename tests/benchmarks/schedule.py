"""When windows are: one, of as many steps, for everybody."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

WAIT: Final = 20
WARMUP: Final = 1
ACTIVE: Final = 3


def of_torch() -> Callable[..., Any]:
    """Give it as torch's profiler takes it."""
    return torch.profiler.schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1)
