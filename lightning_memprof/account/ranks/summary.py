"""The summary of one window of one rank, in some kilobytes: enough to compare thousands of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, NamedTuple, TypeVar

import msgspec

from lightning_memprof.artifacts.files import read_plain
from lightning_memprof.artifacts.series import PHASES, AllocatorRow, HookRow, HostRow, SeriesRow
from lightning_memprof.errors import ArtifactError
from lightning_memprof.read.run.model import Series, read_series
from lightning_memprof.read.trace.communication import Collective, collectives
from lightning_memprof.units import MIB

SCHEMA_VERSION: Final = 1
# A step has some tens of them: the first steps of a window tell who comes late, and the file stays below 10 kB.
MOST_COLLECTIVES: Final = 200
MOST_CALLBACKS: Final = 10
# A thousand times what it usually has.
_MOST_BYTES: Final = 16 * MIB

R = TypeVar("R", bound=SeriesRow)

# Sums of some hundred are still 64 bits; what is beyond (nine years, the year 2116) is damage.
_Nanoseconds = Annotated[int, msgspec.Meta(ge=-(1 << 58), le=1 << 58)]
_Moment = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class StepTime(NamedTuple):
    """One step: ``phases_ns`` holds the host's time of each of ``PHASES`` and sums to ``duration_ns``."""

    step: int
    window: int | None
    duration_ns: int
    phases_ns: Sequence[int]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The mean of some steps on the host's clock, in ns, and its phases."""

    mean_ns: int
    phases_ns: dict[str, int]


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """The first collectives of a window, one entry of each list for each; ``count`` is how many there were.

    ``kinds`` are name, group and size in bytes (null: not known, or each rank has its own), and ``kind`` an index into
    it. ``start_ns`` and ``duration_ns``: when this rank came to it, after ``base_ns`` (Unix epoch), and how long it was
    in it.
    """

    count: int = 0
    base_ns: _Moment = 0
    kinds: list[tuple[str, str, int | None]] = []
    kind: list[int] = []
    sequence: list[int] = []
    start_ns: list[_Nanoseconds] = []
    duration_ns: list[_Nanoseconds] = []


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The summary of one window of one rank.

    ``recorded`` are the window's steps, which pay for their recording; ``usual`` the last steps before it that do not,
    null where there was none. ``callbacks_ns`` is the time of each callback in the mean recorded step, the longest
    first. ``memory`` holds the peaks of the window.
    """

    schema_version: int = SCHEMA_VERSION
    rank: int
    world_size: int
    host: str
    window: int
    steps: list[int]
    recorded: Figures | None = None
    usual: Figures | None = None
    callbacks_ns: dict[str, int] = {}
    memory: dict[str, int] = {}
    arrivals: Arrivals = Arrivals()


_decode: Final = msgspec.json.Decoder(RankSummary).decode


def encode_summary(summary: RankSummary) -> bytes:
    """Return a summary as JSON."""
    return msgspec.json.encode(summary)


def read_summary(path: str | Path) -> RankSummary:
    """Read a summary.

    Raises:
        ArtifactError: it is missing, damaged, or newer than this version.
    """
    try:
        summary = _decode(read_plain(path, _MOST_BYTES))
    except (OSError, msgspec.DecodeError) as error:
        raise ArtifactError(f"{path}: cannot be read ({error}); the other ranks' summaries do without it") from error
    lists = summary.arrivals
    if summary.schema_version > SCHEMA_VERSION:
        raise ArtifactError(f"{path}: was written by a newer version of this package; install that one to read it")
    lengths = {len(lists.kind), len(lists.sequence), len(lists.start_ns), len(lists.duration_ns)}
    if len(lengths) > 1 or (lists.kind and not 0 <= min(lists.kind) <= max(lists.kind) < len(lists.kinds)):
        raise ArtifactError(f"{path}: is damaged, its collectives do not fit together; copy it again")
    return summary


def summarise(
    origin: RankSummary, times: Sequence[StepTime], series: Mapping[str, Path], trace: Path | None
) -> RankSummary:
    """Return the summary of a window that has come to its end.

    Args:
        origin: whose summary it is: rank, world size, host and window, and nothing else yet.
        times: the last steps of this rank, those of the window included.
        series: the window's series by collector. What cannot be read is left out.
        trace: its operator trace, if it has one.
    """
    recorded = [step_times for step_times in times if step_times.window == origin.window]
    hooks = _series(series, HookRow)
    steps = hooks.by_step.keys()
    callbacks: Counter[str] = Counter()
    for row in hooks.rows:
        if row.action and row.action.startswith("[Callback]") and row.duration_ns is not None and row.step in steps:
            callbacks[row.action.removeprefix("[Callback]").rpartition(".")[0]] += row.duration_ns
    window_steps = sorted(steps or {step_times.step for step_times in recorded})
    return msgspec.structs.replace(
        origin,
        steps=window_steps,
        recorded=_figures([step_times for step_times in recorded if step_times.step in window_steps]),
        usual=_figures([step_times for step_times in times if step_times.window is None]),
        callbacks_ns={name: ns // (len(steps) or 1) for name, ns in callbacks.most_common(MOST_CALLBACKS)},
        memory=_memory(series),
        arrivals=arrivals_of(readable_collectives(trace), MOST_COLLECTIVES),
    )


def _figures(times: Sequence[StepTime]) -> Figures | None:
    if not times:
        return None
    return Figures(
        mean_ns=sum(step_times.duration_ns for step_times in times) // len(times),
        phases_ns={
            phase: sum(step_times.phases_ns[index] for step_times in times) // len(times)
            for index, phase in enumerate(PHASES)
        },
    )


def _series(files: Mapping[str, Path], kind: type[R]) -> Series[R]:
    path = files.get(kind.series)
    return Series() if path is None else read_series(path, kind, 0)


def _memory(files: Mapping[str, Path]) -> dict[str, int]:
    host, allocator = _series(files, HostRow).rows, _series(files, AllocatorRow).rows
    found = {
        "peak_rss_bytes": [row.peak_rss_bytes for row in host],
        "allocated_bytes.all.peak": [row.peak_allocated_bytes for row in allocator],
    }
    known = {name: [value for value in values if value is not None] for name, values in found.items()}
    return {name: max(values) for name, values in known.items() if values}


def readable_collectives(trace: Path | None) -> list[Collective]:
    """Return the collectives of a trace, none where it cannot be read."""
    try:
        return collectives(trace) if trace is not None else []
    except ArtifactError:
        return []


def arrivals_of(found: Sequence[Collective], most: int | None = None) -> Arrivals:
    """Return the first collectives of a rank by start, at most so many, in columns."""
    first = found[:most]
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(collective.kind for collective in first))}
    base = first[0].start_ns if first else 0
    return Arrivals(
        count=len(found),
        base_ns=base,
        kinds=list(kinds),
        kind=[kinds[collective.kind] for collective in first],
        sequence=[collective.sequence for collective in first],
        start_ns=[collective.start_ns - base for collective in first],
        duration_ns=[collective.duration_ns for collective in first],
    )
