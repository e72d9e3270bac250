"""The tracker's totals are those of torch's own; what torch's raises into the user's code, this one does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from lightning_memprof.capture.tracker.tracker import CategoryTracker


def network() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """A network whose optimizer has done its first step."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Sequential(nn.Linear(16, 16), nn.GELU()), nn.Linear(16, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4, 8)
    step(model, optimizer, batch)
    return model, optimizer, batch


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()


def test_the_peak_is_that_of_torchs_own_tracker() -> None:
    model, optimizer, batch = network()
    torchs = MemTracker()
    torchs.track_external(model, optimizer, batch)
    with torchs:
        step(model, optimizer, batch)
    model, optimizer, batch = network()
    ours = CategoryTracker()
    with ours.tracking(model, [optimizer], batch):
        step(model, optimizer, batch)
        report = ours.report()
    assert ours.guard.failure is None
    (peak,) = report.peak
    assert peak.total_bytes == torchs.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def test_what_a_checkpoint_computes_again_is_an_activation() -> None:
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), torch.randn(1000, 8)
    tracker = CategoryTracker()
    with tracker.tracking(model, [], batch):
        checkpoint(model, batch, use_reentrant=False).sum().backward()
        (peak,) = tracker.report().peak
    assert peak.by_kind["Activation"] >= 1000 * 16 * 4


def test_what_an_optimizer_uses_for_a_moment_is_temporary_and_not_its_state() -> None:
    model, optimizer, batch = network()
    tracker = CategoryTracker()
    with tracker.tracking(model, [optimizer], batch):
        step(model, optimizer, batch)
        report = tracker.report()
    parameter_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    state = 2 * parameter_bytes + 4 * len(list(model.parameters()))
    for figures in (*report.peak, *report.end):
        assert figures.categories()["optimizer_state"] == state


def test_nothing_is_left_behind() -> None:
    model, optimizer, batch = network()
    before = vars(torch.UntypedStorage).get("resize_")
    tracker = CategoryTracker()
    with tracker.tracking(model, [optimizer], batch):
        step(model, optimizer, batch)
        assert _get_current_dispatch_mode() is tracker
    assert _get_current_dispatch_mode() is None
    assert vars(torch.UntypedStorage).get("resize_") is before
    assert not torch_module._global_forward_hooks
    assert not torch_module._global_forward_pre_hooks
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert not torch_optimizer._global_optimizer_post_hooks
    assert all(parameter._post_accumulate_grad_hooks is None for parameter in model.parameters())
    assert all(parameter._backward_hooks is None for parameter in model.parameters())
    step(model, optimizer, batch)


def test_a_hook_of_the_users_on_a_parameter_stays() -> None:
    model, optimizer, batch = network()
    told: list[Any] = []
    (parameter, *_) = model.parameters()
    parameter.register_post_accumulate_grad_hook(told.append)
    tracker = CategoryTracker()
    with tracker.tracking(model, [optimizer], batch):
        step(model, optimizer, batch)
    step(model, optimizer, batch)
    assert len(told) == 2


def test_a_frozen_parameter_is_no_obstacle() -> None:
    model, optimizer, batch = network()
    model.get_submodule("0").requires_grad_(False)
    tracker = CategoryTracker()
    with tracker.tracking(model, [optimizer], batch):
        step(model, optimizer, batch)
    assert tracker.guard.failure is None


def test_a_leaf_that_autograd_is_asked_for_is_no_obstacle() -> None:
    model, optimizer, batch = network()
    batch.requires_grad_()
    tracker = CategoryTracker()
    with tracker.tracking(model, [optimizer], batch):
        (slope,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
        slope.square().sum().backward()
    assert tracker.guard.failure is None


@pytest.mark.slow
def test_what_compiled_code_saves_is_an_activation() -> None:
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), torch.randn(1000, 8)
    compiled, tracker = torch.compile(model, backend="aot_eager"), CategoryTracker()
    with tracker.tracking(model, [], batch):
        loss = compiled(batch).sum()
        tracker.add_saved(loss)
        (now,) = tracker.report().end
    torch._dynamo.reset()
    assert tracker.guard.failure is None
    assert now.by_kind["Activation"] >= 1000 * 16 * 4


def test_a_failure_of_the_tracker_does_not_reach_the_users_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, batch = network()
    tracker = CategoryTracker()

    def fail(*_: object) -> None:
        raise LookupError

    monkeypatch.setattr(tracker, "_track", fail)
    with tracker.tracking(model, [optimizer], batch):
        step(model, optimizer, batch)
    assert isinstance(tracker.guard.failure, LookupError)


def test_the_users_own_exception_is_the_users() -> None:
    model, optimizer, batch = network()
    tracker = CategoryTracker()
    with pytest.raises(RuntimeError, match="shapes"), tracker.tracking(model, [optimizer], batch):
        model(torch.ones(4, 9))
    assert tracker.guard.failure is None
    assert _get_current_dispatch_mode() is None


def test_a_storage_that_changes_its_size_is_followed() -> None:
    model, optimizer, batch = network()
    tracker = CategoryTracker()
    with tracker.tracking(model, [optimizer], batch):
        made = torch.empty(256)
        before = tracker.report().end[0].total_bytes
        result = made.untyped_storage().resize_(0)
        after = tracker.report().end[0].total_bytes
    assert before - after == 1024
    assert result.nbytes() == 0


@pytest.mark.parametrize("first", [0, 1])
def test_two_trackers_end_in_any_order_and_leave_nothing(first: int) -> None:
    model, optimizer, batch = network()
    before = dict(vars(torch.UntypedStorage))
    trackers = [CategoryTracker(), CategoryTracker()]
    contexts = [tracker.tracking(model, [optimizer], batch) for tracker in trackers]
    for context in contexts:
        context.__enter__()
    contexts[first].__exit__(None, None, None)
    assert _get_current_dispatch_mode() is trackers[1 - first]
    step(model, optimizer, batch)
    contexts[1 - first].__exit__(None, None, None)
    assert _get_current_dispatch_mode() is None
    assert dict(vars(torch.UntypedStorage)) == before


@pytest.mark.slow
def test_tensors_of_a_compiler_that_starts_in_the_step_do_not_count() -> None:
    model, _, batch = network()
    tracker = CategoryTracker()
    with tracker.tracking(model, [], batch):
        before = tracker.get_tracker_snapshot()
        # As torch.compile does, outside of its fake mode.
        fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.stack([batch, batch])[0])
        assert tracker.guard.failure is None
        assert tracker.get_tracker_snapshot() == before
    del fake


def test_a_sparse_gradient_is_its_indices_and_values() -> None:
    model = nn.Embedding(32, 8, sparse=True)
    tracker = CategoryTracker()
    with tracker.tracking(model, [], None):
        model(torch.tensor([1, 2, 3])).sum().backward()
        tracker.add_gradients(model)
        (now,) = tracker.report().end
    assert tracker.guard.failure is None
    assert now.by_kind["Gradient"] == 3 * 8 + 3 * 8 * 4
