"""Saved activations of each backward, by module, and the bytes that persist from step to step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from lightning_memprof.artifacts.series import SavedTensorsRow
from lightning_memprof.capture.base import Collector, OnMark, RunContext, SkipWindow
from lightning_memprof.capture.clock import DeviceTimer
from lightning_memprof.capture.sources.compiled import module_paths
from lightning_memprof.capture.sources.module_calls import module_calls
from lightning_memprof.capture.sources.saved_graph import Checkpoint, SavedGraph, SavedStorages
from lightning_memprof.capture.sources.tensors import (
    ModelTensors,
    PersistentBytes,
    batch_bytes,
    fold,
    local_bytes,
    tensors_in,
)
from lightning_memprof.capture.torch_internals import (
    DisableTorchFunction,
    _current_graph_task_id,
    _get_sequence_nr,
)
from lightning_memprof.schedule import Mark, Point, Window

if TYPE_CHECKING:
    from lightning_memprof.artifacts.sink import SeriesWriter

NO_BACKWARD: Final = (
    "no backward of this step went through Lightning: saved activations of other backwards are not recorded"
)


class SavedTensors(Collector):
    """Saved activations of each backward, by module and by dtype, and the bytes that persist from step to step.

    Read from the graph of the loss, without saved-tensor hooks, which restrict user code. Every storage counts once,
    for the module whose forward saved it first; storages of parameters and buffers do not count, nor does a tensor of
    the data set of which the batch is a slice. Tensors saved in the step outside every module's forward belong to the
    root, and those saved in a compiled module to that module. Tensors saved before the step are unattributed.

    Not included: tensors that a custom function stores on its ``ctx`` without ``save_for_backward``, tensors saved by
    an in-place operation on a view, and branches that do not lead to the loss.
    """

    name: ClassVar[str] = "saved_tensors"

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Record the forwards, and read the graph before each backward.

        Raises:
            SkipWindow: the stage has no backward.
        """
        if run.stage != "fit":
            raise SkipWindow(f"{run.stage} has no backward")

        def guarded(call: Callable[..., None]) -> Callable[..., None]:
            return run.guarded(call, collector=self.name, window=window)

        log = _ForwardLog(run.timer, run.on_fault(self.name, window))
        with run.sink.series(window, self.name) as write:
            recorder = _Recorder(run, log, write)
            try:
                with (
                    run.training.listen(batch=guarded(recorder.batch), loss=guarded(recorder.loss)),
                    module_calls(run.model, *log.hooks()),
                ):
                    yield recorder.mark
            finally:
                log.close()


# [own bytes, inclusive bytes, calls, nanoseconds of forward or None, input bytes]
_Row = list[Any]
_OWN, _INCLUSIVE, _CALLS, _FORWARD, _INPUT = range(5)


class _ForwardLog:
    """The running module by autograd's sequence number, and each module's calls.

    Args:
        timer: the device's clock; None is the host's.
        failed: called with an error of a hook.
    """

    def __init__(self, timer: DeviceTimer | None, failed: Callable[[Exception], None]) -> None:
        self._timer = timer
        self._failed = failed
        # From sequences[i] on, graph nodes are created in the forward of the module owners[i].
        self.sequences: list[int] = []
        self.owners: list[str] = []
        self._rows: dict[str, _Row] = {}
        self._inside: list[tuple[str, Any, _Row]] = []
        self._timed: list[tuple[_Row, Any, Any]] = []
        self.detects_anomaly = False
        self.doubles: set[str] = set()

    def begin_step(self) -> None:
        """Discard the previous step."""
        self.sequences[:] = [_get_sequence_nr()]
        self.owners[:] = [self._inside[-1][0] if self._inside else ""]
        self._rows.clear()
        self.read_timer()

    def hooks(self) -> tuple[Callable[[str, tuple[Any, ...]], None], Callable[[str, Any], None]]:
        """Return the functions for before and after a module's forward.

        They are closures, since every module of the model calls them in each step. A forward inside a backward is a
        checkpoint's recomputation and does not count.
        """
        timer = self._timer
        now: Callable[[], Any] = time.perf_counter_ns if timer is None else timer.record
        zero = None if timer else 0
        sequences, owners, rows, inside = self.sequences, self.owners, self._rows, self._inside
        doubles, double, strided = self.doubles, torch.float64, torch.strided
        recomputed = 0

        def before(path: str, args: tuple[Any, ...]) -> None:
            nonlocal recomputed
            if _current_graph_task_id() != -1:
                recomputed += 1
                return
            # The program may switch it on for its own forward only.
            self.detects_anomaly |= torch.is_anomaly_enabled()
            plain = len(args) == 1 and type(args[0]) is torch.Tensor and args[0].layout is strided
            size = args[0].nbytes if plain else self._size(args)
            row = rows.get(path)
            if row is None:
                row = rows[path] = [0, 0, 1, zero, size]
            else:
                row[_CALLS] += 1
                row[_INPUT] += size
            sequences.append(_get_sequence_nr())
            owners.append(path)
            inside.append((path, now(), row))

        def after(path: str, output: Any) -> None:
            nonlocal recomputed
            if type(output) is torch.Tensor and output.dtype is double:
                doubles.add(path)
            if recomputed:
                recomputed -= 1
            elif inside:
                _, start, row = inside.pop()
                if timer is None:
                    row[_FORWARD] += now() - start
                else:
                    self._timed.append((row, start, now()))
                sequences.append(_get_sequence_nr())
                owners.append(inside[-1][0] if inside else "")

        return before, after

    def _size(self, args: tuple[Any, ...]) -> int:
        try:
            with DisableTorchFunction():
                return sum(map(local_bytes, tensors_in(args)))
        except Exception as error:  # noqa: BLE001 nothing of ours may raise into the user's code
            self._failed(error)
            return 0

    def take_rows(self) -> dict[str, _Row]:
        """Return the rows of the modules called since the last call of this; times are added to them later."""
        rows = dict(self._rows)
        self._rows.clear()
        return rows

    def read_timer(self) -> None:
        """Add the times that the device has reached to the rows."""
        if self._timer is None:
            return
        waiting = []
        for row, start, end in self._timed:
            if self._timer.reached(end):
                row[_FORWARD] = (row[_FORWARD] or 0) + self._timer.elapsed_ns(start, end)
                self._timer.release(start)
                self._timer.release(end)
            else:
                waiting.append((row, start, end))
        self._timed = waiting

    def close(self) -> None:
        """Release every timestamp; times that the device has not reached stay unknown."""
        self.read_timer()
        if self._timer is not None:
            for row, start, end in self._timed:
                row[_FORWARD] = None
                self._timer.release(start)
                self._timer.release(end)


