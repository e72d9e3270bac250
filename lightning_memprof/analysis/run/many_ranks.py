"""Read thousands of ranks: a few in full, of the others what one page says of them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from lightning_memprof.analysis.run.rows import ManifestRows, manifest_rows
from lightning_memprof.artifacts.manifest import MOST_LINES, is_fact
from lightning_memprof.artifacts.naming import pulse_name
from lightning_memprof.artifacts.plain_file import read_plain

__all__ = ["in_full", "light_rows", "missing_ranks", "within"]

# Their pulses and lists of files fit on a page and into seconds; beyond, the summaries of the windows speak for a rank.
FULL_RANKS: Final = 64
# Of so many ranks these are read in full all the same: the page's columns show the first.
FIRST_RANKS: Final = 8
SHOWN: Final = 8

_decode: Final = msgspec.json.Decoder(dict).decode
_ARTIFACT: Final = b'"kind":"artifact"'
_SPACED: Final = b'"kind": "artifact"'


def in_full(ranks: Sequence[int]) -> frozenset[int]:
    """Return which ranks are read with everything they wrote."""
    return frozenset(ranks if len(ranks) <= FULL_RANKS else ranks[:FIRST_RANKS])


def within(directory: Path, ranks: list[int], max_pulse_bytes: int | None) -> list[int]:
    """Return the first ranks whose pulses together are not too large, at least one; all where there is no limit."""
    if max_pulse_bytes is None:
        return ranks
    total = 0
    for count, rank in enumerate(ranks):
        pulse = directory / pulse_name(rank)
        total += pulse.stat().st_size if pulse.exists() else 0
        if count and total > max_pulse_bytes:
            return ranks[:count]
    return ranks


def light_rows(path: Path) -> tuple[ManifestRows, str | None]:
    """Return the rows of a manifest without its lists of files, and what is wrong with it, as ``manifest_rows`` does.

    Those lists are nine tenths of a manifest.
    """
    try:
        content = read_plain(path)
        if not content.endswith(b"\n") or content.count(b"\n") > MOST_LINES:
            return manifest_rows(path)
        lines = (line for line in io.BytesIO(content) if _ARTIFACT not in line and _SPACED not in line)
        return ManifestRows(row for line in lines if is_fact(row := _decode(line))), None
    except (OSError, ValueError, msgspec.DecodeError):
        return manifest_rows(path)


def missing_ranks(ranks: Sequence[int], world_size: int) -> str | None:
    """Say which ranks are here where that is not all of them."""
    if len(ranks) >= world_size:
        return None
    here = ", ".join(map(str, ranks[:SHOWN])) + (", ..." if len(ranks) > SHOWN else "")
    return f"{len(ranks)} of {world_size} ranks are here: {here}"
