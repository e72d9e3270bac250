"""New inputs from old ones, by what the files mean: half of random bytes would be refused at the first look."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import zlib
from collections.abc import Callable
from typing import Any, Final

from fuzz_targets import BETWEEN
from lightning_memprof.read.snapshot.restricted_pickle import read_pickle
from mutations import changed, damaged

_MOST: Final = 1 << 20


def mutated(name: str, content: bytes, chance: random.Random) -> bytes:
    """Return a changed input of the target called ``name``; bytes are damaged where it has lost its meaning."""
    try:
        changes = _CHANGES[name](content, chance) if chance.random() < 0.7 else None
    except Exception:  # noqa: BLE001 what has no meaning any more is damaged further as bytes
        changes = None
    made = damaged(content, chance) if changes is None else changes
    return made[:_MOST]


def _unpacked(content: bytes) -> bytes:
    return zlib.decompressobj(31).decompress(content, _MOST) if content.startswith(b"\x1f\x8b") else content


def _packed(content: bytes, chance: random.Random) -> bytes:
    return gzip.compress(content, 1, mtime=0) if chance.random() < 0.1 else content


def _trace(content: bytes, chance: random.Random) -> bytes:
    made = changed(json.loads(_unpacked(content)), chance)
    return _packed(json.dumps(made, indent=chance.choice((None, 1)), default=repr).encode(), chance)


def _snapshot(content: bytes, chance: random.Random) -> bytes:
    made: Any = changed(read_pickle(_unpacked(content), "seed"), chance)
    return _packed(pickle.dumps(made, chance.choice((2, 4, 4, 5))), chance)


def _manifest(content: bytes, chance: random.Random) -> bytes:
    parts = content.split(BETWEEN, 2)
    at = chance.choice((0, 0, 0, len(parts) - 1))
    lines = parts[at].split(b"\n")
    number = chance.randrange(len(lines))
    match chance.randrange(8):
        case 0:
            lines.insert(number, chance.choice(lines))
        case 1:
            del lines[number]
        case _:
            lines[number] = json.dumps(changed(json.loads(lines[number]), chance), default=repr).encode()
    parts[at] = b"\n".join(lines)
    return BETWEEN.join(parts)


_CHANGES: Final[dict[str, Callable[[bytes, random.Random], bytes]]] = {
    "trace": _trace,
    "snapshot": _snapshot,
    "manifest": _manifest,
}
