"""The loggers of this package."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any


class _Safe:
    """A logger whose lines cannot end a training: handlers and filters are the program's, and may raise."""

    def handle(self, record: logging.LogRecord) -> None:
        """Pass a record to the handlers; what they raise is lost, like a line on a closed stream."""
        with suppress(Exception):
            super().handle(record)  # type: ignore[misc]


def logger_of(name: str) -> logging.Logger:
    """Return the logger of a module; what a handler or a filter of the program raises does not reach the training."""
    found: Any = logging.getLogger(name)
    if not isinstance(found, _Safe):
        found.__class__ = type(type(found).__name__, (_Safe, type(found)), {})
    return found  # type: ignore[no-any-return]
