"""What a run, traces or snapshots are compared by, read from their files."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.compare.measures import (
    RESIDENT,
    holder_bytes,
    operator_times,
    peak,
    severities,
    site_bytes,
    typical,
)
from lightning_memprof.analysis.compare.model import QUANTITIES, Measure, Side
from lightning_memprof.analysis.findings import Facts, examine, examine_files
from lightning_memprof.analysis.memory.allocations import run_allocations, window_allocations
from lightning_memprof.analysis.memory.report import memory_report
from lightning_memprof.analysis.run.rows import text
from lightning_memprof.analysis.steps.statistics import window_steps
from lightning_memprof.analysis.steps.throughput import rank_throughput
from lightning_memprof.artifacts.series import PHASES
from lightning_memprof.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from lightning_memprof.analysis.findings import Finding
    from lightning_memprof.analysis.memory.model import DeviceAllocations
    from lightning_memprof.analysis.memory.report import RankMemory
    from lightning_memprof.analysis.run.load import Rank, Run
    from lightning_memprof.analysis.trace.model import GpuTimes, TraceReport

__all__ = ["run_side", "snapshots_side", "traces_side"]

# Operators are summed up at some 10 MB/s of compressed trace: the last traces that are no more together.
_MOST_TRACE_BYTES: Final = 64 << 20
_CATEGORIES: Final = ("parameter", "gradient", "optimizer_state", "activation")
_GPU_TIMES: Final = ("window", "busy", "idle", "compute", "communication", "communication_exposed", "memory_copy")


@dataclass
class _Gathered:
    """What was found of one side so far."""

    measures: dict[str, Measure] = field(default_factory=dict)
    named: dict[str, Mapping[str, float]] = field(default_factory=dict)
    spreads: dict[str, Mapping[str, float]] = field(default_factory=dict)
    sentences: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, *measures: Measure | None) -> None:
        for measure in measures:
            if measure is not None:
                self.measures.setdefault(measure.name, measure)

    def add_findings(self, findings: Sequence[Finding]) -> None:
        self.named["findings"], self.sentences = severities(findings)
        count = float(len(self.named["findings"]))
        self.add(
            Measure(name="warnings", unit=QUANTITIES["warnings"], value=count, noise=0.0, samples=1, source="findings")
        )

    def add_operators(self, traces: Sequence[Path]) -> None:
        if not traces:
            return
        try:
            operators, kernels = operator_times(traces)
        except ArtifactError as error:
            self.notes.append(str(error))
            return
        for group, times in (("operators", operators), ("kernels", kernels)):
            if times.values:
                self.named[group], self.spreads[group] = times.values, times.spreads

    def add_allocations(self, found: Sequence[DeviceAllocations], device: str, source: str) -> None:
        """Take the memory of one device, the model's where it is known, over all windows."""
        on_it = [device_memory for device_memory in found if device_memory.device == device]
        if not on_it:
            return
        self.add(
            peak(
                "peak_allocated_bytes",
                [(device_memory.start_bytes or 0) + device_memory.peak_bytes for device_memory in on_it],
                source,
            )
        )
        self.named["stacks"] = site_bytes(
            max(on_it, key=lambda device_memory: (device_memory.start_bytes or 0) + device_memory.peak_bytes).sites
        )

    def side(self, label: str, kind: str) -> Side:
        return Side(
            label=label,
            kind=kind,  # type: ignore[arg-type]
            measures=self.measures,
            named=self.named,
            spreads=self.spreads,
            sentences=self.sentences,
            notes=tuple(self.notes),
        )


def run_side(run: Run, label: str) -> Side:
    """Return what a run is compared by: the time of its lead rank, the largest peaks of its ranks."""
    found = _Gathered()
    lead = run.lead
    _add_times(found, lead)
    rate = rank_throughput(lead)[0]
    step = found.measures.get("step_ns")
    if rate is not None and rate.samples and step is not None and step.value:
        # Of the median step: the mean one follows a single hiccup.
        speed = rate.samples / step.value * 1e9
        noise = speed * step.noise / step.value
        found.add(replace(step, name="samples_per_s", unit="per_s", value=speed, noise=noise))
    _add_sizes(found, run)
    allocations = [allocation for allocation in run_allocations(run.in_full) if allocation.rank == lead.rank]
    found.notes += [allocation.problem for allocation in allocations if allocation.problem]
    device = text(lead.facts, "device") or "cpu"
    found.add_allocations(
        [device_memory for window in allocations for device_memory in window.devices], device, _traced(device)
    )
    _add_memory(found, memory_report(run.in_full).lead)
    traces = [
        artifact
        for artifact in run.artifacts
        if artifact.type == "trace" and artifact.rank == lead.rank and artifact.state == "present"
    ]
    found.add_operators(_last([trace.file for trace in traces]))
    found.add_findings(examine(Facts.of(run)))
    found.notes += [f"{problem.piece}: {problem.message}" for problem in run.problems]
    return found.side(label, "run")


def _traced(device: str) -> str:
    where = "above the bytes at the start of its window" if device == "cpu" else "of the allocator"
    return f"the operator trace, {where}"


def _last(traces: Sequence[Path]) -> list[Path]:
    chosen: list[Path] = []
    total = 0
    for path in reversed(traces):
        total += path.stat().st_size
        if chosen and total > _MOST_TRACE_BYTES:
            break
        chosen.append(path)
    return chosen[::-1]


