from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from lightning_memprof.account.snapshot.replay import FreeRange, free_ranges, replay
from lightning_memprof.account.snapshot.report import HeldLine, SnapshotReport, snapshot_report
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.snapshot.reader import parse_snapshot
from snapshots import (
    LINEAR,
    MODEL,
    MODEL_LINE,
    START_US,
    TRAIN,
    TRAIN_LINE,
    block,
    event,
    failed,
    freed,
    segment,
    snapshot,
    unused,
    write_snapshot,
)


def reported(directory: Path, data: Any) -> SnapshotReport:
    return snapshot_report(write_snapshot(directory / "a.pickle", data))


def test_holders_are_folded_to_the_users_line_with_what_it_called(tmp_path):
    ring = [event("alloc", 0, 1000, LINEAR, MODEL), event("alloc", 1024, 600, MODEL), event("alloc", 4096, 9, TRAIN)]
    blocks = [block(0, 1000), block(1000, 24, state="inactive"), block(1024, 600), block(4096, 9)]
    (device,) = reported(tmp_path, snapshot([segment(*blocks)], ring)).devices
    assert device.lines_at_peak == (
        HeldLine(site=MODEL_LINE, called=("forward",), bytes=1600, blocks=2, stacks=2),
        HeldLine(site=TRAIN_LINE, called=(), bytes=9, blocks=1, stacks=1),
    )
    assert sum(line.bytes for line in device.lines_at_peak) == device.peak_requested_bytes == 1609


def test_holders_are_summed_by_function_over_its_lines(tmp_path):
    later = {**MODEL, "line": 9}
    ring = [event("alloc", 0, 1000, LINEAR, MODEL), event("alloc", 1024, 600, later), event("alloc", 4096, 9, TRAIN)]
    blocks = [block(0, 1000), block(1000, 24, state="inactive"), block(1024, 600), block(4096, 9)]
    (device,) = reported(tmp_path, snapshot([segment(*blocks)], ring)).devices
    assert device.functions_at_peak == (
        HeldLine(site="/home/a/model.py: forward", called=("forward",), bytes=1600, blocks=2, stacks=2),
        HeldLine(site="/home/a/train.py: <module>", called=(), bytes=9, blocks=1, stacks=1),
    )


def test_a_failed_request_has_the_line_that_asked(tmp_path):
    report = reported(tmp_path, snapshot([segment(block(0, 1024))], [event("alloc", 0, 1024), failed(4096, 100)]))
    assert report.oom is not None
    assert report.oom.site == TRAIN_LINE


def test_a_failed_request_has_what_was_live_and_the_largest_free_piece(tmp_path):
    blocks = [block(0, 1024, MODEL), unused(1024, 2048), block(3072, 1024), unused(4096, 512)]
    report = reported(tmp_path, snapshot([segment(*blocks)], [event("alloc", 0, 1024), failed(4096, 100)]))
    assert report.oom is not None
    assert (report.oom.requested_bytes, report.oom.device_free_bytes) == (4096, 100)
    assert (report.oom.largest_free_bytes, report.oom.unused_bytes) == (2048, 2560)
    assert (report.oom.live.requested_bytes, report.oom.time_us) == (2048, START_US + 1000)


def test_a_failed_request_is_told_from_what_came_after_it(tmp_path):
    # The program caught the error, freed the large block and gave a segment back.
    ring = [failed(8192, 0), *freed(1024, 2048), event("segment_free", 9000, 700), event("alloc", 4096, 512, TRAIN)]
    report = reported(tmp_path, snapshot([segment(block(0, 1024), unused(1024, 3072), block(4096, 512))], ring))
    assert report.oom is not None
    assert (report.oom.unused_bytes, report.oom.largest_free_bytes) == (1024 + 512 + 700, 1024 + 512)
    assert report.oom.live.reserved_bytes == 4608 + 700


