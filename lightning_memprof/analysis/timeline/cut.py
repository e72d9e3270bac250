"""Cut some steps out of a trace that is too large to be opened whole."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from lightning_memprof.analysis.timeline.merge import Merged, Progress, merge_traces
from lightning_memprof.analysis.timeline.model import Source
from lightning_memprof.analysis.trace.text import TraceText
from lightning_memprof.errors import ArtifactError, ConfigError
from lightning_memprof.units import nanoseconds

__all__ = ["cut", "step_spans"]

_STEP: Final = re.compile(r"ProfilerStep#?\s*([0-9]+)")
# What is larger is damage.
_DIGITS: Final = 19
_MOST_US: Final = 4e15


class _Named(msgspec.Struct, gc=False):
    """What tells a step; the rest of an event is skipped."""

    name: str = ""
    ts: int | float = 0
    dur: int | float = 0


_DECODE: Final = msgspec.json.Decoder(list[_Named]).decode


def step_spans(trace: Path) -> dict[int, tuple[int, int]]:
    """When each step began and ended, in ns by the trace's own ``ts``: the earliest and the latest of all ranks.

    The ranges ``ProfilerStep#N`` tell, those of the device included, where a step's kernels run on behind its end.

    Raises:
        ArtifactError: the trace is missing, cut off, or no trace.
    """
    text = TraceText(trace)
    found: dict[int, tuple[int, int]] = {}
    for events in text.pieces(_steps):
        for step, start, end in events:
            first, last = found.get(step, (start, end))
            found[step] = (min(first, start), max(last, end))
    offset = text.ts_offset_us * 1000
    return {step: (first + offset, last + offset) for step, (first, last) in sorted(found.items())}


def cut(trace: Path, steps: Sequence[int], out: Path, progress: Progress | None = None) -> Merged:
    """Write what happened from the first of the steps to the last into a trace of its own.

    What reaches over an edge is clipped to it. The trace is streamed; memory is bounded by the slice.

    Args:
        trace: a trace, merged or not, plain or gzip-compressed.
        steps: numbers of steps, as the ranges ``ProfilerStep#N`` in it have them.
        out: where the slice goes, compressed where the name ends in ``.gz``.
        progress: as for ``merge_traces``.

    Raises:
        ArtifactError: the trace is missing, cut off, or holds none of the steps.
        ConfigError: no step was asked for.
    """
    if not steps:
        raise ConfigError("steps: none was named; name one or more, such as 2-3")
    spans = step_spans(trace)
    wanted = [spans[step] for step in steps if step in spans]
    if not wanted:
        there = f"it holds {min(spans)} to {max(spans)}" if spans else "it holds none: no schedule recorded it"
        raise ArtifactError(f"{trace}: has no step {', '.join(map(str, steps))}; {there}")
    span = (min(first for first, _ in wanted), max(last for _, last in wanted))
    return merge_traces([Source(label="", trace=trace, span_ns=span)], out, progress)


def _steps(text: bytes) -> list[tuple[int, int, int]]:
    if b"ProfilerStep" not in text:
        return []
    try:
        events = _DECODE(text)
    except msgspec.ValidationError:
        events = [name for name in map(_named, msgspec.json.decode(text)) if name is not None]
    found = []
    for event in events:
        step = _STEP.fullmatch(event.name) if event.name.startswith("ProfilerStep") else None
        if step and len(step[1]) < _DIGITS and abs(event.ts) < _MOST_US and abs(event.dur) < _MOST_US:
            start = nanoseconds(event.ts)
            found.append((int(step[1]), start, start + nanoseconds(event.dur)))
    return found


def _named(fields: object) -> _Named | None:
    try:
        return msgspec.convert(fields, _Named, strict=False)
    except msgspec.ValidationError:
        return None
