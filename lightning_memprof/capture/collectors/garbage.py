"""The pauses of Python's garbage collector, and the tensors that only a reference cycle has kept alive."""

from __future__ import annotations

import gc
import time
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import torch
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_memprof.capture.base import Collector, OnMark
from lightning_memprof.capture.sources.tensors import PLAIN_TENSORS, local_bytes, storages
from lightning_memprof.schedule import Point

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_memprof.capture.base import RunContext
    from lightning_memprof.schedule import Mark, Window

__all__ = ["Garbage"]

# A row lists the largest tensors of a collection; the sum counts all.
_LISTED: Final = 50


class Garbage(Collector):
    """Each pause of Python's cyclic garbage collector in the window's steps: a series of one row a collection.

    A row says when it began, how long it took, its generation, and how many objects it collected. The whole process
    stands still meanwhile, whichever thread set it off. Outside of windows nothing is called.

    Args:
        cycles: look, at each collection, for tensors that die in it: only a reference cycle has kept them alive. Adds
            ``tensors``, the largest 50 of them, and ``tensor_bytes``, what they have given back. It costs some 5 us a
            tensor and 0.2 us an object of the generations that are collected, at each collection.

    """

    name: ClassVar[str] = "garbage"
    every_rank: ClassVar[bool] = True

    def __init__(self, *, cycles: bool = False) -> None:
        self._cycles = cycles

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Listen to the collector of garbage."""
        pauses = _Pauses(watches_tensors=self._cycles, offset_ns=run.unix_offset_ns)
        told = pauses.told
        gc.callbacks.append(told)
        try:
            yield pauses.mark
        finally:
            if told in gc.callbacks:
                gc.callbacks.remove(told)
            if pauses.rows:
                run.sink.write_rows(window, self.name, pauses.rows)


class _Pauses:
    """The collections of a window's steps."""

    def __init__(self, *, watches_tensors: bool, offset_ns: int) -> None:
        self.rows: list[dict[str, Any]] = []
        self._watches_tensors = watches_tensors
        self._mark: Mark | None = None
        self._began: int | None = None
        self._error: Exception | None = None
        self._tensors: list[_Watched] = []
        self._offset_ns = offset_ns

    def mark(self, mark: Mark) -> None:
        """Take where the training is; what lies between two steps is not the training's."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        self._mark = None if mark.point is Point.STEP_END else mark

    def told(self, phase: str, info: dict[str, int]) -> None:
        """Take the start or the end of a collection, as ``gc.callbacks`` are called.

        That happens wherever an object is made, also while the manifest is being written: a failure is told later.
        """
        now = time.perf_counter_ns()
        # Inside of a compiled call torch would compile what looks at tensors here.
        compiling = set_eval_frame(None)
        try:
            if phase == "start":
                self._tensors = _tensors_up_to(info["generation"]) if self._watches_tensors and self._mark else []
                # What looking for them took is not the pause.
                self._began = time.perf_counter_ns()
            else:
                self._ended(now, info)
        except Exception as error:  # noqa: BLE001 it would be printed, and nothing else
            self._error = error
        finally:
            set_eval_frame(compiling)

    def _ended(self, now: int, info: dict[str, int]) -> None:
        began, mark, self._began = self._began, self._mark, None
        tensors, self._tensors = self._tensors, []
        if began is None or mark is None:
            return
        row: dict[str, Any] = {
            "step": mark.step,
            "global_step": mark.global_step,
            "recorded": mark.recorded,
            "time_ns": began + self._offset_ns,
            "duration_ns": now - began,
            "generation": info["generation"],
            "collected": info["collected"],
            "uncollectable": info["uncollectable"],
        }
        self.rows.append(row | _died(tensors) if self._watches_tensors else row)


class _Watched(NamedTuple):
    """A tensor of which nothing is kept, and what is told of it when it has died."""

    tensor: weakref.ref[torch.Tensor]
    storages: list[tuple[StorageWeakRef, int]]
    type: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


def _tensors_up_to(generation: int) -> list[_Watched]:
    """Give the tensors of the generations that are about to be collected."""
    found: list[_Watched] = []
    for number in range(generation + 1):
        objects = gc.get_objects(generation=number)
        # Not isinstance: it asks an object's own __class__, and a lazy one would be loaded by that.
        tensors = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor)}
        known = [_watch(item) for item in objects if type(item) in tensors]
        found += [watched for watched in known if watched is not None]
    return found


def _watch(tensor: torch.Tensor) -> _Watched | None:
    """Give what is to be known of a tensor; None of one that a compiler is tracing or that has no shape."""
    with torch._C.DisableTorchFunctionSubclass(), suppress(NotImplementedError, RuntimeError):  # noqa: SLF001 torch has no public one
        shape = tuple(tensor.shape)
        # A size that is a symbol becomes a number by being looked at.
        if any(type(size) is not int for size in shape) or type(tensor).__module__.startswith("torch._subclasses"):
            return None
        # The general way costs ten times as much.
        plain = type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided
        behind = (tensor.untyped_storage(),) if plain else storages(tensor)
        weak = [(StorageWeakRef(storage), storage.nbytes()) for storage in behind]  # type: ignore[no-untyped-call]
        dtype = str(tensor.dtype).removeprefix("torch.")
        return _Watched(weakref.ref(tensor), weak, type(tensor).__name__, shape, dtype, local_bytes(tensor))
    return None


def _died(tensors: list[_Watched]) -> dict[str, Any]:
    """Give those that are gone; the memory of one whose storage another tensor still holds was not given back."""
    dead = [tensor for tensor in tensors if tensor.tensor() is None]
    freed = {storage.cdata: size for tensor in dead for storage, size in tensor.storages if storage.expired()}  # type: ignore[no-untyped-call]
    dead.sort(key=lambda tensor: -tensor.bytes)
    return {
        "tensors": [
            {"type": tensor.type, "shape": list(tensor.shape), "dtype": tensor.dtype, "bytes": tensor.bytes}
            for tensor in dead[:_LISTED]
        ],
        "tensor_bytes": sum(freed.values()),
    }
