"""The sources of a run's timeline: its traces, its series as events, and its findings.

Series are read line by line when the merger asks for them, so that a run takes the memory of one line here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from lightning_memprof.artifacts.files import MOST_BYTES, open_plain
from lightning_memprof.artifacts.naming import regions_name, system_name
from lightning_memprof.artifacts.rows import DAMAGE, decode_rows
from lightning_memprof.artifacts.series import GarbageRow, HookRow, RegionRow, SeriesRow, WorkerBatchRow
from lightning_memprof.errors import ConfigError, ReportError
from lightning_memprof.judge import Facts, Finding, examine
from lightning_memprof.read.run.model import Rank, RecordedWindow, Run
from lightning_memprof.read.trace.text import BASE_TIME, UNREADABLE, open_trace
from lightning_memprof.timeline.clocks import Clocks
from lightning_memprof.timeline.events import Source, TimelineEvent

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


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a run to show; None for all.

    ``steps`` counts training batches as the pulse does; only events inside them are kept, on every rank by its own
    clock.
    """

    window: int | None = None
    ranks: Collection[int] | None = None
    steps: Collection[int] | None = None


def file_sources(files: Sequence[Path], offsets_ns: Sequence[int]) -> list[Source]:
    """Return the sources of trace files, labelled by name, or by path where two files have the same name.

    ``offsets_ns`` are added to the times of each.

    Raises:
        ConfigError: a file is named twice.
    """
    names = [file.name for file in files]
    labels = [name if names.count(name) == 1 else str(file) for name, file in zip(names, files, strict=True)]
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise ConfigError(f"{twice}: named twice; name each trace once")
    return [
        Source(label="" if len(files) == 1 else _without_suffixes(label), sort=at, trace=file, offset_ns=offset)
        for at, (label, file, offset) in enumerate(zip(labels, files, offsets_ns, strict=True))
    ]


def _without_suffixes(label: str) -> str:
    for suffix in (".gz", ".json", ".trace", ".pt"):
        label = label.removesuffix(suffix)
    return label


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
    choice = Choice(window=window, ranks=ranks, steps=steps)
    clocks = clocks or Clocks()
    chosen = _chosen(run, choice)
    found: list[Source] = []
    for rank, windows in chosen:
        offset = clocks.offset_ns(rank)
        for candidate in windows:
            span = _span(candidate, rank, choice.steps)
            found += _window_sources(run, rank, candidate, offset, span if choice.steps is not None else None)
            always = run.directory / system_name(rank.rank)
            if "system" not in candidate.series and span is not None and always.is_file():
                found.append(_ready(rank, offset, span, partial(_counters, "system", always)))
        named = run.directory / regions_name(rank.rank)
        if named.is_file() and (
            spans := [span for candidate in windows if (span := _span(candidate, rank, choice.steps))]
        ):
            found += [_ready(rank, offset, span, partial(_named, named)) for span in spans]
    return [*_finding_sources(run, chosen, clocks, choice), *found]


def rank_label(rank: Rank) -> str:
    """Return the name of a rank on the timeline: ``"rank 3 · host"``."""
    host = rank.facts.host
    return f"rank {rank.rank} · {host}" if host else f"rank {rank.rank}"


def _chosen(run: Run, choice: Choice) -> list[tuple[Rank, list[RecordedWindow]]]:
    here = {rank.rank for rank in run.ranks}
    missing = sorted(set(choice.ranks or ()) - here)
    if missing:
        raise ReportError(f"rank {missing[0]} is not in this run; its ranks are {_listed(here)}")
    chosen = [
        (rank, [window for window in rank.windows if _wanted(window, choice)])
        for rank in run.ranks
        if choice.ranks is None or rank.rank in choice.ranks
    ]
    chosen = [(rank, windows) for rank, windows in chosen if windows]
    if not chosen:
        raise ReportError(_nothing(run, choice))
    return chosen


def _wanted(window: RecordedWindow, choice: Choice) -> bool:
    if choice.window is not None and window.index != choice.window:
        return False
    return choice.steps is None or not set(choice.steps).isdisjoint(_steps(window))


def _steps(window: RecordedWindow) -> tuple[int, ...]:
    return (*window.warmup_steps, *window.steps)


