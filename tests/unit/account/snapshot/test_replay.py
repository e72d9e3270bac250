from __future__ import annotations

from typing import Any

import pytest

from lightning_memprof.account.snapshot.replay import Holder, Live, Replay, replay
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.snapshot.reader import parse_snapshot
from snapshots import LINEAR, MODEL, TRAIN, event

UNWIND = {"filename": "??", "line": 0, "name": "torch::unwind::unwind()"}
NODE = {
    "filename": "??",
    "line": 0,
    "name": "torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&)",
}
ADD = {"filename": "RegisterCUDA.cpp", "line": 0, "name": "at::_ops::add_Tensor::call(at::Tensor const&)"}


def block(address: int, size: int, requested: int, state: str = "active_allocated", *frames: dict[str, Any]) -> Any:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": list(frames)}


def segment(address: int, *blocks: Any) -> dict[str, Any]:
    size = sum(block["size"] for block in blocks)
    return {"device": 0, "address": address, "total_size": size, "stream": 0, "blocks": list(blocks)}


def replayed(segments: list[Any], *events: dict[str, Any]) -> Replay:
    return replay(parse_snapshot({"segments": segments, "device_traces": [list(events)]}, "it"))


def test_a_block_from_before_the_ring_is_live_until_it_is_freed():
    found = replayed(
        [segment(0, block(0, 1024, 1000, "active_allocated", MODEL), block(1024, 512, 9, "inactive"))],
        event("free_requested", 1024, 300, TRAIN),
        event("free_completed", 1024, 300),
    )
    assert [found.live_at(i) for i in (-1, 0, 1)] == [
        Live(1300, 1536, 1536),
        Live(1300, 1024, 1536),
        Live(1000, 1024, 1536),
    ]
    assert (found.peak_requested_bytes, found.peak_event, found.peak_time_us) == (1300, -1, None)
    # Who allocated the freed one is not known: the stack of its free is not the stack of its allocation.
    assert found.holders_at_peak == (
        Holder(("/home/a/model.py(7): forward",), "/home/a/model.py(7): forward", 1000, 1),
        Holder((), "", 300, 1),
    )


def test_the_peak_has_its_moment_and_its_holders():
    found = replayed(
        [segment(0, block(0, 1024, 1000, "active_allocated", LINEAR, MODEL), block(1024, 2048, 2048, "inactive"))],
        event("alloc", 0, 1000, LINEAR, MODEL, time_us=10),
        event("alloc", 1024, 600, LINEAR, MODEL, time_us=20),
        event("alloc", 2048, 500, TRAIN, time_us=30),
        event("free_requested", 1024, 600, time_us=40),
        event("free_completed", 1024, 600, time_us=41),
        event("free_requested", 2048, 500, time_us=50),
        event("free_completed", 2048, 500, time_us=51),
    )
    assert (found.peak_requested_bytes, found.peak_event, found.peak_time_us) == (2100, 2, 30)
    linear = "/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py(130): forward"
    assert found.holders_at_peak == (
        Holder((linear, "/home/a/model.py(7): forward"), "/home/a/model.py(7): forward", 1600, 2),
        Holder(("/home/a/train.py(3): <module>",), "/home/a/train.py(3): <module>", 500, 1),
    )
    assert found.holders_at(-1) == ()


def test_of_equal_peaks_the_last_one_counts_because_more_of_its_blocks_have_stacks():
    found = replayed(
        [segment(0, block(0, 1024, 1000, "active_allocated", MODEL))],
        event("free_requested", 0, 1000),
        event("free_completed", 0, 1000),
        event("alloc", 0, 1000, MODEL),
        event("snapshot", 0, 0),
    )
    assert (found.peak_event, [holder.site for holder in found.holders_at_peak]) == (
        2,
        ["/home/a/model.py(7): forward"],
    )


