"""Measures from samples: a value and its noise."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.compare.model import QUANTITIES, Measure
from lightning_memprof.analysis.findings import Severity
from lightning_memprof.analysis.stacks import parse_frame
from lightning_memprof.analysis.trace.key_averages import collect_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from lightning_memprof.analysis.findings import Finding
    from lightning_memprof.analysis.memory.model import Site
    from lightning_memprof.analysis.snapshot.replay import Holder

__all__ = [
    "EXACT",
    "ONE_TIME",
    "RESIDENT",
    "Times",
    "holder_bytes",
    "operator_times",
    "peak",
    "severities",
    "site_bytes",
    "typical",
]

# Noise of a single time, for which there is no spread.
ONE_TIME: Final = 0.10
# Allocator counters are reproducible but for blocks of a few bytes.
EXACT: Final = 0.001
# RSS of two processes of the same program: arenas and threads of libraries.
RESIDENT: Final = 0.02
# Standard deviation per median absolute deviation, for a normal distribution.
_MAD_TO_SD: Final = 1.4826
# With fewer samples the median deviation is often 0 by chance; the range is used.
_FEW_SAMPLES: Final = 5
# A shared machine is slower at times: two runs differ as much as the halves of one run.
_MANY_SAMPLES: Final = 10
_BUILTIN: Final = "<built-in "
_STEPS: Final = "ProfilerStep*"


def typical(name: str, samples: Sequence[float], source: str, least_share: float = 0.0) -> Measure | None:
    """Return the median of samples and their spread; None without samples."""
    if not samples:
        return None
    value = statistics.median(samples)
    noise = max(_spread(samples), least_share * abs(value), ONE_TIME * abs(value) if len(samples) == 1 else 0.0)
    return Measure(
        name=name, unit=QUANTITIES[name], value=value, noise=noise, samples=len(samples), source=source
    )  # fmt: skip


def peak(name: str, samples: Sequence[float], source: str, least_share: float = EXACT) -> Measure | None:
    """Return the maximum of samples and their spread; None without samples."""
    if not samples:
        return None
    value = max(samples)
    noise = max(_spread(samples), least_share * abs(value))
    return Measure(
        name=name, unit=QUANTITIES[name], value=value, noise=noise, samples=len(samples), source=source
    )  # fmt: skip


def _spread(samples: Sequence[float]) -> float:
    """Return the spread of samples in time order: their deviation, or the drift between halves if larger."""
    if len(samples) < _FEW_SAMPLES:
        return max(samples) - min(samples)
    middle = statistics.median(samples)
    drift = 0.0
    half = len(samples) // 2
    if half >= _MANY_SAMPLES:
        drift = abs(statistics.median(samples[:half]) - statistics.median(samples[half:]))
    return max(drift, _MAD_TO_SD * statistics.median(abs(sample - middle) for sample in samples))


def operator_times(traces: Sequence[Path]) -> tuple[Times, Times]:
    """Return self time in ns per step by name, of host operators and annotations, and of kernels; no Python frames.

    Each trace is a sample. A trace without steps counts as one step.

    Raises:
        ArtifactError: a trace is missing, damaged or cut off.

    """
    operators, kernels = Times(), Times()
    for trace in traces:
        collected = collect_rows([trace], group_by_input_shapes=False)
        steps = max((row.count for row in collected.rows if row.name == _STEPS and not row.on_device), default=0)
        on_host: Counter[str] = Counter()
        on_device: Counter[str] = Counter()
        for row in collected.rows:
            if row.on_device and not row.is_annotation:
                on_device[row.name] += row.self_device_ns
            elif not row.on_device and parse_frame(row.name) is None and not row.name.startswith(_BUILTIN):
                on_host[row.name] += row.self_cpu_ns
        operators.add(on_host, max(steps, 1))
        kernels.add(on_device, max(steps, 1))
    return operators, kernels


class Times:
    """Times by name over several traces."""

    def __init__(self) -> None:
        self._samples: list[dict[str, float]] = []

    def add(self, sums: Mapping[str, int], steps: int) -> None:
        """Add the sums over the steps of one trace."""
        self._samples.append({name: ns / steps for name, ns in sums.items()})

    def _of(self, name: str) -> list[float]:
        return [sample.get(name, 0.0) for sample in self._samples]

    @property
    def values(self) -> dict[str, float]:
        """The median over the traces, in ns per step."""
        names = dict.fromkeys(name for sample in self._samples for name in sample)
        return {name: statistics.median(self._of(name)) for name in names}

    @property
    def spreads(self) -> dict[str, float]:
        """The range over the traces, in ns per step."""
        return {name: max(known) - min(known) for name in self.values if (known := self._of(name))}


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
        rule: finding.sentence for rule, finding in worst.items()
    }
