from __future__ import annotations

import gzip
import os
import pickle
import pickletools
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.snapshot.reader import parse_snapshot, read_snapshot
from lightning_memprof.read.snapshot.restricted_pickle import read_pickle

FRAMES = [
    {"filename": "/home/a/model.py", "line": 7, "name": "forward"},
    {"filename": "/home/a/train.py", "line": 3, "name": "<module>"},
]
BLOCKS = [
    {"address": 4096, "size": 1024, "requested_size": 1000, "state": "active_allocated", "frames": FRAMES},
    {"address": 5120, "size": 512, "requested_size": 4, "state": "active_pending_free", "frames": []},
    {"address": 5632, "size": 2560, "requested_size": 9, "state": "inactive", "frames": []},
]
SEGMENT = {
    "device": 0,
    "address": 4096,
    "total_size": 4096,
    "allocated_size": 1024,
    "active_size": 1536,
    "requested_size": 1000,
    "stream": 0,
    "segment_type": "small",
    "segment_pool_id": (0, 1),
    "is_expandable": True,
    "frames": FRAMES,
    "blocks": BLOCKS,
}
EMPTY = {"device": 1, "address": 9000, "total_size": 64, "stream": 3, "blocks": [{"size": 64, "state": "inactive"}]}
EVENTS = [
    {"action": "alloc", "addr": 4096, "size": 1000, "stream": 0, "time_us": 17, "frames": FRAMES},
    {"action": "oom", "device_free": 70, "size": 2**40, "stream": 0, "time_us": 18, "compile_context": "N/A"},
]
SNAPSHOT = {
    "segments": [SEGMENT, EMPTY],
    "device_traces": [EVENTS, []],
    "allocator_settings": {"max_split_size": -1},
    "external_annotations": [{"stage": "START", "name": "ProfilerStep", "device": 0, "time_us": 16}],
}


def write(directory: Path, data: Any, *, protocol: int = 4) -> Path:
    path = directory / "snapshot.pickle"
    path.write_bytes(pickle.dumps(data, protocol))
    return path


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("compressed", [False, True])
def test_a_snapshot_has_its_segments_blocks_events_and_shared_stacks(tmp_path, protocol, compressed):
    path = write(tmp_path, SNAPSHOT, protocol=protocol)
    if compressed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    snapshot = read_snapshot(path)
    assert (snapshot.form, list(snapshot.devices)) == ("dict", [0, 1])
    device = snapshot.devices[0]
    (segment,) = device.segments
    assert (segment.pool, segment.is_expandable, segment.kind, segment.stream) == ((0, 1), True, "small", 0)
    assert [(block.address, block.state) for block in segment.blocks] == [
        (4096, "active_allocated"),
        (5120, "active_pending_free"),
        (5632, "inactive"),
    ]
    assert [str(frame) for frame in device.stacks[segment.blocks[0].stack]] == [
        "/home/a/model.py(7): forward",
        "/home/a/train.py(3): <module>",
    ]
    alloc, oom = device.events
    assert (alloc.action, alloc.address, alloc.size, alloc.time_us, alloc.stack) == (
        "alloc", 4096, 1000, 17, segment.blocks[0].stack,
    )  # fmt: skip
    assert (oom.action, oom.size, oom.device_free, oom.stack) == ("oom", 2**40, 70, 0)
    assert snapshot.settings["max_split_size"] == -1


def test_bytes_are_counted_as_torch_counts_them(tmp_path):
    snapshot = read_snapshot(write(tmp_path, SNAPSHOT))
    used, empty = snapshot.devices.values()
    assert (used.reserved_bytes, used.allocated_bytes, used.requested_bytes) == (4096, 1024, 1000)
    assert (used.pending_bytes, used.inactive_bytes, used.free_segment_bytes) == (512, 2560, 0)
    assert (used.largest_free_block, empty.free_segment_bytes, empty.allocated_bytes) == (2560, 64, 0)
    assert (used.inactive_split_bytes, used.rounding_bytes) == (2560, 24)


def test_a_bare_list_of_segments_is_a_snapshot_without_events(tmp_path):
    snapshot = read_snapshot(write(tmp_path, [SEGMENT]))
    assert (snapshot.form, snapshot.devices[0].events, snapshot.settings) == ("list", (), {})


def test_blocks_of_torch_2_0_have_their_place_from_the_ones_before_and_their_stack_from_the_history():
    history = [{"addr": 64, "real_size": 90, "frames": FRAMES}, {"addr": 1, "real_size": 2}]
    blocks = [
        {"size": 512, "requested_size": 90, "state": "active_allocated", "history": history},
        {"size": 512, "requested_size": 80, "state": "inactive"},
    ]
    old = {"device": 0, "address": 64, "total_size": 1024, "stream": 0, "segment_type": "small", "blocks": blocks}
    device = parse_snapshot({"segments": [old], "device_traces": [[]]}, "old").devices[0]
    first, second = device.segments[0].blocks
    assert (first.address, second.address, first.requested_size) == (64, 576, 90)
    assert device.stacks[first.stack][0].name == "forward"
    assert device.segments[0].pool == (0, 0)


