"""Charts of a run, a trace or a snapshot for the page: divs, their data, and the library that draws them, all inline.

Nothing is fetched: bokeh's JavaScript comes from its wheel. The page needs ``chart_resources()`` once, in its head,
and the ``html`` of each chart at its place. Visible charts are drawn first, then the others;
``data-charts="drawn"`` of the root element marks the end. No script uses ``eval``:
``script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:`` is enough. Charts follow ``data-theme``
("light" or "dark") of the root element, else ``prefers-color-scheme``; on paper they are light.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from lightning_memprof.account.memory.blocks import Blocks, read_blocks, replayed_blocks, with_held
from lightning_memprof.account.snapshot.report import SnapshotReport
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.account.trace.table import device_timeline
from lightning_memprof.errors import ArtifactError
from lightning_memprof.judge.device_bound import busy
from lightning_memprof.read.run.model import Run
from lightning_memprof.report.charts.embed import Chart
from lightning_memprof.report.charts.holders import holder_path, holders_chart, site_path
from lightning_memprof.report.charts.memory import memory_chart
from lightning_memprof.report.charts.ranks import ranks_chart
from lightning_memprof.report.charts.steps import run_memory_chart, steps_chart
from lightning_memprof.report.charts.system import system_chart
from lightning_memprof.report.charts.traces import timeline_chart
from lightning_memprof.report.charts.trial import trial_chart
from lightning_memprof.report.sections.memory import peak_allocations
from lightning_memprof.report.sections.snapshots import snapshot_peak
from lightning_memprof.report.view import View

# A chart over time reads its file again; 64 MiB of gzip take some ten seconds.
_MAX_BYTES: Final = 64 * 1024 * 1024
_FILES: Final = 4


def charts(view: View) -> dict[str, Chart]:
    """Return the charts of a run by their ids, in the order of the page; those without data are left out.

    With ``traces`` and ``snapshots`` in the view theirs too.
    """
    run = view.run
    lead = run.lead
    made = [
        steps_chart(view, lead),
        run_memory_chart(lead),
        *_window_memory(view, run),
        ranks_chart(view.across),
        system_chart(run),
        trial_chart(view.trial),
    ]
    found = {chart.id: chart for chart in made if chart is not None}
    return found | file_charts(view.traces, view.snapshots)


def file_charts(traces: Sequence[TraceReport], snapshots: Sequence[SnapshotReport] = ()) -> dict[str, Chart]:
    """Return the charts of traces and snapshots by their ids, which count them in the order of the page."""
    ordered = sorted(traces, key=busy)
    made: list[Chart | None] = list(_timelines(ordered[:_FILES]))
    made += islice(_of_snapshots(sorted(snapshots, key=snapshot_peak, reverse=True)), 2 * _FILES)
    return {chart.id: chart for chart in made if chart is not None}


def _window_memory(view: View, run: Run) -> Iterator[Chart | None]:
    """Yield the lead rank's window with the highest peak over time, and the allocation sites of the peak."""
    memory = view.memory.lead
    highest = peak_allocations(memory)
    files = {allocation.window: allocation.trace for allocation in memory.allocations if allocation.devices}
    window, device = highest or (None, None)
    path = files.get(window)
    if path is None:
        last = [trace for trace in run.files("trace", rank=run.lead.rank) if trace.window is not None]
        path, window = (last[-1].file, last[-1].window) if last else (None, None)
    where = f"window {window} of rank {run.lead.rank}"
    blocks = next((blocks for blocks in _blocks(path) if device is None or blocks.device == device.device), None)
    if blocks is not None:
        held = _held(view, window) if blocks.device == run.lead.facts.device else {}
        yield memory_chart(with_held(blocks, held) if held else blocks, "memory", where)
    if device is not None:
        sites = ((site_path(site), site.bytes, site.blocks) for site in device.sites)
        yield holders_chart(sites, "holders", where)


def _held(view: View, window: int | None) -> Mapping[str, int]:
    """Return the bytes by category that the lead rank held in a window, empty where they were not counted."""
    memory = view.memory.lead
    if window is not None and (held := memory.held.get(window)):
        return held
    if memory.peak is None or memory.peak.window != window:
        return {}
    return {name: size for name, size in memory.peak.categories.items() if size is not None}


def _blocks(path: Path | None) -> tuple[Blocks, ...]:
    try:
        return read_blocks(path) if path is not None and path.stat().st_size <= _MAX_BYTES else ()
    except (ArtifactError, OSError):  # reported with the run's problems
        return ()


def _timelines(traces: Sequence[TraceReport]) -> Iterator[Chart]:
    for number, trace in enumerate(traces):
        try:
            is_short = trace.gpu_window is not None and trace.file.stat().st_size <= _MAX_BYTES
            found = device_timeline(trace.file) if is_short else None
        except (ArtifactError, OSError):
            continue
        if found is not None:
            where = f"rank {trace.rank}" if trace.rank is not None else trace.file.name
            yield timeline_chart(found, f"timeline-{number}", where)


def _of_snapshots(snapshots: Sequence[SnapshotReport]) -> Iterator[Chart]:
    for number, snapshot in enumerate(snapshots):
        for device in snapshot.devices:
            where = f"{snapshot.file.name}, cuda:{device.device}"
            held = ((holder_path(holder), holder.bytes, holder.blocks) for holder in device.holders_at_peak)
            for chart in (
                memory_chart(replayed_blocks(device), f"allocations-{number}-{device.device}", where),
                holders_chart(held, f"sites-{number}-{device.device}", where),
            ):
                if chart is not None:
                    yield chart
