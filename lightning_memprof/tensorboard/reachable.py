"""Whether a host answers, asked beside the server's threads."""

from __future__ import annotations

import socket
import threading
import time
from urllib.request import getproxies

__all__ = ["Reachable"]

# A host that takes longer is no help to a page; the answer of a slow name server still counts for the next page.
_PATIENCE_S = 2.0
# So long an answer is believed: notebooks move between networks.
_BELIEVED_S = 60.0


class Reachable:
    """Knows of one host whether this machine can open a connection to it.

    Args:
        host: its name.
        port: its port.

    """

    def __init__(self, host: str, port: int = 443) -> None:
        self._host = host
        self._port = port
        self._lock = threading.Lock()
        self._asking: threading.Thread | None = None
        self._asked = float("-inf")
        self._answer = False

    def __call__(self) -> bool:
        """Whether the host answers, or may: behind a proxy only who asks it can know. Takes two seconds at most."""
        if {"https", "all"} & set(getproxies()):
            return True
        with self._lock:
            if self._asking is None and time.monotonic() - self._asked > _BELIEVED_S:
                self._asking = threading.Thread(target=self._ask, name=f"memprof asks {self._host}", daemon=True)
                self._asking.start()
            asking = self._asking
        if asking is not None:
            asking.join(_PATIENCE_S)
        return self._answer

    def _ask(self) -> None:
        """Open a connection and close it; nothing is sent."""
        try:
            socket.create_connection((self._host, self._port), timeout=_PATIENCE_S).close()
            answer = True
        except OSError:
            answer = False
        with self._lock:
            self._answer, self._asked, self._asking = answer, time.monotonic(), None
