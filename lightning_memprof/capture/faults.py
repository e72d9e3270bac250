"""Failures of collectors: reported once, written to the manifest, and the collector disabled; training continues."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from lightning_memprof.artifacts.manifest import ErrorRow, ManifestWriter
from lightning_memprof.artifacts.secrets import masked
from lightning_memprof.errors import is_ctrl_c
from lightning_memprof.logs import logger_of

log = logger_of(__name__)

OnError = Literal["warn", "raise"]


def describe(error: BaseException) -> str:
    """Return an exception as one line without its secrets, also if its text is not available."""
    try:
        return masked(f"{type(error).__name__}: {error}".removesuffix(": "))
    except Exception:  # noqa: BLE001 the text of any exception may fail
        return type(error).__name__


class Faults:
    """The policy for failing collectors of one run.

    Args:
        manifest: gets the ``error`` rows.
        on_error: ``"warn"`` logs and disables the collector; ``"raise"`` raises into the training, for tests.

    Attributes:
        disabled: names of the collectors that failed.
    """

    def __init__(self, manifest: ManifestWriter, on_error: OnError) -> None:
        self._manifest = manifest
        self._on_error = on_error
        self.disabled: set[str] = set()

    def report(self, collector: str, where: str, window: int | None, error: BaseException) -> None:
        """Write that ``collector`` failed, and disable it; Ctrl-C is raised.

        Raises:
            KeyboardInterrupt: the error is Ctrl-C.
        """
        if is_ctrl_c(error):
            raise KeyboardInterrupt from error
        first = collector not in self.disabled
        self.disabled.add(collector)
        with suppress(OSError):
            text = "".join(traceback.format_exception(error))
            self._manifest.append(
                ErrorRow(collector=collector, where=where, window=window, message=describe(error), traceback=text)
            )
        if self._on_error == "raise":
            raise error
        if first:
            log.warning(
                "collector %s failed on %s and is disabled; training continues",
                collector,
                where,
                exc_info=error,
            )

    @contextmanager
    def caught(self, collector: str, where: str, window: int | None = None) -> Iterator[None]:
        """Report an exception of the body instead of raising it into the training."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 a failure of ours, or of anybody's collector, must not stop the training
            self.report(collector, where, window, error)
