"""Makes ``profiler="fts_extended"`` known, and attaches to every Trainer where the environment asks for it.

Both go through Lightning's entry point for callbacks, which Lightning calls in every ``Trainer()`` before it looks at
the profiler.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from pathlib import Path
from typing import Any, Final

__all__ = ["ENVIRONMENT_VARIABLE", "PROFILER_NAME", "lightning_callbacks", "pytorch_lightning_callbacks"]

log = logging.getLogger(__name__)

PROFILER_NAME: Final = "fts_extended"
ENVIRONMENT_VARIABLE: Final = "LIGHTNING_MEMPROF"
_OFF: Final = ("", "0", "false", "no", "off")
_ON: Final = ("1", "true", "yes", "on")


def lightning_callbacks() -> list[Any]:
    """Register with ``lightning.pytorch``; return the callbacks that the environment asks for."""
    return _register("lightning.pytorch.trainer.setup")


def pytorch_lightning_callbacks() -> list[Any]:
    """Register with ``pytorch_lightning``; return the callbacks that the environment asks for."""
    return _register("pytorch_lightning.trainer.setup")


def _register(module_name: str) -> list[Any]:
    # An exception in an entry point would break every Trainer of the program.
    try:
        _wrap_init_profiler(sys.modules.get(module_name))
        return _attached_callbacks()
    except Exception:
        from lightning_memprof.errors import ConfigError

        if isinstance(sys.exc_info()[1], ConfigError):
            raise
        log.warning("lightning-memprof could not be registered; training goes on without it", exc_info=True)
        return []


def _wrap_init_profiler(module: Any) -> None:
    original = getattr(module, "_init_profiler", None)
    if original is None or getattr(original, "memprof_profiler_name", None) == PROFILER_NAME:
        return

    @functools.wraps(original)
    def init_profiler(trainer: Any, profiler: Any) -> None:
        original(trainer, _profiler_for(profiler))

    init_profiler.memprof_profiler_name = PROFILER_NAME  # type: ignore[attr-defined]
    module._init_profiler = init_profiler


def _profiler_for(profiler: Any) -> Any:
    named = isinstance(profiler, str) and profiler.lower() == PROFILER_NAME
    if named or (profiler is None and _asked() is not None):
        _check_installed(f"profiler='{PROFILER_NAME}'" if named else ENVIRONMENT_VARIABLE)
        from lightning_memprof.integration.profiler import ExtendedPyTorchProfiler

        # The name promises the whole page; the class has the defaults of torch's profiler.
        return ExtendedPyTorchProfiler(profile_memory=True)
    return profiler


def _asked() -> str | None:
    value = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
    return None if value.lower() in _OFF else value


def _attached_callbacks() -> list[Any]:
    value = _asked()
    if value is None:
        return []
    _check_installed(f"{ENVIRONMENT_VARIABLE}={value}")
    from lightning_memprof.integration.attached import AttachedCallback, load_options

    options = {} if value.lower() in _ON else load_options(Path(value))
    return [AttachedCallback(**options)]


def _check_installed(what: str) -> None:
    from lightning_memprof.integration.distributions import missing_lightning

    if message := missing_lightning(what):
        from lightning_memprof.errors import ConfigError

        raise ConfigError(message)
