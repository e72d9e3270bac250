from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.utils.checkpoint import checkpoint

from fake_runs import make_run
from kineto import write_trace
from known import known
from lightning_memprof import ExtendedPyTorchProfiler, Schedule
from lightning_memprof.account.memory.allocations import device_allocations, run_allocations, window_allocations
from lightning_memprof.account.memory.blocks import replayed_blocks
from lightning_memprof.account.memory.model import DeviceAllocations, Site
from lightning_memprof.account.snapshot.replay import replay
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.run.load import load_run
from lightning_memprof.read.run.model import ArtifactFile, Run
from lightning_memprof.read.snapshot.reader import parse_snapshot
from snapshots import MODEL, event, frame
from training import loader, trainer

WIDTH = 512


class Wide(pl.LightningModule):
    """Layers whose outputs are told apart by their sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(8, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH // 2)
        self.last = nn.Linear(WIDTH // 2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hidden = torch.relu(self.first(batch))
        return self.last(self.half(hidden)).square().mean()

    def half(self, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.second, hidden, use_reentrant=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def record(directory: Path, **options: Any) -> Path:
    schedule = Schedule(wait=1, warmup=1, active=2, repeat=1)
    profiler = ExtendedPyTorchProfiler(schedule=schedule, profile_memory=True, record_shapes=True, **options)
    fit = trainer(directory, profiler=profiler)
    fit.fit(Wide(), loader(6))
    return Path(fit.log_dir or "")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("run"), with_stack=True)


@pytest.fixture(scope="module")
def host(recorded: Path) -> DeviceAllocations:
    (window,) = run_allocations(load_run(recorded))
    (device,) = window.devices
    assert (window.rank, window.window, window.problem) == (0, 0, None)
    return device


def raw_events(log_dir: Path) -> list[dict[str, Any]]:
    (trace,) = log_dir.glob("*.pt.trace.json.gz")
    events: list[dict[str, Any]] = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return events


def adds_up(device: DeviceAllocations) -> bool:
    held = sum(site.bytes for site in device.sites) + device.unattributed_bytes
    return held == device.peak_bytes + device.freed_outside_bytes


@pytest.mark.slow
def test_the_peak_of_a_real_run_is_the_most_that_its_events_leave_live(recorded, host):
    live: dict[int, int] = {}
    peak = 0
    for raw in raw_events(recorded):
        if raw["name"] == "[memory]":
            address, count = raw["args"]["Addr"], raw["args"]["Bytes"]
            live[address] = count
            if count < 0:
                del live[address]
            peak = max(peak, sum(live.values()))
    assert host.device == "cpu"
    assert host.start_bytes is None
    assert host.peak_bytes == peak > WIDTH * WIDTH * 2
    assert host.peak_step == 2
    assert adds_up(host)
    assert host.unattributed_bytes < 0.05 * host.peak_bytes


def test_gradients_at_the_peak_belong_to_the_modules_of_their_forwards_and_to_the_lines_of_the_forwards(host):
    (weight,) = [site for site in host.sites if site.bytes == WIDTH * WIDTH // 2 * 4 and site.phase == "backward"]
    assert (weight.operator, weight.module, weight.blocks) == ("aten::mm", "second", 1)
    assert weight.line is not None
    assert weight.line.startswith("test_allocations.py(") or "/test_allocations.py(" in weight.line
    assert weight.line.endswith(": half")
    assert weight.stack[-1].endswith(": <module>") or len(weight.stack) > 10


@pytest.mark.slow
def test_forward_blocks_have_their_module_phase_and_step(recorded):
    device = at_forward(recorded)
    held = {(site.operator, site.module, site.bytes, site.phase, site.step) for site in device.sites}
    assert ("aten::addmm", "second", 4 * WIDTH // 2 * 4, "forward", 2) in held


def at_forward(log_dir: Path) -> DeviceAllocations:
    """The same trace cut where the first backward starts: its peak is in a forward."""
    events = raw_events(log_dir)
    (end, *_) = sorted(event["ts"] for event in events if event["name"].endswith("Strategy.backward"))
    kept = [event for event in events if event["name"] != "[memory]" or event["ts"] < end]
    return window_allocations(write_trace(log_dir / "cut.json.gz", kept))[0]


def test_live_bytes_are_known_at_the_points_of_every_step(host):
    points = [mark.point for mark in host.marks if mark.step == 2]
    assert points == [
        "step_start",
        "batch_start",
        "after_forward",
        "before_backward",
        "after_backward",
        "before_optimizer_step",
        "batch_end",
        "step_end",
    ]
    second, third = host.steps
    assert (second.step, third.step) == (2, 3)
    assert second.start_bytes == 0
    assert third.peak_bytes == host.peak_bytes
    assert third.start_bytes == second.end_bytes > 0  # gradients stay
    after_forward = next(mark for mark in host.marks if mark.point == "after_forward")
    assert 4 * WIDTH * 4 <= after_forward.live_bytes <= second.peak_bytes
    assert second.peak_time_ns == host.peak_time_ns < third.peak_time_ns


def test_a_trace_without_allocations_says_how_to_record_them(tmp_path):
    fit = trainer(tmp_path, profiler=ExtendedPyTorchProfiler(schedule=Schedule(wait=0, warmup=1, active=1)))
    fit.fit(Wide(), loader(3))
    (window,) = run_allocations(load_run(fit.log_dir or ""))
    assert window.devices == ()
    assert window.problem == "the trace has no allocations: record it with profile_memory=True"


@pytest.mark.slow
def test_a_damaged_trace_is_a_problem_of_its_window(tmp_path):
    log_dir = record(tmp_path)
    (trace,) = log_dir.glob("*.pt.trace.json.gz")
    trace.write_bytes(trace.read_bytes()[:-100])
    (window,) = run_allocations(load_run(log_dir))
    assert window.devices == ()
    assert "truncated" in (window.problem or "")


# Traces that are written by hand: times in us.


def span(name: str, start: float, end: float, *, cat: str = "cpu_op", tid: int = 1, **node: int) -> dict[str, Any]:
    """An event; `makes` or `runs` is the sequence number of the autograd node that it makes or runs."""
    args: dict[str, int] = {}
    for word, number in node.items():
        args = {"Sequence number": number, "Fwd thread id": int({"makes": False, "runs": True}[word])}
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": end - start, "args": args}


def memory(time: float, count: int, address: int, *, tid: int = 1, kind: int = 0, total: int = 0) -> dict[str, Any]:
    number = 0 if kind else -1
    args = {"Bytes": count, "Addr": address, "Device Type": kind, "Device Id": number, "Total Allocated": total}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": tid, "ts": time, "args": args}


def devices(directory: Path, *events: dict[str, Any]) -> tuple[DeviceAllocations, ...]:
    found = window_allocations(write_trace(directory / "t.json", list(events), baseTimeNanoseconds=5_000_000))
    assert all(adds_up(device) for device in found)
    return found


def only_site(directory: Path, *events: dict[str, Any]) -> Site:
    ((site,),) = [device.sites for device in devices(directory, *events)]
    return site


def test_bytes_that_no_operator_allocated_are_unattributed(tmp_path):
    (device,) = devices(
        tmp_path, span("aten::mm", 0, 10), memory(5, 64, 8), memory(20, 36, 9), memory(21, 4, 10, tid=2)
    )
    assert [(site.operator, site.bytes) for site in device.sites] == [("aten::mm", 64)]
    assert (device.peak_bytes, device.unattributed_bytes) == (104, 40)
    assert device.peak_time_ns == 5_021_000


def test_a_device_knows_what_lay_there_before_and_what_of_it_was_freed(tmp_path):
    (device,) = devices(
        tmp_path,
        span("aten::mm", 0, 10),
        memory(1, 512, 8, kind=1, total=10_512),
        memory(2, -4096, 9, kind=1, total=6_416),
        memory(3, 8192, 9, kind=1, total=14_608),
    )
    assert (device.device, device.start_bytes) == ("cuda:0", 10_000)
    assert (device.peak_bytes, device.freed_outside_bytes) == (14_608 - 10_000, 4096)
    assert device.curve == ((5_001_000, 512), (5_002_000, -3584), (5_003_000, 4608))


def test_a_device_that_only_frees_had_its_peak_at_the_start(tmp_path):
    (device,) = devices(tmp_path, memory(1, -512, 8, kind=1, total=100))
    assert (device.peak_bytes, device.start_bytes, device.sites, device.peak_time_ns) == (0, 612, (), 5_001_000)


def test_on_the_host_frees_of_blocks_from_before_the_trace_mean_nothing(tmp_path):
    (device,) = devices(tmp_path, memory(1, -512, 8, total=100), memory(2, 16, 9, total=116), memory(3, -16, 9))
    assert (device.start_bytes, device.peak_bytes, device.curve[0][1], device.allocations) == (None, 16, 0, 1)


def test_a_block_whose_free_was_not_seen_ends_where_its_address_is_taken_again(tmp_path):
    (device,) = devices(tmp_path, span("a", 0, 9), memory(1, 100, 8), memory(2, 30, 8), memory(3, 10, 9))
    assert device.peak_bytes == 100
    assert [live for _, live in device.curve] == [100, 30, 40]


def test_every_device_has_its_own_figures_the_host_first(tmp_path):
    found = devices(tmp_path, span("a", 0, 9), memory(1, 100, 8, kind=1), memory(2, 30, 8), memory(3, 10, 9, kind=12))
    assert [(device.device, device.peak_bytes) for device in found] == [("cpu", 30), ("cuda:0", 100), ("xpu:0", 10)]


def test_an_operator_that_only_allocates_stands_for_its_caller(tmp_path):
    events = [span("aten::to", 0, 9), span("aten::_to_copy", 1, 8), span("aten::empty_strided", 2, 4)]
    assert only_site(tmp_path, *events, memory(3, 8, 1)).operator == "aten::_to_copy"
    assert only_site(tmp_path, span("aten::empty", 2, 4), memory(3, 8, 1)).operator == "aten::empty"


def test_a_range_that_the_user_named_is_no_operator(tmp_path):
    (device,) = devices(tmp_path, span("mine", 0, 9, cat="user_annotation"), memory(3, 8, 1))
    assert device.unattributed_bytes == 8


def test_a_python_call_that_ends_inside_a_range_that_it_opened_is_not_around_it(tmp_path):
    site = only_site(
        tmp_path,
        span("train.py(3): step", 0, 100, cat="python_function"),
        span("train.py(9): opens", 1, 10, cat="python_function"),
        span("aten::mm", 5, 90),
        memory(50, 8, 1),
    )
    assert site.stack == ("train.py(3): step",)


def test_a_step_that_outlasts_the_call_around_it_hides_no_call(tmp_path):
    calls = [
        span("loop.py(3): run", 0, 100, cat="python_function"),
        span("loop.py(9): go", 1, 50, cat="python_function"),
    ]
    step = span("ProfilerStep#2", 5, 55, cat="user_annotation")
    site = only_site(tmp_path, *calls, step, span("aten::mm", 10, 20), memory(15, 8, 1))
    assert (site.stack, site.step) == (("loop.py(9): go", "loop.py(3): run"), 2)


def test_the_line_is_the_innermost_of_the_users_own_code(tmp_path):
    stack = ["train.py(3): <module>", "model.py(7): forward", "torch/nn/modules/linear.py(130): forward"]
    frames = [span(text, at, 100 - at, cat="python_function") for at, text in enumerate(stack)]
    builtin = span("<built-in method mm of type object at 0x7f>", 4, 90, cat="python_function")
    site = only_site(tmp_path, *frames, builtin, span("aten::mm", 5, 80), memory(50, 8, 1))
    assert site.line == "model.py(7): forward"
    assert site.stack == tuple(reversed(stack))


def test_a_backward_on_a_thread_of_its_own_belongs_to_the_module_of_its_forward(tmp_path):
    site = only_site(
        tmp_path,
        span("ProfilerStep#7", 0, 100, cat="user_annotation"),
        span("[pl][module]torch.nn.modules.linear.Linear: net.0", 1, 10),
        span("aten::linear", 2, 9, makes=5),
        span("autograd::engine::evaluate_function: MmBackward0", 20, 30, tid=2, runs=5),
        span("MmBackward0", 21, 29, tid=2, runs=5),
        span("aten::mm", 22, 28, tid=2),
        memory(25, 8, 1, tid=2),
    )
    assert (site.operator, site.module, site.phase, site.step) == ("aten::mm", "net.0", "backward", 7)


def test_the_last_operator_that_saw_a_sequence_number_is_the_one_that_took_it(tmp_path):
    site = only_site(
        tmp_path,
        span("aten::detach", 0, 1, makes=5),
        span("[pl][module]a.B: net.1", 2, 10),
        span("aten::mul", 3, 4, makes=5),
        span("autograd::engine::evaluate_function: MulBackward0", 20, 30, runs=5),
        memory(25, 8, 1),
    )
    assert (site.operator, site.module) == ("MulBackward0", "net.1")


def test_numbers_of_a_forward_that_backward_repeats_are_kept_apart(tmp_path):
    """What checkpointing computes again runs on backward's thread, which numbers its nodes from the start."""
    forward = [span("[pl][module]a.B: net.0", 1, 10), span("aten::mm", 2, 3, makes=5)]
    forward += [span("aten::mm", 4 + i / 10, 4.05 + i / 10, makes=6 + i) for i in range(3)]
    recomputed = [span("[pl][module]a.B: net.9", 21, 25, tid=2), span("aten::mm", 22, 23, tid=2, makes=5)]
    nodes = [span(f"autograd::engine::evaluate_function: N{i}", 30 + i, 30.5 + i, tid=2, runs=5 + i) for i in range(3)]
    assert only_site(tmp_path, *forward, *recomputed, *nodes, memory(30.2, 8, 1, tid=2)).module == "net.0"


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "data_wait"),
        ("[pl][profile][Strategy]DDPStrategy.training_step", "forward"),
        ("[pl][profile][Callback]X.on_train_batch_end", "callbacks"),
        ("[pl][profile]run_training_batch", None),
    ],
)
def test_the_phase_is_that_of_the_innermost_range_that_has_one(tmp_path, name, phase):
    site = only_site(tmp_path, span(name, 0, 9, cat="user_annotation"), span("a", 1, 3), memory(2, 8, 1))
    assert (site.phase, site.module, site.step) == (phase, None, None)


