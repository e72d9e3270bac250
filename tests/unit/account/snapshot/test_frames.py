from __future__ import annotations

import pytest

from lightning_memprof.account.snapshot.frames import is_lightning, is_training, phase_of
from lightning_memprof.read.snapshot.reader import parse_snapshot
from lightning_memprof.units import MIB
from snapshots import TRAIN, History, frame

TORCH = "/venv/lib/python3.11/site-packages/torch"
MODEL = (frame("/home/a/model.py", "forward"), frame(f"{TORCH}/nn/modules/module.py", "_call_impl"), TRAIN)
OPTIMIZER = (frame("/home/a/adam.py", "step"), frame(f"{TORCH}/optim/optimizer.py", "wrapper"), TRAIN)
LIGHTNING = frame("/venv/lib/python3.11/site-packages/lightning/pytorch/loops/fit_loop.py", "advance")
ENGINE = frame("??", "torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask>)", 0)
BINDING = frame("??", "torch::autograd::THPVariable_matmul(_object*, _object*, _object*)", 0)


@pytest.mark.parametrize(
    ("stacks", "lightning", "trains"),
    [
        ([()], False, True),
        ([MODEL], False, False),
        ([(BINDING, *MODEL)], False, False),
        ([MODEL, ()], False, True),
        ([MODEL, OPTIMIZER], False, True),
        ([(*MODEL, LIGHTNING)], True, False),
        ([(*MODEL, frame("/home/a/model.py", "training_step"), LIGHTNING)], True, True),
        ([(ENGINE,)], False, True),
    ],
)
def test_the_stacks_tell_the_program(stacks, lightning, trains):
    history = History()
    for stack in stacks:
        history.allocate(MIB, *stack)
    device = parse_snapshot(history.data(), "a.pickle").devices[0]
    assert (is_lightning(device), is_training(device)) == (lightning, trains)


@pytest.mark.parametrize(
    ("stack", "phase"),
    [
        ([frame("/home/a/model.py", "forward"), frame(f"{TORCH}/optim/adam.py", "step")], "forward"),
        ([frame("/home/a/model.py", "backward"), frame(f"{TORCH}/optim/adam.py", "step")], "backward"),
        ([frame(f"{TORCH}/optim/adam.py", "_init_group"), frame("/home/a/train.py", "forward")], "optimizer"),
        ([frame(f"{TORCH}/nn/modules/module.py", "_apply"), frame("/home/a/train.py", "main")], "loading"),
        ([frame(f"{TORCH}/utils/data/_utils/pin_memory.py", "pin"), frame("/home/a/train.py", "main")], "data_wait"),
        ([frame("/home/a/train.py", "main")], None),
        *(
            (
                [frame(f"{TORCH}/nn/modules/linear.py", "linear"), frame(f"{TORCH}/nn/modules/module.py", call)],
                "forward",
            )
            for call in ("_call_impl", "_wrapped_call_impl")
        ),
        ([ENGINE], "backward"),
    ],
)
def test_the_innermost_frame_that_tells_is_the_phase(stack, phase):
    history = History()
    history.allocate(MIB, *stack)
    (found,) = [each for each in parse_snapshot(history.data(), "a.pickle").devices[0].stacks if each]
    assert phase_of(found) == phase
