from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from known import known
from lightning_memprof.account.ledger.growth import Growth
from lightning_memprof.account.snapshot.report import snapshot_report
from lightning_memprof.units import MIB
from snapshots import TRAIN, History, frame, write_snapshot

TORCH = "/venv/lib/python3.11/site-packages/torch"
CALL = frame(f"{TORCH}/nn/modules/module.py", "_call_impl")
LAYER = (frame("/home/a/layer.py", "forward"), CALL, frame("/home/a/model.py", "forward"), CALL, TRAIN)
MODEL = (frame("/home/a/model.py", "forward"), CALL, TRAIN)
LOSS = (frame("/home/a/loss.py", "cross_entropy"), TRAIN)
KEPT = (frame("/home/a/train.py", "log_loss", 97), TRAIN)
OPTIMIZER = (frame("/home/a/adam.py", "step"), frame(f"{TORCH}/optim/optimizer.py", "wrapper"), TRAIN)
CHECKPOINTED = (frame("/home/a/layer.py", "forward"), CALL, frame(f"{TORCH}/utils/checkpoint.py", "checkpoint"), TRAIN)
RECOMPUTED = (frame("/home/a/layer.py", "forward"), CALL, frame(f"{TORCH}/utils/checkpoint.py", "unpack_hook"))
GRADIENT = (frame("/home/a/triton.py", "backward"), frame(f"{TORCH}/autograd/function.py", "apply"), TRAIN)
HOOK = (frame("/venv/lib/python3.11/site-packages/deepspeed/zero.py", "reduce_partition"),)
CACHED = (frame("/home/a/kv_cache.py", "update"), *MODEL)
LAYERS = 8


def growth(directory: Path, history: History, since: int = 0) -> Growth | None:
    return snapshot_report(write_snapshot(directory / "a.pickle", history.data(since))).devices[0].growth


def forward(history: History, *, layers: int = LAYERS, saved: int = 10 * MIB) -> list[int]:
    """The saved activations of a forward pass; each layer has a block that it frees."""
    blocks = []
    for _ in range(layers):
        history.free(history.allocate(MIB, *LAYER))
        blocks.append(history.allocate(saved, *LAYER))
    return blocks


def backward(history: History, activations: list[int]) -> None:
    """Its threads have no Python stacks."""
    for block in reversed(activations):
        gradient = history.allocate(MIB)
        history.free(block, gradient)


def train(history: History, steps: int, *kept: dict[str, Any], size: int = 20 * MIB) -> list[int]:
    """Steps that each keep a block of a stack."""
    found = []
    for _ in range(steps):
        activations = forward(history)
        loss = history.allocate(MIB, *LOSS)
        backward(history, activations)
        history.free(loss)
        found += [history.allocate(size, *kept)] if kept else []
    return found


def weights(history: History) -> None:
    for _ in range(10):
        history.allocate(10 * MIB, frame("/home/a/model.py", "__init__"), TRAIN)


def test_blocks_that_each_step_keeps_are_growth_with_their_line_and_bytes(tmp_path):
    history = History()
    weights(history)
    train(history, 10, *KEPT)
    assert growth(tmp_path, history) == Growth(
        owner="/home/a/train.py(97): log_loss",
        per_step=20 * MIB,
        added=200 * MIB,
        steps=10,
        blocks=10,
        peak_bytes=180 * MIB,
    )


def test_training_without_them_does_not_grow_in_its_middle_neither(tmp_path):
    history = History()
    weights(history)
    train(history, 10)
    assert growth(tmp_path, history) is None
    started = len(history.events)
    forward(history)
    assert growth(tmp_path, history) is None
    assert growth(tmp_path, history, started) is None


def test_a_forward_pass_that_keeps_one_block_per_layer_is_one_step(tmp_path):
    history = History()
    for _ in range(LAYERS):
        history.free(history.allocate(MIB, *LAYER))
        history.allocate(20 * MIB, *MODEL)
    assert growth(tmp_path, history) is None


def test_a_first_forward_pass_that_one_function_computes_is_one_step(tmp_path):
    history = History()
    for _ in range(LAYERS):
        history.free(history.allocate(MIB, frame(f"{TORCH}/nn/modules/linear.py", "forward"), CALL, TRAIN))
        history.allocate(20 * MIB, TRAIN)
    assert growth(tmp_path, history) is None


def test_layers_that_a_training_step_calls_one_by_one_are_one_step(tmp_path):
    history = History()
    for _ in range(LAYERS):
        history.free(history.allocate(MIB, *LAYER), history.allocate(MIB, *LOSS))
        history.allocate(30 * MIB, *LAYER)
        history.allocate(20 * MIB, *KEPT)
    assert growth(tmp_path, history) is None


