"""Buffers of kernels, as torch's own launch code asked for them with an A100's properties."""

from __future__ import annotations

import pytest
import torch

from lightning_memprof.analysis.estimate import DEVICES
from lightning_memprof.estimation.kernels import kernel_buffers

THREADS = DEVICES["NVIDIA A100 40GB"].resident_threads


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (1024, 512, [4_194_304, 16]),
        (1024, 1536, [12_582_912, 48]),
        (1024, 2048, [16_777_216, 64]),
        (2048, 512, [8_388_608, 16]),
        (2048, 2048, [33_554_432, 64]),
        (256, 512, []),
    ],
)
def test_a_sum_over_rows_that_blocks_of_threads_share_has_partial_results(
    rows: int, columns: int, expected: list[int]
) -> None:
    data = torch.empty(rows, columns, device="meta")
    found = kernel_buffers("aten.sum.dim_IntList", (data, [0], True), data.sum(0, keepdim=True), THREADS)
    assert [buffer.size for buffer in found] == expected


def test_more_blocks_than_run_at_once_are_not_used() -> None:
    data = torch.empty(1 << 16, 512, device="meta")
    sizes = {
        name: [buffer.size for buffer in kernel_buffers("aten.sum.dim_IntList", (data, [0]), data.sum(0), device)]
        for name, device in (("large", THREADS), ("small", 28 * 1536))
    }
    assert sizes == {"large": [4 * 512 * 128 * 432, 16], "small": [4 * 512 * 128 * 84, 16]}


def test_a_convolution_may_need_copies_and_other_operators_need_nothing() -> None:
    data = torch.empty(2, 3, 8, 8, device="meta")
    arguments = (data, None, None, 1, 0, 1, False, 0, 1)
    (buffer,) = kernel_buffers("aten.convolution.default", arguments, data, THREADS)
    assert (buffer.size, buffer.is_optional) == (2 * data.nbytes, True)
    assert list(kernel_buffers("aten.mm.default", (data, data), data, THREADS)) == []
