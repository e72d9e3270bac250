"""Buffers of kernels, as torch's own launch code asked for them with an A100's properties."""

from __future__ import annotations

import multiprocessing
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import profile
from torch.utils._pytree import tree_leaves

from lightning_memprof.account.estimate import DEVICES
from lightning_memprof.estimation.kernels import kernel_buffers, likely_result
from lightning_memprof.estimation.simulated_device import _FLOAT, _FLOAT_RESULT, _LOWER, _WIDEST, Target
from lightning_memprof.estimation.storages import StorageTracer

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
    arguments = (data, torch.empty(3, 3, 1, 1, device="meta"), None, 1, 0, 1, False, 0, 1)
    (buffer,) = kernel_buffers("aten.convolution.default", arguments, data, THREADS)
    assert (buffer.size, buffer.is_optional) == (2 * data.nbytes, True)
    assert list(kernel_buffers("aten.mm.default", (data, data), data, THREADS)) == []


def _in_child(function: Callable[[str], Any], name: str) -> Any:
    """Call a function where autograd's threads do not keep this process from forking."""
    with multiprocessing.get_context("fork").Pool(1, torch.autograd.set_multithreading_enabled, (False,)) as pool:
        return pool.apply(function, (name,))


def _convolved(last: str) -> tuple[list[bool], list[int], list[int]]:
    target = Target()
    with target.simulated() as device, StorageTracer(device, target) as tracer:
        data = torch.empty(2, 8, 16, 16, device=device, requires_grad=True)
        weight = torch.empty(8, 8, 3, 3, device=device, requires_grad=True)
        given = {"data": data, "weight": weight}
        given[last] = given[last].to(memory_format=torch.channels_last)
        before = len(tracer.log.requests)
        made = functional.conv2d(given["data"], given["weight"])
        requests = list(tracer.log.requests.events)[before:]
        gradients = torch.autograd.grad(made.sum(), list(given.values()))
    other = {"data": weight, "weight": data}[last]
    are_last = [tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (made, *gradients)]
    return are_last, requests[:2], [made.nbytes, other.nbytes]


@pytest.mark.parametrize("last", ["data", "weight"])
def test_a_convolution_of_channels_last_gives_channels_last_and_copies_the_other_operand(last: str) -> None:
    are_last, requests, expected = _in_child(_convolved, last)
    assert all(are_last)
    assert requests == expected


def _read(name: str) -> int:
    target = Target()
    with target.simulated() as device, StorageTracer(device, target) as tracer:
        data = torch.empty(64, 32, device=device)
        before = len(tracer.log.requests)
        if name == "layer_norm":
            functional.layer_norm(data.t(), (64,))
        else:
            functional.log_softmax(data.t(), 1)
        return list(tracer.log.requests.events)[before:].count(data.nbytes)


@pytest.mark.parametrize("name", ["layer_norm", "log_softmax"])
def test_kernels_that_read_contiguous_tensors_copy_others(name: str) -> None:
    assert _in_child(_read, name) == 2


def _normed(is_cast: str) -> tuple[torch.dtype, int]:
    """Return the dtype of an RMS norm under autocast, and how many tensors of 32-bit numbers it made of its input."""
    operator: Any = torch.ops.aten.rms_norm.default
    operator.has_kernel_for_dispatch_key = lambda _key: bool(is_cast)
    target = Target()
    with target.simulated() as device, StorageTracer(device, target) as tracer:
        data = torch.empty(64, 32, device=device, dtype=torch.bfloat16)
        before = len(tracer.log.requests)
        with torch.autocast(device.type, torch.bfloat16):
            made = functional.rms_norm(data, (32,))
        return made.dtype, list(tracer.log.requests.events)[before:].count(2 * data.nbytes)


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_fused_rms_norm"), reason="this torch has no fused RMS norm")
@pytest.mark.parametrize(("is_cast", "expected"), [("since torch 2.12", (torch.float32, 2)), ("", (torch.bfloat16, 0))])
def test_autocast_casts_the_operators_that_the_installed_torch_casts_on_cuda(
    is_cast: str, expected: tuple[torch.dtype, int]
) -> None:
    assert _in_child(_normed, is_cast) == expected


