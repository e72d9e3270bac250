"""What happens when a collector fails: said once, written down, switched off; training goes on."""

from __future__ import annotations

import logging
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from lightning_memprof.artifacts.secrets import masked

if TYPE_CHECKING:
    from lightning_memprof.artifacts.manifest import ManifestWriter

__all__ = ["Faults", "OnError", "describe"]

log = logging.getLogger(__name__)

OnError = Literal["warn", "raise"]


def describe(error: BaseException) -> str:
    """Write an exception as one line without the secrets in it, also one whose own text cannot be had."""
    try:
        return masked(f"{type(error).__name__}: {error}")
    except Exception:  # noqa: BLE001 the text of anybody's exception may fail
        return type(error).__name__


class Faults:
    """The policy for failing collectors of one run.

    Args:
        manifest: where ``error`` rows go.
        on_error: ``"warn"`` logs and switches the collector off; ``"raise"`` raises into the training, for tests.

    """

    def __init__(self, manifest: ManifestWriter, on_error: OnError) -> None:
        self._manifest = manifest
        self._on_error = on_error
        self.switched_off: set[str] = set()

    def report(self, collector: str, where: str, window: int | None, error: BaseException) -> None:
        """Write down that ``collector`` failed, and switch it off."""
        first = collector not in self.switched_off
        self.switched_off.add(collector)
        with suppress(OSError):
            self._manifest.append(
                "error",
                collector=collector,
                where=where,
                window=window,
                message=describe(error),
                traceback="".join(traceback.format_exception(error)),
            )
        if self._on_error == "raise":
            raise error
        if first:
            log.warning(
                "collector %s failed on %s and is switched off; training goes on", collector, where, exc_info=error
            )