def test_equal_stacks_have_one_number():
    copies = [{"action": "alloc", "addr": at, "size": 1, "frames": [dict(frame) for frame in FRAMES]} for at in (1, 2)]
    device = parse_snapshot({"segments": [], "device_traces": [[], copies]}, "it").devices[1]
    assert len({event.stack for event in device.events}) == 1
    assert len(device.stacks) == 2


class Runs:
    """Would run a program as it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch ran",)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_pickle_that_names_a_global_is_refused_with_its_name_before_anything_runs(tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, {"segments": [Runs()]}, protocol=protocol)
    with pytest.raises(ArtifactError, match=r"names the global '(posix|nt)\.system'") as refused:
        read_snapshot(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("value", [OrderedDict(a=1), {1, 2}, frozenset({1}), bytearray(b"a"), 1j, Path("a"), range(3)])
def test_what_is_no_plain_data_is_refused(value):
    with pytest.raises(ArtifactError, match=r"the global|the opcode"):
        read_pickle(pickle.dumps([value], 5), "it")


SEGMENTS = b"\x80\x04}\x8c\x08segments"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x80\x04ios\nsystem\n.", "opcode INST"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93)R.", "names the global 'os.system'"),
        (b"\x80\x04K\x01K\x02\x93.", r"names the global '\?\.\?'"),
        (b"\x80\x04\x82\x01.", "opcode EXT1"),
        (b"Pid\n.", "opcode PERSID"),
        (b"\x80\x04NQ.", "opcode BINPERSID"),
        (b"\x80\x04)R.", "opcode REDUCE"),
        (b"\x80\x04Nb.", "opcode BUILD"),
        (b"\x80\x05\x97.", "opcode NEXT_BUFFER"),
        (b"\x80\x05\x96" + struct.pack("<Q", 1 << 50) + b".", "opcode BYTEARRAY8"),
        (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"abc.", "opcode BINBYTES8"),
        (b"Np4294967280\n.", "opcode PUT"),
        (b"\x80\x04j" + struct.pack("<I", 9) + b".", "damaged or cut off"),
        (b"\x80\x04\x8b" + struct.pack("<I", 1 << 30) + b"\x00.", "opcode LONG4"),
        (b"\x80\x04\x8a\xff" + b"\x01" * 255 + b".", "opcode LONG1"),
        (b"(" * 2000 + b".", "nests deeper"),
        (b"\x80\x04}K\x01K\x02s.", "damaged or cut off"),
        (b"\x80\x04NNa.", "damaged or cut off"),
        (b"\x80\x04]N(e.", "damaged or cut off"),
        (b"\x80\x04}(\x8c\x01au.", "damaged or cut off"),
        (b"\x80\x04.", "damaged or cut off"),
        (b"", "damaged or cut off"),
        (b"\xff\xff", "damaged or cut off"),
        (b"<html>", "damaged or cut off"),
    ],
)
@pytest.mark.timeout(60)
def test_hostile_and_damaged_pickles_are_refused_at_once(data, words):
    with pytest.raises(ArtifactError, match=words) as refused:
        read_pickle(data, "it")
    assert str(refused.value).startswith("it: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("cut", [1, 10, 500])
def test_a_snapshot_that_is_cut_off_says_so(tmp_path, cut):
    path = write(tmp_path, SNAPSHOT)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ArtifactError, match="damaged or cut off"):
        read_snapshot(path)


def test_data_after_the_pickle_are_named_with_their_place(tmp_path):
    path = write(tmp_path, SNAPSHOT)
    length = path.stat().st_size
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(
        ArtifactError, match=f"has {length} bytes after the end of the pickle at byte {length}"
    ) as error:
        read_snapshot(path)
    assert "\n" not in str(error.value)


def test_an_empty_file_is_named_as_empty(tmp_path):
    path = tmp_path / "a.pickle"
    path.touch()
    with pytest.raises(ArtifactError, match=r"a\.pickle: the file is empty"):
        read_snapshot(path)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"requested_size": 5000}, id="requested"),
        pytest.param({"size": 5000}, id="size"),
        pytest.param({"size": 2048}, id="sum"),
    ],
)
def test_blocks_that_exceed_their_segment_are_damage(changes):
    data = {"segments": [{**SEGMENT, "blocks": [{**BLOCKS[0], **changes}, *BLOCKS[1:]]}]}
    with pytest.raises(ArtifactError, match=r"it: a segment of 4096 bytes has .* damaged"):
        parse_snapshot(data, "it")


def test_a_tuple_of_a_tuple_and_so_on_is_read_or_refused_and_never_a_key():
    deep = b"\x80\x04)" + b"\x85" * 50_000
    read_pickle(deep + b".", "it")
    with pytest.raises(ArtifactError, match="damaged"):
        read_pickle(b"\x80\x04}" + deep[2:] + b"Ns.", "it")


def test_size_is_bounded(tmp_path, monkeypatch):
    limits = "lightning_memprof.read.snapshot.restricted_pickle"
    monkeypatch.setattr(f"{limits}.MAX_CONTAINERS", 100)
    assert len(read_pickle(pickle.dumps([[] for _ in range(99)]), "it")) == 99
    with pytest.raises(ArtifactError, match="more than 100 lists"):
        read_pickle(pickle.dumps([[] for _ in range(100)]), "it")
    bomb = tmp_path / "bomb.gz"
    bomb.write_bytes(gzip.compress(b"\x80\x04" + b"N" * (8 << 20)))
    for module in (limits, "lightning_memprof.read.snapshot.reader"):
        monkeypatch.setattr(f"{module}.MAX_BYTES", 1 << 20)
    with pytest.raises(ArtifactError, match="longer than 1048576 bytes"):
        read_snapshot(bomb)


def test_a_small_file_that_shares_its_lists_is_not_walked_for_ever():
    blocks = [{"size": 1, "state": "inactive"}] * 3000
    segment = {**SEGMENT, "blocks": blocks}
    data = pickle.dumps({"segments": [segment] * 3000})
    assert len(data) < 40_000
    with pytest.raises(ArtifactError, match=r"it: .* shared lists"):
        parse_snapshot(read_pickle(data, "it"), "it")
    shared = {"segments": [{**SEGMENT, "blocks": blocks} for _ in range(2)]}
    with pytest.raises(ArtifactError, match=r"it: .* shared lists"):
        parse_snapshot(shared, "it")


def changed(**fields: Any) -> dict[str, Any]:
    return {"segments": [{**SEGMENT, **fields}], "device_traces": [EVENTS]}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (3, "has no segments"),
        ({}, "has no segments"),
        ({"segments": {}}, "not lists"),
        ({"segments": [None]}, "damaged"),
        (changed(address="x"), r"`int`.*\.address"),
        (changed(address=None), r"`int`.*\.address"),
        (changed(total_size=-1), r"`int` >= 0.*\.total_size"),
        (changed(total_size=2**70), r"`int` <= 9223372036854775807.*\.total_size"),
        (changed(total_size=True), r"`int`.*\.total_size"),
        (changed(blocks=None), "not lists"),
        (changed(blocks=[{"size": 1}]), "`state`"),
        (changed(segment_pool_id=(1,)), "segment_pool_id"),
        (changed(blocks=[{"size": 1, "state": "inactive", "frames": 3}]), "frames"),
        (changed(blocks=[{"size": 1, "state": "inactive", "frames": [[]]}]), "`object`"),
        ({"segments": [], "device_traces": [[{"size": 1}]]}, "`action`"),
        ({"segments": [], "device_traces": [3]}, "not lists"),
        ({"segments": [], "device_traces": [[{"action": "alloc", "size": 1.5}]]}, r"`int`.*\.size"),
    ],
)
def test_what_torch_does_not_write_is_refused_by_name(data, words):
    with pytest.raises(ArtifactError, match=f"it: .*{words}") as refused:
        parse_snapshot(data, "it")
    assert "\n" not in str(refused.value)


def test_a_container_that_holds_itself_is_no_endless_message():
    endless: list[Any] = []
    endless.append(endless)
    data = read_pickle(pickle.dumps({"segments": endless}, 4), "it")
    with pytest.raises(ArtifactError, match="damaged"):
        parse_snapshot(data, "it")


def test_files_that_are_no_pickle_are_refused_by_name(tmp_path):
    with pytest.raises(ArtifactError, match="no such file"):
        read_snapshot(tmp_path / "x")
    broken = tmp_path / "x.gz"
    broken.write_bytes(gzip.compress(pickle.dumps(SNAPSHOT))[:-30])
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_snapshot(broken)


def test_a_pickle_that_was_optimised_is_read_too():
    data = pickletools.optimize(pickle.dumps(SNAPSHOT, 2))
    assert read_pickle(data, "it") == SNAPSHOT


def test_reading_loads_neither_torch_nor_pickle(run_python):
    loaded = "print(*{'torch', 'pandas', 'lightning', 'pickle'} & {*sys.modules})"
    assert run_python("-c", f"import sys, lightning_memprof.account.snapshot.replay; {loaded}").stdout == "\n"


@pytest.mark.slow
def test_reading_allocations_loads_no_torch(run_python):
    loaded = "print(*{'torch', 'pandas', 'lightning'} & {*sys.modules})"
    assert run_python("-c", f"import sys, lightning_memprof.account.memory.allocations; {loaded}").stdout == "\n"
