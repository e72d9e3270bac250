"""Five thousand damaged traces and snapshots: each gives a result or one line, in bounded time and memory."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from corpus_files import CORPUS
from fuzz_targets import LONGEST_LINE, outcome
from lightning_memprof.account.snapshot.report import snapshot_report
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.cli.main import main
from lightning_memprof.judge import examine_files
from lightning_memprof.units import GIB, MIB
from mutations import Runs, changed, damaged
from snapshots import MODEL, TRAIN, block, event, failed, freed, segment, snapshot, unused

pytestmark = pytest.mark.slow

ROUNDS = 10
FILES_A_ROUND = {"trace": 150, "snapshot": 350}  # 5,000 together; `make fuzz` tries more
# Of one small file, which takes milliseconds; the machines that run this are slow and busy.
MOST_SECONDS = 5.0
# Every so many of them `show` is asked as well, which takes ten times as long.
SHOWN_EVERY = 50
MOST_BYTES = 128 * MIB


def kineto(kind: str, start: float, length: float, name: str, tid: Any = 7, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": length, "args": args}


def recent_trace() -> dict[str, Any]:
    """A step as torch 2 writes it: data, operators, launches, kernels, a collective, copies, memory."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 1, "args": {"name": "python"}}
    ]
    for step in range(2):
        at = 1000.25 + 500 * step
        events += [
            kineto("user_annotation", at, 480, f"ProfilerStep#{step}"),
            kineto("gpu_user_annotation", at + 9, 400, f"ProfilerStep#{step}", 20),
            kineto("user_annotation", at, 90.125, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"),
            kineto("cpu_op", at + 100, 50, "aten::mm", **{"External id": 5 + step, "Input Dims": [[2, 3], []]}),
            kineto("cuda_runtime", at + 110, 8, "cudaLaunchKernel", correlation=50 + step),
            kineto("kernel", at + 150, 99.5, "volta_sgemm_128x64_nn", 20, correlation=50 + step, stream=20),
            kineto("cuda_runtime", at + 160, 9, "cudaMemcpyAsync", correlation=60 + step),
            kineto("gpu_memcpy", at + 200, 3, "Memcpy HtoD (Pageable -> Device)", 20, correlation=60 + step, bytes=96),
            kineto("cuda_runtime", at + 210, 80, "cudaStreamSynchronize", correlation=70 + step),
            kineto("cuda_runtime", at + 300, 30, "cudaMalloc", correlation=80 + step),
            kineto("cuda_runtime", at + 330, 3, "cudaLaunchKernel", correlation=90 + step),
            kineto(
                "kernel", at + 340, 70, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 24, correlation=90 + step,
                **{"Collective name": "allreduce", "In msg nelems": 9, "dtype": "Float", "Process Group Name": "0"},
            ),
            kineto("overhead", at + 420, 6, "CUPTI Overhead", -1),
            {
                "ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 1, "tid": 7, "ts": at + 105,
                "args": {"Device Type": 1, "Device Id": 0, "Addr": 64, "Bytes": 512, "Total Allocated": 512},
            },
            {"ph": "s", "id": 50 + step, "pid": 1, "tid": 7, "ts": at + 110, "cat": "ac2g", "name": "ac2g"},
        ]  # fmt: skip
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "Fake"}],
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2},
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
        "traceEvents": events,
        "traceName": "a.json",
    }


def first_trace() -> dict[str, Any]:
    """A step as torch 1.8 wrote it, with times since 1970."""
    at = 1_615_000_000_000_000
    return {
        "schemaVersion": 1,
        "traceEvents": [
            kineto("Operator", at, 400, "ProfilerStep#3", "7"),
            kineto("Operator", at + 10, 80, "aten::add", "7", **{"external id": 3}),
            kineto("Runtime", at + 20, 5, "cudaLaunchKernel", "7", **{"external id": 3, "correlation": 3}),
            kineto("Kernel", at + 50, 60, "void add<float>", "stream 7", **{"external id": 3, "correlation": 3}),
            kineto("Memcpy", at + 130, 6, "Memcpy DtoH", "stream 7", bytes=8),
        ],
    }


def snapshots() -> list[Any]:
    """A recent one with two devices and a failed request, a bare list of segments, and one of torch 2.0."""
    ring = [
        event("segment_alloc", 0, 4096),
        event("alloc", 0, 1024, MODEL, TRAIN),
        event("alloc", 1024, 512, MODEL),
        *freed(1024, 512),
        event("segment_map", 8192, 2048),
        event("segment_unmap", 8192, 2048),
        event("free_requested", 0, 1024),
        failed(GIB, 70),
        event("snapshot", 0, 1024),
    ]
    first = segment(block(0, 1024, MODEL, state="active_pending_free"), unused(1024, 3072), segment_pool_id=(0, 1))
    second = segment(block(0, 64, TRAIN), device=1, is_expandable=True, frames=[TRAIN])
    history = [{"addr": 0, "real_size": 90, "frames": [MODEL]}]
    old = {"size": 512, "requested_size": 90, "state": "active_allocated", "history": history}
    oldest = {"device": 0, "address": 64, "total_size": 512, "stream": 0, "segment_type": "small", "blocks": [old]}
    return [
        snapshot([first, second], ring, [event("alloc", 0, 64)]),
        [first, second],
        {"segments": [oldest], "device_traces": [[event("free_completed", 9, 9)]]},
    ]