def _add_times(found: _Gathered, rank: Rank) -> None:
    steps = rank.typical_steps
    if steps is not None:
        rows = [(duration, breakdown) for _, duration, breakdown in steps.steps]
        source = f"the pulse, on the {steps.clock}'s clock"
    else:
        reports = [window_step for window in rank.windows for window_step in window_steps(rank, window)[0]]
        rows = [(step.duration_ns, step.breakdown_ns or {}) for step in reports if step.duration_ns is not None]
        source = "recorded steps, which pay for being recorded"
    step = typical("step_ns", [duration for duration, _ in rows], source)
    found.add(step)
    # What slows whole steps for a while slows every phase of them.
    share = step.noise / step.value if step is not None and step.value else 0.0
    for phase in PHASES:
        known = [ns for _, breakdown in rows if (ns := breakdown.get(phase)) is not None]
        found.add(typical(f"{phase}_ns", known, source, share))


def _add_sizes(found: _Gathered, run: Run) -> None:
    """Take resident memory and the device's peaks, the largest over ranks."""
    rss = [max(known) for rank in run.ranks if (known := [r for row in rank.pulse if (r := row["rss_bytes"])])]
    device = [
        max(known) for rank in run.ranks if (known := [r for row in rank.pulse if (r := row["device_peak_bytes"])])
    ]
    found.add(peak("peak_rss_bytes", rss and [max(rss)], "the pulse", RESIDENT))
    found.add(peak("peak_allocated_bytes", device and [max(device)], "the device's allocator"))
    steps = [window_step for window in run.lead.windows for window_step in window_steps(run.lead, window)[0]]
    reserved = [r for step in steps if step.device and (r := step.device.reserved_bytes) is not None]
    found.add(peak("peak_reserved_bytes", reserved, "recorded steps"))
    resident = [r for step in steps if (r := step.host.max_rss_bytes) is not None]
    found.add(peak("peak_rss_bytes", resident and [max(resident)], "recorded steps", RESIDENT))


def _add_memory(found: _Gathered, memory: RankMemory) -> None:
    if memory.peak is not None:
        for category in _CATEGORIES:
            size = memory.peak.categories.get(category)
            found.add(peak(f"{category}_bytes", [] if size is None else [size], memory.peak.source))
    if memory.activations is not None:
        modules = memory.activations.modules
        found.named["modules"] = {
            module.name or "(the model)": float(module.inclusive_activation_bytes) for module in modules
        }
        held = {module.name or "(the model)": module.parameter_bytes for module in modules}
        found.named["parameters"] = {name: float(size) for name, size in held.items() if size}


def traces_side(paths: Sequence[Path], label: str) -> Side:
    """Return what traces are compared by; of several, each counts as a sample.

    Raises:
        ArtifactError: one is missing, damaged or cut off.

    """
    from lightning_memprof.analysis.trace.report import trace_report

    reports = [trace_report(path) for path in paths]
    found = _Gathered()
    steps = [float(step.duration_ns) for trace in reports for step in trace.steps]
    found.add(typical("step_ns", steps, "the steps of the trace"))
    loading = [float(step.data_loading_ns) for trace in reports for step in trace.steps]
    found.add(typical("data_loading_ns", loading, "the steps of the trace"))
    found.add(
        typical("duration_ns", [float(trace.end_ns - trace.start_ns) for trace in reports], "first to last event")
    )
    _add_gpu_times(found, reports)
    collectives: Counter[str] = Counter()
    for trace in reports:
        for collective in trace.collectives:
            collectives[collective.name] += collective.total_ns
    if collectives:
        found.named["collectives"] = {name: ns / max(len(steps), 1) for name, ns in collectives.items()}
    found.add_operators(paths)
    memory = [device for path in paths for device in window_allocations(path)]
    devices = sorted({window_allocation.device for window_allocation in memory}, key=lambda name: (name == "cpu", name))
    if devices:
        found.add_allocations(memory, devices[0], _traced(devices[0]))
    found.add_findings(examine_files(reports, ()))
    return found.side(label, "traces")


def _add_gpu_times(found: _Gathered, reports: Sequence[TraceReport]) -> None:
    """Take the devices' times: of a mean step where all traces have steps, else of the whole traces."""
    within = [
        (trace.step_window, len(trace.steps)) for trace in reports if trace.step_window is not None and trace.steps
    ]
    anywhere = [(trace.gpu_window, 1) for trace in reports if trace.gpu_window is not None]
    chosen: Sequence[tuple[GpuTimes, int]] = within if len(within) == len(reports) else anywhere
    source = "a step's mean" if chosen is within else "the whole trace"
    for name in _GPU_TIMES:
        found.add(typical(f"gpu_{name}_ns", [getattr(times, f"{name}_ns") / steps for times, steps in chosen], source))


def snapshots_side(paths: Sequence[Path], label: str) -> Side:
    """Return what snapshots are compared by: the fullest of their devices.

    Raises:
        ArtifactError: one is missing, damaged or no snapshot.

    """
    from lightning_memprof.analysis.snapshot.report import snapshot_report

    reports = [snapshot_report(path) for path in paths]
    found = _Gathered()
    sizes: dict[str, list[float]] = defaultdict(list)
    for device in (device for snapshot in reports for device in snapshot.devices):
        for name in (
            "peak_requested_bytes",
            "peak_reserved_bytes",
            "allocated_bytes",
            "requested_bytes",
            "reserved_bytes",
            "inactive_bytes",
        ):
            sizes[name].append(float(getattr(device, name)))
    for name, known in sizes.items():
        found.add(peak(name, [max(known)], "the snapshot"))
    held: Counter[str] = Counter()
    for device in (device for snapshot in reports for device in snapshot.devices):
        for site, count in holder_bytes(device.holders_at_peak).items():
            held[site] = max(held[site], round(count))
    found.named["stacks"] = dict(held)
    found.add_findings(examine_files((), reports))
    return found.side(label, "snapshots")
