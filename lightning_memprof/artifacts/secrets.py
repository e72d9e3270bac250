"""Take out of a free text what must not stand in a file that others are given.

What is written of the process, the Trainer and the machine is an allow-list; an exception's words are anybody's.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FREE_TEXTS", "masked"]

FREE_TEXTS: Final = frozenset({"exception", "message", "reason", "traceback"})
"""Fields of the manifest that hold what somebody else's code says."""

_SECRET: Final = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTHORIZATION")
# Shorter values are words that a text may have by chance: "true", "1".
_SHORTEST: Final = 8
_PASSWORD: Final = re.compile(r"(://[^/\s:@]*):[^/\s@]+@")
_MASK: Final = "***"


def masked(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return a text without the values of environment variables that hold secrets, and without passwords in URLs.

    Args:
        text: anybody's.
        environment: variables by name; None are this process's.

    """
    for secret in _secrets(os.environ if environment is None else environment):
        text = text.replace(secret, _MASK)
    return _PASSWORD.sub(rf"\1:{_MASK}@", text)


def _secrets(environment: Mapping[str, str]) -> list[str]:
    found = {
        value
        for name, value in environment.items()
        # The place of a file with a secret is none.
        if len(value) >= _SHORTEST and not value.startswith("/") and _SECRET.search(name.upper())
    }
    # One may begin with another.
    return sorted(found, key=len, reverse=True)
