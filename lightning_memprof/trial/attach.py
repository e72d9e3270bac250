"""The entry point that Lightning calls in every ``Trainer()``, also in processes that a tried program starts."""

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
