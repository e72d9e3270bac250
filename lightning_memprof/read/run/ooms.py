"""Out-of-memory events of a rank, as recorded in its manifest and its OOM file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from lightning_memprof.artifacts.files import read_plain
from lightning_memprof.artifacts.manifest import Manifest, OomRow
from lightning_memprof.artifacts.naming import oom_name
from lightning_memprof.artifacts.rows import salvaged


class OomEvent(msgspec.Struct, frozen=True):
    """One event. ``facts`` come from the OOM file, or from the manifest row where the file lacks the event.

    ``snapshot`` is the allocator snapshot of that moment, or None.
    """

    rank: int
    number: int
    facts: OomRow
    snapshot: Path | None


def oom_events(directory: Path, rank: int, manifest: Manifest) -> tuple[OomEvent, ...]:
    """Return the events of a rank in recorded order."""
    listed = {row.number: row for row in manifest.of(OomRow) if row.number is not None}
    if not listed:
        return ()
    full = _in_file(directory / oom_name(rank))
    events = []
    for number, row in sorted(listed.items()):
        facts = salvaged({**row.fields, **full.get(number, {})}, OomRow)
        events.append(OomEvent(rank=rank, number=number, facts=facts, snapshot=_snapshot(directory, facts.snapshot)))
    return tuple(events)


def _snapshot(directory: Path, name: str | None) -> Path | None:
    if not name or "/" in name:
        return None
    path = directory / name
    try:
        return path if path.is_file() else None
    except OSError:  # the name is too long
        return None


def _in_file(path: Path) -> dict[int, dict[str, Any]]:
    try:
        events = json.loads(read_plain(path))["events"]
        return {event["number"]: event for event in events if isinstance(event, dict) and type(event["number"]) is int}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        # The manifest rows remain; the damaged file is reported with the other files.
        return {}
