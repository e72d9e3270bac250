"""Seeds of `make fuzz`, inputs made of them, and small files that mean large ones.

Each gives a result or one line, in bounded time and memory.
"""

from __future__ import annotations

import gzip
import pickle
import random
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fuzz_mutations import mutated
from fuzz_targets import SEEDS, TARGETS, target
from lightning_memprof.units import MIB
from mutations import Runs
from snapshots import event

# A run directory is read in some 30 ms, a file in one; `make fuzz` tries more.
MADE = {"trace": 1_500, "snapshot": 3_500, "manifest": 25}
# Of one small file, which takes milliseconds; the machines that run this are slow and busy.
MOST_SECONDS = 5.0
MOST_BYTES = 128 * MIB


def seeds(name: str) -> list[Path]:
    return sorted((SEEDS / name).iterdir())


@contextmanager
def bounded(seconds: float = MOST_SECONDS, size: int = MOST_BYTES) -> Iterator[None]:
    """Fail where the body takes longer, or more memory than it began with; the memory is told on Linux only."""
    is_told = Path("/proc/self/clear_refs").exists()
    if is_told:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    start, before = time.process_time(), resident("VmRSS") if is_told else 0
    yield
    assert time.process_time() - start < seconds
    if is_told:
        assert resident("VmHWM") - before < size


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


@pytest.mark.parametrize("name", TARGETS)
def test_every_seed_is_read_or_refused_with_one_line(tmp_path: Path, name: str) -> None:
    read = target(name, tmp_path)
    said = {path.name: read(path.read_bytes()) for path in seeds(name)}
    # Those that do not begin with `crash` are whole.
    assert {path: words for path, words in said.items() if words and not path.startswith("crash")} == {}
    assert len(said) >= 3


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_what_is_made_of_the_seeds_is_read_or_refused_with_one_line(tmp_path: Path, name: str) -> None:
    chance = random.Random(name)
    read, pool = target(name, tmp_path), [path.read_bytes() for path in seeds(name)]
    refused = 0
    for number in range(MADE[name]):
        content = mutated(name, chance.choice(pool), chance)
        try:
            with bounded():
                refused += bool(read(content))
        except Exception as error:
            (tmp_path / "crash").write_bytes(content)
            raise AssertionError(f"input {number}, left at {tmp_path / 'crash'}") from error
        if number % 3 == 0:
            pool.append(content)
    assert 0 < refused < MADE[name]


def unpacked(unit: bytes, size: int, head: bytes = b'{"traceEvents":[', tail: bytes = b"") -> bytes:
    """A small gzip file that means a large one."""
    return gzip.compress(head + unit * (size // len(unit)) + tail, 6)


BOMBS = {
    "zeros": unpacked(b"\0", 64 * MIB, b""),
    "deep": unpacked(b"[", 2 * MIB),
    "deep objects": unpacked(b'{"a":', 2 * MIB),
    "deep metadata": unpacked(b'{"a":', 2 * MIB, b""),
    "many in the metadata": unpacked(b"{},", MIB, b'{"a":['),
    "many in one event": unpacked(b"[],", MIB, b'{"traceEvents":[{"ph":"X","args":{"a":['),
    "a text without end": unpacked(b"a", 4 * MIB, b'{"traceEvents":[{"ph":"X","name":"'),
    "a text of escapes": unpacked(b'\\"', MIB, b'{"traceEvents":[{"ph":"X","name":"'),
    "a number without end": unpacked(b"9", 2 * MIB, b'{"traceEvents":[{"ph":"X","ts":'),
    "empty lines": unpacked(b"\n", MIB, b'{"traceEvents":[{"ph":"X","name":NaN'),
    "keys": unpacked(b'"ph":', MIB, b'{"traceEvents":[{'),
    "metadata without end": unpacked(b"x", 64 * MIB, b'{"traceEvents":[{"ph":"X"}],"a":"', b'"}'),
    "more and more": unpacked(b'{"ph":"X","ts":1,"dur":1,"name":"%s"},' % (b"a" * 200_000), 80 * MIB, tail=b"{}]}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_small_trace_that_means_a_large_one_is_refused_in_bounded_time_and_memory(tmp_path, name):
    read = target("trace", tmp_path)
    with bounded(60):
        assert read(BOMBS[name])


def shared(depth: int) -> Any:
    """Lists of one list ten times, of one list ten times ...: 10 ** depth in all."""
    made: Any = {"size": 1, "state": "inactive"}
    for _ in range(depth):
        made = [made] * 10
    return made


def many_blocks() -> Any:
    blocks = [{"size": 512, "state": "inactive"}] * 3_000
    return [{"device": 0, "address": 0, "total_size": 512, "blocks": blocks} for _ in range(3_000)]


PICKLES = {
    "shared lists": pickle.dumps({"segments": shared(9)}, 4),
    "shared blocks": pickle.dumps(many_blocks(), 4),
    "shared events": pickle.dumps({"segments": [], "device_traces": [[event("alloc", 0, 1)] * 100_000] * 300}, 4),
    "a deep stack": pickle.dumps([], 4)[:-1] + b"(" * 100_000 + b".",
    "deep tuples": b"\x80\x04)" + b"\x85" * 200_000 + b".",
    "a memo": b"\x80\x04Nr" + struct.pack("<I", 0xFFFFFFF0) + b".",
    "a text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"abc.",
    "a number": b"\x80\x04\x8b" + struct.pack("<I", 1 << 30) + b"\xff" * 1000 + b".",
    "digits": b"I" + b"9" * MIB + b"\n.",
    "a program": pickle.dumps([Runs()], 4),
    "a name without end": b"\x80\x04c" + b"o" * MIB + b"\ns\n.",
    "zeros": gzip.compress(bytes(64 * MIB), 6),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PICKLES)
def test_a_small_pickle_that_means_a_large_one_is_refused_in_bounded_time_and_memory(tmp_path, name):
    read = target("snapshot", tmp_path)
    with bounded(60):
        assert read(PICKLES[name])
