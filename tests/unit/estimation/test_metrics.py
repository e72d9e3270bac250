"""Sizes of results that depend on values, beside those of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from lightning_memprof.estimation.metrics import likely_result

aten = torch.ops.aten
ONES = torch.ones(2, 3)
MASK = torch.ones(2, 3, dtype=torch.bool)
CLASSES = torch.tensor([3, 3, 3])


# Of these values the likely sizes are the real ones.
@pytest.mark.parametrize(
    ("operator", "args", "kwargs"),
    [
        (aten.nonzero.default, (ONES,), {}),
        (aten.masked_select.default, (ONES, MASK), {}),
        (aten.masked_select.default, (ONES, MASK[:1]), {}),
        (aten.bincount.default, (CLASSES, None, 4), {}),
        (aten.bincount.default, (CLASSES,), {"minlength": 4}),
        (aten.bincount.default, (CLASSES, torch.ones(3)), {"minlength": 4}),
        (aten.bincount.default, (CLASSES, torch.ones(3, dtype=torch.float64), 4), {}),
        (aten._unique2.default, (ONES,), {}),
        (aten._unique2.default, (ONES, True, True, True), {}),
        (aten.unique_consecutive.default, (ONES,), {"return_inverse": True}),
        (aten.index.Tensor, (ONES, [MASK]), {}),
        (aten.index.Tensor, (ONES, [MASK[:, 0], torch.tensor([0, 1])]), {}),
        (aten.index_put.default, (ONES, [None, MASK[0]], torch.zeros(3)), {}),
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
    assert likely_result(aten.unique_dim.default, (ONES, 0), {}) is None
