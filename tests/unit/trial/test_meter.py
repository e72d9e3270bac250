"""The time of a step, of which one in each epoch is the first."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_memprof.trial.meter import _Clock, _hash
from training import Perceptron


def clock(*, first: int, others: int) -> _Clock:
    found = _Clock()
    found.counts = {True: first, False: others}
    found._spent_ns = {True: 500 * first, False: 100 * others}
    return found


@pytest.mark.parametrize("first", [1, 3])
def test_the_first_step_counts_with_its_share_however_often_it_was_measured(first):
    assert clock(first=first, others=7).step_ns(10) == pytest.approx(140)
    assert clock(first=first, others=7).step_ns(math.inf) == pytest.approx(100)


def test_epochs_of_one_step_have_first_steps_only():
    assert clock(first=4, others=0).step_ns(1) == pytest.approx(500)


def test_weights_are_hashed_without_code_of_their_class():
    class Asked(torch.nn.Parameter):
        asked = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.asked += 1
            return super().__torch_function__(func, types, args, kwargs or {})

    plain, odd = Perceptron(), Perceptron()
    odd.net[0].weight = Asked(odd.net[0].weight.data)  # type: ignore[arg-type]
    Asked.asked = 0
    assert _hash(odd) == _hash(plain)
    assert Asked.asked == 0
