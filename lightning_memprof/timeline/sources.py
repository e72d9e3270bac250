"""The sources of a run's timeline: its traces, its series as events, and its findings.

Series are read line by line when the merger asks for them, so that a run takes the memory of one line here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from lightning_memprof.artifacts.files import MOST_BYTES, open_plain
from lightning_memprof.artifacts.naming import regions_name, system_name
from lightning_memprof.artifacts.rows import DAMAGE, decode_rows
from lightning_memprof.artifacts.series import GarbageRow, HookRow, RegionRow, SeriesRow, WorkerBatchRow
from lightning_memprof.errors import ArtifactError, ReportError
from lightning_memprof.judge import Facts, Finding, examine
from lightning_memprof.read.run.model import Rank, RecordedWindow, Run
from lightning_memprof.read.trace.text import BASE_TIME, UNREADABLE, open_trace
from lightning_memprof.timeline.clocks import Clocks
from lightning_memprof.timeline.events import Source, TimelineEvent
from lightning_memprof.timeline.steps import steps_span

R = TypeVar("R", bound="SeriesRow | dict[str, Any]")
_Span = tuple[int, int]
Reader = Callable[[Path], Iterator[TimelineEvent]]

# Place and time of a row, not measurements.
_PLACE: Final = frozenset({"step", "global_step", "point", "recorded", "time_ns", "device", "name"})
# The allocator statistics with a curve; there are a hundred more.
_CURVES: Final = (
    "allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current",
    "active_bytes.all.current", "inactive_split_bytes.all.current",
)  # fmt: skip
# Kineto writes it before the events.
_HEAD: Final = 1 << 16
_FETCHES: Final = ("train_dataloader_next", "].val_next", "].test_next", "].predict_next")
# A larger number is damage, and does not fit into a float.
_MOST: Final = 1e30


def file_sources(
    files: Sequence[Path], offsets_ns: Sequence[int], steps: Collection[int] | None = None
) -> list[Source]:
    """Return the sources of trace files, labelled by name, or by path where two files have the same name.

    Args:
        files: the traces, plain or gzip-compressed.
        offsets_ns: added to the times of each.
        steps: the time to keep of each, from the first of these steps to the last; None for all.

    Raises:
        ArtifactError: a trace is missing, truncated, or has none of the steps.
    """
    names = Counter(file.name for file in files)
    return [
        Source(
            label="" if len(files) == 1 else bare_name(file.name if names[file.name] == 1 else str(file)),
            sort=at,
            trace=file,
            offset_ns=offset,
            span_ns=None if steps is None else steps_span(file, steps),
        )
        for at, (file, offset) in enumerate(zip(files, offsets_ns, strict=True))
    ]


def bare_name(name: str) -> str:
    """Return the name of a trace or a snapshot without suffixes."""
    for suffix in (".gz", ".json", ".trace", ".pt", ".pickle"):
        name = name.removesuffix(suffix)
    return name


def run_sources(
    run: Run, window: int | None = None, ranks: Collection[int] | None = None, *,
    steps: Collection[int] | None = None, clocks: Clocks | None = None,
) -> list[Source]:  # fmt: skip
    """Return the sources of a run's windows, by global rank.

    Args:
        run: the run.
        window: index of one window; None for all.
        ranks: global ranks; None for all.
        steps: steps to keep; None for whole windows.
        clocks: the hosts' clocks, from :func:`lightning_memprof.timeline.clocks.align_clocks`; None for the
            clocks as recorded.

    Returns:
        The run's findings, on a track of their own; then the traces and series of each rank and window.

    Raises:
        ReportError: the run has no such window, rank or step, or no window.
    """
    clocks = clocks or Clocks()
    found: list[Source] = []
    spans: list[_Span] = []
    for rank, windows in _chosen(run, window, ranks, steps):
        offset = clocks.offset_ns(rank)
        named, always = run.directory / regions_name(rank.rank), run.directory / system_name(rank.rank)
        for candidate in windows:
            span = _span(candidate, rank, steps)
            found += _window_sources(run, rank, candidate, offset, span if steps is not None else None)
            if span is not None:
                spans.append((span[0] + offset, span[1] + offset))
                if "system" not in candidate.series and always.is_file():
                    found.append(_ready(rank, offset, span, partial(_counters, "system", always)))
                if named.is_file():
                    found.append(_ready(rank, offset, span, partial(_named, named)))
    return [*_finding_source(run, spans), *found]


def rank_label(rank: Rank) -> str:
    """Return the name of a rank on the timeline: ``"rank 3 · host"``."""
    host = rank.facts.host
    return f"rank {rank.rank} · {host}" if host else f"rank {rank.rank}"


def _chosen(
    run: Run, window: int | None, ranks: Collection[int] | None, steps: Collection[int] | None
) -> list[tuple[Rank, list[RecordedWindow]]]:
    here = {rank.rank for rank in run.ranks}
    missing = sorted(set(ranks or ()) - here)
    if missing:
        raise ReportError(f"rank {missing[0]} is not in this run; its ranks are {_listed(here)}")
    chosen = [
        (rank, windows)
        for rank in run.ranks
        if (ranks is None or rank.rank in ranks)
        and (windows := [each for each in rank.windows if _is_wanted(each, window, steps)])
    ]
    if not chosen:
        raise ReportError(_nothing(run, steps))
    return chosen


def _is_wanted(window: RecordedWindow, index: int | None, steps: Collection[int] | None) -> bool:
    return index in {None, window.index} and (steps is None or not set(steps).isdisjoint(_steps(window)))


def _steps(window: RecordedWindow) -> tuple[int, ...]:
    return (*window.warmup_steps, *window.steps)


def _nothing(run: Run, steps: Collection[int] | None) -> str:
    windows = [each for rank in run.ranks for each in rank.windows]
    if not windows:
        return f"{run.directory}: no window was recorded; give MemProfilerCallback a schedule that reaches one"
    if steps is not None:
        recorded = _listed(step for each in windows for step in each.steps)
        return f"no window has step {_listed(steps)}; the recorded steps are {recorded}"
    return f"the chosen ranks have no such window; the run's windows are {_listed(each.index for each in windows)}"


def _listed(numbers: Iterable[int]) -> str:
    """Return numbers as text: ``"0-3, 7"``."""
    groups: list[list[int]] = []
    for number in sorted(set(numbers)):
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    shown = [f"{group[0]}-{group[-1]}" if len(group) > 1 else f"{group[0]}" for group in groups]
    return ", ".join(shown[:10]) + (", ..." if len(shown) > 10 else "")


def _span(window: RecordedWindow, rank: Rank, steps: Collection[int] | None) -> _Span | None:
    """Return begin and end of a window's steps by the rank's clock; None where they are unknown."""
    inside = set(_steps(window)) if steps is None else set(steps) & set(_steps(window))
    edges = [
        (start, start + duration)
        for row in rank.pulse
        if row["step"] in inside and (start := row["start_ns"]) and (duration := row["duration_ns"]) is not None
    ]
    # A step that is cut out has the edges of the slice that is drawn; the pulse is in memory.
    if "hooks" in window.series and (steps is not None or not edges):
        drawn = [
            (event.start_ns, event.start_ns + event.duration_ns)
            for event in _hooks(window.series["hooks"])
            if event.cat == "step" and (event.args or {}).get("step") in inside
        ]
        edges = drawn or edges
    return (min(start for start, _ in edges), max(end for _, end in edges)) if edges else None


def _window_sources(run: Run, rank: Rank, window: RecordedWindow, offset: int, span: _Span | None) -> Iterator[Source]:
    label = rank_label(rank)
    for trace in run.files("trace", rank=rank.rank):
        if trace.window == window.index:
            own = None if span is None else _in_trace(trace.file, span)
            yield Source(label=label, sort=rank.rank, trace=trace.file, offset_ns=offset, span_ns=own)
    readers: dict[str, Reader] = {
        "hooks": _hooks,
        "garbage": _pauses,
        "worker_batches": _batches,
        "host": partial(_counters, "memory"),
        "allocator": _allocator,
        "system": partial(_counters, "system"),
    }
    for collector, reader in readers.items():
        if collector in window.series:
            yield _ready(rank, offset, span, partial(reader, window.series[collector]))
    marked = next((window.series[name] for name in ("host", "allocator") if name in window.series), None)
    if marked is not None:
        yield _ready(rank, offset, span, partial(_marks, marked))


def _ready(rank: Rank, offset: int, span: _Span | None, events: Callable[[], Iterable[TimelineEvent]]) -> Source:
    return Source(label=rank_label(rank), sort=rank.rank, events=events, offset_ns=offset, span_ns=span)


def _in_trace(trace: Path, span: _Span) -> _Span:
    """Return a span of Unix time in a trace's clock, which counts from its base; 0 where that cannot be read."""
    found = None
    with suppress(ArtifactError, *UNREADABLE), open_trace(trace) as (_, stream):
        found = BASE_TIME.search(stream.read(_HEAD))
    base = int(found[1]) if found else 0
    return span[0] - base, span[1] - base


