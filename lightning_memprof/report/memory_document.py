"""The key ``memory`` of a run as JSON."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.analysis.memory.report import CATEGORIES
from lightning_memprof.report.memory import peak_allocations

if TYPE_CHECKING:
    from lightning_memprof.analysis.memory.allocations import WindowAllocations
    from lightning_memprof.analysis.memory.checkpointing import CheckpointedGroup
    from lightning_memprof.analysis.memory.functions import FunctionReport
    from lightning_memprof.analysis.memory.report import CategoryPeak, MemoryReport, RankMemory

__all__ = ["memory_document"]

# A window has thousands of sites, nearly all of them of a few bytes: their sum is there.
MAX_SITES: Final = 200
QUANTITIES: Final = (
    "rss_bytes",
    "vms_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "forward_rss_bytes",
    "saved_bytes",
)


def memory_document(report: MemoryReport) -> dict[str, Any]:
    """Return the lead rank's memory, and under ``ranks`` every rank's peak, functions and step curve."""
    lead = _rank(report.lead)
    kept = (
        "rank",
        "peak_bytes",
        "total_bytes",
        "source",
        "moment",
        "unattributed_bytes",
        "functions",
        "curve",
        "reasons",
    )
    return {**lead, "ranks": [{name: _rank(rank)[name] for name in kept} for rank in report.ranks]}


def _rank(memory: RankMemory) -> dict[str, Any]:
    found = peak_allocations(memory)
    window, device = found if found is not None else (None, None)
    sites = device.sites if device is not None else ()
    activations = memory.activations
    return {
        "rank": memory.rank,
        **_peak(memory.peak),
        "activations": None
        if activations is None
        else {
            "window": activations.window,
            "step": activations.step,
            "total_bytes": activations.total_bytes,
            "dtypes": dict(activations.dtypes),
            "attribution": activations.attribution,
            "uncounted": activations.uncounted,
        },
        "modules": [dataclasses.asdict(module) for module in activations.modules] if activations else [],
        "unattributed_bytes": activations.unattributed_bytes if activations else None,
        "allocations": [allocation for window in memory.allocations for allocation in _allocations(window)],
        "sites": [
            {**dataclasses.asdict(site), "window": window, "device": device.device if device is not None else None}
            for site in sites[:MAX_SITES]
        ],
        "more_sites": {"count": len(sites[MAX_SITES:]), "bytes": sum(site.bytes for site in sites[MAX_SITES:])},
        "functions": {function.name: _function(function) for function in memory.functions},
        "curve": [dataclasses.asdict(step) for step in memory.steps],
        "checkpointing": [_group(group) for group in memory.checkpointing],
        "reasons": dict(memory.reasons),
    }


def _peak(peak: CategoryPeak | None) -> dict[str, Any]:
    if peak is None:
        empty = dict.fromkeys(("source", "moment", "window", "step", "device", "total_bytes"))
        return {**empty, "peak_bytes": dict.fromkeys(CATEGORIES), "unknown": {}, "other_devices": []}
    others = [
        {
            "device": device_peak.device,
            "total_bytes": device_peak.total_bytes,
            "peak_bytes": dict(device_peak.categories),
        }
        for device_peak in peak.others
    ]
    return {
        "source": peak.source,
        "moment": peak.moment,
        "window": peak.window,
        "step": peak.step,
        "device": peak.device,
        "total_bytes": peak.total_bytes,
        "peak_bytes": dict(peak.categories),
        "unknown": dict(peak.unknown),
        "other_devices": others,
    }


def _allocations(allocation: WindowAllocations) -> list[dict[str, Any]]:
    found = [dataclasses.asdict(dataclasses.replace(device, sites=())) for device in allocation.devices]
    return [
        {"window": allocation.window, **{name: device[name] for name in device if name != "sites"}} for device in found
    ]


def _function(function: FunctionReport) -> dict[str, Any]:
    changes = {name: found for name in QUANTITIES if (found := function.changes(name))}
    return {
        "calls": len(function.calls),
        "unfinished": sum(call.end is None for call in function.calls),
        "raised": sum(call.raised is not None for call in function.calls),
        "changes": {
            name: {"mean": round(sum(found) / len(found)), "max": max(found)} for name, found in changes.items()
        },
        "each": [dataclasses.asdict(call) for call in function.calls],
    }


def _group(group: CheckpointedGroup) -> dict[str, Any]:
    return dataclasses.asdict(group)
