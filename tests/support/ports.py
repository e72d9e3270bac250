"""Ports of this machine that are free, and that the kernel gives to nobody before they are bound."""

from __future__ import annotations

import random
import socket
from typing import Final

# The kernel's own choices, for connections and for port 0, begin at 32768.
_CHOSEN: Final = range(20_000, 32_000)


def free_port() -> int:
    """Give a port that nothing is bound to."""
    while True:
        port = random.SystemRandom().choice(_CHOSEN)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
