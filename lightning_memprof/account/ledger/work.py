"""Arithmetic and memory traffic of operators, from their recorded inputs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

import msgspec
import numpy as np

from lightning_memprof.account.ledger.model import OperatorWork
from lightning_memprof.account.ledger.table import Table, joined, summed
from lightning_memprof.account.parts import PARTS
from lightning_memprof.read.trace.columns import Inputs, TraceColumns, item_bytes

_DTYPES: Final = {"double": "float64", "float": "float32", "c10::BFloat16": "bfloat16", "c10::Half": "float16"}
# Positions of padding, stride and dilation among the inputs of a convolution.
_CONVOLUTIONS: Final = {"cudnn_convolution": 2, "miopen_convolution": 3, "mkldnn_convolution": 3}
# Position of the queries among the inputs of attention, the dimension of the sequence, and the number of products of
# matrices: two in forward, five in backward, as torch.utils.flop_counter counts them. A causal mask saves up to half.
_ATTENTION: Final = {
    "_flash_attention_forward": (0, 1, 2),
    "_efficient_attention_forward": (0, 1, 2),
    "_scaled_dot_product_flash_attention_for_cpu": (0, 2, 2),
    "_flash_attention_backward": (1, 1, 5),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (1, 2, 5),
}
# Batch, sequence, heads and their size.
_DENSE: Final = 4
_PRODUCTS: Final = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
# Their result is small.
_REDUCES: Final = ("sum", "mean")
# The operators with the most time; the others change no statement.
_MOST: Final = 200

Dims = tuple[int, ...]


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What one call computes: floating-point operations, and bytes that it reads and writes at least once each.

    ``shapes`` and ``dtype`` are those of its operands, for people. ``flops`` is 0 for operators that are not products
    of matrices, convolutions or attention: memory bounds these.
    """

    flops: int
    bytes: int
    shapes: str
    dtype: str


def work_of(inputs: Inputs) -> Work | None:
    """Return the work of one call; None where the inputs do not tell it."""
    try:
        dims, types, values = (msgspec.json.decode(text) if text else [] for text in inputs[1:])
        return _work(inputs.operator.removeprefix("aten::"), dims, types, values)
    except (msgspec.DecodeError, IndexError, TypeError, ValueError, KeyError, ZeroDivisionError):
        return None  # a trace of a program that writes other inputs under this name


def _work(name: str, dims: list[Any], types: list[str], values: list[str]) -> Work | None:
    operands = [
        (tuple(map(int, each)), kind) for each, kind in zip(dims, types, strict=False) if each and item_bytes(kind)
    ]
    if not operands:
        return None
    flops, operands, result = _counted(name, [tuple(each) for each in dims], operands, values)
    if flops is None:
        return None
    dtype = operands[0][1]
    sizes = [(each, item_bytes(kind) or 0) for each, kind in (*operands, (result, dtype))]
    moved = sum(prod(each) * size for each, size in sizes)
    shapes = " and ".join(dict.fromkeys("x".join(map(str, each)) for each, _ in operands[:2]))
    return Work(flops=flops, bytes=moved, shapes=shapes, dtype=_DTYPES.get(dtype, dtype.removeprefix("c10::")))


def _counted(
    name: str, dims: list[Dims], operands: list[tuple[Dims, str]], values: list[str]
) -> tuple[int | None, list[tuple[Dims, str]], Dims]:
    """Return floating-point operations (None: unknown), the operands that matter, and the dimensions of the result."""
    if name in _PRODUCTS:
        first, second = dims[_PRODUCTS[name] :][:2]
        result = (*first[:-1], second[-1])
        return 2 * prod(result) * first[-1], operands[-2:], result
    if name in _CONVOLUTIONS:
        (batch, _, *pixels), weight, at = dims[0], dims[1], _CONVOLUTIONS[name]
        padding, stride, dilation = (_numbers(values[at + i], len(pixels)) for i in range(3))
        out = [
            (size + 2 * pad - reach * (kernel - 1) - 1) // step + 1
            for size, pad, step, reach, kernel in zip(pixels, padding, stride, dilation, weight[2:], strict=True)
        ]
        return 2 * batch * prod(out) * prod(weight), operands[:2], (batch, weight[0], *out)
    if name == "convolution_backward":
        gradient, image, weight = dims[:3]
        times = re.findall("True|False", values[10])[:2].count("True")
        return 2 * prod(gradient) * prod(weight[1:]) * times, operands[:3], image
    if name in _ATTENTION:
        at, sequence, products = _ATTENTION[name]
        queries, keys = dims[at], dims[at + 1]
        # Sequences of different lengths have one dimension less.
        flops = 2 * products * prod(queries) * keys[sequence] if len(queries) == _DENSE else None
        return flops, operands[at : at + 3], queries
    return 0, operands, (0,) if name in _REDUCES else _broadcast([each for each, _ in operands])


def _broadcast(dims: list[Dims]) -> Dims:
    """Return the dimensions of an elementwise result; those of the largest operand where others are parameters."""
    backwards = list(itertools.zip_longest(*(each[::-1] for each in dims), fillvalue=1))
    if all(len({*sizes, 1}) <= 2 for sizes in backwards):
        return tuple(max(sizes) for sizes in reversed(backwards))
    return max(dims, key=prod)


def _numbers(text: str, count: int) -> list[int]:
    found = [int(number) for number in re.findall(r"\d+", text)]
    return found * count if len(found) == 1 else found


def operator_work(
    columns: TraceColumns,
    tables: Sequence[Table],
    path: Callable[[int], str | None],
    steps: int,
) -> tuple[OperatorWork, ...]:
    """Return the work of operators per step, most time first.

    Args:
        columns: the trace.
        tables: numbers of part, inputs, module and operator; then ns and calls; then the longest call.
        path: the path of a module by number.
        steps: number of steps.
    """
    if not tables:
        return ()
    table = joined(list(tables))
    table = table[:, np.argsort(-table[4], kind="stable")[:_MOST]]
    known = {number: work_of(columns.shapes.inputs[number]) for number in np.unique(table[1]).tolist()}
    return tuple(
        OperatorWork(
            part=PARTS[part],
            module=path(module),
            operator=columns.name_of[operator],
            shapes=work.shapes,
            dtype=work.dtype,
            ns=ns / steps,
            count=count / steps,
            flops=work.flops * count / steps,
            bytes=work.bytes * count / steps,
        )
        for part, inputs, module, operator, ns, count, _ in table.T.tolist()
        if ns and count and (work := known[inputs]) is not None
    )


def shaped(*owners: Any) -> Table:
    """Return the sums of events by owner; rows without inputs are left out.

    Args:
        owners: ``(m,)`` or one: numbers of part, inputs, module and operator; then ns and calls.
    """
    columns = np.broadcast_arrays(*owners)
    kept = columns[1] >= 0
    return summed(*(column[kept] for column in columns), columns[4][kept])
