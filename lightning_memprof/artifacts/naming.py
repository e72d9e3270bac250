"""The file names of a run; ``rank`` is always the global rank. A parser returns None for a name of another kind."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

RUN_DIRECTORY: Final = "memprofiler"
ESTIMATE: Final = "estimate.json"
TRIED: Final = "tried.json"
TRIGGER_REQUEST: Final = "trigger.request.json"
TRIGGER_PLAN: Final = "trigger.plan.json"

Edge = Literal["start", "end"]
StatsFormat = Literal["yaml", "pickle"]

_MANIFEST: Final = re.compile(r"manifest\.rank([0-9]{5,})\.jsonl")
_PULSE: Final = re.compile(r"pulse\.rank([0-9]{5,})\.csv")
_SERIES: Final = re.compile(r"window([0-9]{3,})/rank([0-9]{5,})\.([^/.]+)\.jsonl")
_SUMMARY: Final = re.compile(r"window([0-9]{3,})/rank([0-9]{5,})\.summary\.json")
_NUMBERED: Final = re.compile(r"(.+?)(?:-([2-9]|[1-9][0-9]+))?")
_SNAPSHOT: Final = re.compile(r"cuda_alloc_rank_([0-9]+)\.(.+)\.([0-9]+)\.(start|end)\.pickle")
_TRACE: Final = re.compile(
    r"(?P<stage>[a-z]+)-(?P<filename>.+)-(?P<rank>[0-9]+)\[Strategy\](?P<strategy>\w+)\.(?P<function>\w+)"
    r"\.(?P<time_ns>[0-9]+)\.pt\.trace\.json(?:\.gz)?"
)


manifest_name = "manifest.rank{:05d}.jsonl".format
"""Name of a rank's manifest inside the run directory."""


def parse_manifest_name(name: str) -> int | None:
    """Return the rank of a manifest's name."""
    match = _MANIFEST.fullmatch(name)
    return int(match[1]) if match else None


pulse_name = "pulse.rank{:05d}.csv".format
"""Name of a rank's pulse inside the run directory."""


def parse_pulse_name(name: str) -> int | None:
    """Return the rank of a pulse's name."""
    match = _PULSE.fullmatch(name)
    return int(match[1]) if match else None


actions_name = "actions.rank{:05d}.jsonl".format
"""Name of a rank's totals by action and of its stalls, inside the run directory."""
processes_name = "processes.rank{:05d}.jsonl".format
"""Name of a rank's samples of worker processes and validations, inside the run directory."""
holders_name = "holders.rank{:05d}.jsonl".format
"""Name of a rank's holders of growing memory, inside the run directory."""
hangs_name = "hangs.rank{:05d}.jsonl".format
"""Name of a rank's steps that took too long, inside the run directory."""
hang_stacks_name = "stacks.rank{:05d}.txt".format
"""Name of the Python stacks of all threads in those steps, inside the run directory."""
collectives_name = "collectives.rank{:05d}.jsonl".format
"""Name of a rank's last collectives in those steps, inside the run directory."""
heartbeat_name = "heartbeat.rank{:05d}.jsonl".format
"""Name of the place of a running rank some seconds ago, inside the run directory."""
regions_name = "snapshots.rank{:05d}.jsonl".format
"""Name of a rank's named snapshots and regions inside the run directory."""
system_name = "system.rank{:05d}.jsonl".format
"""Name of a rank's samples of the machine over the whole run, inside the run directory."""
oom_name = "oom.rank{:05d}.json".format
"""Name of the facts of a rank's out-of-memory events inside the run directory."""
oom_snapshot_name = "cuda_oom_rank_{}.pickle".format
"""Name of the allocator snapshot of a rank's device when it ran out of memory."""
functions_name = "functions.rank{:05d}.jsonl".format
"""Name of a rank's rows of functions by call, inside the run directory."""


def memory_stats_name(rank: int, form: StatsFormat = "yaml") -> str:
    """Name of a rank's memory at the start and end of functions, inside the run directory."""
    return f"rank_{rank}_memory_stats.{form}"


def fsdp_log_name(rank: int, function: str, number: int) -> str:
    """Name of a rank's FSDP memory report of one step; ``number`` is the step + 1."""
    return f"fsdp_mem_rank_{rank}_{function}_{number}.log"


def series_path(window: int, rank: int, collector: str) -> str:
    """Path of a collector's series inside the run directory, with ``/``."""
    return f"window{window:03d}/rank{rank:05d}.{collector}.jsonl"


def parse_series_path(path: str) -> tuple[int, int, str] | None:
    """Return ``(window, rank, collector)`` of the path of a series."""
    match = _SERIES.fullmatch(path)
    return (int(match[1]), int(match[2]), match[3]) if match else None


curves_directory = "tb/rank{}".format
"""Path of the directory of a rank's curves inside the run directory, with ``/``; TensorBoard shows its name."""


def summary_path(window: int, rank: int) -> str:
    """Path of a rank's summary of a window inside the run directory, with ``/``."""
    return f"window{window:03d}/rank{rank:05d}.summary.json"


def parse_summary_path(path: str) -> tuple[int, int] | None:
    """Return ``(window, rank)`` of the path of a summary."""
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


temporary_name = "{}.partial".format
"""Name under which ``name`` is written before it is renamed; TensorBoard's patterns do not match it."""


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
        """Return the parts of a trace's name."""
        match = _TRACE.fullmatch(name)
        found: dict[str, Any] = match.groupdict() if match else {}
        return cls(**{**found, "rank": int(found["rank"]), "time_ns": int(found["time_ns"])}) if match else None


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
        """Return the parts of a snapshot's name."""
        match = _SNAPSHOT.fullmatch(name)
        return cls(int(match[1]), match[2], int(match[3]), cast("Edge", match[4])) if match else None
