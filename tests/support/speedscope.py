"""What speedscope's file format demands, as its specification (`src/lib/file-format-spec.ts`) says it."""

from __future__ import annotations

from typing import Any

SCHEMA = "https://www.speedscope.app/file-format-schema.json"
UNITS = {"none", "nanoseconds", "microseconds", "milliseconds", "seconds", "bytes"}
FILE = {"$schema": str, "shared": dict, "profiles": list}
FILE_TOO = {"name": str, "exporter": str, "activeProfileIndex": int, "version": str}
FRAME = {"name": str}
FRAME_TOO = {"file": str, "line": int, "col": int}
PROFILE = {"type": str, "name": str, "unit": str, "startValue": (int, float), "endValue": (int, float)}


def validate(document: dict[str, Any]) -> None:
    """Check a document.

    Raises:
        AssertionError: something in it is not as the format demands.

    """
    _keys(document, FILE, FILE_TOO)
    assert document["$schema"] == SCHEMA
    assert set(document["shared"]) == {"frames"}
    frames = document["shared"]["frames"]
    for frame in frames:
        _keys(frame, FRAME, FRAME_TOO)
    assert document["profiles"]
    assert 0 <= document.get("activeProfileIndex", 0) < len(document["profiles"])
    for profile in document["profiles"]:
        evented = profile["type"] == "evented"
        own = {"events": list} if evented else {"samples": list, "weights": list}
        _keys(profile, {**PROFILE, **own}, {})
        assert profile["type"] in {"evented", "sampled"}
        assert profile["unit"] in UNITS
        assert profile["startValue"] <= profile["endValue"]
        (_evented if evented else _sampled)(profile, len(frames))


def _keys(found: dict[str, Any], needed: dict[str, Any], allowed: dict[str, Any]) -> None:
    assert needed.keys() <= found.keys() <= needed.keys() | allowed.keys(), found.keys()
    for key, value in found.items():
        assert isinstance(value, {**needed, **allowed}[key]), (key, value)
        assert not isinstance(value, bool), (key, value)


def _evented(profile: dict[str, Any], frames: int) -> None:
    stack: list[int] = []
    last = profile["startValue"]
    for event in profile["events"]:
        _keys(event, {"type": str, "at": (int, float), "frame": int}, {})
        assert 0 <= event["frame"] < frames
        assert last <= event["at"] <= profile["endValue"]
        last = event["at"]
        if event["type"] == "O":
            stack.append(event["frame"])
        else:
            assert event["type"] == "C"
            assert stack, "closes what is not open"
            assert stack.pop() == event["frame"]
    assert not stack, "leaves frames open"


def _sampled(profile: dict[str, Any], frames: int) -> None:
    assert len(profile["samples"]) == len(profile["weights"])
    assert sum(profile["weights"]) == profile["endValue"] - profile["startValue"]
    for sample, weight in zip(profile["samples"], profile["weights"], strict=True):
        assert sample
        assert all(0 <= frame < frames for frame in sample)
        assert weight >= 0
