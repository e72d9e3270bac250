from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fake_memory import FakeMemory
from fake_runs import FakeRun, make_run
from known import known
from lightning_memprof.account.ledger.growth import validation_growth, worker_growth
from lightning_memprof.account.ledger.memory import ByteLedger, grouped_bytes, run_bytes, snapshot_bytes
from lightning_memprof.account.memory.report import memory_report
from lightning_memprof.account.snapshot.report import snapshot_report
from lightning_memprof.artifacts.naming import system_name
from lightning_memprof.artifacts.series import ProcessRow
from lightning_memprof.read.run.load import load_run
from lightning_memprof.report.printers.values import words_text
from lightning_memprof.report.sections.memory import peak_stack
from lightning_memprof.report.view import run_view
from lightning_memprof.units import GIB, KIB, MIB
from snapshots import block, event, freed, segment, snapshot, unused, write_snapshot


def ledger_of(
    root: Path, fake: FakeRun | None = None, rows: tuple[dict[str, Any], ...] = (), **limits: int
) -> ByteLedger:
    directory = make_run(root, fake)
    if rows:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / "processes.rank00000.jsonl").write_text(text)
    if limits:
        path = directory / "manifest.rank00000.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[0]["environment"] = {**lines[0].get("environment", {}), **limits}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = load_run(directory)
    return known(run_bytes(run.lead, memory_report(run).lead))


def held(found: ByteLedger) -> int:
    return sum(line.bytes for line in found.lines)


