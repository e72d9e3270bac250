"""Collectives of traces as torch writes them with gloo and with NCCL."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lightning_memprof.read.trace.communication import collectives

BASE_NS = 1_790_857_026_000_000_000


def event(cat: str, name: str, ts: float, dur: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 2, "ts": ts, "dur": dur, "args": {}, **more}


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    text = json.dumps({"schemaVersion": 1, "traceEvents": events, "baseTimeNanoseconds": BASE_NS})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def shaped(*dims: int, kind: str = "float") -> dict[str, Any]:
    return {"Input Dims": [list(dims)], "Input type": [kind]}


def test_gloos_spans_are_collectives_with_their_unix_times_and_sizes(tmp_path: Path) -> None:
    trace = write(
        tmp_path / "a.json.gz",
        [
            event("user_annotation", "gloo:all_reduce", 1000.5, 20.25, args=shaped(3, 4)),
            event("cpu_op", "aten::mul", 1001, 2),
            event("user_annotation", "gloo:broadcast", 1500, 5, args=shaped(3, kind="long int")),
            event("user_annotation", "gloo:all_reduce", 2000, 10, args=shaped(3, 4)),
            event("user_annotation", "gloo:send", 2100, 10, args=shaped(3, 4)),
        ],
    )
    first, second, third = collectives(trace)
    assert (first.name, first.bytes, first.sequence, first.device) == ("all_reduce", 48, 0, "host")
    assert (first.start_ns, first.end_ns) == (BASE_NS + 1_000_500, BASE_NS + 1_020_750)
    assert (second.name, second.bytes, second.sequence) == ("broadcast", 24, 0)
    assert (third.kind, third.sequence, third.duration_ns) == (first.kind, 1, 10_000)


def test_without_shapes_the_size_is_not_known(tmp_path: Path) -> None:
    (collective,) = collectives(write(tmp_path / "a.json", [event("user_annotation", "gloo:barrier", 1, 2)]))
    assert collective.bytes is None


def test_a_kernel_of_nccl_is_named_by_its_own_arguments(tmp_path: Path) -> None:
    args = {"Collective name": "_allgather_base", "In msg nelems": 100, "dtype": "BFloat16", "Process Group Name": "7"}
    trace = write(tmp_path / "a.json", [event("kernel", "ncclDevKernel_AllGather_RING_LL(x)", 10, 5, args=args)])
    (collective,) = collectives(trace)
    assert (collective.name, collective.group, collective.bytes, collective.device) == ("all_gather", "7", 200, "cuda")


@pytest.mark.parametrize(("numbers", "expected"), [((7, 8, 11), [7, 8, 11]), ((7, 7, 8), [0, 1, 2]), ((), [0, 1, 2])])
def test_a_collective_has_its_groups_number_where_each_has_one_of_its_own(
    tmp_path: Path, numbers: tuple[int, ...], expected: list[int]
) -> None:
    args = {"Collective name": "allreduce", "In msg nelems": 100, "dtype": "Float", "Process Group Name": "0"}
    given = [{**args, "Seq": number} for number in numbers] or [args] * 3
    kernels = [
        event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 10 * at, 5, args=each)
        for at, each in enumerate(given)
    ]
    trace = write(tmp_path / "a.json", kernels)
    assert [collective.sequence for collective in collectives(trace)] == expected


def test_a_kernel_without_arguments_is_named_by_the_annotation_on_its_stream(tmp_path: Path) -> None:
    stream = {"pid": 0, "tid": 21}
    call = {"Process Group Name": "3", "Collective name": "allreduce"}
    trace = write(
        tmp_path / "a.json",
        [
            event("cpu_op", "record_param_comms", 100, 50, args=call),
            event("user_annotation", "nccl:all_reduce", 110, 20, args={"External id": 9, **shaped(10)}),
            event("kernel", "ncclDevKernel_Generic(args)", 300, 70, **stream),
            event("gpu_user_annotation", "nccl:all_reduce", 300, 70, args={"External id": 9}, **stream),
            event("user_annotation", "nccl:broadcast", 500, 20, args=shaped(10)),
        ],
    )  # fmt: skip
    (collective,) = collectives(trace)
    assert (collective.name, collective.group, collective.bytes, collective.start_ns - BASE_NS) == (
        "all_reduce",
        "3",
        40,
        300_000,
    )


@pytest.mark.parametrize("launched", ["nccl:all_to_all", "nccl:send"])
def test_sends_are_an_all_to_all_only_where_the_program_sends_nothing_else(tmp_path: Path, launched: str) -> None:
    kernel = event("kernel", "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(x)", 300, 70)
    trace = write(tmp_path / "a.json", [event("user_annotation", launched, 1, 2), kernel])
    assert [collective.name for collective in collectives(trace)] == (
        ["all_to_all"] if "all_to_all" in launched else []
    )


def test_an_event_is_found_across_the_pieces_in_which_a_trace_is_read(tmp_path: Path) -> None:
    filler = [event("cpu_op", "aten::" + "x" * 300, at, 1) for at in range(3000)]
    ours = [event("user_annotation", "gloo:all_reduce", 5000 + at, 1, args=shaped(8)) for at in range(300)]
    mixed = [event for pair in zip(filler, ours * 10, strict=True) for event in pair]
    assert len(collectives(write(tmp_path / "a.json.gz", mixed))) == 3000


def test_arguments_may_stand_before_the_name_and_names_in_text_are_no_events(tmp_path: Path) -> None:
    ours = {"args": shaped(8), "cat": "user_annotation", "dur": 1, "name": "gloo:all_reduce", "ph": "X", "pid": 1,
            "tid": 1, "ts": 1}  # fmt: skip
    quoted = event("python_function", 'x("gloo:all_reduce")', 1, 1, args={"stack": '{"ph": "gloo:barrier"}'})
    assert len(collectives(write(tmp_path / "a.json", [ours, quoted]))) == 1
