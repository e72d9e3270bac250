from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kineto import write_trace
from lightning_memprof import ExtendedPyTorchProfiler, Schedule
from lightning_memprof.account.memory.allocations import window_allocations
from lightning_memprof.account.memory.blocks import (
    KINDS,
    Blocks,
    live_by_kind,
    read_blocks,
    replayed_blocks,
    with_held,
)
from lightning_memprof.account.memory.columns import Origin
from lightning_memprof.account.snapshot.replay import replay
from lightning_memprof.read.snapshot.reader import parse_snapshot
from snapshots import LINEAR, MODEL, TRAIN, event
from training import Perceptron, loader, trainer

ADAM = {"filename": "/venv/lib/python3.11/site-packages/torch/optim/adam.py", "line": 9, "name": "_init_group"}
NODE = {"filename": "??", "line": 0, "name": "torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>)"}


def totals(lives: Blocks) -> dict[str, int]:
    """The most live bytes by category."""
    return {name: max(values) for name, values in live_by_kind(lives)[1].items()}


def highest(lives: Blocks) -> int:
    return max(map(sum, zip(*live_by_kind(lives)[1].values(), strict=True)))


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    profiler = ExtendedPyTorchProfiler(schedule=Schedule(wait=0, warmup=1, active=3, repeat=1), profile_memory=True)
    fit = trainer(tmp_path_factory.mktemp("run"), profiler=profiler)
    fit.fit(Perceptron(), loader(5))
    return next(Path(fit.log_dir or "").glob("*.pt.trace.json.gz"))


def test_blocks_of_a_training_add_up_to_its_peak_and_have_the_categories_of_their_phases(traced: Path):
    (lives,) = read_blocks(traced)
    (known,) = window_allocations(traced)
    assert len(lives) == known.allocations
    assert highest(lives) == known.peak_bytes
    parameter_bytes = sum(parameter.numel() * parameter.element_size() for parameter in Perceptron().parameters())
    # Autograd's own gradient of each parameter becomes the parameter's.
    assert totals(lives)["gradient"] >= parameter_bytes
    assert totals(lives)["activation"] > 0
    assert any("aten::" in text for text in lives.texts()[1])


def memory(ts: float, size: int, address: int, total: int = 0, kind: int = 1) -> dict[str, Any]:
    args = {"Device Type": kind, "Device Id": 0, "Addr": address, "Bytes": size, "Total Allocated": total}
    event = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 7, "tid": 7}
    return {**event, "ts": ts, "args": args}


def test_what_a_device_held_before_its_trace_is_there_and_may_go(tmp_path: Path):
    events = [memory(10, 100, 1, total=600), memory(20, -300, 2, total=300), memory(30, -100, 1, total=200)]
    (lives,) = read_blocks(write_trace(tmp_path / "t.json", events, baseTimeNanoseconds=0))
    assert lives.device == "cuda:0"
    moments, live = live_by_kind(lives)
    assert dict(zip(moments, zip(live["before"], live["temporary"], strict=True), strict=True)) == {
        10_000: (500, 100),
        20_000: (200, 100),
        30_000: (200, 0),
    }


LINE = Origin("a", None, None, ())


def test_parameters_and_optimizer_state_lie_below_what_a_window_allocated_and_nothing_counts_twice():
    blocks = Blocks(device="cpu", times=range(101), before_bytes=None, origins=[LINE])
    blocks.add((10, 101, 1, 300), 0, "optimizer_state")
    blocks.add((10, 50, 2, 70), 0, "activation")
    found = with_held(blocks, {"parameter": 1000, "optimizer_state": 2000, "gradient": 500})
    assert totals(found) == {"parameter": 1000, "optimizer_state": 2000, "activation": 70}
    assert found.held_before == {"parameter": 1000, "optimizer_state": 1700}
    assert highest(found) == highest(blocks) + 2700
    assert (blocks.before_bytes, found.before_bytes) == (None, 0)


def test_what_a_device_held_before_its_trace_is_told_apart_and_stays_as_much():
    blocks = Blocks(device="cuda:0", times=range(101), before_bytes=5000, origins=[LINE])
    found = with_held(blocks, {"parameter": 1000, "optimizer_state": 2000})
    assert totals(found) == {"before": 2000, "parameter": 1000, "optimizer_state": 2000}
    assert with_held(blocks, {"parameter": 6000}) == blocks


