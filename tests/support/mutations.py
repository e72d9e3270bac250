"""Damage for files that are read: seeded, so that what fails can be made again."""

from __future__ import annotations

import copy
import pickle
import random
from collections import OrderedDict
from typing import Any

NUMBERS = (0, -1, 1, 2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**40, 1e-320, 1e18, 1.5, -1e308)
WORDS = (
    "",
    "\x00",
    "\ud83d\ude00" * 40,
    "</script><img onerror>",
    "a\nb",
    "%s{}",
    "x" * 3000,
    "-1",
    "1e400",
    "stream 7",
)
TOKENS = (
    b"NaN", b"-Infinity", b"1e999", b"null", b'"', b"{", b"}", b"[", b"]", b",", b"\\u0000", b"\\", b"\x00",
    b"\xff\xfe", b"9" * 400, b"[" * 300, b'{"a":' * 300, b'"ph":', b'}, {"ph"', b"\r\n", b"(", b"cos\nsystem\n",
    b"\x8a\xff", b"\x94" * 50, b"0", b"1", b"2", b"}\x94(", b"]\x94(", b"h\x00", b"u", b"e", b".", b"\x85", b"\x86R",
)  # fmt: skip


def strange(chance: random.Random) -> Any:
    """A value that stands nowhere in such a file."""
    match chance.randrange(8):
        case 0 | 1 | 2:
            return chance.choice(NUMBERS)
        case 3 | 4:
            return chance.choice(WORDS)
        case 5:
            return chance.choice((None, True, False, [], {}, (), [[]], [{}], {"a": {}}, [None], b"bytes", ["x", 1]))
        case 6:
            return nested(chance.choice((3, 60, 400)))
        case _:
            return [0] * chance.choice((2, 700))


def nested(depth: int) -> Any:
    """A list in a list in a list."""
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


def changed(data: Any, chance: random.Random) -> Any:
    """Return a copy in which a few things are something else, lie elsewhere, are there twice or not at all."""
    data = pickle.loads(pickle.dumps(data))  # noqa: S301 a copy, ten times as fast as deepcopy
    for _ in range(chance.choice((1, 1, 2, 5))):
        places = [*_places(data)]
        if not places:
            return strange(chance)
        holder, key = chance.choice(places)
        match chance.randrange(6):
            case 0 | 1 | 2:
                holder[key] = strange(chance)
            case 3:
                del holder[key]
            case 4:
                other, at = chance.choice(places)
                if at in other if isinstance(other, dict) else at < len(other):
                    holder[key] = copy.deepcopy(other[at])
            case _ if isinstance(holder, list):
                chance.shuffle(holder)
            case _:
                holder[chance.choice(WORDS)] = strange(chance)
    return data


def _places(data: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    if depth > 8 or not isinstance(data, (dict, list)):
        return []
    keys = list(data) if isinstance(data, dict) else range(len(data))
    own = [(data, key) for key in keys]
    return own + [place for key in keys for place in _places(data[key], depth + 1)]


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Return bytes of which some are missing, doubled, swapped, changed, or others between them."""
    for _ in range(chance.choice((1, 1, 1, 3, 10))):
        at, until = sorted((chance.randrange(len(content) + 1), chance.randrange(len(content) + 1)))
        near = min(until, at + chance.choice((1, 3, 40)))
        match chance.randrange(7):
            case 0:
                content = content[:at]
            case 1:
                content = content[:at] + content[near:]
            case 2:
                content = content[:near] + content[at:]
            case 3:
                content = content[:at] + chance.choice(TOKENS) + content[at:]
            case 4:
                content = content[:at] + chance.choice(TOKENS) + content[near:]
            case 5:
                content = content[:at] + chance.randbytes(near - at) + content[near:]
            case _:
                middle = (at + until) // 2
                content = content[:at] + content[middle:until] + content[at:middle] + content[until:]
    return content


class Runs:
    """Would call something as it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return OrderedDict, ()
