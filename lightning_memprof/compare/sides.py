"""The sides of a comparison: the measures of a run, of traces or of snapshots, with their noise."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from lightning_memprof.account.ledger.ranks import across_ranks
from lightning_memprof.account.memory.allocations import run_allocations, window_allocations
from lightning_memprof.account.memory.model import DeviceAllocations, Site
from lightning_memprof.account.memory.report import RankMemory, memory_report
from lightning_memprof.account.parts import PHASE_PARTS
from lightning_memprof.account.snapshot.replay import Holder
from lightning_memprof.account.steps.statistics import peak_rss_bytes, typical_steps, window_steps
from lightning_memprof.account.steps.throughput import rank_throughput
from lightning_memprof.account.trace.key_averages import collect_rows
from lightning_memprof.account.trace.model import GpuTimes, TraceReport
from lightning_memprof.compare.model import QUANTITIES, Measure, Side
from lightning_memprof.compare.significance import drift
from lightning_memprof.errors import ArtifactError
from lightning_memprof.judge import Facts, Finding, Severity, examine, examine_files
from lightning_memprof.read.run.model import Rank, Run
from lightning_memprof.read.stacks import parse_frame

# Noise of a single time, for which there is no spread.
_ONE_TIME: Final = 0.10
# Noise of the mean of many times.
_ONE_MEAN: Final = 0.05
_PARTS: Final = 4
# Allocator counters are reproducible but for blocks of a few bytes.
_EXACT: Final = 0.001
# RSS of two processes of the same program: arenas and threads of libraries.
_RESIDENT: Final = 0.02
# Standard deviation per median absolute deviation, for a normal distribution.
_MAD_TO_SD: Final = 1.4826
# With fewer samples the median deviation is often 0 by chance; the range is used.
_FEW_SAMPLES: Final = 5
_BUILTIN: Final = "<built-in "
_STEPS: Final = "ProfilerStep*"
# Summing operators reads about 10 MB/s of compressed trace: only the last traces, up to this size together, are read.
_MOST_TRACE_BYTES: Final = 64 << 20
_CATEGORIES: Final = ("parameter", "gradient", "optimizer_state", "activation")
_PEAKS: Final = ("peak_requested_bytes", "peak_reserved_bytes")
_SIZES: Final = ("allocated_bytes", "requested_bytes", "reserved_bytes", "inactive_bytes")
_GPU_TIMES: Final = ("window", "busy", "idle", "compute", "communication", "communication_exposed", "memory_copy")


def _add_findings(side: Side, findings: Sequence[Finding]) -> None:
    side.named["findings"], sentences = severities(findings)
    side.sentences.update(sentences)
    count = float(len(side.named["findings"]))
    side.add(
        Measure(name="warnings", unit=QUANTITIES["warnings"], value=count, noise=0.0, samples=1, source="findings")
    )


def _add_operators(side: Side, traces: Sequence[tuple[int | None, Path]]) -> None:
    try:
        found = [(rank, operator_times(trace)) for rank, trace in traces]
    except ArtifactError as error:
        side.notes.append(str(error))
        return
    for at, group in enumerate(("operators", "kernels")):
        values, spreads = over_traces([(rank, times[at]) for rank, times in found])
        if values:
            side.named[group], side.spreads[group] = values, spreads


def _add_allocations(
    side: Side, found: Sequence[tuple[int | None, DeviceAllocations]], device: str, source: str
) -> None:
    """Add the peak of one device over all windows and ranks, and the allocation sites at the largest."""
    peaks = [
        (rank, (memory.start_bytes or 0) + memory.peak_bytes, memory)
        for rank, memory in found
        if memory.device == device
    ]
    if peaks:
        sizes = _over_ranks(((rank, size) for rank, size, _ in peaks), max)
        side.add(peak("peak_allocated_bytes", sizes, source))
        side.named["stacks"] = site_bytes(max(peaks, key=itemgetter(1))[2].sites)


def run_side(run: Run, label: str) -> Side:
    """Return the side of a run: times of its lead rank, the largest peaks over its ranks."""
    found = Side(label=label, kind="run")
    lead = run.lead
    _add_times(found, lead)
    rate = rank_throughput(lead)
    step = found.measures.get("step_ns")
    if rate is not None and rate.samples and step is not None and step.value:
        # By the median step: a single hiccup moves the mean.
        speed = rate.samples / step.value * 1e9
        noise = speed * step.noise / step.value
        steps = tuple(rate.samples / ns * 1e9 for ns in step.steps or () if ns)
        found.add(replace(step, name="samples_per_s", unit="per_s", value=speed, noise=noise, steps=steps))
    _add_sizes(found, run)
    allocations = [allocation for allocation in run_allocations(run.in_full) if allocation.rank == lead.rank]
    found.notes.extend(allocation.problem for allocation in allocations if allocation.problem)
    device = lead.facts.device or "cpu"
    memory = [(lead.rank, allocated) for window in allocations for allocated in window.devices]
    _add_allocations(found, memory, device, _traced(device))
    _add_memory(found, memory_report(run.in_full).lead)
    last = _last([trace.file for trace in run.files("trace", rank=lead.rank)])
    _add_operators(found, [(lead.rank, trace) for trace in last])
    _add_findings(found, examine(Facts.of(run)))
    found.notes.extend(f"{problem.piece}: {problem.message}" for problem in run.problems)
    return found


def _traced(device: str) -> str:
    where = "live bytes above the start of its window" if device == "cpu" else "allocator counters"
    return f"the operator trace ({where})"


def _last(traces: Sequence[Path]) -> list[Path]:
    chosen: list[Path] = []
    total = 0
    for path in reversed(traces):
        total += path.stat().st_size
        if chosen and total > _MOST_TRACE_BYTES:
            break
        chosen.append(path)
    return chosen[::-1]


def _add_times(found: Side, rank: Rank) -> None:
    steps = typical_steps(rank)
    if steps is not None:
        rows = [(duration, breakdown) for _, duration, breakdown in steps.steps]
        source = f"the pulse, on the {steps.clock}'s clock"
    else:
        reports = [window_step for window in rank.windows for window_step in window_steps(rank, window)]
        rows = [(step.duration_ns, step.breakdown_ns or {}) for step in reports if step.duration_ns is not None]
        source = "recorded steps, with the profiler overhead"
    step = typical("step_ns", [duration for duration, _ in rows], source, of_steps=True)
    found.add(step)
    if steps is not None:
        found.add(_mean("mean_step_ns", [duration for duration, _ in rows], source))
    # A slow phase of the machine slows every phase of a step.
    share = step.noise / step.value if step is not None and step.value else 0.0
    for phase in PHASE_PARTS:
        known = [ns for _, breakdown in rows if (ns := breakdown.get(phase)) is not None]
        found.add(typical(f"{phase}_ns", known, source, share, of_steps=True))


def _add_sizes(found: Side, run: Run) -> None:
    """Add the peak RSS and the device peaks, each of the rank with the largest."""
    rss = [size for rank in run.ranks if (size := peak_rss_bytes(rank))]
    is_whole = all(rank.high_water_bytes for rank in run.ranks)
    device = [
        max(known) for rank in run.ranks if (known := [r for row in rank.pulse if (r := row["device_peak_bytes"])])
    ]
    source = "the kernel's high-water mark" if is_whole else "samples at steps"
    found.add(peak("peak_rss_bytes", rss and [max(rss)], source, _RESIDENT))
    found.add(peak("peak_allocated_bytes", device and [max(device)], "the device's allocator"))
    steps = [window_step for window in run.lead.windows for window_step in window_steps(run.lead, window)]
    reserved = [r for step in steps if step.device and (r := step.device.reserved_bytes) is not None]
    found.add(peak("peak_reserved_bytes", reserved, "recorded steps"))


def _add_memory(found: Side, memory: RankMemory) -> None:
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
    """Return the side of traces; each is one sample, and the traces of several ranks are one together.

    Raises:
        ArtifactError: a trace is missing, damaged or truncated.
    """
    from lightning_memprof.account.trace.report import trace_report

    reports = across_ranks([trace_report(path) for path in paths])
    found = Side(label=label, kind="traces")
    steps = _over_ranks((trace.rank, length) for trace in reports for length in _step_lengths(trace))
    found.add(typical("step_ns", steps, "the steps of the trace", of_steps=True))
    loading = _over_ranks((trace.rank, step.data_loading_ns) for trace in reports for step in trace.steps)
    found.add(typical("data_loading_ns", loading, "the steps of the trace", of_steps=True))
    # The length of a recording is that of the program only where as many steps were recorded.
    recorded = statistics.median(len(trace.steps) for trace in reports)
    of_steps = f" of {recorded:g} steps" if recorded else ""
    lengths = _over_ranks((trace.rank, trace.end_ns - trace.start_ns) for trace in reports)
    found.add(typical("duration_ns", lengths, f"first to last event{of_steps}"))
    _add_gpu_times(found, reports)
    collectives: Counter[str] = Counter()
    for trace in reports:
        for collective in trace.collectives:
            collectives[collective.name] += collective.total_ns
    if collectives:
        number = max(sum(len(trace.steps) for trace in reports), 1)
        found.named["collectives"] = {name: ns / number for name, ns in collectives.items()}
    _add_operators(found, [(trace.rank, trace.file) for trace in reports])
    memory = [(trace.rank, allocated) for trace in reports for allocated in window_allocations(trace.file)]
    devices = sorted({allocations.device for _, allocations in memory}, key=lambda name: (name == "cpu", name))
    if devices:
        _add_allocations(found, memory, devices[0], _traced(devices[0]))
    _add_findings(found, examine_files(reports, ()))
    return found


def _over_ranks(
    samples: Iterable[tuple[int | None, float]], of: Callable[[Iterable[float]], float] = statistics.fmean
) -> list[float]:
    """Return the mean over the ranks, or another figure, of each of their samples in order.

    Differences between ranks are not noise: the others wait for a late one. Traces without a rank are those of one.
    """
    by_rank: dict[int | None, list[float]] = defaultdict(list)
    for rank, sample in samples:
        by_rank[rank].append(sample)
    return [of(together) for together in zip(*by_rank.values(), strict=False)]


def _step_lengths(trace: TraceReport) -> Sequence[int]:
    """Return the durations of a trace's steps; where the host is ahead of the device, those on the device."""
    return trace.ahead_steps_ns or [step.duration_ns for step in trace.steps]


