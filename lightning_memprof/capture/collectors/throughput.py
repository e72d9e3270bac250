"""Samples, tokens and padding of the steps of a window, and their floating-point operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch.utils.flop_counter import flop_registry

from lightning_memprof.artifacts.series import ThroughputRow
from lightning_memprof.capture.base import Collector, OnMark, RunContext
from lightning_memprof.capture.room import with_room
from lightning_memprof.capture.sources.batches import batch_elements, batch_padding, batch_samples
from lightning_memprof.capture.sources.compiled import is_compiled
from lightning_memprof.capture.sources.methods import compiled_methods
from lightning_memprof.capture.torch_internals import (
    DisableTorchFunction,
    FakeTensor,
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    active_fake_mode,
)
from lightning_memprof.errors import ConfigError
from lightning_memprof.logs import logger_of
from lightning_memprof.schedule import Mark, Point, Window

log = logger_of(__name__)

_COMPILED: Final = "operations are not counted: a part of the model is compiled, and counting would change how it runs"
_MODES: Final = "operations are not counted: another torch dispatch mode was active in every step"
_NOTHING: Final = "operations are not counted: no matrix product, convolution or attention ran"
# Columns with what a function of the program may return, or that are read from the device later.
_COUNTS: Final = ("samples", "tokens", "positions", "padded", "beyond_longest")
_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})


class Throughput(Collector):
    """Samples, elements, tokens and padding of each recorded step's batch, and the operations of one step on request.

    Rows are written when the window has closed: no step waits for a count that is still on the device. Operations are
    counted once, in the run's first window: in a warmup step, or without one in a recorded step, whose times then
    include the counting, some 10 µs per operator.

    Args:
        samples: batch to its number of samples; None is the first dimension of its first tensor.
        tokens: batch to its number of tokens; None does not count them. Both get the batch itself and must not change
            it; an exception is reported once and leaves the count unknown.
        flops: count the floating-point operations of a step: matrix products, convolutions and attention, forward and
            backward, including the recomputation of activation checkpointing.

    Raises:
        ConfigError: ``samples`` or ``tokens`` is not a function.
    """

    name: ClassVar[str] = "throughput"

    def __init__(
        self,
        samples: Callable[[Any], int] | None = None,
        tokens: Callable[[Any], int] | None = None,
        flops: bool = False,  # noqa: FBT001, FBT002 read from YAML
    ) -> None:
        for option, function in (("samples", samples), ("tokens", tokens)):
            if function is not None and not callable(function):
                msg = f"Throughput({option}={function!r}): must be a function from the batch to a number, or None"
                raise ConfigError(msg)
        if not isinstance(flops, bool):
            raise ConfigError(f"Throughput(flops={flops!r}): must be true or false")
        self._samples = samples or batch_samples
        self._tokens = tokens
        self._flops = flops

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Write one row per recorded step."""
        operations = _Operations(run) if self._flops and window.index == 0 else None
        batches = _Batches(self._samples, self._tokens)
        on_batch = run.guarded(batches.count, collector=self.name, window=window)

        def on_mark(mark: Mark) -> None:
            if operations is not None:
                operations.on_mark(mark)
            batches.on_mark(mark)

        try:
            with run.training.listen(batch=on_batch):
                yield on_mark
        finally:
            flops = None
            if operations is not None:
                flops = operations.close()
                if operations.reason is not None:
                    run.note_unavailable(self.name, operations.reason, window)
                    log.info("%s", operations.reason)
            with run.sink.series(window, self.name) as write:
                for mark, row in batches.rows():
                    row.flops, row.peak_flops = flops, run.peak_flops
                    write(mark, row)


class _Batches:
    """The rows of recorded steps; a count may be a tensor until the window has closed."""

    def __init__(self, samples: Callable[[Any], int | None], tokens: Callable[[Any], int] | None) -> None:
        self._counters = (samples, tokens)
        self._row = ThroughputRow()
        self._start_ns = 0
        self._rows: list[tuple[Mark, ThroughputRow]] = []

    def count(self, batch: Any) -> None:
        samples, tokens = self._counters
        # One at a time: what raises leaves the others known.
        self._row = row = ThroughputRow(samples=samples(batch))
        row.elements = batch_elements(batch)
        if (padding := batch_padding(batch)) is not None:
            row.positions, row.padded, row.beyond_longest = padding
        if tokens is not None:
            row.tokens = tokens(batch)

    def on_mark(self, mark: Mark) -> None:
        if mark.point is Point.STEP_START:
            self._start_ns = mark.time_ns
            self._row = ThroughputRow()
        elif mark.point is Point.STEP_END and mark.recorded:
            self._row.duration_ns = mark.time_ns - self._start_ns
            self._rows.append((mark, self._row))

    def rows(self) -> list[tuple[Mark, ThroughputRow]]:
        """Return the rows; a count that is a tensor is read here."""
        for _, row in self._rows:
            for name in _COUNTS:
                if (count := getattr(row, name)) is not None:
                    setattr(row, name, int(count))
        return self._rows