def _rows(path: Path, kind: type[R]) -> Iterator[R]:
    """Yield the readable rows of a series; a damaged line is skipped, and reported by the run's page."""
    decode = msgspec.json.Decoder(kind).decode
    try:
        with open_plain(path, most=MOST_BYTES) as lines:
            for line in lines:
                try:
                    yield decode(line)
                except DAMAGE:
                    yield from decode_rows(line, kind)[0]
    except OSError:
        return


def _facts(row: SeriesRow, *names: str) -> dict[str, Any]:
    """Return the known ones of a row's columns."""
    return {name: value for name in names if (value := getattr(row, name)) is not None}


def _hooks(path: Path) -> Iterator[TimelineEvent]:
    for row in _rows(path, HookRow):
        action = row.action
        if row.start_ns is None or row.duration_ns is None or action is None:
            continue
        if action == "step":
            name, thread, cat = f"step {row.step}", "steps", "step"
        elif action.endswith(_FETCHES) or action.startswith("[DataLoader]"):
            name, thread, cat = action, "data fetches", "data_fetch"
        else:
            name, thread, cat = action, "hooks", "hook"
        yield TimelineEvent(
            name=name,
            start_ns=row.start_ns,
            duration_ns=max(0, row.duration_ns),
            thread=thread,
            cat=cat,
            args=_facts(row, "step", "global_step", "recorded"),
        )


