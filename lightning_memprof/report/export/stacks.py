"""Flame graphs as JSON for speedscope: https://github.com/jlfwong/speedscope/wiki/Importing-from-custom-sources."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import IO, TYPE_CHECKING, Any, Final

import msgspec

from lightning_memprof.account.memory.model import Site
from lightning_memprof.account.snapshot.replay import Holder
from lightning_memprof.read.stacks import parse_frame

if TYPE_CHECKING:
    from lightning_memprof.account.trace.lanes import Lanes

_SCHEMA: Final = "https://www.speedscope.app/file-format-schema.json"
_UNKNOWN: Final = "(unknown)"

Stack = tuple[str, ...]


class Speedscope(msgspec.Struct):
    """A file for speedscope, profile after profile. Frames are shared: each name once."""

    name: str
    exporter: str
    profiles: list[dict[str, Any]] = msgspec.field(default_factory=list)
    _frames: dict[str, int] = msgspec.field(default_factory=dict)

    def add_lanes(self, title: str, lanes: Lanes) -> None:
        """Add a trace: one profile for each of its threads and streams, times in ns from its first event."""
        for lane in lanes.lanes:
            calls = ((call, self._frame(lanes.names[call.name])) for call in lane.calls())
            self.profiles.append(
                {
                    "type": "evented",
                    "name": f"{title} {lane.title}".strip(),
                    "unit": "nanoseconds",
                    "startValue": 0,
                    "endValue": lanes.end_ns,
                    "events": [
                        {"type": "O" if call.is_begin else "C", "at": call.at_ns, "frame": frame}
                        for call, frame in calls
                    ],
                }
            )

    def add_stacks(self, title: str, stacks: Mapping[Stack, int]) -> None:
        """Add one profile of bytes by stack, outermost frame first."""
        self.profiles.append(
            {
                "type": "sampled",
                "name": title,
                "unit": "bytes",
                "startValue": 0,
                "endValue": sum(stacks.values()),
                "samples": [[self._frame(name) for name in stack] for stack in stacks],
                "weights": list(stacks.values()),
            }
        )

    def _frame(self, name: str) -> int:
        return self._frames.setdefault(name, len(self._frames))

    def write(self, out: IO[str]) -> None:
        """Write the file."""
        document = {
            "$schema": _SCHEMA,
            "name": self.name,
            "exporter": self.exporter,
            "activeProfileIndex": 0,
            "shared": {"frames": [_described(name) for name in self._frames]},
            "profiles": self.profiles,
        }
        json.dump(document, out, allow_nan=False)


def _described(name: str) -> dict[str, Any]:
    frame = parse_frame(name)
    if frame is None:
        return {"name": name or _UNKNOWN}
    return {"name": frame.name or _UNKNOWN, "file": frame.filename, "line": frame.line}


def site_stacks(sites: Iterable[Site], root: str) -> Counter[Stack]:
    """Return bytes by stack, outermost frame first: Python's frames where there are some, else phase and module."""
    found: Counter[Stack] = Counter()
    for site in sites:
        modules = [site.module] if site.stack else [site.phase, *(site.module or "").split(".")]
        outer = (*site.stack[::-1], *filter(None, modules))
        found[(root, *outer, site.operator or _UNKNOWN)] += site.bytes
    return found


def holder_stacks(holders: Iterable[Holder], root: str) -> Counter[Stack]:
    """Return bytes by stack, outermost frame first."""
    found: Counter[Stack] = Counter()
    for holder in holders:
        outer = holder.stack[::-1] or (holder.site or "before the history was switched on",)
        found[(root, *outer)] += holder.bytes
    return found
