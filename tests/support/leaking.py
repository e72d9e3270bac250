"""Trainings that keep more with every step; a comment marks the line that assigns the variable."""

from __future__ import annotations

import ctypes
import functools
import gc
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torchmetrics import CatMetric

from training import Perceptron

# 1 MiB of float32.
SIZE = (512, 512)
SEEN: dict[int, torch.Tensor] = {}  # global
BLOCKS: list[int] = []
LIBC = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p
LIBC.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
LIBC.free.argtypes = (ctypes.c_void_p,)


class Leaking(Perceptron):
    """Keeps nothing; what is kept is kept in each training step."""

    kind = ""

    def keep(self, batch: torch.Tensor, step: int) -> None:
        """Keep something of a step."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.keep(batch, batch_idx)
        return self.loss(batch)


class InList(Leaking):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[torch.Tensor] = []  # list

    def keep(self, batch: torch.Tensor, step: int) -> None:
        self.history.append(torch.randn(SIZE))


class InGlobal(Leaking):
    def keep(self, batch: torch.Tensor, step: int) -> None:
        SEEN[step] = torch.randn(SIZE)


@functools.cache  # lru_cache
def positions(step: int) -> torch.Tensor:
    return torch.randn(SIZE)


class InCache(Leaking):
    def keep(self, batch: torch.Tensor, step: int) -> None:
        positions(step)


def recorder() -> Callable[[torch.Tensor], None]:
    recorded: list[torch.Tensor] = []  # closure

    def record(value: torch.Tensor) -> None:
        recorded.append(value)

    return record


class InClosure(Leaking):
    def __init__(self) -> None:
        super().__init__()
        self.record = recorder()

    def keep(self, batch: torch.Tensor, step: int) -> None:
        self.record(torch.randn(SIZE))


class InHook(Leaking):
    def __init__(self) -> None:
        super().__init__()
        outputs: list[torch.Tensor] = []  # hook

        def save(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            outputs.append(output.new_ones(SIZE))

        self.net[1].register_forward_hook(save)


class InTraceback(Leaking):
    def __init__(self) -> None:
        super().__init__()
        self.errors: list[Exception] = []  # traceback

    def parse(self, step: int) -> None:
        logits = torch.randn(SIZE)
        if logits.isfinite().all():
            raise ValueError(step)

    def keep(self, batch: torch.Tensor, step: int) -> None:
        try:
            self.parse(step)
        except ValueError as error:
            self.errors.append(error)


class InClass(Leaking):
    kept: ClassVar[list[torch.Tensor]] = []  # class attribute

    def keep(self, batch: torch.Tensor, step: int) -> None:
        self.kept.append(torch.randn(SIZE))


class Node:  # cycle
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self.peer = self


class InCycle(Leaking):
    def on_train_start(self) -> None:
        gc.collect()
        gc.disable()

    def keep(self, batch: torch.Tensor, step: int) -> None:
        Node(torch.randn(SIZE))

    def on_train_end(self) -> None:
        gc.enable()


class InMetric(Leaking):
    def __init__(self) -> None:
        super().__init__()
        self.scores = CatMetric()  # metric

    def keep(self, batch: torch.Tensor, step: int) -> None:
        self.scores.update(torch.randn(SIZE))


class Images(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.buffer: list[Any] = []  # logger

    def add(self, image: torch.Tensor) -> None:
        self.buffer.append({"image": image})


class InLogger(Leaking):
    def keep(self, batch: torch.Tensor, step: int) -> None:
        images: Any = self.logger
        images.add(torch.randn(SIZE))


class InGraph(Leaking):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 32768)
        self.total: Any = 0.0  # graph

    def keep(self, batch: torch.Tensor, step: int) -> None:
        self.total = self.total + self.wide(batch).sigmoid().exp().mean()


class InCpp(Leaking):
    """Memory that no Python object refers to."""

    def on_train_start(self) -> None:
        # Blocks that the C allocator would reuse are resident already, and would add nothing.
        LIBC.malloc_trim(0)

    def keep(self, batch: torch.Tensor, step: int) -> None:
        BLOCKS.append(LIBC.malloc(36 << 20))
        LIBC.memset(BLOCKS[-1], 1, 36 << 20)


class InCallback(pl.Callback):
    def __init__(self) -> None:
        self.weights: list[np.ndarray] = []  # numpy

    def on_train_batch_end(self, *args: Any) -> None:
        self.weights.append(np.ones(SIZE, np.float32))


class InDefault(Leaking):
    def keep(self, batch: torch.Tensor, step: int, seen: list[bytes] = []) -> None:  # noqa: B006 # default
        # Zeros would be mapped without memory.
        seen.append(b"1" * (1 << 20))


class InGenerator(Leaking):
    def __init__(self) -> None:
        super().__init__()
        self.stream = self.collected()

    def collected(self) -> Iterator[int]:
        past = []  # generator
        while True:
            past.append(torch.randn(SIZE))
            yield len(past)

    def keep(self, batch: torch.Tensor, step: int) -> None:
        next(self.stream)


class InNested(Leaking):
    def __init__(self) -> None:
        super().__init__()
        self.by_label: dict[int, list[torch.Tensor]] = defaultdict(list)  # nested

    def keep(self, batch: torch.Tensor, step: int) -> None:
        self.by_label[step % 3].append(torch.randn(SIZE))


class Replay:
    def __init__(self) -> None:
        self.items: deque[Any] = deque()  # helper

    def push(self, item: Any) -> None:
        self.items.append(item)


class InHelper(Leaking):
    def __init__(self) -> None:
        super().__init__()
        self.replay = Replay()

    def keep(self, batch: torch.Tensor, step: int) -> None:
        self.replay.push((step, torch.randn(SIZE)))


class InAppended(Leaking):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[torch.Tensor] = []  # rebuilt

    def keep(self, batch: torch.Tensor, step: int) -> None:
        self.outputs = [*self.outputs, torch.randn(SIZE)]


class InHooks(Leaking):
    """Registers one more hook in each step."""

    def keep(self, batch: torch.Tensor, step: int) -> None:
        mask = torch.randn(SIZE)  # hooks
        self.net[0].register_forward_pre_hook(lambda module, inputs: None if mask.is_leaf else inputs)


class InText(Leaking):
    def __init__(self) -> None:
        super().__init__()
        self.log_lines: set[str] = set()  # text

    def keep(self, batch: torch.Tensor, step: int) -> None:
        self.log_lines.update(f"{step} {number} " + "x" * 500 for number in range(2000))


LEAKS: dict[str, tuple[type[Leaking], str]] = {
    "list": (InList, "InList.history"),
    "global": (InGlobal, "leaking.SEEN"),
    "lru_cache": (InCache, "lru_cache of leaking.positions"),
    "closure": (InClosure, "recorded"),
    "hook": (InHook, "outputs"),
    "traceback": (InTraceback, "InTraceback.errors"),
    "class attribute": (InClass, "InClass.kept"),
    "cycle": (InCycle, "reference cycle -> Node"),
    "metric": (InMetric, "InMetric.scores.value"),
    "logger": (InLogger, "Images.buffer"),
    "graph": (InGraph, "InGraph.total"),
    "default": (InDefault, "InDefault.keep"),
    "generator": (InGenerator, "collected"),
    "nested": (InNested, "InNested.by_label"),
    "helper": (InHelper, "InHelper.replay.items[...]"),
    "rebuilt": (InAppended, "InAppended.outputs"),
    "hooks": (InHooks, "forward pre-hook of InHooks.net.0: InHooks.keep.<locals>.<lambda> (closure variable mask)"),
    "text": (InText, "InText.log_lines"),
}


def release() -> None:
    """Free what outlives its training: other tests of the process would find it."""
    SEEN.clear()
    positions.cache_clear()
    InClass.kept.clear()
    for default in InDefault.keep.__defaults__ or ():
        default.clear()
    while BLOCKS:
        LIBC.free(BLOCKS.pop())
    gc.collect()
