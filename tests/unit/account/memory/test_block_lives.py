from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kineto import write_trace
from lightning_memprof import ExtendedPyTorchProfiler, Schedule
from lightning_memprof.account.memory.allocations import window_allocations
from lightning_memprof.account.memory.block_lives import (
    KINDS,
    BlockLives,
    live_by_kind,
    lives_of_replay,
    lives_of_trace,
    with_held,
)
from lightning_memprof.account.snapshot.replay import replay
from lightning_memprof.read.snapshot.reader import parse_snapshot
from training import Perceptron, loader, trainer

STEP = {"filename": "/home/a/train.py", "line": 3, "name": "<module>"}
FORWARD = {"filename": "/home/a/model.py", "line": 7, "name": "forward"}
LINEAR = {"filename": "/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", "line": 130, "name": "forward"}
ADAM = {"filename": "/venv/lib/python3.11/site-packages/torch/optim/adam.py", "line": 9, "name": "_init_group"}
NODE = {"filename": "??", "line": 0, "name": "torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>)"}


def totals(lives: BlockLives) -> dict[str, int]:
    """The most live bytes by category."""
    return {name: max(values) for name, values in live_by_kind(lives)[1].items()}


def highest(lives: BlockLives) -> int:
    return max(map(sum, zip(*live_by_kind(lives)[1].values(), strict=True)))


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    profiler = ExtendedPyTorchProfiler(schedule=Schedule(wait=0, warmup=1, active=3, repeat=1), profile_memory=True)
    fit = trainer(tmp_path_factory.mktemp("run"), profiler=profiler)
    fit.fit(Perceptron(), loader(5))
    return next(Path(fit.log_dir or "").glob("*.pt.trace.json.gz"))


def test_blocks_of_a_training_add_up_to_its_peak_and_have_the_categories_of_their_phases(traced: Path):
    (lives,) = lives_of_trace(traced)
    (known,) = window_allocations(traced)
    assert len(lives) == known.allocations
    assert highest(lives) == known.peak_bytes
    parameter_bytes = sum(parameter.numel() * parameter.element_size() for parameter in Perceptron().parameters())
    # Autograd's own gradient of each parameter becomes the parameter's.
    assert totals(lives)["gradient"] >= parameter_bytes
    assert totals(lives)["activation"] > 0
    assert any("aten::" in stack for stack in lives.stacks)


def memory(ts: float, size: int, address: int, total: int = 0, kind: int = 1) -> dict[str, Any]:
    args = {"Device Type": kind, "Device Id": 0, "Addr": address, "Bytes": size, "Total Allocated": total}
    event = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 7, "tid": 7}
    return {**event, "ts": ts, "args": args}


def test_what_a_device_held_before_its_trace_is_there_and_may_go(tmp_path: Path):
    events = [memory(10, 100, 1, total=600), memory(20, -300, 2, total=300), memory(30, -100, 1, total=200)]
    (lives,) = lives_of_trace(write_trace(tmp_path / "t.json", events, baseTimeNanoseconds=0))
    assert lives.device == "cuda:0"
    moments, live = live_by_kind(lives)
    assert dict(zip(moments, zip(live["before"], live["temporary"], strict=True), strict=True)) == {
        10_000: (500, 100),
        20_000: (200, 100),
        30_000: (200, 0),
    }


def test_parameters_and_optimizer_state_lie_below_what_a_window_allocated_and_nothing_counts_twice():
    lives = BlockLives("cpu", start=0, end=100, knows_before=False, stacks=["a"])
    lives.add((10, 101, 1, 300), "optimizer_state", 0)
    lives.add((10, 50, 2, 70), "activation", 0)
    found = with_held(lives, {"parameter": 1000, "optimizer_state": 2000, "gradient": 500})
    assert totals(found) == {"parameter": 1000, "optimizer_state": 2000, "activation": 70}
    assert found.held_before == {"parameter": 1000, "optimizer_state": 1700}
    assert highest(found) == highest(lives) + 2700
    assert (lives.knows_before, found.knows_before) == (False, True)


