"""Every file name of a run: build it and parse it back. ``rank`` is always the global rank."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

__all__ = [
    "RUN_DIRECTORY",
    "TRIGGER_PLAN",
    "TRIGGER_REQUEST",
    "SnapshotName",
    "TraceName",
    "curves_path",
    "fsdp_log_name",
    "fsdp_stats_name",
    "functions_name",
    "manifest_name",
    "memory_stats_name",
    "module_log_name",
    "numbered",
    "oom_name",
    "oom_snapshot_name",
    "parse_curves_path",
    "parse_fsdp_log_name",
    "parse_fsdp_stats_name",
    "parse_functions_name",
    "parse_manifest_name",
    "parse_memory_stats_name",
    "parse_module_log_name",
    "parse_numbered",
    "parse_oom_name",
    "parse_oom_snapshot_name",
    "parse_pulse_name",
    "parse_series_path",
    "parse_summary_path",
    "parse_system_name",
    "pulse_name",
    "regions_name",
    "series_path",
    "summary_path",
    "system_name",
    "table_name",
    "temporary_name",
]

RUN_DIRECTORY: Final = "memprofiler"
TRIGGER_REQUEST: Final = "trigger.request.json"
TRIGGER_PLAN: Final = "trigger.plan.json"

Edge = Literal["start", "end"]
StatsFormat = Literal["yaml", "pickle"]

_MANIFEST: Final = re.compile(r"manifest\.rank([0-9]{5,})\.jsonl")
_PULSE: Final = re.compile(r"pulse\.rank([0-9]{5,})\.csv")
_SERIES: Final = re.compile(r"window([0-9]{3,})/rank([0-9]{5,})\.([^/.]+)\.jsonl")
_SUMMARY: Final = re.compile(r"window([0-9]{3,})/rank([0-9]{5,})\.summary\.json")
_NUMBERED: Final = re.compile(r"(.+?)(?:-([2-9]|[1-9][0-9]+))?")
_SYSTEM: Final = re.compile(r"system\.rank([0-9]{5,})\.jsonl")
_SNAPSHOT: Final = re.compile(r"cuda_alloc_rank_([0-9]+)\.(.+)\.([0-9]+)\.(start|end)\.pickle")
_OOM: Final = re.compile(r"oom\.rank([0-9]{5,})\.json")
_OOM_SNAPSHOT: Final = re.compile(r"cuda_oom_rank_([0-9]+)\.pickle")
_CURVES: Final = re.compile(r"tb/rank([0-9]+)/events\.out\.tfevents\.rank([0-9]{5,})")
_FUNCTIONS: Final = re.compile(r"functions\.rank([0-9]{5,})\.jsonl")
_MEMORY_STATS: Final = re.compile(r"rank_([0-9]+)_memory_stats\.(yaml|pickle)")
_MEMORY_LOG: Final = re.compile(r"(fsdp|module)_mem_rank_([0-9]+)_(.+)_([0-9]+)\.log")
_FSDP_STATS: Final = re.compile(r"rank_([0-9]+)_fsdp_memory_stats\.yaml")
_TRACE: Final = re.compile(
    r"(?P<stage>[a-z]+)-(?P<filename>.+)-(?P<rank>[0-9]+)\[Strategy\](?P<strategy>\w+)\.(?P<function>\w+)"
    r"\.(?P<time_ns>[0-9]+)\.pt\.trace\.json(?:\.gz)?"
)


def manifest_name(rank: int) -> str:
    """Name of a rank's manifest inside the run directory."""
    return f"manifest.rank{rank:05d}.jsonl"


def parse_manifest_name(name: str) -> int | None:
    """Return the rank of a manifest's name, or None where it is none."""
    match = _MANIFEST.fullmatch(name)
    return int(match[1]) if match else None


def pulse_name(rank: int) -> str:
    """Name of a rank's pulse inside the run directory."""
    return f"pulse.rank{rank:05d}.csv"