def test_layers_that_a_function_calls_one_by_one_with_checkpoints_are_one_step_of_a_training(tmp_path):
    history = History()
    train(history, 1)
    for _ in range(LAYERS):
        history.free(history.allocate(MIB, *LAYER), history.allocate(MIB, *CHECKPOINTED))
        history.allocate(20 * MIB, *KEPT)
    assert growth(tmp_path, history) is None


def test_predictions_that_a_loop_without_backward_keeps_are_growth(tmp_path):
    history = History()
    weights(history)
    for _ in range(10):
        batch = history.allocate(MIB, frame("/home/a/data.py", "move"), TRAIN)
        history.free(*forward(history))
        history.allocate(20 * MIB, *MODEL)
        history.free(batch)
    found = known(growth(tmp_path, history))
    assert (found.steps, found.owner) == (10, "/home/a/model.py(1): forward")


def test_fewer_steps_than_five_and_a_wrapped_history_with_few_do_not_tell(tmp_path):
    history = History()
    train(history, 4, *KEPT)
    assert growth(tmp_path, history) is None
    train(history, 1, *KEPT)
    assert growth(tmp_path, history) is not None
    assert growth(tmp_path, history, len(history.events) // 2) is None


def test_what_is_filled_once_is_no_growth(tmp_path):
    history = History()
    train(history, 6, *KEPT)
    train(history, 6)
    assert growth(tmp_path, history) is None


def test_data_and_weights_that_are_loaded_before_are_no_growth(tmp_path):
    history = History()
    for _ in range(20):
        history.free(history.allocate(10 * MIB, frame("/home/a/load.py", "read"), TRAIN))
        history.allocate(20 * MIB, *KEPT)
    forward(history, layers=1)
    assert growth(tmp_path, history) is None


def test_a_buffer_with_a_limit_is_no_growth_even_if_the_history_starts_when_it_is_full(tmp_path):
    history = History()
    kept = train(history, 8, *KEPT)
    started = len(history.events)
    for block in kept:
        history.free(block)
        train(history, 1, *KEPT)
    assert growth(tmp_path, history, started) is None
    history.free(*train(history, 8, *KEPT))
    train(history, 8, *KEPT)
    assert growth(tmp_path, history) is None


def test_one_large_block_among_small_ones_is_no_growth(tmp_path):
    history = History()
    train(history, 1, *KEPT, size=400 * MIB)
    train(history, 9, *KEPT, size=MIB)
    assert growth(tmp_path, history) is None


def test_little_of_the_peak_is_no_growth(tmp_path):
    history = History()
    history.allocate(400 * MIB, TRAIN)
    train(history, 10, *KEPT, size=4 * MIB)
    assert growth(tmp_path, history) is None
    history = History()
    train(history, 10, *KEPT, size=3 * MIB)
    assert growth(tmp_path, history) is None


@pytest.mark.parametrize("kept", [HOOK, GRADIENT, ()], ids=["hook", "gradient", "thread"])
def test_gradients_of_a_first_backward_pass_are_to_stay(tmp_path, kept):
    history = History()
    history.free(*forward(history))
    for _ in range(LAYERS):
        history.free(history.allocate(MIB, *RECOMPUTED), history.allocate(MIB))
        history.allocate(20 * MIB, *kept)
    assert growth(tmp_path, history) is None


def test_states_of_a_first_optimizer_step_are_to_stay(tmp_path):
    history = History()
    train(history, 1)
    for _ in range(LAYERS):
        history.free(history.allocate(MIB, *OPTIMIZER))
        history.allocate(20 * MIB, *OPTIMIZER)
    assert growth(tmp_path, history) is None


def test_a_thread_of_backward_with_most_of_the_forward_is_not_that_of_the_program(tmp_path):
    history = History()
    for _ in range(10):
        train(history, 1, *KEPT)
        history.free(*(history.allocate(MIB, *RECOMPUTED) for _ in range(50)))
    assert growth(tmp_path, history) is not None


def test_a_cache_of_keys_and_values_grows_by_design(tmp_path):
    history = History()
    for _ in range(10):
        history.free(*forward(history), history.allocate(MIB, *LOSS))
        history.allocate(20 * MIB, *CACHED)
    assert growth(tmp_path, history) is None


def test_a_graph_that_is_kept_is_growth_of_its_largest_function(tmp_path):
    history = History()
    for _ in range(6):
        train(history, 1, *KEPT, size=60 * MIB)
        forward(history)
    found = known(growth(tmp_path, history))
    assert (found.owner, found.per_step) == ("/home/a/layer.py(1): forward", LAYERS * 10 * MIB)