def test_blocks_without_addresses_do_not_count(tmp_path):
    (device,) = devices(tmp_path, span("a", 0, 9), memory(1, 100, 0), memory(2, 30, 8), memory(3, -60, 0))
    assert (device.peak_bytes, device.unattributed_bytes, len(device.curve)) == (30, 0, 1)


@pytest.mark.slow
def test_a_curve_of_many_points_keeps_the_peak_the_ends_and_every_large_swing(tmp_path):
    events = [memory(i, -(i % 7) if i % 2 else 1000 * (i % 97), 10_000 + i, kind=1) for i in range(5000)]
    events[2601] = memory(2601, 10**9, 3, kind=1)
    events[2602] = memory(2602, -(10**9), 3, kind=1)
    (device,) = devices(tmp_path, *events)
    assert 300 < len(device.curve) <= 400
    assert [time for time, _ in device.curve] == sorted({time for time, _ in device.curve})
    assert (device.peak_time_ns, device.peak_bytes) in device.curve
    assert (device.curve[0][0], device.curve[-1][0]) == (5_000_000, 5_000_000 + 4999_000)
    lowest = min(live for _, live in device.curve)
    assert lowest <= 0


def test_numbers_that_no_memory_has_are_no_crash(tmp_path):
    path = write_trace(
        tmp_path / "t.json",
        [
            memory(1, 10**30, 2**70),
            memory(2, 5, -3),
            span("a", 0, 3, runs=2**64 - 1),
        ],
    )
    (device,) = window_allocations(path)
    assert device.peak_bytes == 5


