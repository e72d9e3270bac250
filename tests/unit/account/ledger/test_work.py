"""Arithmetic and memory traffic of operators in closed form, and what of a trace it is counted for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kineto import write_trace
from lightning_memprof.account.ledger.work import work_of
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.read.trace.columns import Inputs


def inputs(name: str, dims: list[Any], dtype: str = "float", values: list[str] | None = None) -> Inputs:
    types = [dtype if each else "Scalar" for each in dims]
    return Inputs(
        f"aten::{name}", *(json.dumps(each).encode() if each is not None else b"" for each in (dims, types, values))
    )


@pytest.mark.parametrize(
    ("given", "flops", "moved"),
    [
        (inputs("mm", [[2, 3], [3, 5]]), 2 * 2 * 3 * 5, 4 * (6 + 15 + 10)),
        (inputs("addmm", [[5], [2, 3], [3, 5], [], []], "c10::Half"), 60, 2 * (6 + 15 + 10)),
        (inputs("bmm", [[7, 2, 3], [7, 3, 5]], "double"), 7 * 60, 8 * 7 * 31),
        (
            inputs(
                "cudnn_convolution",
                [[8, 3, 32, 32], [16, 3, 3, 3], [], [], [], []],
                values=["", "", "[1, 1]", "[2, 2]", "[1, 1]", "1"],
            ),
            2 * 8 * 16 * 16 * 16 * 3 * 9,
            4 * (8 * 3 * 32 * 32 + 16 * 27 + 8 * 16 * 16 * 16),
        ),
        (
            inputs(
                "convolution_backward",
                [[8, 16, 16, 16], [8, 3, 32, 32], [16, 3, 3, 3], [], [], [], [], [], [], [], []],
                values=[""] * 10 + ["[False, True, False]"],
            ),
            2 * 8 * 16 * 16 * 16 * 27,
            4 * (8 * 16 * 256 + 2 * 8 * 3 * 1024 + 16 * 27),
        ),
        (
            inputs("_flash_attention_forward", [[2, 64, 4, 16], [2, 32, 4, 16], [2, 32, 4, 16]], "c10::BFloat16"),
            2 * 2 * 2 * 4 * 64 * 32 * 16,
            2 * (2 * 64 * 64 * 2 + 2 * 2 * 32 * 64),
        ),
        (inputs("add", [[8, 1, 4], [3, 4], []]), 0, 4 * (32 + 12 + 96)),
        (inputs("cudnn_batch_norm", [[8, 3, 5, 5], [3], [3], [3], [3], []]), 0, 4 * (600 + 12 + 600)),
        (inputs("sum", [[100, 10]]), 0, 4_000),
    ],
)
def test_the_work_of_an_operator_is_that_of_its_inputs(given: Inputs, flops: int, moved: int) -> None:
    work = work_of(given)
    assert work is not None
    assert (work.flops, work.bytes) == (flops, moved)


@pytest.mark.parametrize(
    "given",
    [
        inputs("mm", [[2], []]),
        inputs("mm", []),
        inputs("cudnn_convolution", [[8, 3, 32, 32], [16, 3, 3, 3]]),
        inputs("convolution_backward", [[8, 16, 16, 16], [8, 3, 32, 32], [16, 3, 3, 3]]),
        inputs("_flash_attention_forward", [[128, 4, 16], [128, 4, 16], [128, 4, 16]]),
        inputs("add", [[8, 4]], "QuantizedThing"),
        Inputs("aten::mm", b"[[2, 3", b"", b""),
    ],
)
def test_work_that_the_inputs_do_not_tell_is_unknown(given: Inputs) -> None:
    assert work_of(given) is None


MM = {"Input Dims": [[64, 32], [32, 64]], "Input type": ["float", "float"]}


def test_the_work_of_a_device_has_the_time_of_its_kernels(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [{"cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 1_000}]
    for call in range(3):
        at = 100 * call
        events += [
            {"cat": "cpu_op", "name": "aten::linear", "ts": at, "dur": 30},
            {"cat": "cpu_op", "name": "aten::mm", "ts": at + 1, "dur": 20, "args": MM},
            {
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "ts": at + 2,
                "dur": 3,
                "args": {"correlation": call + 1},
            },
            {"cat": "kernel", "name": "gemm", "ts": at + 40, "dur": 50, "tid": 7, "args": {"correlation": call + 1}},
        ]
    plain = [{"ph": "X", "pid": 1, "tid": 1, **event} for event in events]
    report = trace_report(write_trace(tmp_path / "trace.json", plain))
    assert report.device_ledger is not None
    (work,) = report.device_ledger.work
    assert (work.operator, work.shapes, work.dtype, work.count) == ("aten::mm", "64x32 and 32x64", "float32", 3)
    assert work.ns == 150_000
    assert work.flops == 3 * 2 * 64 * 32 * 64


def test_the_work_of_a_host_has_the_time_of_the_operator_with_what_it_calls(tmp_path: Path) -> None:
    events = [
        {"cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 1_000},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 100, "dur": 300, "args": MM},
        {"cat": "cpu_op", "name": "aten::resolve_conj", "ts": 150, "dur": 50},
        {"cat": "cpu_op", "name": "aten::view", "ts": 500, "dur": 50, "args": {"Input Dims": [[64, 32]]}},
    ]
    plain = [{"ph": "X", "pid": 1, "tid": 1, **event} for event in events]
    report = trace_report(write_trace(tmp_path / "trace.json", plain))
    assert report.host_ledger is not None
    (work,) = report.host_ledger.work
    assert (work.part, work.ns, work.count) == ("forward", 300_000, 1)
    assert work.bytes == 4 * (2 * 64 * 32 + 64 * 64)
