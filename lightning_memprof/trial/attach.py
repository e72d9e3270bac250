"""Entry points that Lightning calls in every ``Trainer()``: a tried program may train in processes that it starts."""

from __future__ import annotations

import os
from typing import Any, Final

VARIABLE: Final = "LIGHTNING_MEMPROF_TRIAL"
"""The environment variable with the task; processes that the program starts inherit it."""


def lightning_callbacks() -> list[Any]:
    """Prepare a process that the tried program has started; return no callbacks."""
    if os.environ.get(VARIABLE):
        from lightning_memprof.trial.program import prepare

        prepare()
    return []


def pytorch_lightning_callbacks() -> list[Any]:
    """Return no callbacks.

    Raises:
        MemprofError: the program is being tried; its training would run unchanged, to its end.
    """
    if os.environ.get(VARIABLE):
        from lightning_memprof.errors import MemprofError

        raise MemprofError("the Trainer is that of pytorch_lightning: import lightning.pytorch to try the program")
    return []
