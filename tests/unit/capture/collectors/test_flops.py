from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memprof.capture.collectors.flops import FlopCount


def test_shapes_that_are_tried_without_values_run_as_ever_and_count_nothing() -> None:
    """What a sharded tensor does to find out how an operator can be sharded."""
    made = torch.ones(4, 4)
    with FlopCount() as count:
        made @ made
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(made)
            found = (fake @ fake).mul_(0.9)
            (torch.empty(4, 4) @ torch.empty(4, 4)).sum()
        made @ made
    assert (found.shape, type(found)) == (made.shape, type(fake))
    assert count.failure is None
    assert count.flops == 2 * (2 * 4 * 4 * 4)
