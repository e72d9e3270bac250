"""Random numbers of samples do not depend on what was drawn before."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_memprof.trial.seeds import make_repeatable
from training import trainer


class Drawn(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(1)


def test_a_sample_is_the_same_whenever_it_is_read_and_other_random_numbers_are_kept(tmp_path):
    loader = DataLoader(Drawn(), batch_size=2)
    make_repeatable(trainer(tmp_path), loader)
    torch.manual_seed(1)
    first, after = torch.cat([*loader]), torch.rand(1)
    torch.manual_seed(1)
    torch.rand(7)
    assert torch.equal(first, torch.cat([*loader]))
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1))
    assert len(set(first.flatten().tolist())) == 4