def test_what_waits_to_be_freed_is_requested_and_no_more_allocated():
    pending = block(0, 1024, 1000, "active_pending_free")
    found = replayed([segment(0, pending)], event("alloc", 0, 1000), event("free_requested", 0, 1000))
    assert [found.live_at(i)[:2] for i in (-1, 0, 1)] == [(0, 0), (1000, 1024), (1000, 0)]
    assert replayed([segment(0, pending)]).live_at(-1) == Live(1000, 0, 1024)


def test_a_ring_that_was_told_to_skip_completed_frees_ends_blocks_where_they_were_asked_for():
    found = replayed([], event("alloc", 0, 1000), event("free_requested", 0, 1000))
    assert [found.live_at(i)[:2] for i in (-1, 0, 1)] == [(0, 0), (1000, 1024), (0, 0)]


def test_an_allocation_that_is_missing_in_the_ring_harms_no_other_block():
    found = replayed(
        [segment(0, block(0, 512, 200))],
        event("alloc", 0, 400),
        event("free_completed", 0, 400),
        event("snapshot", 0, 0),
    )
    assert [found.live_at(i).requested_bytes for i in range(-1, 3)] == [0, 400, 200, 200]


def test_a_free_that_is_missing_in_the_ring_harms_no_other_block():
    found = replayed([segment(0, block(0, 512, 200))], event("alloc", 64, 400), event("alloc", 0, 200))
    assert [found.live_at(i).requested_bytes for i in range(-1, 2)] == [0, 0, 200]


def test_reserved_bytes_follow_the_segments_and_the_parts_of_expandable_ones():
    found = replayed(
        [segment(0, block(0, 512, 9, "inactive"))],
        event("segment_alloc", 4096, 2048),
        event("segment_map", 9000, 100),
        event("segment_unmap", 9000, 100),
        event("segment_free", 4096, 2048),
    )
    assert [found.live_at(i).reserved_bytes for i in range(-1, 4)] == [512, 2560, 2660, 2560, 512]
    assert found.peak_reserved_bytes == 2660


@pytest.mark.parametrize(
    ("frames", "site", "depth"),
    [
        ([UNWIND, LINEAR, MODEL], "/home/a/model.py(7): forward", 2),
        ([UNWIND, LINEAR], f"{LINEAR['filename']}(130): forward", 1),
        ([UNWIND, ADD, NODE], "MmBackward0", 3),
        ([UNWIND, ADD], "add_Tensor", 2),
        ([UNWIND], "", 1),
        ([], "", 0),
    ],
)
def test_the_site_is_the_users_own_line_or_what_cxx_did_where_there_is_no_python(frames, site, depth):
    (holder,) = replayed([segment(0, block(0, 512, 9, "active_allocated", *frames))]).holders_at_peak
    assert (holder.site, len(holder.stack), holder.bytes) == (site, depth, 9)


def test_stacks_that_differ_in_cxx_only_are_one_holder():
    blocks = [
        block(0, 512, 9, "active_allocated", UNWIND, MODEL),
        block(512, 512, 1, "active_allocated", ADD, UNWIND, MODEL),
    ]
    (holder,) = replayed([segment(0, *blocks)]).holders_at_peak
    assert (holder.bytes, holder.blocks) == (10, 2)


def test_a_device_that_is_not_there_and_a_moment_that_is_not_there_are_refused():
    snapshot = parse_snapshot([segment(0)], "it")
    with pytest.raises(ArtifactError, match="it: has no device 3; it has 0"):
        replay(snapshot, 3)
    with pytest.raises(IndexError):
        replay(snapshot).live_at(0)


def test_sizes_that_no_device_has_are_no_crash():
    huge = 2**62
    segments = [segment(0, block(0, huge, huge)), segment(huge, block(huge, huge, huge))]
    found = replayed(segments, event("segment_free", 0, huge))
    assert (found.peak_requested_bytes, found.peak_reserved_bytes) == (2 * huge, 3 * huge)
