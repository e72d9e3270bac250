from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memprof.account.snapshot.replay import replay
from lightning_memprof.read.snapshot.reader import parse_snapshot
from lightning_memprof.read.snapshot.restricted_pickle import read_pickle

PROFILE = settings(max_examples=60)
STACKS = [[], *([{"filename": f"/home/a/{name}.py", "line": 1, "name": "f"}] for name in "abc")]


@dataclass
class Allocator:
    """What an allocator would do: it records what was live after each of its events."""

    events: list[dict[str, Any]] = field(default_factory=list)
    live: dict[int, tuple[int, int]] = field(default_factory=dict)  # address -> requested, number of the stack
    pending: set[int] = field(default_factory=set)
    # The first one holds all blocks.
    segments: dict[int, int] = field(default_factory=lambda: {1 << 50: 1 << 30})
    moments: list[tuple[int, int, int, Counter[int]]] = field(default_factory=list)

    def record(self, action: str, addr: int, size: int, stack: int = 0) -> None:
        number = len(self.events)
        self.events.append({"action": action, "addr": addr, "size": size, "time_us": number, "frames": STACKS[stack]})
        self.note()

    def note(self) -> None:
        held: Counter[int] = Counter()
        for size, stack in self.live.values():
            held[stack] += size
        allocated = sum(rounded(size) for addr, (size, _) in self.live.items() if addr not in self.pending)
        requested = sum(size for size, _ in self.live.values())
        self.moments.append((requested, allocated, sum(self.segments.values()), held))

    def snapshot(self, kept: int) -> dict[str, Any]:
        """What is there at the end, with the last `kept` events."""
        blocks = [
            {
                "address": address,
                "size": rounded(size),
                "requested_size": size,
                "state": "active_pending_free" if address in self.pending else "active_allocated",
                "frames": STACKS[stack],
            }
            for address, (size, stack) in self.live.items()
        ]
        holder = {"device": 0, "address": 0, "total_size": sum(self.segments.values()), "stream": 0, "blocks": blocks}
        return {"segments": [holder], "device_traces": [self.events[len(self.events) - kept :]]}


def rounded(size: int) -> int:
    return -(-size // 512) * 512


@st.composite
def histories(draw: st.DrawFn) -> tuple[Allocator, int]:
    allocator = Allocator()
    allocator.note()
    for _ in range(draw(st.integers(0, 40))):
        addresses = st.integers(0, 5).map(lambda n: n * 4096)
        match draw(st.sampled_from(["alloc", "free", "free", "complete", "segment", "other"])):
            case "alloc":
                address, size, stack = draw(addresses), draw(st.integers(1, 4000)), draw(st.integers(0, 3))
                if address not in allocator.live:
                    allocator.live[address] = (size, stack)
                    allocator.record("alloc", address, size, stack)
            case "free":
                usable = [address for address in allocator.live if address not in allocator.pending]
                if usable:
                    address = draw(st.sampled_from(usable))
                    size = allocator.live[address][0]
                    allocator.pending.add(address)
                    allocator.record("free_requested", address, size)
                    if draw(st.booleans()):
                        complete(allocator, address)
            case "complete" if allocator.pending:
                complete(allocator, draw(st.sampled_from(sorted(allocator.pending))))
            case "segment":
                change_segments(allocator, draw(st.integers(1, 9000)))
            case "other":
                allocator.record(draw(st.sampled_from(["snapshot", "oom", "later_kind"])), 0, 77)
    return allocator, draw(st.integers(0, len(allocator.events)))


def frees_are_half_known(events: list[dict[str, Any]]) -> bool:
    """Whether one of the two kinds of frees is not in the ring: it may as well have been told to skip that kind."""
    kinds = {event["action"] for event in events} & {"free_requested", "free_completed"}
    return len(kinds) == 1


def complete(allocator: Allocator, address: int) -> None:
    size, _ = allocator.live.pop(address)
    allocator.pending.discard(address)
    allocator.record("free_completed", address, size)


def change_segments(allocator: Allocator, size: int) -> None:
    if len(allocator.segments) > 3:
        address, size = allocator.segments.popitem()
        allocator.record("segment_free", address, size)
    else:
        address = 10**6 + len(allocator.events)
        allocator.segments[address] = size
        allocator.record("segment_alloc", address, size)


@pytest.mark.slow
@PROFILE
@given(histories())
def test_a_ring_that_was_cut_anywhere_gives_what_was_live_at_each_of_its_events(history):
    allocator, kept = history
    if frees_are_half_known(allocator.events[len(allocator.events) - kept :]):
        return
    found = replay(parse_snapshot(allocator.snapshot(kept), "it"))
    moments = allocator.moments[len(allocator.moments) - kept - 1 :]
    assert [found.live_at(i).requested_bytes for i in range(-1, kept)] == [moment[0] for moment in moments]
    assert [found.live_at(i).allocated_bytes for i in range(-1, kept)] == [moment[1] for moment in moments]
    assert [found.live_at(i).reserved_bytes for i in range(-1, kept)] == [moment[2] for moment in moments]
    requested = [moment[0] for moment in moments]
    assert found.peak_requested_bytes == max(requested)
    rises = [i for i in range(kept + 1) if not i or requested[i - 1] < requested[i]]
    assert found.peak_event == max(i for i in rises if requested[i] == max(requested)) - 1
    assert found.peak_reserved_bytes == max(moment[2] for moment in moments)
    for i in range(-1, kept):
        assert sum(holder.bytes for holder in found.holders_at(i)) == requested[i + 1]


@pytest.mark.slow
@PROFILE
@given(histories())
def test_with_the_whole_ring_the_holders_are_known_at_every_event(history):
    allocator, _ = history
    count = len(allocator.events)
    if frees_are_half_known(allocator.events):
        return
    found = replay(parse_snapshot(allocator.snapshot(count), "it"))
    for i, (_, _, _, held) in enumerate(allocator.moments):
        sites = {holder.site: holder.bytes for holder in found.holders_at(i - 1)}
        names = ["", *(f"/home/a/{name}.py(1): f" for name in "abc")]
        assert sites == {names[stack]: size for stack, size in held.items()}


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.lists(inner).map(tuple),
    max_leaves=30,
)


@pytest.mark.slow
@PROFILE
@given(plain, st.sampled_from([3, 4, 5]))
def test_plain_data_come_back_as_they_were(data, protocol):
    assert read_pickle(pickle.dumps(data, protocol), "it") == data