@settings(max_examples=25, deadline=None)
@given(
    rss=st.lists(st.integers(MIB, 64 * GIB), min_size=20, max_size=40),
    kept=st.integers(0, 4 * GIB),
    workers=st.integers(0, 8 * GIB),
    is_device=st.booleans(),
)
def test_the_lines_sum_to_the_peak_whatever_is_measured(
    rss: list[int], kept: int, workers: int, is_device: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    fake = FakeRun(
        steps=len(rss),
        rss_bytes=lambda step: rss[step],
        device_bytes=(lambda step: rss[step]) if is_device else None,
        memory=FakeMemory(kept_bytes=kept),
        trace=False,
    )
    found = ledger_of(tmp_path_factory.mktemp("run"), fake, ({"kind": "workers", "step": 3, "private_bytes": workers},))
    assert held(found) == found.peak_bytes >= max(rss)
    assert sum(found.categories.values()) == found.peak_bytes
    assert all(line.bytes > 0 for line in found.lines)
    assert sum(line.bytes for line in grouped_bytes(found.lines)) == found.peak_bytes


def test_tensors_are_owned_by_category_and_module_and_the_rest_is_unattributed(tmp_path: Path) -> None:
    found = ledger_of(tmp_path, FakeRun(rss_bytes=lambda _: GIB, memory=FakeMemory(kept_bytes=MIB)))
    parameters = FakeMemory().parameter_bytes
    assert found.categories["parameter"] == found.categories["gradient"] == parameters
    assert found.categories["optimizer_state"] == 2 * parameters
    assert found.categories["activation"] == FakeMemory(kept_bytes=MIB).activation_bytes
    head = [line for line in found.lines if line.module == "net.head"]
    assert {line.category: line.bytes for line in head} == {
        "activation": MIB // 2,
        "parameter": 512 * KIB,
        "gradient": 512 * KIB,
    }
    assert found.lines[-1].category == "unattributed"
    joined = {line.module: line.bytes for line in grouped_bytes(found.lines) if line.category == "parameter"}
    assert joined["net.blocks.0-3.mix"] == 4 * 256 * KIB


def test_workers_count_with_their_private_memory(tmp_path: Path) -> None:
    rows = tuple({"kind": "workers", "step": step, "private_bytes": size} for step, size in ((1, MIB), (9, GIB)))
    found = ledger_of(tmp_path, FakeRun(rss_bytes=lambda _: GIB, memory=None), rows)
    alone = ledger_of(tmp_path / "alone", FakeRun(rss_bytes=lambda _: GIB, memory=None))
    assert (found.peak_bytes - alone.peak_bytes, found.bytes("workers")) == (GIB, GIB)


def test_steady_growth_is_a_line_and_at_most_what_tensors_leave(tmp_path: Path) -> None:
    fake = FakeRun(steps=120, rss_bytes=lambda step: GIB + 4 * MIB * step, memory=None)
    found = ledger_of(tmp_path, fake)
    assert found.bytes("growth") == pytest.approx(4 * MIB * 107, rel=0.02)


def test_memory_from_before_the_run_is_a_line_without_the_parameters_and_within_the_peak(tmp_path: Path) -> None:
    training = {"parameter_dtypes": {"float32": 3 * MIB, "bfloat16": MIB}}
    fake = FakeRun(rss_bytes=lambda _: GIB, memory=FakeMemory(kept_bytes=MIB), training=training)
    unknown = ledger_of(tmp_path / "unknown", fake)
    found = ledger_of(tmp_path / "found", fake, rss_at_start_bytes=GIB // 2)
    assert unknown.bytes("before_run") == 0
    assert found.bytes("before_run") == GIB // 2 - 4 * MIB
    assert found.peak_bytes == unknown.peak_bytes
    large = ledger_of(tmp_path / "large", fake, rss_at_start_bytes=4 * GIB)
    assert large.bytes("before_run") == unknown.bytes("unattributed") > 0
    assert large.peak_bytes == unknown.peak_bytes


def test_the_data_set_is_a_line_without_which_the_memory_before_the_run_is(tmp_path: Path) -> None:
    def ledger(size: int, **facts: Any) -> ByteLedger:
        loaders = {"dataloaders": [{"data_bytes": size}, {"data_bytes": size}]}
        fake = FakeRun(rss_bytes=lambda _: GIB, memory=FakeMemory(kept_bytes=MIB), training=loaders)
        return ledger_of(tmp_path / str(size), fake, **facts)

    found = ledger(300 * MIB, rss_at_start_bytes=GIB // 2)
    assert (found.bytes("data_set"), found.bytes("before_run")) == (300 * MIB, 212 * MIB)
    # Pages that nothing has touched are not resident.
    large = ledger(4 * GIB, rss_at_start_bytes=GIB // 2)
    assert (large.peak_bytes, large.bytes("before_run"), large.bytes("unattributed")) == (found.peak_bytes, 0, 0)
    assert large.bytes("data_set") > 300 * MIB


def test_the_limit_is_the_smaller_one_and_ranks_of_a_host_share_it(tmp_path: Path) -> None:
    fake = FakeRun(rss_bytes=lambda _: 5 * GIB, memory=None)
    found = ledger_of(tmp_path, fake, memory_bytes=64 * GIB, memory_limit_bytes=7 * GIB)
    assert found.limit_bytes == 7 * GIB
    assert found.is_under_pressure
    assert not ledger_of(tmp_path / "large", fake, memory_bytes=64 * GIB).is_under_pressure


def test_reserved_bytes_that_are_not_allocated_are_cached(tmp_path: Path) -> None:
    found = ledger_of(tmp_path, FakeRun(device_bytes=lambda _: GIB, windows=((2, 3),)))
    assert found.place == "cuda:0"
    assert found.bytes("cached") == 64 * MIB
    assert held(found) == found.peak_bytes == GIB + 128 * MIB
    assert found.basis == "bytes that the allocator reserved"
    later = ledger_of(tmp_path / "later", FakeRun(device_bytes=lambda step: GIB * (1 + step), windows=((2, 3),)))
    assert later.bytes("cached") == 0
    assert later.basis == "bytes that the allocator allocated"


def test_memory_of_other_processes_is_no_part_of_a_peak_but_of_a_full_device(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(device_bytes=lambda _: GIB, windows=((2, 3),)))
    alone = load_run(directory).lead
    rows = [{"step": 2, "recorded": True, "time_ns": 1, "gpu0_memory_used_bytes": size * GIB} for size in (21, 9)]
    (directory / system_name(0)).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run = load_run(directory)
    found, before = run_bytes(run.lead, memory_report(run).lead), run_bytes(alone, None)
    assert found is not None
    assert before is not None
    assert found.peak_bytes == before.peak_bytes == GIB + 128 * MIB
    assert found.outside_bytes == 21 * GIB - found.peak_bytes
    full = replace(found, limit_bytes=24 * GIB)
    assert full.filled == 21 / 24
    assert full.is_under_pressure
    stack = known(peak_stack(run_view(run)))
    assert "other processes and CUDA contexts: at least 19.9 GiB" in [words_text(note) for note in stack.notes]


def test_a_snapshot_owns_each_reserved_byte(tmp_path: Path) -> None:
    blocks = [block(0, 3 * MIB), unused(3 * MIB, MIB), block(4 * MIB, 4 * MIB)]
    ring = [event("alloc", 4 * MIB, 4 * MIB), event("alloc", 8 * MIB, MIB), *freed(8 * MIB, MIB)]
    data = snapshot([segment(*blocks), segment(unused(8 * MIB, 2 * MIB))], ring)
    report = snapshot_report(write_snapshot(tmp_path / "a.pickle", data))
    for device in report.devices:
        found = snapshot_bytes(device)
        assert held(found) == found.peak_bytes
        assert found.bytes("requested") == device.peak_requested_bytes


def workers(*sizes: int) -> list[ProcessRow]:
    return [ProcessRow(kind="workers", step=10 * n, private_bytes=size * MIB) for n, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "batches", "found"),
    [
        pytest.param((40, 100, 160, 220, 280), (), (6, 180, 30), id="until the end"),
        pytest.param((40, 100, 160), (), (6, 120, 20), id="in a run of seconds at one rate from their start"),
        pytest.param((40, 100, 160, 220, 220), (4, 14, 24, 34, 34), (6, 120, 20), id="until all batches were loaded"),
        pytest.param((40, 100, 160, 220, 226), (4, 14, 24, 34, 35), (4.2, 126, 30), id="by batch"),
    ],
)
def test_workers_that_rise_with_what_they_load_grow(
    sizes: tuple[int, ...], batches: tuple[int, ...], found: tuple[float, int, int]
) -> None:
    loading = [ProcessRow(kind="worker", step=10 * n, batches=count) for n, count in enumerate(batches)]
    grown = known(worker_growth([*loading, *workers(*sizes)]))
    assert grown.per_step == pytest.approx(found[0] * MIB)
    assert (grown.added // MIB, grown.steps) == found[1:]
    assert not batches or worker_growth(workers(*sizes)) is None


def test_pages_that_workers_copy_in_their_first_seconds_hide_no_steady_growth() -> None:
    private, shared = (53, 97, 202, 286, 451), (354, 352, 278, 218, 218)
    rows = [
        ProcessRow(kind="workers", step=step, private_bytes=own * MIB, shared_bytes=common * MIB)
        for step, own, common in zip((2, 9, 14, 18, 56), private, shared, strict=True)
    ]
    found = known(worker_growth(rows))
    assert found.added == (451 + 218 - 97 - 352) * MIB
    copied = [replace(row, shared_bytes=(500 - own) * MIB) for row, own in zip(rows, private, strict=True)]
    assert worker_growth(copied) is None


@pytest.mark.parametrize(
    "sizes",
    [
        (40, 100, 100, 100, 100),
        (40, 100, 300, 310, 312),
        (40, 100, 160, 90, 150),
        (40, 160),
        (40, 100, 140),
        (40, 100, 105, 110, 115),
        (30, 31, 32, 32, 115, 115, 115),
        (30, 31, 32, 40, 41, 42, 120),
        (30, 31, 115),
        (30, 33, 117, 118, 188),
    ],
    ids=[
        "steady",
        "a cache that is full",
        "workers that start anew",
        "too few samples",
        "a short run",
        "too little",
        "a garbage collection",
        "one at the end",
        "one in a short run",
        "two",
    ],
)
def test_workers_that_do_not_rise_until_the_end_do_not_grow(sizes: tuple[int, ...]) -> None:
    assert worker_growth(workers(*sizes)) is None


@pytest.mark.parametrize(("batches", "samples"), [(64, 32), (60, 30)])
def test_a_validation_that_keeps_each_batch_grows_by_all_of_them(batches: int, samples: int) -> None:
    row = ProcessRow(kind="validation", batches=batches, rss_bytes=[(500 + 4 * n) * MIB for n in range(samples)])
    found = known(validation_growth([row]))
    assert (found.per_step, found.start, found.steps) == (2 * MIB, 504 * MIB, batches)
    assert found.added == batches * 2 * MIB


@pytest.mark.parametrize(
    "sizes",
    [[500 * MIB] * 32, [500 * MIB] + [700 * MIB] * 31, [500 * MIB + n * KIB for n in range(32)]],
    ids=["steady", "the first batch", "too little"],
)
def test_a_validation_that_keeps_nothing_does_not_grow(sizes: list[int]) -> None:
    assert validation_growth([ProcessRow(kind="validation", batches=32, rss_bytes=sizes)]) is None


@pytest.mark.parametrize(("kept", "is_found"), [(4 * MIB, True), (2 * MIB, True), (64 * 1024, False)])
def test_a_fragmented_heap_is_not_kept_by_a_validation(kept: int, is_found: bool) -> None:
    sizes = [500 * MIB + batch * 4 * MIB for batch in range(32)]
    heap = [100 * MIB + batch * kept for batch in range(32)]
    row = ProcessRow(kind="validation", batches=32, rss_bytes=sizes, heap_bytes=heap)
    assert (validation_growth([row]) is not None) == is_found


@pytest.mark.parametrize(("free", "is_found"), [(12, True), (28, False)])
def test_a_validation_that_first_uses_freed_memory_again_grows_by_what_it_keeps(free: int, is_found: bool) -> None:
    heap = [(200 + 4 * batch) * MIB for batch in range(32)]
    resident = [(500 + 4 * max(batch - free, 0)) * MIB for batch in range(32)]
    found = validation_growth([ProcessRow(kind="validation", batches=32, rss_bytes=resident, heap_bytes=heap)])
    assert (found is not None) == is_found
    if found is not None:
        assert (found.per_step, found.added) == (4 * MIB, 128 * MIB)