def _nothing(run: Run, choice: Choice) -> str:
    windows = [window for rank in run.ranks for window in rank.windows]
    if not windows:
        return f"{run.directory}: no window was recorded; give MemProfilerCallback a schedule that reaches one"
    if choice.window is not None and choice.window not in {window.index for window in windows}:
        return f"there is no window {choice.window} in this run; its windows are {_listed(w.index for w in windows)}"
    if choice.steps is not None:
        recorded = _listed(step for window in windows for step in window.steps)
        return f"no window has step {_listed(choice.steps)}; the recorded steps are {recorded}"
    return "the chosen ranks recorded no such window; remove --ranks or --window"


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
    # The pulse is in memory; a step that is cut out has the edges of the slice that is drawn.
    edges = [] if steps is not None else _pulse_edges(rank, inside)
    if not edges and "hooks" in window.series:
        edges = [
            (event.start_ns, event.start_ns + event.duration_ns)
            for event in _hooks(window.series["hooks"])
            if event.cat == "step" and (event.args or {}).get("step") in inside
        ]
    edges = edges or _pulse_edges(rank, inside)
    return (min(start for start, _ in edges), max(end for _, end in edges)) if edges else None


def _pulse_edges(rank: Rank, steps: Collection[int]) -> list[_Span]:
    return [
        (start, start + duration)
        for row in rank.pulse
        if row["step"] in steps and (start := row["start_ns"]) and (duration := row["duration_ns"]) is not None
    ]


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
    chosen = events if span is None else partial(_within, events, span)
    return Source(label=rank_label(rank), sort=rank.rank, events=chosen, offset_ns=offset)


def _within(events: Callable[[], Iterable[TimelineEvent]], span: _Span) -> Iterator[TimelineEvent]:
    """Yield the events in a span; slices across its edges are clipped."""
    first, last = span
    for event in events():
        start, end = event.start_ns, event.start_ns + event.duration_ns
        if first <= start and end <= last:
            yield event
        elif event.ph == "X" and start < last and end > first:
            start, end = max(start, first), min(end, last)
            yield msgspec.structs.replace(event, start_ns=start, duration_ns=end - start)


def _in_trace(trace: Path, span: _Span) -> _Span:
    """Return a span of Unix time in a trace's clock, which counts from its base."""
    base = _base_ns(trace)
    return span[0] - base, span[1] - base


def _base_ns(trace: Path) -> int:
    """Return the Unix epoch time in ns from which a trace's times count; 0 where it has none or cannot be read."""
    try:
        with open_trace(trace) as stream:
            found = BASE_TIME.search(stream.read(_HEAD))
    except UNREADABLE:
        return 0
    return int(found[1]) if found else 0


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
                args=_facts(row, "generation", "collected", "uncollectable", "tensor_bytes"),
            )


def _counters(process: str, path: Path) -> Iterator[TimelineEvent]:
    for row in _rows(path, dict):
        if (time := _whole(row.get("time_ns"))) is not None:
            for key, value in row.items():
                if key not in _PLACE and _is_figure(value):
                    yield _counter(process, key, time, value)


def _allocator(path: Path) -> Iterator[TimelineEvent]:
    for row in _rows(path, dict):
        if (time := _whole(row.get("time_ns"))) is not None:
            device = row.get("device") or "device"
            for key in _CURVES:
                if _is_figure(row.get(key)):
                    name = key.replace(".all.current", "").replace(".all.peak", "_peak")
                    yield _counter("memory", f"{device} {name}", time, row[key])


def _counter(process: str, name: str, time: int, value: float) -> TimelineEvent:
    return TimelineEvent(ph="C", name=name, start_ns=time, process=process, cat="counter", args={"value": value})


def _whole(value: object) -> int | None:
    """Return a value where it is a whole number of 64 bits: larger ones are damage."""
    return value if type(value) is int and -(1 << 63) <= value < 1 << 63 else None


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


def _finding_sources(
    run: Run, chosen: list[tuple[Rank, list[RecordedWindow]]], clocks: Clocks, choice: Choice
) -> Iterator[Source]:
    spans = [
        (span[0] + clocks.offset_ns(rank), span[1] + clocks.offset_ns(rank))
        for rank, windows in chosen
        for window in windows
        if (span := _span(window, rank, choice.steps)) is not None
    ]
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
