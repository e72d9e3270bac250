from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trace_events import OTHER_STREAM, STREAM, call, event, kernel, report


def given(shapes: list[list[int]], types: list[str]) -> dict[str, Any]:
    return {"Input Dims": shapes, "Input type": types}


def test_a_collective_is_known_by_its_arguments_and_by_what_launched_it(tmp_path):
    told: dict[str, Any] = {
        "Collective name": "allreduce", "In msg nelems": 256, "dtype": "Float", "Process Group Name": "dp",
    }  # fmt: skip
    found = report(
        tmp_path,
        event("kernel", "ncclDevKernel_Generic", 0, 10, STREAM, **told),
        event("user_annotation", "nccl:_all_gather_base", 20, 25, **given([[8, 4]], ["float"])),
        call(21, 22, 5),
        kernel(30, 50, 5, OTHER_STREAM, name="ncclDevKernel_Generic"),
        kernel(40, 45),
        event("user_annotation", "gloo:broadcast", 60, 90, 31, **given([[2]], ["double"])),
        event("cpu_op", "aten::mm", 70, 80),
    )
    assert [(each.name, each.group, each.bytes_each, each.exposed_ns) for each in found.collectives] == [
        ("broadcast", "", 16, 20_000),
        ("all_gather", "", 128, 15_000),
        ("all_reduce", "dp", 1024, 10_000),
    ]


@pytest.mark.parametrize(
    ("collective", "elements", "ranks", "of_the_whole"),
    [
        ("allreduce", (1000, 1000), 4, 2 * 3 / 4),
        ("_allgather_base", (250, 1000), 4, 3 / 4),
        ("_reduce_scatter_base", (1000, 250), 4, 3 / 4),
        ("alltoall_base", (1000, 1000), 8, 7 / 8),
        ("broadcast", (1000, 1000), 4, None),
        ("allreduce", (1000, 1000), 1, None),
        ("allreduce", (1000, 1000), None, None),
    ],
)
def test_the_bus_bandwidth_is_that_of_the_fastest_and_of_the_whole_tensor(
    tmp_path: Path, collective: str, elements: tuple[int, int], ranks: int | None, of_the_whole: float | None
) -> None:
    sent, received = elements
    told: dict[str, Any] = {
        "Collective name": collective, "In msg nelems": sent, "Out msg nelems": received, "dtype": "Float",
        "Process Group Name": "dp", "Group size": ranks,
    }  # fmt: skip
    kernels = [event("kernel", "ncclDevKernel", start, end, STREAM, **told) for start, end in ((0, 10), (20, 50))]
    (found,) = report(tmp_path, *kernels).collectives
    assert found.bytes_each == 4000
    # 4,000 bytes in 10 µs
    assert found.bus_bytes_per_s == (None if of_the_whole is None else pytest.approx(4e8 * of_the_whole))


def test_the_median_of_two_collectives_lies_between_them(tmp_path):
    told: dict[str, Any] = {"Collective name": "allreduce", "In msg nelems": 256, "dtype": "Float"}
    kernels = [event("kernel", "ncclDevKernel", start, end, STREAM, **told) for start, end in ((0, 10), (20, 50))]
    assert [(each.count, each.median_ns) for each in report(tmp_path, *kernels).collectives] == [(2, 20_000)]


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        ("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 8>(c10::BFloat16*)", "all_reduce"),
        ("void <unnamed>::two_shot_all_reduce_kernel<float>(float*)", "all_reduce"),
        ("void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*)", "all_reduce"),
        ("void tensorrt_llm::kernels::allreduce_fusion_kernel_oneshot_lamport<1>(int)", "all_reduce"),
        ("ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs*)", "all_gather"),
        ("oneccl_allreduce_large_kernel", "all_reduce"),
        ("hcom_allReduce__123_0_1", "all_reduce"),
    ],
)
def test_collectives_of_any_library_are_known_by_their_kernels(name, collective, tmp_path):
    found = report(tmp_path, kernel(0, 10, name=name))
    assert found.kernels[0].kind == "communication"
    assert [row.name for row in found.collectives] == [collective]