def _sampled(mode: str) -> tuple[torch.dtype, torch.dtype]:
    with Target().simulated() as device, torch.autocast(device.type, torch.bfloat16):
        image = torch.empty(2, 3, 16, 16, device=device, dtype=torch.bfloat16)
        moved = functional.grid_sample(image, torch.empty(2, 8, 8, 2, device=device), align_corners=False)
        return moved.dtype, functional.interpolate(image, scale_factor=2, mode=mode).dtype


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear"])
def test_autocast_samples_images_in_32_bits(mode: str) -> None:
    assert _in_child(_sampled, mode) == (torch.float32, torch.float32)


def test_autocast_has_the_lists_of_the_installed_torch() -> None:
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    lists = {"LOWER_PRECISION_FP": _LOWER, "FP32": _FLOAT, "FP32_SET_OPT_DTYPE": _FLOAT_RESULT, "PROMOTE": _WIDEST}
    missing = {}
    for name, ours in lists.items():
        body = header.partition(f"#define AT_FORALL_{name}(_)")[2].partition("\n\n")[0]
        theirs = set(re.findall(r"_\((\w+)", body))
        assert theirs
        missing[name] = theirs - {*ours, "softmax", "log_softmax"}
    assert not any(missing.values()), missing


def test_backward_of_attention_has_buffers():
    query = torch.empty(8, 8, 256, 64, device="meta", dtype=torch.bfloat16)
    name = "aten._scaled_dot_product_flash_attention_backward.default"
    result = torch.empty(8, 256, 8, 64, device="meta", dtype=torch.bfloat16).transpose(1, 2)
    for gradient, copies in ((result, []), (query, [query.nbytes])):
        flash = kernel_buffers(name, (gradient, query, query, query, result), None, THREADS)
        assert [buffer.size for buffer in flash] == [*copies, 65_536, 4_194_304]
    query = query.float()
    arguments = (query, query, query, query, None, query)
    efficient = list(
        kernel_buffers("aten._scaled_dot_product_efficient_attention_backward.default", arguments, None, THREADS)
    )
    assert [(buffer.size, buffer.is_brief) for buffer in efficient] == [
        (4_194_304, True),
        (65_536, True),
        (65_536, False),
        (4_198_400, False),
    ]


def _residual(values: Tensor) -> Tensor:
    first, second = values * 2, values * 3
    return first + second + first.exp()


INDEX = torch.tensor([0, 2, 1])
GRAPHS = {
    "gradients from several consumers": lambda values: values.sin() + values.cos() + values.exp(),
    "a gradient that goes to two places": _residual,
    "an expanded gradient": lambda values: values.sum(0) + values.mean(0),
    "an expanded gradient first": lambda values: values.mean(0) + values.sum(0),
    "index": lambda values: values[INDEX.to(values.device)],
    "index_select": lambda values: values.index_select(0, INDEX.to(values.device)),
    "gather": lambda values: values.gather(0, INDEX.to(values.device)[:, None]),
    "max": lambda values: values.max(0)[0],
    "topk": lambda values: values.topk(2, 0)[0],
    "loss": lambda values: functional.binary_cross_entropy_with_logits(values, torch.zeros_like(values)),
    "loss with weights": lambda values: functional.binary_cross_entropy_with_logits(
        values, torch.zeros_like(values), pos_weight=torch.ones(4, device=values.device)
    ),
    "a double backward": lambda values: torch.autograd.grad(_residual(values).sum(), values, create_graph=True)[0],
}
NAMES = ("add", "sub", "mul", "index_put", "index_add", "scatter", "scatter_add")


def _real(graph: Callable[[Tensor], Tensor]) -> Counter[str]:
    loss = graph(torch.rand(6, 4, requires_grad=True)).sum()
    with profile() as recorded:
        loss.backward()
    return Counter(event.name.removeprefix("aten::") for event in recorded.events())


def _simulated(name: str) -> Counter[str]:
    target, graph = Target(), GRAPHS[name]
    with target.simulated() as device, StorageTracer(device, target) as tracer:
        loss = graph(torch.empty(6, 4, device=device, requires_grad=True)).sum()
        first = len(tracer.log.sizes)
        loss.backward()
        made = range(first, len(tracer.log.sizes))
        return Counter(tracer.log.label(number, "operator", 0).split(".")[1] for number in made)


@pytest.mark.slow
def test_backward_adds_and_writes_in_place_where_torch_does():
    with multiprocessing.get_context("fork").Pool(1, torch.autograd.set_multithreading_enabled, (False,)) as pool:
        for name, graph in GRAPHS.items():
            found, expected = pool.apply(_simulated, (name,)), _real(graph)
            counts = {operator: (found[operator], expected[operator]) for operator in NAMES}
            assert all(ours == torchs for ours, torchs in counts.values()), (name, counts)


