"""What a profile says of each function."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import cProfile


ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class Spent:
    """What the profile says of one function: calls, and seconds in it without and with what it calls."""

    calls: int
    own: float
    whole: float


def spent(profile: cProfile.Profile) -> dict[str, Spent]:
    """Give a profile by function, without the machine's own directories and addresses."""
    found: dict[str, Spent] = {}
    for entry in profile.getstats():
        code = entry.code
        # Built-in names hold addresses, which differ from process to process.
        name = (
            ADDRESS.sub("", code)
            if isinstance(code, str)
            else f"{_short(code.co_filename)}:{code.co_firstlineno} {code.co_name}"
        )
        before = found.get(name, Spent(0, 0.0, 0.0))
        found[name] = Spent(
            before.calls + entry.callcount, before.own + entry.inlinetime, before.whole + entry.totaltime
        )
    return found


def _short(path: str) -> str:
    parts = Path(path).parts
    for anchor in ("site-packages", "lightning_memprof", "benchmarks"):
        if anchor in parts:
            at = len(parts) - 1 - parts[::-1].index(anchor)
            return "/".join(parts[at + (anchor == "site-packages") :])
    return "/".join(parts[-2:])