@pytest.mark.parametrize("number", [1e308, 10**30, -(10**400), 10**400, "1e999", "NaN"])
@pytest.mark.parametrize("key", ["ts", "dur"])
def test_times_that_no_trace_has_are_no_crash(tmp_path, key, number):
    path = write_trace(
        tmp_path / "t.json",
        [{**span("a", 0, 3), key: number}, span(f"ProfilerStep#{'9' * 5000}", 0, 9), memory(1, 5, 8)],
    )
    (device,) = window_allocations(path)
    assert device.peak_bytes == 5


def test_a_trace_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match="no such file"):
        window_allocations(tmp_path / "t.json")


NODE = frame("??", "torch::autograd::generated::MmBackward0::apply(int)", 0)


def history(start_us: int = 0) -> dict[str, Any]:
    """1000 bytes are live at the start and are freed; the peak is at the third allocation, 2100 bytes."""
    events = [
        event("alloc", 8192, 700, MODEL, time_us=10),
        event("free_requested", 4096, 1000, time_us=20),
        event("free_completed", 4096, 1000, time_us=20),
        event("alloc", 4096, 1300, NODE, time_us=30),
        event("alloc", 16384, 100, time_us=40),
        event("free_requested", 4096, 1300, time_us=50),
        event("free_completed", 4096, 1300, time_us=50),
    ]
    blocks = [
        {"address": 8192, "size": 1024, "requested_size": 700, "state": "active_allocated", "frames": [MODEL]},
        {"address": 16384, "size": 512, "requested_size": 100, "state": "active_allocated", "frames": []},
    ]
    segment = {"device": 0, "address": 0, "total_size": 32768, "stream": 0, "blocks": blocks}
    timed = [{**each, "time_us": each["time_us"] + start_us} for each in events]
    return {"segments": [segment], "device_traces": [timed]}


