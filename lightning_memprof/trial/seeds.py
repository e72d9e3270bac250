"""Random numbers of compared runs: the same for each epoch, sample and batch, however many workers read them."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, get_worker_info

from lightning_memprof.capture.observe import Link, replaced
from lightning_memprof.trial.task import SEED


def seed(value: int = SEED) -> None:
    """Seed the generators of Python, NumPy and the CPU; workers have no device."""
    random.seed(value)
    np.random.seed(value)  # noqa: NPY002 the generator that programs use
    torch.default_generator.manual_seed(value)


def make_repeatable(trainer: Trainer, loader: DataLoader[Any]) -> None:
    """Seed the samplers of a DataLoader in each epoch, and each of its samples and batches."""
    loader.generator = loader.generator or torch.Generator().manual_seed(SEED)
    for sampler in (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        if hasattr(sampler, "__dict__"):
            replaced(type(sampler), "__iter__", partial(_ordered, trainer))
    worker = _Worker(loader.worker_init_fn)
    worker.change(loader.dataset)
    loader.worker_init_fn = worker
    loader.collate_fn = _Collate(loader.collate_fn, worker)


class _Worker:
    """Seeds the samples of a data set, also in a spawned worker, whose classes are not those of its parent."""

    def __init__(self, given: Callable[[int], None] | None) -> None:
        self._given = given
        self.key: Any = None

    def __call__(self, number: int) -> None:
        info = get_worker_info()
        if info is not None:
            self.change(info.dataset)
        if self._given is not None:
            self._given(number)

    def change(self, dataset: Any) -> None:
        """Seed each sample by its key."""
        if hasattr(dataset, "__dict__") and not isinstance(dataset, torch.Tensor):
            for name in ("__getitem__", "__getitems__"):
                if hasattr(type(dataset), name):
                    replaced(type(dataset), name, self._seeded)

    def _seeded(self, link: Link) -> Callable[..., Any]:
        def get(dataset: Any, key: Any) -> Any:
            self.key = key
            with _numbers(zlib.crc32(repr(key).encode())):
                return link.call(dataset, key)

        return get


class _Collate:
    """Seeds the making of a batch by the last key of its samples."""

    def __init__(self, given: Callable[[Any], Any], worker: _Worker) -> None:
        self._given = given
        self._worker = worker

    def __call__(self, samples: Any) -> Any:
        with _numbers(zlib.crc32(repr(self._worker.key).encode())):
            return self._given(samples)


def _ordered(trainer: Trainer, link: Link) -> Callable[..., Any]:
    """Give a sampler random numbers of its own in each epoch: how far it is read ahead depends on the workers."""

    def iterate(sampler: Any) -> Iterator[Any]:
        value = SEED + trainer.current_epoch
        if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
            generator.manual_seed(value)
        with _numbers(value):
            found, state = iter(link.call(sampler)), _state()
        while True:
            try:
                with _numbers(state):
                    key, state = next(found), _state()
            except StopIteration:
                return
            yield key

    return iterate


@contextmanager
def _numbers(start: int | tuple[Any, Any, Any]) -> Iterator[None]:
    """Draw from a seed or a state in the context, and outside as before."""
    before = _state()
    try:
        if isinstance(start, int):
            seed(start)
        else:
            _restore(start)
        yield
    finally:
        _restore(before)


def _state() -> tuple[Any, Any, Any]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 as in seed


def _restore(state: tuple[Any, Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])  # noqa: NPY002 as in seed
    torch.set_rng_state(state[2])