def _add_gpu_times(found: Side, reports: Sequence[TraceReport]) -> None:
    """Add the device times: per mean step if all traces have steps, otherwise over whole traces."""
    within = [
        (trace.rank, trace.work_window, len(trace.steps))
        for trace in reports
        if trace.work_window is not None and trace.steps
    ]
    anywhere = [(trace.rank, trace.gpu_window, 1) for trace in reports if trace.gpu_window is not None]
    chosen: Sequence[tuple[int | None, GpuTimes, int]] = within if len(within) == len(reports) else anywhere
    source = "the mean per step" if chosen is within else "the whole trace"
    for name in _GPU_TIMES:
        times = _over_ranks((rank, getattr(times, f"{name}_ns") / steps) for rank, times, steps in chosen)
        found.add(typical(f"gpu_{name}_ns", times, source))


def snapshots_side(paths: Sequence[Path], label: str) -> Side:
    """Return the side of snapshots: the maximum over their devices.

    Raises:
        ArtifactError: a file is missing, damaged or not a snapshot.
    """
    from lightning_memprof.account.snapshot.report import snapshot_report

    reports = [snapshot_report(path) for path in paths]
    found = Side(label=label, kind="snapshots")
    sizes: dict[str, list[float]] = defaultdict(list)
    for device in (device for snapshot in reports for device in snapshot.devices):
        for source, names in ((device, _PEAKS), (device.snapshot, _SIZES)):
            for name in names:
                sizes[name].append(float(getattr(source, name)))
    for name, known in sizes.items():
        found.add(peak(name, [max(known)], "the snapshot"))
    held: Counter[str] = Counter()
    for device in (device for snapshot in reports for device in snapshot.devices):
        for site, count in holder_bytes(device.holders_at_peak).items():
            held[site] = max(held[site], round(count))
    found.named["stacks"] = dict(held)
    _add_findings(found, examine_files((), reports))
    return found


