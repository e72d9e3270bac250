"""Standard output where the caller has closed it, as ``>&-`` does: Python then has none at all."""

from __future__ import annotations

import io
from typing import NoReturn

from lightning_memprof.errors import ReportError

__all__ = ["ClosedOutput"]


class ClosedOutput(io.TextIOBase):
    """Takes nothing."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """What a console asks for before it writes."""
        return "utf-8"

    def write(self, text: str, /) -> NoReturn:  # noqa: ARG002 the signature is its base's
        """Refuse.

        Raises:
            ReportError: always.

        """
        raise ReportError("standard output is closed; leave >&- out, or send it to a file or to /dev/null")