def test_what_a_device_held_before_its_trace_is_told_apart_and_stays_as_much():
    lives = BlockLives("cuda:0", start=0, end=100, before_bytes=5000, stacks=["a"])
    found = with_held(lives, {"parameter": 1000, "optimizer_state": 2000})
    assert totals(found) == {"before": 2000, "parameter": 1000, "optimizer_state": 2000}
    assert with_held(lives, {"parameter": 6000}) == lives


def test_an_address_that_is_given_out_again_was_freed_meanwhile(tmp_path: Path):
    events = [memory(10, 100, 1, kind=0), memory(20, 50, 1, kind=0)]
    (lives,) = lives_of_trace(write_trace(tmp_path / "t.json", events, baseTimeNanoseconds=0))
    assert sorted(zip(lives.born, lives.died, lives.size, strict=True)) == [
        (10_000, 20_000, 100),
        (20_000, 20_001, 50),
    ]


def test_a_trace_without_addresses_has_no_blocks(tmp_path: Path):
    assert lives_of_trace(write_trace(tmp_path / "t.json", [memory(10, 100, 0)], baseTimeNanoseconds=0)) == ()


def event(action: str, addr: int, size: int, time_us: int, *frames: dict[str, Any]) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "frames": list(frames), "time_us": time_us}


def ring(*events: dict[str, Any]) -> BlockLives:
    block = {"address": 0, "size": 512, "requested_size": 500, "state": "active_allocated", "frames": []}
    segment = {"device": 0, "address": 0, "total_size": 512, "stream": 0, "blocks": [block]}
    return lives_of_replay(replay(parse_snapshot({"segments": [segment], "device_traces": [list(events)]}, "it")))


def test_the_phases_of_a_ring_are_told_from_its_stacks():
    lives = ring(
        event("alloc", 512, 10, 1, LINEAR, FORWARD, STEP),
        event("alloc", 1024, 20, 2, LINEAR, FORWARD, STEP),
        event("free_completed", 1024, 20, 3),
        event("alloc", 2048, 30, 4, NODE),
        event("free_completed", 512, 10, 5),
        event("alloc", 4096, 40, 6, ADAM, STEP),
        event("free_completed", 2048, 30, 7),
        event("free_completed", 4096, 40, 8),
    )
    found = {size: (KINDS[kind], born, died) for size, kind, born, died in
             zip(lives.size, lives.kind, lives.born, lives.died, strict=True)}  # fmt: skip
    assert found == {
        500: ("before", 1000, 8001),
        10: ("activation", 1000, 5000),
        20: ("temporary", 2000, 3000),
        30: ("gradient", 4000, 7000),
        40: ("temporary", 6000, 8000),
    }
    # Frames of libraries are left out where there are the user's own.
    assert lives.stacks[lives.stack[list(lives.size).index(10)]] == (
        "/home/a/model.py(7): forward\n/home/a/train.py(3): <module>"
    )


def test_a_block_from_before_the_ring_has_the_category_of_its_stack():
    block = {"address": 0, "size": 512, "requested_size": 500, "state": "active_allocated", "frames": [FORWARD]}
    segment = {"device": 0, "address": 0, "total_size": 512, "stream": 0, "blocks": [block]}
    data = {"segments": [segment], "device_traces": [[event("alloc", 512, 10, 1, STEP)]]}
    lives = lives_of_replay(replay(parse_snapshot(data, "it")))
    assert [KINDS[kind] for kind, size in zip(lives.kind, lives.size, strict=True) if size == 500] == ["activation"]


def test_a_ring_without_times_counts_its_events():
    untimed = [event("alloc", 512, 10, 0, FORWARD), event("free_completed", 512, 10, 0)]
    for ring_event in untimed:
        del ring_event["time_us"]
    lives = ring(*untimed)
    assert (lives.is_timed, lives.start, lives.end) == (False, 0, 1)
    assert highest(lives) == 510
