"""Our log lines on the terminal, where the program has not set up logging itself."""

from __future__ import annotations

import logging

__all__ = ["LogLines"]


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Told apart from the handlers of the program."""


class LogLines:
    """Shows INFO lines between :meth:`show` and :meth:`hide`, as Lightning shows its own, and leaves no trace."""

    def __init__(self) -> None:
        self._handler: logging.Handler | None = None
        self._level = logging.NOTSET

    def show(self) -> None:
        """Begin, unless the program or another run of ours shows them already."""
        logger = logging.getLogger("lightning_memprof")
        if self._handler is not None or logging.getLogger().handlers or logger.handlers:
            return
        self._handler = _Handler()
        self._handler.setFormatter(logging.Formatter("memprof: %(message)s"))
        logger.addHandler(self._handler)
        self._level = logger.level
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)

    def hide(self) -> None:
        """End."""
        if self._handler is not None:
            logger = logging.getLogger("lightning_memprof")
            logger.removeHandler(self._handler)
            logger.setLevel(self._level)
            self._handler = None
