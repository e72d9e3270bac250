from __future__ import annotations

import math

import pytest
import torch

from lightning_memprof.demo.train import GPT, GPTConfig

SMALL = GPTConfig(vocabulary=16, context=12, width=8, heads=2, layers=2)


def test_the_demos_model_has_a_few_million_parameters():
    assert 2e6 < sum(parameter.numel() for parameter in GPT(GPTConfig()).parameters()) < 4e6


def test_logits_are_one_row_of_the_vocabulary_for_each_token():
    assert GPT(SMALL)(torch.zeros(3, 7, dtype=torch.long)).shape == (3, 7, 16)


def test_a_token_is_predicted_from_those_before_it_only():
    model = GPT(SMALL)
    tokens = torch.randint(16, (1, 12), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 16
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_an_untrained_model_knows_nothing():
    tokens = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(0))
    logits = GPT(GPTConfig())(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(256), rel=0.05)
