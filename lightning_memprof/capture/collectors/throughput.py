"""How much data the steps of a window work through, and how many operations that takes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from lightning_memprof.capture.base import Collector, OnMark
from lightning_memprof.capture.collectors.flops import FlopCount, other_modes
from lightning_memprof.capture.sources.methods import compiled_methods
from lightning_memprof.capture.sources.module_calls import is_compiled
from lightning_memprof.errors import ConfigError
from lightning_memprof.schedule import Point

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_memprof.capture.base import RunContext
    from lightning_memprof.schedule import Mark, Window

__all__ = ["Throughput", "batch_samples"]

log = logging.getLogger(__name__)

_COMPILED: Final = "operations are not counted: a part of the model is compiled, and torch would run it otherwise"
_MODES: Final = "operations are not counted: another dispatch mode of torch's was active in each step that could be"
_NOTHING: Final = "operations are not counted: no matrix product, convolution or attention was seen"
_DEPTH: Final = 4


def batch_samples(batch: Any, depth: int = _DEPTH) -> int | None:
    """Return the first dimension of the first tensor in a batch, looked for in its order; None where there is none.

    A batch that holds texts has as many samples as its first list of them.
    """
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.ndim else None
    if depth == 0 or isinstance(batch, (str, bytes)):
        return None
    if isinstance(batch, Sequence) and batch and all(isinstance(part, (str, bytes)) for part in batch):
        return len(batch)
    return next((samples for part in _parts(batch) if (samples := batch_samples(part, depth - 1)) is not None), None)


def _parts(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, Sequence):
        return list(batch)
    if is_dataclass(batch):
        return [getattr(batch, field.name) for field in fields(batch)]
    return []


class Throughput(Collector):
    """Samples and tokens of each recorded step's batch, and the operations of one step where asked.

    Rows are written when the window has closed: a count that is still on the device is not waited for in a step.
    Operations are counted once, in the run's first window: in a warmup step, or where that has none in a recorded one,
    whose times then hold the counting, some 10 us an operator.

    Args:
        samples: batch to its number of samples; None is the first dimension of its first tensor.
        tokens: batch to its number of tokens; None does not count them. Both get the batch itself and may not change
            it; what a count raises is reported once and leaves it unknown.
        flops: count the floating-point operations of a step: matrix products, convolutions and attention, forward and
            backward, with what activation checkpointing computes again.

    Raises:
        ConfigError: ``samples`` or ``tokens`` is no function.

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
            msg = f"Throughput(flops={flops!r}): must be true or false"
            raise ConfigError(msg)
        self._samples = samples or batch_samples
        self._tokens = tokens
        self._flops = flops

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Write one row a recorded step."""
        counting = _Counting(run) if self._flops and window.index == 0 else None
        batches = _Batches(self._samples, self._tokens)
        hear = run.guarded(batches.hear, collector=self.name, window=window)

        def on_mark(mark: Mark) -> None:
            if counting is not None:
                counting.come_to(mark)
            batches.come_to(mark)

        try:
            with run.training.listen(batch=hear):
                yield on_mark
        finally:
            flops = None
            if counting is not None:
                flops = counting.leave()
                if counting.reason is not None:
                    _not_counted(run, window, counting.reason)
            if rows := batches.rows(flops=flops, peak_flops=run.peak_flops):
                run.sink.write_rows(window, self.name, rows)


def _not_counted(run: RunContext, window: Window, reason: str) -> None:
    run.sink.manifest.append("unavailable", collector=Throughput.name, window=window.index, reason=reason)
    log.info("%s", reason)


class _Batches:
    """Sizes of the batches, by step."""

    def __init__(self, samples: Callable[[Any], int | None], tokens: Callable[[Any], int] | None) -> None:
        self._of_batch = (samples, tokens)
        self._heard: tuple[Any, Any] = (None, None)
        self._start_ns = 0
        self._steps: list[tuple[Mark, int, tuple[Any, Any]]] = []

    def hear(self, batch: Any) -> None:
        """Count one batch."""
        samples, tokens = self._of_batch
        self._heard = (samples(batch), None)
        if tokens is not None:
            self._heard = (self._heard[0], tokens(batch))

    def come_to(self, mark: Mark) -> None:
        """Begin and end a step."""
        if mark.point is Point.STEP_START:
            self._start_ns = mark.time_ns
            self._heard = (None, None)
        elif mark.point is Point.STEP_END and mark.recorded:
            self._steps.append((mark, mark.time_ns - self._start_ns, self._heard))

    def rows(self, *, flops: int | None, peak_flops: float | None) -> list[dict[str, Any]]:
        """Return the rows; here a count that is a tensor is read."""
        return [
            {
                "step": mark.step,
                "global_step": mark.global_step,
                "point": mark.point.value,
                "recorded": mark.recorded,
                "time_ns": mark.time_ns,
                "samples": _whole(samples),
                "tokens": _whole(tokens),
                "duration_ns": duration_ns,
                "flops": flops,
                "peak_flops": peak_flops,
            }
            for mark, duration_ns, (samples, tokens) in self._steps
        ]


def _whole(count: Any) -> int | None:
    return None if count is None else int(count)


class _Counting:
    """Counts the operations of the window's first step in which nobody else stands between torch and its operators.

    From the batch to the end of the batch: a validation that follows in the same step is not in it.

    Attributes:
        reason: why there is no count, when it has been looked for.

    """

    def __init__(self, run: RunContext) -> None:
        compiled = is_compiled(run.model) or bool(compiled_methods(run.model))
        self.reason = _COMPILED if compiled else None
        self._wanted = not compiled
        self._flops: int | None = None
        self._mode: FlopCount | None = None

    def come_to(self, mark: Mark) -> None:
        """Enter at the start of a batch, leave at its end.

        Raises:
            Exception: what one of torch's formulas raised.

        """
        if mark.point is Point.BATCH_START and self._wanted and self._mode is None:
            if other_modes():
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

    def leave(self) -> int | None:
        """Return the count, None without one; a step that did not end has none.

        Raises:
            Exception: as :meth:`come_to`.

        """
        self._leave_mode()
        return self._flops

    def _leave_mode(self) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if mode.failure is not None:
                raise mode.failure
