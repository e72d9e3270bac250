"""Numbers on the command line: ``0,3-5``."""

from __future__ import annotations

from typing import Final

from lightning_memprof.errors import ConfigError

__all__ = ["numbers"]

_MOST: Final = 1_000_000


def numbers(option: str, given: str) -> list[int]:
    """Return the numbers that a text such as ``0,3-5`` means, in rising order.

    Raises:
        ConfigError: it is no such text, a range runs backwards, or there are more than a million.

    """
    found: set[int] = set()
    for part in given.split(","):
        first, dash, last = (text.strip() for text in part.partition("-"))
        if not (first.isdecimal() and first.isascii()) or (dash and not (last.isdecimal() and last.isascii())):
            raise ConfigError(
                f"{option} {given!r}: {part.strip()!r} is no number; write numbers and ranges, as in 0,3-5"
            )
        low, high = int(first), int(last) if dash else int(first)
        if high < low:
            raise ConfigError(f"{option} {given!r}: {part.strip()!r} runs backwards; write {high}-{low}")
        if high - low + len(found) > _MOST:
            raise ConfigError(f"{option} {given!r}: is more than {_MOST} numbers; name fewer")
        found.update(range(low, high + 1))
    return sorted(found)