def typical(
    name: str, samples: Sequence[float], source: str, least_share: float = 0.0, *, of_steps: bool = False
) -> Measure | None:
    """Return the median of samples and their spread; None without samples.

    ``of_steps`` says that each sample is one step.
    """
    if not samples:
        return None
    value = statistics.median(samples)
    noise = max(_spread(samples), least_share * abs(value), _ONE_TIME * abs(value) if len(samples) == 1 else 0.0)
    measure = _measure(name, samples, source, value, noise)
    return replace(measure, steps=tuple(samples)) if of_steps else measure


def _mean(name: str, samples: Sequence[float], source: str) -> Measure:
    """Return the mean of samples, in which is what happens now and then, such as workers that restart in each epoch.

    Its noise is half of the spread over four consecutive parts, of which a hiccup is in one, and that of two runs.
    """
    value, size = statistics.fmean(samples), -(-len(samples) // _PARTS)
    parts = [statistics.fmean(samples[at : at + size]) for at in range(0, len(samples), size)]
    return _measure(name, parts, source, value, max(_spread(parts) / 2, _ONE_MEAN * value))


def peak(name: str, samples: Sequence[float], source: str, least_share: float = _EXACT) -> Measure | None:
    """Return the maximum of samples and their spread; None without samples."""
    if not samples:
        return None
    value = max(samples)
    noise = max(_spread(samples), least_share * abs(value))
    return _measure(name, samples, source, value, noise)


def _measure(name: str, samples: Sequence[float], source: str, value: float, noise: float) -> Measure:
    return Measure(name=name, unit=QUANTITIES[name], value=value, noise=noise, samples=len(samples), source=source)


def _spread(samples: Sequence[float]) -> float:
    """Return the spread of samples in time order: their deviation, or the drift between halves if larger."""
    if len(samples) < _FEW_SAMPLES:
        return max(samples) - min(samples)
    middle = statistics.median(samples)
    return max(drift(samples), _MAD_TO_SD * statistics.median(abs(sample - middle) for sample in samples))


def operator_times(trace: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Return self time in ns per step by name, of host operators and annotations, and of kernels; no Python frames.

    A trace without steps counts as one step.

    Raises:
        ArtifactError: the trace is missing, damaged or truncated.
    """
    rows = collect_rows([trace], group_by_input_shapes=False).rows
    steps = max((row.count for row in rows if row.name == _STEPS and not row.on_device), default=0)
    sums = Counter[str](), Counter[str]()
    for row in rows:
        if row.on_device and not row.is_annotation:
            sums[1][row.name] += row.self_device_ns
        elif not row.on_device and parse_frame(row.name) is None and not row.name.startswith(_BUILTIN):
            sums[0][row.name] += row.self_cpu_ns
    operators, kernels = ({name: ns / max(steps, 1) for name, ns in each.items()} for each in sums)
    return operators, kernels


def over_traces(samples: Sequence[tuple[int | None, Mapping[str, float]]]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the median of each name's times over the traces of a rank, and their range."""
    names = dict.fromkeys(name for _, sample in samples for name in sample)
    times = {name: _over_ranks((rank, sample.get(name, 0.0)) for rank, sample in samples) for name in names}
    return (
        {name: statistics.median(each) for name, each in times.items()},
        {name: max(each) - min(each) for name, each in times.items()},
    )


def site_bytes(sites: Iterable[Site]) -> dict[str, float]:
    """Return the live bytes at the peak by operator and module or line, over all steps."""
    held: Counter[str] = Counter()
    for site in sites:
        where = site.module or (_short(site.line) if site.line else None)
        held[f"{site.operator} in {where}" if where else site.operator] += site.bytes
    return dict(held)


def holder_bytes(holders: Iterable[Holder]) -> dict[str, float]:
    """Return the live bytes at the peak by allocation site."""
    held: Counter[str] = Counter()
    for holder in holders:
        held[_short(holder.site) or "allocated before the history was on"] += holder.bytes
    return dict(held)


def _short(line: str) -> str:
    """Return a code location without line number and leading directories, which differ between runs."""
    frame = parse_frame(line)
    return line if frame is None else f"{'/'.join(frame.filename.split('/')[-2:])}: {frame.name}"


def severities(findings: Iterable[Finding]) -> tuple[dict[str, float], Mapping[str, str]]:
    """Return the severity and the sentence of each rule that warns."""
    worst: dict[str, Finding] = {}
    for finding in sorted(findings, key=lambda finding: finding.severity):
        if finding.severity >= Severity.WARNING:
            worst[finding.rule] = finding
    return {rule: float(finding.severity) for rule, finding in worst.items()}, {
        rule: finding.title for rule, finding in worst.items()
    }
