"""An event of a trace whose fields have other types than Kineto writes: what can be read of it."""

from __future__ import annotations

from typing import Any, Final, TypedDict

import msgspec

__all__ = ["LARGEST", "LONGEST_US", "EventFields", "event_fields", "number"]

# Sums of two are still 64 bits in ns; what is beyond (127 years) is damage.
LONGEST_US: Final = 4e15
LARGEST: Final = 1 << 64


class EventFields(TypedDict):
    """What every event has; ``ts`` and ``dur`` are microseconds, 0 where they cannot be."""

    ph: str
    cat: str
    name: str
    pid: int | str
    tid: int | str
    ts: float
    dur: float


def event_fields(event: Any) -> tuple[EventFields, dict[str, Any]]:
    """Return the fields that every event has, and its arguments.

    Raises:
        msgspec.DecodeError: it is no JSON object.
    """
    if not isinstance(event, dict):
        raise msgspec.DecodeError(f"an event is a JSON object, not {type(event).__name__}")
    args, pid, tid = event.get("args"), event.get("pid"), event.get("tid")
    fields = EventFields(
        ph=str(event.get("ph") or ""),
        cat=str(event.get("cat") or ""),
        name=str(event.get("name") or ""),
        pid=pid if isinstance(pid, int) else str(pid),
        tid=tid if isinstance(tid, int) else str(tid),
        ts=number(event.get("ts"), LONGEST_US),
        dur=number(event.get("dur"), LONGEST_US),
    )
    return fields, args if isinstance(args, dict) else {}


def number(value: Any, most: float = LARGEST) -> float:
    """Return a number, also one that came as a string; 0 for anything else or larger. Integers keep their digits."""
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            try:
                value = float(value)
            except ValueError:
                return 0
    return value if isinstance(value, (int, float)) and -most <= value <= most else 0