def parse_pulse_name(name: str) -> int | None:
    """Return the rank of a pulse's name, or None where it is none."""
    match = _PULSE.fullmatch(name)
    return int(match[1]) if match else None


def regions_name(rank: int) -> str:
    """Name of a rank's named snapshots and regions inside the run directory."""
    return f"snapshots.rank{rank:05d}.jsonl"


def system_name(rank: int) -> str:
    """Name of a rank's samples of the machine over the whole run, inside the run directory."""
    return f"system.rank{rank:05d}.jsonl"


def parse_system_name(name: str) -> int | None:
    """Return the rank of the name of such samples, or None where it is none."""
    match = _SYSTEM.fullmatch(name)
    return int(match[1]) if match else None


def oom_name(rank: int) -> str:
    """Name of the facts of a rank's out-of-memory events inside the run directory."""
    return f"oom.rank{rank:05d}.json"


def parse_oom_name(name: str) -> int | None:
    """Return the rank of the name of such facts, or None where it is none."""
    match = _OOM.fullmatch(name)
    return int(match[1]) if match else None


def oom_snapshot_name(rank: int) -> str:
    """Name of the allocator snapshot of a rank's device when it ran out of memory."""
    return f"cuda_oom_rank_{rank}.pickle"


def parse_oom_snapshot_name(name: str) -> int | None:
    """Return the rank of such a snapshot's name, or None where it is none."""
    match = _OOM_SNAPSHOT.fullmatch(name)
    return int(match[1]) if match else None


def functions_name(rank: int) -> str:
    """Name of a rank's rows of functions that are counted by their calls, inside the run directory."""
    return f"functions.rank{rank:05d}.jsonl"


def parse_functions_name(name: str) -> int | None:
    """Return the rank of the name of such rows, or None where it is none."""
    match = _FUNCTIONS.fullmatch(name)
    return int(match[1]) if match else None


def memory_stats_name(rank: int, form: StatsFormat = "yaml") -> str:
    """Name of a rank's memory at the start and end of functions, inside the run directory."""
    return f"rank_{rank}_memory_stats.{form}"


def parse_memory_stats_name(name: str) -> tuple[int, StatsFormat] | None:
    """Return the rank and the format of the name of such a file, or None where it is none."""
    match = _MEMORY_STATS.fullmatch(name)
    if match is None:
        return None
    return int(match[1]), "yaml" if match[2] == "yaml" else "pickle"


def fsdp_log_name(rank: int, function: str, number: int) -> str:
    """Name of a rank's FSDP memory report of one step; ``number`` is the step + 1."""
    return f"fsdp_mem_rank_{rank}_{function}_{number}.log"


def parse_fsdp_log_name(name: str) -> tuple[int, str, int] | None:
    """Return ``(rank, function, number)`` of such a report's name, or None where it is none."""
    return _parse_log_name(name, "fsdp")


def module_log_name(rank: int, function: str, number: int) -> str:
    """Name of a rank's module memory report of one step; ``number`` is the step + 1."""
    return f"module_mem_rank_{rank}_{function}_{number}.log"


def parse_module_log_name(name: str) -> tuple[int, str, int] | None:
    """Return ``(rank, function, number)`` of such a report's name, or None where it is none."""
    return _parse_log_name(name, "module")


def _parse_log_name(name: str, kind: str) -> tuple[int, str, int] | None:
    match = _MEMORY_LOG.fullmatch(name)
    return (int(match[2]), match[3], int(match[4])) if match and match[1] == kind else None


def fsdp_stats_name(rank: int) -> str:
    """Name of a rank's FSDP memory figures inside the run directory."""
    return f"rank_{rank}_fsdp_memory_stats.yaml"


def parse_fsdp_stats_name(name: str) -> int | None:
    """Return the rank of the name of such figures, or None where it is none."""
    match = _FSDP_STATS.fullmatch(name)
    return int(match[1]) if match else None


