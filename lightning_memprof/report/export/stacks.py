"""Flame graphs: speedscope's JSON and Brendan Gregg's folded stacks.

Formats: https://github.com/jlfwong/speedscope/wiki/Importing-from-custom-sources, and the input of flamegraph.pl.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, Final

import msgspec

from lightning_memprof.account.memory.model import Site
from lightning_memprof.account.snapshot.replay import Holder
from lightning_memprof.read.stacks import parse_frame

if TYPE_CHECKING:
    from lightning_memprof.account.trace.lanes import Lane, Lanes

_SCHEMA: Final = "https://www.speedscope.app/file-format-schema.json"
_UNKNOWN: Final = "(unknown)"

Stack = tuple[str, ...]


class Speedscope(msgspec.Struct):
    """A file for speedscope, profile after profile. Frames are shared: each name once."""

    name: str
    exporter: str
    _frames: dict[str, int] = msgspec.field(default_factory=dict)
    _profiles: list[dict[str, Any]] = msgspec.field(default_factory=list)

    def add_lanes(self, title: str, lanes: Lanes) -> None:
        """Add a trace: one profile for each of its threads and streams, times in ns from its first event."""
        end = lanes.end_ns
        for lane in lanes.lanes:
            self._profiles.append(
                {
                    "type": "evented",
                    "name": f"{title} {lane.title}".strip(),
                    "unit": "nanoseconds",
                    "startValue": 0,
                    "endValue": end,
                    "events": self._events(lane, lanes.names),
                }
            )

    def _events(self, lane: Lane, names: Sequence[str]) -> list[dict[str, Any]]:
        return [
            {"type": "O" if call.is_begin else "C", "at": call.at_ns, "frame": self._frame(names[call.name])}
            for call in lane.calls()
        ]

    def add_stacks(self, title: str, stacks: Mapping[Stack, int]) -> None:
        """Add one profile of bytes by stack, outermost frame first."""
        self._profiles.append(
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

    @property
    def profiles(self) -> int:
        """The number of profiles."""
        return len(self._profiles)

    def write(self, out: IO[str]) -> None:
        """Write the file."""
        document = {
            "$schema": _SCHEMA,
            "name": self.name,
            "exporter": self.exporter,
            "activeProfileIndex": 0,
            "shared": {"frames": [_described(name) for name in self._frames]},
            "profiles": self._profiles,
        }
        json.dump(document, out, allow_nan=False)


def _described(name: str) -> dict[str, Any]:
    frame = parse_frame(name)
    if frame is None:
        return {"name": name or _UNKNOWN}
    return {"name": frame.name or _UNKNOWN, "file": frame.filename, "line": frame.line}


def write_folded(stacks: Mapping[Stack, int], out: IO[str]) -> None:
    """Write folded stacks: the frames from the outermost one, separated by ``;``, a blank, and a whole number."""
    folded: Counter[str] = Counter()
    for stack, count in stacks.items():
        folded[";".join(map(_plain, stack)) or _UNKNOWN] += count
    for line, count in sorted(folded.items()):
        if count > 0:
            out.write(f"{line} {count}\n")


def _plain(name: str) -> str:
    """Return a name without the separators of frames and lines."""
    return " ".join(name.replace(";", ":").split()) or _UNKNOWN


def site_stacks(sites: Iterable[Site], root: str) -> Counter[Stack]:
    """Return bytes by stack, outermost frame first: Python's frames where there are some, else phase and module."""
    found: Counter[Stack] = Counter()
    for site in sites:
        outer: list[str] = list(reversed(site.stack))
        if not outer:
            outer = [name for name in (site.phase, *(site.module or "").split(".")) if name]
        elif site.module:
            outer.append(site.module)
        stack = (root, *outer, site.operator or _UNKNOWN)
        found[stack] += site.bytes
    return found


def holder_stacks(holders: Iterable[Holder], root: str) -> Counter[Stack]:
    """Return bytes by stack, outermost frame first."""
    found: Counter[Stack] = Counter()
    for holder in holders:
        outer = tuple(reversed(holder.stack)) or (holder.site or "before the history was switched on",)
        stack = (root, *outer)
        found[stack] += holder.bytes
    return found