class _Recorder:
    """Writes the rows of one window."""

    def __init__(self, run: RunContext, log: _ForwardLog, write: SeriesWriter) -> None:
        self._run = run
        self._log = log
        self._write = write
        self._graph = SavedGraph()
        self._model = ModelTensors(run.model)
        self._persistent = PersistentBytes(self._model)
        self._paths = {id(module): path for path, module in module_paths(run.model).items()}
        self._input_bytes: int | None = None
        self._sliced: set[int] = set()
        self._row: SavedTensorsRow | None = None
        self._backwards = 0

    def batch(self, batch: Any) -> None:
        with DisableTorchFunction():
            self._input_bytes, self._sliced = batch_bytes(batch)

    def loss(self, loss: torch.Tensor) -> None:
        """Read the graph of a loss; its row is written at the next mark."""
        self._backwards += 1
        with DisableTorchFunction():
            saved = self._graph.read(loss, self._model.storage_keys() | self._sliced)
        total = unattributed = 0
        dtypes: dict[torch.dtype, int] = {}
        own: dict[str, int] = {}
        for owner, size, dtype in self._owned(saved):
            total += size
            dtypes[dtype] = dtypes.get(dtype, 0) + size
            if owner is None:
                unattributed += size
            else:
                own[owner] = own.get(owner, 0) + size
        self._row = SavedTensorsRow(
            activation_bytes=total,
            unattributed_bytes=unattributed,
            storages=len(saved.storages),
            uncounted=saved.uncounted,
            dtypes={str(dtype).removeprefix("torch."): size for dtype, size in dtypes.items()},
            modules=self._modules(own),
        )

    def mark(self, mark: Mark) -> None:
        """Begin a step, write the row of a backward, or write the row of the step."""
        if mark.point is Point.STEP_START:
            self._log.begin_step()
            self._input_bytes, self._sliced, self._row, self._backwards = None, set(), None, 0
        elif mark.point is Point.BEFORE_BACKWARD and self._row is not None:
            self._write(mark, self._row)
            self._row = None
        elif mark.point is Point.STEP_END:
            with DisableTorchFunction():
                sizes: tuple[dict[str, int], dict[str, Any]] = self._persistent.count(self._run.training.optimizers())
            row = SavedTensorsRow(
                parameters=sizes[1],
                held={**sizes[0], "input_bytes": self._input_bytes},
                note=None if self._backwards else NO_BACKWARD,
                detects_anomaly=self._log.detects_anomaly,
                doubles=sorted(self._log.doubles),
            )
            self._write(mark, row)

    def _modules(self, own: dict[str, int]) -> dict[str, _Row]:
        rows = self._log.take_rows()
        inclusive = fold(self._model.paths, own)
        for path in ("", *own):
            if path not in rows:
                rows[path] = [0, 0, 0, 0, 0]
        for path, row in rows.items():
            row[_OWN], row[_INCLUSIVE] = own.get(path, 0), inclusive[path]
        return rows

    def _owned(self, saved: SavedStorages) -> Iterator[tuple[str | None, int, torch.dtype]]:
        """Yield ``(owner or None, bytes, dtype)`` of each storage."""
        sequences, owners = self._log.sequences, self._log.owners
        after = 0
        for sequence, size, dtype, checkpoint in saved.storages:
            while after < len(sequences) and sequences[after] <= sequence:
                after += 1
            index = after - 1
            if checkpoint is not None and index > 0:
                index = self._caller(checkpoint, sequence, index)
            yield owners[index] if after else None, size, dtype

    def _caller(self, checkpoint: Checkpoint, sequence: int, index: int) -> int:
        """Return the index of the forward that called a checkpoint and saved its inputs, from its first node."""
        sequences, owners = self._log.sequences, self._log.owners
        function = checkpoint.function
        path = self._paths.get(id(getattr(function, "__self__", function)))
        if path:
            while index and (owners[index] + ".").startswith(path + "."):
                index -= 1
        else:
            while index and sequences[index] == sequence:
                index -= 1
        return index
