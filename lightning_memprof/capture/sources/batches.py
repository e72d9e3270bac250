"""Samples and elements of a batch, and padding in one of sequences, as far as the values of its tensors show it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final, NamedTuple

import torch

from lightning_memprof.capture.observe import without_torch_function
from lightning_memprof.capture.torch_internals import DisableTorchFunction

# A shorter dimension is one of features or classes.
_LEAST_LENGTH: Final = 8
# Smaller integers are classes, flags or counts of a table.
_LEAST_TOKEN: Final = 32
_TOKENS: Final = frozenset({torch.int64, torch.int32, torch.int16})
# Of the features of a position, so many show whether it is empty.
_FEATURES: Final = 8
_DEPTH: Final = 4
_MASK: Final = "mask"
_PAD: Final = "pad"


class Padding(NamedTuple):
    """Positions of a batch, batch size times length; those that are padding; of these, those beyond the longest sample.

    The last two are integers or tensors on the batch's device, which are read later.
    """

    positions: int
    padded: Any
    beyond_longest: Any


def batch_samples(batch: Any, depth: int = _DEPTH) -> int | None:
    """Return the first dimension of the first tensor in a batch, in its order; None without a tensor.

    A batch of texts has as many samples as its first list of them.
    """
    if isinstance(batch, torch.Tensor):
        with DisableTorchFunction():
            # Nested tensors have a size, but no shape.
            return int(batch.size(0)) if batch.dim() else None
    if depth == 0 or isinstance(batch, (str, bytes)):
        return None
    parts = _parts(batch)
    if parts and isinstance(batch, Sequence) and all(isinstance(part, (str, bytes)) for _, part in parts):
        return len(parts)
    return next((samples for _, part in parts if (samples := batch_samples(part, depth - 1)) is not None), None)


@without_torch_function
def batch_elements(batch: Any) -> int | None:
    """Return the number of elements of all tensors in a batch; None without a tensor."""
    counts = [tensor.numel() for _, tensor in _tensors("", batch, _DEPTH)]
    return sum(counts) if counts else None


@without_torch_function
def batch_padding(batch: Any) -> Padding | None:
    """Return the padding of a batch; None without sequences.

    Sequences are a mask (a tensor of a mapping with "mask" in its key, and "pad" where 1 is padding), else tokens
    (integers, batch x length), else vectors (floating point, batch x length x features). Padding is a run of one value
    at the end, or the start, of the sequences: the one that most of them end with, zeros for vectors.
    """
    found = [(name, tensor) for name, tensor in _tensors("", batch, _DEPTH) if _may_be_sequences(tensor)]
    masks = [(name, tensor) for name, tensor in found if _MASK in name and tensor.ndim == 2]
    tokens = [tensor for _, tensor in found if tensor.ndim == 2 and tensor.dtype in _TOKENS]
    vectors = [tensor for _, tensor in found if tensor.ndim == 3 and tensor.is_floating_point()]
    with torch.no_grad():
        if masks:
            name, mask = masks[0]
            return _runs(mask != 0 if _PAD in name else mask == 0)
        if tokens:
            ids, ends = tokens[0], (tokens[0][:, -1], tokens[0][:, 0])
            last, first = (end.mode().values for end in ends)
            is_text = (ids.max() >= _LEAST_TOKEN).to(torch.int64)
            return _runs((ids == last) & (last >= 0), (ids == first) & (first >= 0), is_text)
        return _runs((vectors[0][..., :_FEATURES] == 0).all(-1)) if vectors else None


def _runs(at_end: torch.Tensor, at_start: torch.Tensor | None = None, factor: Any = 1) -> Padding:
    """Return the padding by where it may be, each ``(batch, length)``, times a factor of 0 or 1."""
    ends = at_end.flip(1).to(torch.int64).cumprod(1).sum(1)
    starts = (at_end if at_start is None else at_start).to(torch.int64).cumprod(1).sum(1)
    runs = torch.where(ends.sum() >= starts.sum(), ends, starts) * factor
    return Padding(at_end.numel(), runs.sum(), runs.min() * len(runs))


def _may_be_sequences(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
    return is_plain and tensor.ndim in {2, 3} and tensor.shape[0] > 0 and tensor.shape[1] >= _LEAST_LENGTH


def _tensors(name: str, batch: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a batch, each with its key."""
    if isinstance(batch, torch.Tensor):
        yield name, batch
    elif depth:
        for key, part in _parts(batch):
            yield from _tensors(key.lower(), part, depth - 1)


def _parts(batch: Any) -> list[tuple[str, Any]]:
    """Return the parts of a batch, each with its key if any; does not call its ``__bool__`` or ``__len__``."""
    if isinstance(batch, Mapping):
        return [(str(key), part) for key, part in batch.items()]
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return [("", part) for part in batch]
    if is_dataclass(batch):
        return [(field.name, getattr(batch, field.name)) for field in fields(batch)]
    return []