def _batches(path: Path) -> Iterator[TimelineEvent]:
    """Yield the batches of DataLoader workers, a track for each worker."""
    for row in _rows(path, WorkerBatchRow):
        if row.start_ns is not None and row.duration_ns is not None:
            owner = row.dataset or "DataLoader"
            yield TimelineEvent(
                name=f"{owner} batch",
                start_ns=row.start_ns,
                duration_ns=max(0, row.duration_ns),
                thread=f"worker {row.worker} of {owner}, pid {row.pid}",
                cat="data_fetch",
            )


def _pauses(path: Path) -> Iterator[TimelineEvent]:
    for row in _rows(path, GarbageRow):
        if row.time_ns is not None and row.duration_ns is not None:
            yield TimelineEvent(
                name=f"garbage collection, generation {row.generation}",
                start_ns=row.time_ns,
                duration_ns=max(0, row.duration_ns),
                thread="garbage collection",
                cat="gc",
                args=_facts(row, "generation", "collected", "uncollectable"),
            )


def _counters(process: str, path: Path) -> Iterator[TimelineEvent]:
    for row in _rows(path, dict):
        if isinstance(time := row.get("time_ns"), int):
            for key, value in row.items():
                if key not in _PLACE and _is_figure(value):
                    yield _counter(process, key, time, value)


def _allocator(path: Path) -> Iterator[TimelineEvent]:
    for row in _rows(path, dict):
        if isinstance(time := row.get("time_ns"), int):
            device = row.get("device") or "device"
            for key in _CURVES:
                if _is_figure(row.get(key)):
                    name = key.replace(".all.current", "").replace(".all.peak", "_peak")
                    yield _counter("memory", f"{device} {name}", time, row[key])


def _counter(process: str, name: str, time: int, value: float) -> TimelineEvent:
    return TimelineEvent(ph="C", name=name, start_ns=time, process=process, cat="counter", args={"value": value})


def _is_figure(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -_MOST < value < _MOST


def _marks(path: Path) -> Iterator[TimelineEvent]:
    for row in _rows(path, SeriesRow):
        if row.time_ns is not None and row.point is not None:
            where = _facts(row, "step", "global_step", "recorded")
            yield TimelineEvent(ph="i", name=row.point, start_ns=row.time_ns, thread="marks", cat="mark", args=where)


def _named(path: Path) -> Iterator[TimelineEvent]:
    """Yield named snapshots as instants and named regions as slices; a region without an end is an instant."""
    open_regions: dict[str, list[tuple[int, RegionRow]]] = {}
    for row in _rows(path, RegionRow):
        time, name = row.time_ns, row.name
        if time is None or name is None:
            continue
        if row.point == "start":
            open_regions.setdefault(name, []).append((time, row))
        elif row.point == "end" and open_regions.get(name):
            start, before = open_regions[name].pop()
            yield TimelineEvent(
                name=name,
                start_ns=start,
                duration_ns=max(0, time - start),
                thread="regions",
                cat="region",
                args=_change(before, row),
            )
        else:
            yield _instant(name, time, row)
    for name, rows in open_regions.items():
        yield from (_instant(name, time, row) for time, row in rows)


def _instant(name: str, time_ns: int, row: RegionRow) -> TimelineEvent:
    facts = _facts(row, "step", "global_step", "rss_bytes")
    return TimelineEvent(ph="i", name=name, start_ns=time_ns, thread="snapshots", cat="snapshot", args=facts)


def _change(start: RegionRow, end: RegionRow) -> dict[str, Any]:
    if start.rss_bytes is None or end.rss_bytes is None:
        return {"step": start.step}
    return {"step": start.step, "rss_change_bytes": end.rss_bytes - start.rss_bytes}


def _finding_source(run: Run, spans: Sequence[_Span]) -> Iterator[Source]:
    """Yield the findings, over the time of all windows."""
    if spans:
        whole = min(start for start, _ in spans), max(end for _, end in spans)
        found = examine(Facts.of(run))
        yield Source(label="findings", sort=-1, events=lambda: [_finding(finding, *whole) for finding in found])


def _finding(finding: Finding, start: int, end: int) -> TimelineEvent:
    args = {
        "severity": finding.severity.name.lower(),
        "why": finding.why,
        "next": "\n".join(finding.next_steps),
    }
    return TimelineEvent(
        name=finding.title,
        start_ns=start,
        duration_ns=end - start,
        thread=finding.rule,
        cat="finding",
        args=args,
    )