def test_a_recorded_history_has_allocations_relative_to_the_bytes_at_its_start():
    blocks = replayed_blocks(replay(parse_snapshot(history(), "it")))
    found = device_allocations(blocks, [(5_000, 25_000, 2), (26_000, 45_000, 3)])
    assert (found.device, found.start_bytes, found.peak_bytes) == ("cuda:0", 1000, 1100)
    assert (found.peak_time_ns, found.peak_step, found.allocations) == (40_000, 3, 3)
    assert [(site.operator, site.line, site.step, site.bytes) for site in found.sites] == [
        ("MmBackward0", None, 3, 1300),
        ("alloc", "/home/a/model.py(7): forward", 2, 700),
    ]
    assert (found.unattributed_bytes, found.freed_outside_bytes) == (100, 1000)
    held = sum(site.bytes for site in found.sites) + found.unattributed_bytes
    assert held == found.peak_bytes + found.freed_outside_bytes
    assert [live for _, live in found.curve] == [700, 700, -300, 1000, 1100, 1100, -200]


def test_steps_that_the_history_covers_have_their_peaks():
    blocks = replayed_blocks(replay(parse_snapshot(history(), "it")))
    found = device_allocations(blocks, [(5_000, 25_000, 2), (26_000, 45_000, 3), (46_000, 99_000, 4)])
    (step,) = found.steps
    assert (step.step, step.start_bytes, step.peak_bytes, step.peak_time_ns, step.end_bytes) == (
        3, -300, 1100, 40_000, 1100,
    )  # fmt: skip