def series_path(window: int, rank: int, collector: str) -> str:
    """Path of a collector's series inside the run directory, with ``/``."""
    return f"window{window:03d}/rank{rank:05d}.{collector}.jsonl"


def parse_series_path(path: str) -> tuple[int, int, str] | None:
    """Return ``(window, rank, collector)`` of a series' path, or None where it is none."""
    match = _SERIES.fullmatch(path)
    return (int(match[1]), int(match[2]), match[3]) if match else None


def curves_path(rank: int) -> str:
    """Path of a rank's curves, relative to the run directory, with ``/``.

    TensorBoard takes the directory as the name of what it draws, and reads files whose names have ``.tfevents.``.
    """
    return f"tb/rank{rank}/events.out.tfevents.rank{rank:05d}"


def parse_curves_path(path: str) -> int | None:
    """Return the rank of the path of curves, or None where it is none."""
    match = _CURVES.fullmatch(path)
    return int(match[1]) if match and int(match[1]) == int(match[2]) else None


def summary_path(window: int, rank: int) -> str:
    """Path of what one rank's window comes to, relative to the run directory, with ``/``."""
    return f"window{window:03d}/rank{rank:05d}.summary.json"


def parse_summary_path(path: str) -> tuple[int, int] | None:
    """Return the window and the rank of a summary's path, or None where it is none."""
    match = _SUMMARY.fullmatch(path)
    return (int(match[1]), int(match[2])) if match else None


def numbered(name: str, run: int) -> str:
    """Give the name that the ``run``-th run (from 1) in one directory uses: ``name``, ``name-2``, ``name-3``."""
    return name if run == 1 else f"{name}-{run}"


def parse_numbered(name: str) -> tuple[str, int]:
    """Return ``(name, run)`` of what :func:`numbered` built."""
    match = _NUMBERED.fullmatch(name)
    return (match[1], int(match[2] or 1)) if match else (name, 1)


def table_name(stage: str, filename: str, rank: int) -> str:
    """Name of a rank's operator table."""
    return f"{stage}-{filename}-{rank}.txt"


def temporary_name(name: str) -> str:
    """Name under which ``name`` is written before it is renamed; TensorBoard's patterns do not match it."""
    return f"{name}.partial"


@dataclass(frozen=True)
class TraceName:
    """Name of one window's operator trace.

    TensorBoard's profiler tab takes everything before ``.{time_ns}.pt.trace.json`` as the worker and ``time_ns`` as
    the span.
    """

    stage: str
    filename: str
    rank: int
    strategy: str
    function: str
    time_ns: int

    def __str__(self) -> str:
        """Build the file name."""
        return (
            f"{self.stage}-{self.filename}-{self.rank}[Strategy]{self.strategy}.{self.function}"
            f".{self.time_ns}.pt.trace.json.gz"
        )

    @classmethod
    def parse(cls, name: str) -> TraceName | None:
        """Return the parts of a trace's name, or None where it is none."""
        match = _TRACE.fullmatch(name)
        if match is None:
            return None
        return cls(
            match["stage"], match["filename"], int(match["rank"]), match["strategy"], match["function"],
            int(match["time_ns"]),
        )  # fmt: skip


@dataclass(frozen=True)
class SnapshotName:
    """Name of one allocator snapshot; ``number`` is the step + 1."""

    rank: int
    function: str
    number: int
    edge: Edge

    def __str__(self) -> str:
        """Build the file name."""
        return f"cuda_alloc_rank_{self.rank}.{self.function}.{self.number}.{self.edge}.pickle"

    @classmethod
    def parse(cls, name: str) -> SnapshotName | None:
        """Return the parts of a snapshot's name, or None where it is none."""
        match = _SNAPSHOT.fullmatch(name)
        if match is None:
            return None
        edge: Edge = "start" if match[4] == "start" else "end"
        return cls(int(match[1]), match[2], int(match[3]), edge)