class _Operations:
    """Counts the operations of the window's first step in which no other dispatch mode is active.

    From the start to the end of its batch, so without a validation that follows in the same step.

    Attributes:
        reason: why there is no count, after a step that could have been counted.
    """

    def __init__(self, run: RunContext) -> None:
        compiled = is_compiled(run.model) or bool(compiled_methods(run.model))
        self.reason = _COMPILED if compiled else None
        self._wanted = not compiled
        self._flops: int | None = None
        self._mode: FlopCount | None = None

    def on_mark(self, mark: Mark) -> None:
        """Enter at the start of a batch, leave at its end.

        Raises:
            Exception: one of torch's formulas raised it.
        """
        if mark.point is Point.BATCH_START and self._wanted and self._mode is None:
            if _get_current_dispatch_mode_stack():
                self.reason = _MODES
            else:
                self.reason, self._wanted = None, False
                self._mode = FlopCount()
                self._mode.__enter__()  # type: ignore[no-untyped-call]
        elif mark.point is Point.BATCH_END and self._mode is not None:
            self._mode.counting = False
            self._flops = self._mode.flops or None
            self.reason = None if self._flops else _NOTHING
        elif mark.point is Point.STEP_END:
            self._leave_mode()

    def close(self) -> int | None:
        """Return the count; None if no step was counted to its end.

        Raises:
            Exception: as :meth:`on_mark`.
        """
        self._leave_mode()
        return self._flops

    def _leave_mode(self) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if mode.failure is not None:
                raise mode.failure


class FlopCount(TorchDispatchMode):
    """Counts matrix products, convolutions and attention, in forward and backward; values are not touched.

    Every operator runs as it would without: torch's own ``FlopCounterMode`` also hooks modules and gradients. Operators
    without a formula count nothing. Source of the formulas: ``torch.utils.flop_counter.flop_registry``; a
    multiplication with an addition is two operations.

    Attributes:
        flops: operations so far.
        counting: whether operators are counted; otherwise they only pass.
        failure: the first exception of a formula, which ended the counting.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.counting = True
        self.failure: Exception | None = None
        self._formulas = _formulas()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled regions compiled: under other modes torch runs them uncompiled, or raises."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operator, and count it."""
        kwargs = kwargs or {}
        if not self.counting:
            with DisableTorchFunction():
                return func(*args, **kwargs)
        if any(issubclass(kind, FakeTensor) for kind in types):
            # A sharded tensor tries an operator with shapes alone. NotImplemented would fail: the fake mode, which
            # torch asks after every other mode, is the only one that can run it.
            return func(*args, **kwargs)
        if not _PLAIN.issuperset(types):
            # A subclass, a sharded tensor for instance: the operators on this process's part come here.
            return NotImplemented
        formula = self._formulas.get(getattr(func, "overloadpacket", func))
        if formula is None and torch.is_inference_mode_enabled():
            # Only there composite operators arrive undivided; these are the parts that they would run anyway.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        # Called from Python, an operator would dispatch to the program's Tensor subclasses a second time.
        with DisableTorchFunction():
            result = func(*args, **kwargs)
        if formula is not None and active_fake_mode() is None:
            try:
                self.flops += with_room(partial(formula, *args, **kwargs, out_val=result))
            except Exception as error:  # noqa: BLE001 nothing of ours may raise into the user's code
                self.failure, self.counting = error, False
        return result


def _formulas() -> dict[Any, Callable[..., int]]:
    """Return torch's formulas, and those of attention on a CPU, which torch's counter omits."""
    aten = torch.ops.aten
    formulas: dict[Any, Callable[..., int]] = dict(flop_registry)
    for known, cpu in (
        ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        ("_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_flash_attention_for_cpu_backward"),
    ):
        if (formula := formulas.get(getattr(aten, known, None))) is not None and hasattr(aten, cpu):
            formulas.setdefault(getattr(aten, cpu), formula)
    return formulas
