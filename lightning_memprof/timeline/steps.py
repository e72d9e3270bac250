"""The steps in a trace: the ranges ``ProfilerStep#N``, also those of a device, where kernels run after a step's end."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import msgspec

from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.trace.columns import STEP_NAME
from lightning_memprof.read.trace.events import Microseconds, decoder
from lightning_memprof.read.trace.text import TraceText
from lightning_memprof.units import nanoseconds


def steps_span(trace: Path, steps: Collection[int]) -> tuple[int, int]:
    """Return the begin of the first of some steps and the end of the last, in ns of the trace's own ``ts``.

    Raises:
        ArtifactError: the trace is missing, truncated, or has none of the steps.
    """
    text = TraceText(trace)
    found = list(steps_of(text))
    wanted = [(start, end) for step, start, end in found if step in steps]
    if not wanted:
        numbers = [step for step, *_ in found]
        present = f"its steps are {min(numbers)} to {max(numbers)}" if found else "it has none: no schedule recorded it"
        raise ArtifactError(f"{trace}: has no step {', '.join(map(str, steps))}; {present}")
    offset = text.ts_offset_us * 1000
    return min(start for start, _ in wanted) + offset, max(end for _, end in wanted) + offset


def steps_of(text: TraceText) -> Iterator[tuple[int, int, int]]:
    """Read a trace; yield number, begin and end of each range ``ProfilerStep#N`` in ns of the text's ``ts``."""
    for events in text.pieces(_steps):
        yield from events


class _StepEvent(msgspec.Struct, gc=False):
    name: str = ""
    ts: Microseconds | None = None
    dur: Microseconds = 0.0


_decode: Final = decoder(_StepEvent)


def _steps(text: bytes) -> list[tuple[int, int, int]]:
    if b"ProfilerStep" not in text:
        return []
    found = []
    for event in _decode(text):
        if event.ts is not None and (step := STEP_NAME.match(event.name)):
            start = nanoseconds(event.ts)
            found.append((int(step[1]), start, start + nanoseconds(event.dur)))
    return found
