"""Waiting for what others do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], object], seconds: float = 120) -> None:
    """Wait until something holds, for some seconds at most; what comes next says what is missing then."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