def test_an_address_that_is_given_out_again_was_freed_meanwhile(tmp_path: Path):
    events = [memory(10, 100, 1, kind=0), memory(20, 50, 1, kind=0)]
    (lives,) = read_blocks(write_trace(tmp_path / "t.json", events, baseTimeNanoseconds=0))
    assert (lives.times_of(lives.born), lives.times_of(lives.died)) == ([10_000, 20_000], [20_000, 20_001])
    assert list(lives.size) == [100, 50]


def test_a_trace_without_addresses_has_no_blocks(tmp_path: Path):
    path = write_trace(tmp_path / "t.json", [memory(10, 100, 0)], baseTimeNanoseconds=0)
    assert read_blocks(path) == ()


def ring(*events: dict[str, Any]) -> Blocks:
    block = {"address": 0, "size": 512, "requested_size": 500, "state": "active_allocated", "frames": []}
    segment = {"device": 0, "address": 0, "total_size": 512, "stream": 0, "blocks": [block]}
    return replayed_blocks(replay(parse_snapshot({"segments": [segment], "device_traces": [list(events)]}, "it")))


def test_the_phases_of_a_ring_are_told_from_its_stacks():
    lives = ring(
        event("alloc", 512, 10, LINEAR, MODEL, TRAIN, time_us=1),
        event("alloc", 1024, 20, LINEAR, MODEL, TRAIN, time_us=2),
        event("free_completed", 1024, 20, time_us=3),
        event("alloc", 2048, 30, NODE, time_us=4),
        event("free_completed", 512, 10, time_us=5),
        event("alloc", 4096, 40, ADAM, TRAIN, time_us=6),
        event("free_completed", 2048, 30, time_us=7),
        event("free_completed", 4096, 40, time_us=8),
    )
    born, died = lives.times_of(lives.born), lives.times_of(lives.died)
    found = {size: (KINDS[kind], start, end) for size, kind, start, end in
             zip(lives.size, lives.kind, born, died, strict=True)}  # fmt: skip
    assert found == {
        500: ("before", 1000, 8001),
        10: ("activation", 1000, 5000),
        20: ("temporary", 2000, 3000),
        30: ("gradient", 4000, 7000),
        40: ("temporary", 6000, 8000),
    }
    # Frames of libraries are left out where there are the user's own.
    numbers, texts = lives.texts()
    assert texts[numbers[list(lives.size).index(10)]] == "/home/a/model.py(7): forward\n/home/a/train.py(3): <module>"


@pytest.mark.parametrize(
    ("following", "kind"), [([], "temporary"), ([event("alloc", 4096, 40, ADAM, TRAIN, time_us=9)], "gradient")]
)
def test_what_a_backward_holds_at_the_end_of_the_ring_is_a_gradient_if_it_ends_before(following, kind):
    accumulates = {**NODE, "name": "torch::autograd::AccumulateGrad::apply(std::vector<at::Tensor>&&)"}
    events = [
        event("alloc", 512, 10, LINEAR, MODEL, TRAIN, time_us=1),
        event("alloc", 1024, 20, NODE, time_us=2),
        event("alloc", 2048, 30, accumulates, time_us=3),
        *following,
    ]
    blocks = [
        {"address": address, "size": 512, "requested_size": size, "state": "active_allocated"}
        for address, size in ((1024, 20), (2048, 30))
    ]
    segment = {"device": 0, "address": 0, "total_size": 4096, "stream": 0, "blocks": blocks}
    lives = replayed_blocks(replay(parse_snapshot({"segments": [segment], "device_traces": [events]}, "it")))
    found = {size: KINDS[kind] for size, kind in zip(lives.size, lives.kind, strict=True)}
    assert (found[20], found[30]) == (kind, "gradient")


def test_a_block_from_before_the_ring_has_the_category_of_its_stack():
    block = {"address": 0, "size": 512, "requested_size": 500, "state": "active_allocated", "frames": [MODEL]}
    segment = {"device": 0, "address": 0, "total_size": 512, "stream": 0, "blocks": [block]}
    data = {"segments": [segment], "device_traces": [[event("alloc", 512, 10, TRAIN, time_us=1)]]}
    lives = replayed_blocks(replay(parse_snapshot(data, "it")))
    assert [KINDS[kind] for kind, size in zip(lives.kind, lives.size, strict=True) if size == 500] == ["activation"]


def test_a_ring_without_times_counts_its_events():
    lives = ring(event("alloc", 512, 10, MODEL), event("free_completed", 512, 10))
    assert (lives.is_timed, lives.start, lives.end) == (False, 0, 1)
    assert highest(lives) == 510