@pytest.mark.parametrize(
    ("name", "count"),
    [("aten.mse_loss.default", 1), ("aten._softmax_backward_data.default", 1), ("aten.gelu_backward.default", 0)],
)
def test_some_kernels_have_buffers_of_the_size_of_their_input(name: str, count: int) -> None:
    data = torch.empty(16, 512, device="meta")
    found = list(kernel_buffers(name, (data, data), data, THREADS))
    assert [buffer.size for buffer in found] == [data.nbytes] * count


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "loss",
    [
        functional.mse_loss,
        functional.smooth_l1_loss,
        functional.soft_margin_loss,
        functional.binary_cross_entropy,
        functional.l1_loss,
        functional.huber_loss,
        functional.binary_cross_entropy_with_logits,
    ],
    ids=lambda loss: loss.__name__,
)
def test_the_storage_of_a_loss_has_the_bytes_that_torch_gives_it(loss: Callable[..., Tensor], reduction: str) -> None:
    real = loss(torch.rand(8, 32), torch.ones(8, 32), reduction=reduction)
    target = Target(is_gpu=False)
    with target.simulated() as device, StorageTracer(device, target) as tracer:
        data, wanted = torch.empty(8, 32, device=device), torch.empty(8, 32, device=device)
        found = loss(data, wanted, reduction=reduction)
        position = len(tracer.log.requests) - 1
        (number,) = set(tracer.log.peak(position).numbers) - {0, 1}
    assert found.shape == real.shape
    assert tracer.log.sizes[number] == real.untyped_storage().nbytes()


def _storages(name: str) -> int:
    target = Target()
    with target.simulated() as device, StorageTracer(device, target) as tracer:
        values = torch.empty(64, 32, 16, device=device, requires_grad=True)
        weight, bias = torch.empty(8, 32, device=device), torch.empty(8, device=device)
        first = len(tracer.log.sizes)
        if name == "linear":
            functional.linear(values.transpose(1, 2), weight, bias)
        else:
            functional.silu(values).backward(values)
        return len(tracer.log.sizes) - first


# The result and its gradient; the product, to which the bias is added.
@pytest.mark.parametrize(("name", "count"), [("silu", 2), ("linear", 1)])
def test_operators_that_cuda_runs_as_one_kernel_make_one_tensor(name: str, count: int) -> None:
    assert _in_child(_storages, name) == count


ONES = torch.ones(2, 3)
MASK = torch.ones(2, 3, dtype=torch.bool)
CLASSES = torch.tensor([3, 3, 3])


# Of these values the likely sizes are the real ones.
@pytest.mark.parametrize(
    ("operator", "args", "kwargs"),
    [
        (torch.ops.aten.nonzero.default, (ONES,), {}),
        (torch.ops.aten.masked_select.default, (ONES, MASK), {}),
        (torch.ops.aten.masked_select.default, (ONES, MASK[:1]), {}),
        (torch.ops.aten.bincount.default, (CLASSES, None, 4), {}),
        (torch.ops.aten.bincount.default, (CLASSES,), {"minlength": 4}),
        (torch.ops.aten.bincount.default, (CLASSES, torch.ones(3)), {"minlength": 4}),
        (torch.ops.aten.bincount.default, (CLASSES, torch.ones(3, dtype=torch.float64), 4), {}),
        (torch.ops.aten._unique2.default, (ONES,), {}),
        (torch.ops.aten._unique2.default, (ONES, True, True, True), {}),
        (torch.ops.aten.unique_consecutive.default, (ONES,), {"return_inverse": True}),
        (torch.ops.aten.index.Tensor, (ONES, [MASK]), {}),
        (torch.ops.aten.index.Tensor, (ONES, [MASK[:, 0], torch.tensor([0, 1])]), {}),
        (torch.ops.aten.index_put.default, (ONES, [None, MASK[0]], torch.zeros(3)), {}),
    ],
)
def test_the_result_has_the_shape_and_dtype_of_torchs(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    likely, real = (
        [(leaf.shape, leaf.dtype) for leaf in tree_leaves(result)]
        for result in (likely_result(operator, args, kwargs), operator(*args, **kwargs))
    )
    assert likely == real


def test_another_operator_has_no_likely_result() -> None:
    assert likely_result(torch.ops.aten.unique_dim.default, (ONES, 0), {}) is None