def test_the_last_failed_request_of_all_devices_counts(tmp_path):
    rings: list[list[dict[str, Any]]] = [[failed(1, 0), event("alloc", 0, 5)], [event("alloc", 0, 5), failed(2, 0)]]
    report = reported(tmp_path, snapshot([segment(block(0, 5)), segment(block(0, 5), device=1)], *rings))
    assert report.oom is not None
    assert (report.oom.device, report.oom.requested_bytes, len(report.devices)) == (1, 2, 2)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (snapshot([], []), ["The snapshot has no device memory"]),
        ([segment(block(0, 512, MODEL))], ["The file is a bare list of segments"]),
        (snapshot([segment(block(0, 512, MODEL))], []), ["cuda:0 has no events because the history was off"]),
        (snapshot([segment(block(0, 512))], [event("alloc", 0, 512, TRAIN)]), []),
        (
            snapshot([segment(block(0, 512))], [event("alloc", 0, 512)], is_timed=False),
            ["The events of cuda:0 have no times", "No block of cuda:0 has a stack"],
        ),
        (
            snapshot([segment(block(0, 512, TRAIN), block(512, 512))], [event("alloc", 0, 512)]),
            ["The recorded history of cuda:0 starts with 512 B already live; earlier events are not in it."],
        ),
        (
            snapshot([segment(block(0, 512, TRAIN), block(512, 1536))], [event("alloc", 0, 512)]),
            [
                "The recorded history of cuda:0 starts with 1.50 KiB already live",
                "75% of the peak of cuda:0 has no stack: record the history with stacks from the start",
            ],
        ),
    ],
)
def test_what_a_snapshot_lacks_is_said(tmp_path, data, words):
    missing = reported(tmp_path, data).missing
    assert [said.startswith(start) for said, start in zip(missing, words, strict=True)] == [True] * len(words)


def test_what_is_no_snapshot_is_refused_in_one_line(tmp_path):
    path = tmp_path / "a.pickle.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": []}'))
    with pytest.raises(ArtifactError) as refused:
        snapshot_report(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert "\n" not in str(refused.value)


def test_free_pieces_are_known_at_any_moment_of_the_ring():
    # One segment is made with a block in it, a second one grows by a part that is unmapped again.
    ring = [
        event("segment_alloc", 0, 4096),
        event("alloc", 1024, 1024),
        event("segment_map", 12288, 2048),
        event("segment_unmap", 12288, 2048),
        *freed(1024, 1024),
    ]
    found = replay(
        parse_snapshot(
            snapshot([segment(unused(0, 4096)), segment(block(10240, 2048), is_expandable=True)], ring), "it"
        )
    )
    assert free_ranges(found, -1) == ()
    assert free_ranges(found, 0) == (FreeRange(0, 4096, is_segment=True),)
    pieces = (FreeRange(0, 1024, is_segment=False), FreeRange(2048, 2048, is_segment=False))
    assert free_ranges(found, 1) == pieces
    assert free_ranges(found, 2) == (*pieces, FreeRange(12288, 2048, is_segment=False))
    assert free_ranges(found, 3) == pieces
    assert free_ranges(found, 5) == (FreeRange(0, 4096, is_segment=True),)


def test_the_parts_of_an_expandable_segment_are_taken_off_wherever_they_lie():
    ring = [event("segment_map", 2048, 2048), event("segment_map", 0, 2048), event("alloc", 0, 100)]
    found = replay(parse_snapshot(snapshot([segment(block(0, 512), unused(512, 3584))], ring), "it"))
    assert free_ranges(found, 0) == (FreeRange(2048, 2048, is_segment=True),)
    assert free_ranges(found, 1) == (FreeRange(0, 4096, is_segment=True),)
    assert free_ranges(found, 2) == (FreeRange(512, 3584, is_segment=False),)


def test_a_part_that_an_expandable_segment_gave_back_was_one_piece_with_the_rest_of_it():
    ring = [event("snapshot", 0, 0), event("segment_unmap", 2048, 2048), event("segment_free", 4096, 512)]
    found = replay(
        parse_snapshot(snapshot([segment(block(0, 512), unused(512, 1536), is_expandable=True)], ring), "it")
    )
    assert free_ranges(found, 0) == (FreeRange(512, 3584, is_segment=False), FreeRange(4096, 512, is_segment=True))