def run_with(directory: Path, content: bytes) -> Run:
    run = load_run(make_run(directory))
    path = run.directory / "cuda_alloc_rank_0.training_step.3.end.pickle"
    path.write_bytes(content)
    artifact = ArtifactFile(0, "allocator_history", "snapshot", path.name, path, 0, len(content))
    others = tuple(artifact for artifact in run.artifacts if artifact.type != "trace")
    return replace(run, artifacts=(*others, artifact))


def test_the_snapshot_of_a_window_is_read_where_its_trace_has_no_cuda_memory(tmp_path):
    directory = make_run(tmp_path)
    (rank,) = load_run(directory).ranks
    start_ns = known(rank.pulse[2]["start_ns"])
    (window,) = run_allocations(run_with(tmp_path / "other", pickle.dumps(history(start_ns // 1000), 4)))
    (device,) = window.devices
    assert (window.rank, window.window, window.problem) == (0, 0, None)
    assert (device.peak_bytes, device.peak_step) == (1100, 2)


@pytest.mark.parametrize(
    ("data", "words"),
    [([], "no events"), ({"segments": [], "device_traces": [[]]}, "no events"), (3, "has no segments")],
)
def test_a_snapshot_without_events_is_a_problem_of_its_window(tmp_path, data, words):
    (window,) = run_allocations(run_with(tmp_path, pickle.dumps(data, 4)))
    assert window.devices == ()
    assert words in (window.problem or "")
