"""Pauses of Python's garbage collector, and tensors that only a reference cycle kept alive."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import ClassVar, Final, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_memprof.artifacts.series import DeadTensorRow, GarbageRow
from lightning_memprof.capture.base import Collector, OnMark, RunContext
from lightning_memprof.capture.observe import gc_callback
from lightning_memprof.capture.room import with_room
from lightning_memprof.capture.sources.oom_state import tracked_tensors
from lightning_memprof.capture.sources.tensors import PLAIN_TENSORS, local_bytes, storages
from lightning_memprof.capture.torch_internals import DisableTorchFunction, set_eval_frame
from lightning_memprof.schedule import Mark, Point, Window

# A row lists the largest tensors of a collection; the sum includes all.
_LISTED: Final = 50


class GarbageCollection(Collector):
    """GC pauses in the window's steps: a series with one row per collection.

    A row has the start, duration, generation and number of collected objects. The whole process pauses, whichever
    thread triggered the collection. Outside windows nothing is called.

    Args:
        cycles: find the tensors that each collection frees: only a reference cycle kept them alive. Adds ``tensors``,
            the largest 50, and ``tensor_bytes``, the memory that they release. Costs about 5 µs per tensor and 0.2 µs
            per object of the collected generations, at each collection.
    """

    name: ClassVar[str] = "garbage"
    every_rank: ClassVar[bool] = True

    def __init__(self, *, cycles: bool = False) -> None:
        self._cycles = cycles

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Register a callback of the garbage collector."""
        pauses = _Pauses(watches_tensors=self._cycles, offset_ns=run.unix_offset_ns)
        try:
            with gc_callback(pauses.on_collection):
                yield pauses.mark
        finally:
            if pauses.rows:
                run.sink.write_rows(window, self.name, pauses.rows)


class _Pauses:
    """Collections in a window's steps."""

    def __init__(self, *, watches_tensors: bool, offset_ns: int) -> None:
        self.rows: list[GarbageRow] = []
        self._watches_tensors = watches_tensors
        self._mark: Mark | None = None
        self._began: int | None = None
        self._error: Exception | None = None
        self._tensors: list[_Watched] = []
        self._offset_ns = offset_ns

    def mark(self, mark: Mark) -> None:
        """Update the current step; pauses between two steps are not part of the training."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        self._mark = None if mark.point is Point.STEP_END else mark

    def on_collection(self, phase: str, info: dict[str, int]) -> None:
        """Record the start or the end of a collection, as a function of ``gc.callbacks``.

        It is called wherever an object is allocated, also while the manifest is written: a failure is reported later.
        """
        now = time.perf_counter_ns()
        # Inside a compiled call torch would compile the code here that reads tensors.
        compiling = set_eval_frame(None)
        try:
            if phase == "start":
                self._tensors = (
                    with_room(_tensors_up_to, info["generation"]) if self._watches_tensors and self._mark else []
                )
                # The search for them is not part of the pause.
                self._began = time.perf_counter_ns()
            else:
                with_room(self._add, now, info)
        except RecursionError:
            self._began = None  # the program has no frame left
        except Exception as error:  # noqa: BLE001 Python would only print it
            self._error = error
        finally:
            set_eval_frame(compiling)

    def _add(self, now: int, info: dict[str, int]) -> None:
        began, mark, self._began = self._began, self._mark, None
        tensors, self._tensors = self._tensors, []
        if began is None or mark is None:
            return
        row = GarbageRow(
            step=mark.step,
            global_step=mark.global_step,
            recorded=mark.recorded,
            time_ns=began + self._offset_ns,
            duration_ns=now - began,
            generation=info["generation"],
            collected=info["collected"],
            uncollectable=info["uncollectable"],
        )
        if self._watches_tensors:
            row.tensors, row.tensor_bytes = _freed(tensors)
        self.rows.append(row)


class _Watched(NamedTuple):
    """A tensor, without a reference to it, and its description for when it is freed."""

    tensor: weakref.ref[torch.Tensor]
    storages: list[tuple[StorageWeakRef, int]]
    type: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


def _tensors_up_to(generation: int) -> list[_Watched]:
    """Return the tensors of the generations that are about to be collected."""
    found: list[_Watched] = []
    for number in range(generation + 1):
        known = map(_watch, tracked_tensors(partial(gc.get_objects, generation=number)))
        found += [watched for watched in known if watched is not None]
    return found


def _watch(tensor: torch.Tensor) -> _Watched | None:
    """Return the description of a tensor; None if a compiler traces it or it has no shape."""
    with DisableTorchFunction(), suppress(NotImplementedError, RuntimeError):
        shape = tuple(tensor.shape)
        # Reading a symbolic size would specialize it to a number.
        if any(type(size) is not int for size in shape) or type(tensor).__module__.startswith("torch._subclasses"):
            return None
        # The general function costs ten times as much.
        plain = type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided
        own = (tensor.untyped_storage(),) if plain else storages(tensor)
        weak = [(StorageWeakRef(storage), storage.nbytes()) for storage in own]  # type: ignore[no-untyped-call]
        dtype = str(tensor.dtype).removeprefix("torch.")
        return _Watched(weakref.ref(tensor), weak, type(tensor).__name__, shape, dtype, local_bytes(tensor))
    return None


def _freed(tensors: list[_Watched]) -> tuple[list[DeadTensorRow], int]:
    """Return the largest freed tensors, and the bytes of all their storages that no other tensor uses."""
    dead = [watched for watched in tensors if watched.tensor() is None]
    released = {
        storage.cdata: size
        for watched in dead
        for storage, size in watched.storages
        if storage.expired()  # type: ignore[no-untyped-call]
    }
    dead.sort(key=lambda watched: -watched.bytes)
    listed = [
        DeadTensorRow(type=watched.type, shape=list(watched.shape), dtype=watched.dtype, bytes=watched.bytes)
        for watched in dead[:_LISTED]
    ]
    return listed, sum(released.values())