def recorded_traces() -> Iterator[dict[str, Any]]:
    """A few events of some recorded traces, where they are."""
    for path in sorted((CORPUS / "traces").glob("hta_*/*.json.gz"), key=lambda path: path.stat().st_size)[:3]:
        data = json.loads(gzip.decompress(path.read_bytes()).decode("utf-8", "replace"), strict=False)
        yield {**data, "traceEvents": data["traceEvents"][:12]}


def recorded_snapshots() -> Iterator[dict[str, Any]]:
    """The first segments and the last events of a recorded snapshot, where it is."""
    for path in sorted((CORPUS / "snapshots").glob("*silmont/*.pickle.gz")):
        data = pickle.loads(gzip.decompress(path.read_bytes()))  # noqa: S301 builtin containers only, as its README says
        yield {**data, "segments": data["segments"][:1], "device_traces": [data["device_traces"][0][-5:]]}


def damaged_trace(seeds: list[dict[str, Any]], chance: random.Random) -> bytes:
    data = chance.choice(seeds)
    if chance.random() < 0.6:
        data = changed(data, chance)
    content = json.dumps(data, indent=chance.choice((None, 1)), default=repr).encode()
    return compressed(content, chance)


def damaged_snapshot(seeds: list[Any], chance: random.Random) -> bytes:
    data = chance.choice(seeds)
    if chance.random() < 0.6:
        data = changed(data, chance)
    if chance.random() < 0.03:
        data = [data, Runs()]
    content = pickle.dumps(data, chance.choice((0, 2, 4, 4, 4, 5)))
    return compressed(content, chance)


def compressed(content: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.5:
        content = damaged(content, chance)
    if chance.random() < 0.3:
        content = gzip.compress(content, 1)
        if chance.random() < 0.5:
            content = damaged(content, chance)
    return content


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


def read_trace(path: Path) -> None:
    examine_files([trace_report(path)], [])


def read_snapshot(path: Path) -> None:
    report = snapshot_report(path)
    for device in report.devices:
        assert sum(line.bytes for line in device.lines_at_peak) == device.peak_requested_bytes
    examine_files([], [report])


def show(path: Path, refusal: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command as a person gives it: a page and nothing else, or one line on stderr and nothing else."""
    exit_code = main(["show", os.fspath(path)])
    printed = capsys.readouterr()
    if not refusal:
        assert (exit_code, printed.err) == (0, "")
        assert printed.out
        return
    assert (exit_code, printed.out) == (1, "")
    (line,) = printed.err.splitlines()
    assert line.startswith("lightning-memprof: error: ")
    assert len(line) < LONGEST_LINE


@pytest.mark.parametrize("number", range(ROUNDS))
@pytest.mark.parametrize("kind", ["trace", "snapshot"])
def test_damaged_files_give_a_result_or_one_line(tmp_path, capsys, kind, number):
    chance = random.Random(number)
    traces, held = [recent_trace(), first_trace(), *recorded_traces()], [*snapshots(), *recorded_snapshots()]
    path = tmp_path / ("a.json" if kind == "trace" else "a.pickle")
    refused = 0
    for at in range(FILES_A_ROUND[kind]):
        content = damaged_trace(traces, chance) if kind == "trace" else damaged_snapshot(held, chance)
        path.write_bytes(content)
        try:
            with bounded():
                said = outcome(lambda: (read_trace if kind == "trace" else read_snapshot)(path))
            if at % SHOWN_EVERY == number:
                with bounded():
                    show(path, said, capsys)
        except Exception as error:
            raise AssertionError(f"file {at} of round {number}, left at {path}") from error
        refused += bool(said)
    # Neither is everything refused, so that the analysis is reached, nor is the damage too little to be seen.
    assert 0.1 * FILES_A_ROUND[kind] < refused < 0.95 * FILES_A_ROUND[kind]


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


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_trace_that_means_a_large_one_is_refused_in_bounded_time_and_memory(tmp_path, name):
    path = tmp_path / "a.json.gz"
    path.write_bytes(BOMBS[name])
    with bounded(60):
        assert outcome(lambda: read_trace(path))


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


@pytest.mark.parametrize("name", PICKLES)
def test_a_small_pickle_that_means_a_large_one_is_refused_in_bounded_time_and_memory(tmp_path, name):
    path = tmp_path / "a.pickle"
    path.write_bytes(PICKLES[name])
    with bounded(60):
        assert outcome(lambda: read_snapshot(path))
