from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from lightning_memprof.capture.sources.batches import batch_elements, batch_padding, batch_samples

LENGTHS = (10, 4, 7, 7)
TEXTS = [torch.arange(1, length + 1) * 40 for length in LENGTHS]
IDS = pad_sequence(TEXTS, batch_first=True)
WIDE = torch.nn.functional.pad(IDS, (0, 10))
VECTORS = pad_sequence([torch.ones(length, 3) for length in LENGTHS], batch_first=True)
MASK = (IDS != 0).long()


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (IDS, (40, 12, 0)),
        ((IDS, torch.tensor([0, 1, 0, 1])), (40, 12, 0)),
        (WIDE, (80, 52, 40)),
        (IDS.flip(1), (40, 12, 0)),
        (IDS.where(IDS != 0, 50_256), (40, 12, 0)),
        (VECTORS, (40, 12, 0)),
        ({"ids": torch.ones(4, 10, dtype=torch.long), "attention_mask": MASK}, (40, 12, 0)),
        ({"src_key_padding_mask": MASK == 0}, (40, 12, 0)),
    ],
)
def test_a_run_of_one_value_at_an_end_of_sequences_is_padding(batch: Any, expected: tuple[int, int, int]) -> None:
    found = batch_padding(batch)
    assert found is not None
    assert tuple(map(int, found)) == expected


@pytest.mark.parametrize(
    "batch",
    [
        torch.randint(1, 1000, (4, 64)) * 2 + torch.arange(64) % 2,
        torch.randint(0, 2, (4, 20)),
        torch.nn.functional.pad(torch.randint(0, 1000, (4, 8)), (0, 8), value=-100),
        {"mask": (torch.arange(40) % 7 == 0).expand(4, 40)},
        torch.randn(4, 20, 3),
    ],
    ids=["tokens", "flags", "ignored labels", "masked language model", "vectors"],
)
def test_full_sequences_flags_and_labels_have_hardly_any(batch: Any) -> None:
    found = batch_padding(batch)
    assert found is not None
    assert int(found.padded) <= 0.1 * found.positions + 4


@pytest.mark.parametrize(
    "batch", [None, "text", torch.zeros(4), torch.zeros(4, 3), torch.zeros(4, 3, 32, 32), [{"a": torch.zeros(4, 99)}]]
)
def test_other_batches_are_not_judged(batch: Any) -> None:
    assert batch_padding(batch) is None


class Rows(list[Any]):
    """Has no length and no truth value."""

    def __len__(self) -> int:
        raise TypeError

    __bool__ = __len__


class Counted(torch.Tensor):
    asked = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("batch", "samples", "elements"),
    [
        (lambda: nested(torch.strided), 2, 18),
        (lambda: [nested(torch.jagged)], 2, 18),
        (lambda: Rows([torch.ones(3, 2)]), 3, 6),
        (lambda: Rows(["a", "b"]), 2, None),
        (lambda: {"x": torch.ones(5, 2).as_subclass(Counted)}, 5, 10),
        (lambda: torch.tensor(1.0), None, 1),
        (list, None, None),
    ],
)
def test_samples_and_elements_are_counted_without_code_of_the_batch(
    batch: Any, samples: int | None, elements: int | None
) -> None:
    made = batch()
    Counted.asked = 0
    assert (batch_samples(made), batch_elements(made)) == (samples, elements)
    assert batch_padding(made) is None
    assert Counted.asked == 0
