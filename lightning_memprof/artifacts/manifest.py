"""The manifest: one JSON object a line, one line a fact, appended and never rewritten."""

from __future__ import annotations

import errno
import io
import json
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from lightning_memprof.artifacts.files import read_plain
from lightning_memprof.artifacts.rows import DAMAGE, Int64, OpenRow, Row, decode_object, salvaged
from lightning_memprof.artifacts.secrets import FREE_TEXTS, masking
from lightning_memprof.logs import logger_of
from lightning_memprof.units import format_count

log = logger_of(__name__)

SCHEMA_VERSION: Final = 1
MOST_LINES: Final = 1_000_000
"""Limit of the lines that are read of a manifest. A window writes some ten."""
# Limit of the rows of some hundred bytes that wait for a full disk; beyond it, the oldest are dropped.
_MOST_WAITING: Final = 4096
_ARTIFACT: Final = (b'"kind":"artifact"', b'"kind": "artifact"')


class RunFacts(OpenRow):
    """The ``run`` row: the rank and where it runs, as known in ``setup``."""

    time_ns: Int64 | None = None
    schema_version: Int64 | None = None
    stage: str = "fit"
    world_size: Int64 | None = None
    host: str | None = None
    pid: Int64 | None = None
    strategy: str | None = None
    device: str | None = None
    collectors: list[str] = msgspec.field(default_factory=list)
    schedule: dict[str, Any] = msgspec.field(default_factory=dict)
    operator_table: dict[str, Any] = msgspec.field(default_factory=dict)
    environment: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def cpu_count(self) -> int | None:
        """The CPU cores that the process may use; in runs of older versions those of the machine."""
        count = self.environment.get("usable_cpus") or self.environment.get("cpu_count")
        return count if type(count) is int else None

    @property
    def is_lightning(self) -> bool:
        """Whether a Trainer drove the run, not a loop of the program's own; runs of older versions had one."""
        return self.environment.get("lightning", "") is not None

    @property
    def is_cpu(self) -> bool:
        """Whether the run uses no accelerator."""
        return (self.device or "cpu").startswith("cpu")


class OptimizerFacts(OpenRow):
    """An optimizer; ``parameters`` counts tensors, ``modules`` are the direct children of the model that it updates.

    ``settings`` counts the different ones of its ``groups`` of parameters.
    """

    name: str | None = None
    foreach: bool | None = None
    fused: bool | None = None
    parameters: Int64 | None = None
    device: str | None = None
    modules: list[str] = msgspec.field(default_factory=list)
    groups: Int64 | None = None
    settings: Int64 | None = None


class DataLoaderFacts(OpenRow):
    """A DataLoader of the stage, by its arguments; ``is_iterable`` is whether its data set is an IterableDataset.

    ``data_bytes`` are those of the tensors and arrays in memory that the data set refers to, at least; ``data_largest``
    is the attribute that has the largest one, and ``data_dtype`` its dtype.
    """

    num_workers: Int64 | None = None
    batch_size: Int64 | None = None
    prefetch_factor: Int64 | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    is_iterable: bool | None = None
    data_bytes: Int64 | None = None
    data_largest: str | None = None
    data_dtype: str | None = None


class ParameterFacts(OpenRow):
    """One of the largest trainable parameters; ``module`` is the class of the submodule that owns it."""

    name: str = ""
    module: str | None = None
    bytes: Int64 = 0
    sparse: bool = False


class TrainingFacts(OpenRow):
    """The ``training`` row: the loop and the model, as known when training starts.

    ``parameters`` counts numbers, ``threads`` are those of one operator, ``parameter_dtypes`` has bytes by dtype,
    ``not_optimized`` the paths of modules whose parameters need gradients and are in no optimizer, ``zero_lr`` those in
    parameter groups whose learning rate is 0, ``compiled`` those of the modules that torch.compile has compiled, ``""``
    for the model. ``clips_itself`` is whether the module has its own ``configure_gradient_clipping``,
    ``cudnn_benchmark`` whether cuDNN tries its algorithms for each new shape. ``large_hyperparameters`` are names of
    those with many objects or bytes, which each checkpoint contains.
    """

    num_batches: Int64 | None = None
    max_steps: Int64 | None = None
    max_epochs: Int64 | None = None
    accumulate_grad_batches: Int64 | None = None
    precision: str | None = None
    model: str | None = None
    parameters: Int64 | None = None
    optimizers: list[OptimizerFacts] = msgspec.field(default_factory=list)
    dataloaders: list[DataLoaderFacts] = msgspec.field(default_factory=list)
    parameter_dtypes: dict[str, Int64] = msgspec.field(default_factory=dict)
    largest_parameters: list[ParameterFacts] = msgspec.field(default_factory=list)
    not_optimized: list[str] = msgspec.field(default_factory=list)
    zero_lr: list[str] = msgspec.field(default_factory=list)
    compiled: list[str] = msgspec.field(default_factory=list)
    detect_anomaly: bool | None = None
    clips_itself: bool | None = None
    threads: Int64 | None = None
    cudnn_benchmark: bool | None = None
    large_hyperparameters: list[str] = msgspec.field(default_factory=list)


class OomHost(Row):
    """The process, the machine and the limits of the process when memory ran out, in bytes."""

    rss_bytes: Int64 | None = None
    vms_bytes: Int64 | None = None
    total_bytes: Int64 | None = None
    available_bytes: Int64 | None = None
    rlimit_as_bytes: Int64 | None = None
    rlimit_data_bytes: Int64 | None = None
    cgroup_limit_bytes: Int64 | None = None
    cgroup_used_bytes: Int64 | None = None


class OomHeld(Row):
    """Live bytes by category when memory ran out."""

    parameter_bytes: Int64 | None = None
    gradient_bytes: Int64 | None = None
    optimizer_state_bytes: Int64 | None = None
    buffer_bytes: Int64 | None = None
    other_bytes: Int64 | None = None


class OomTensor(Row):
    """One of the largest live tensors."""

    bytes: Int64 = 0
    dtype: str | None = None
    shape: Any = None
    name: str | None = None
    holder: str | None = None


class OomForwards(Row):
    """The source lines of the modules' forwards: file, first and last line, and by path the class and index of them."""

    sources: list[tuple[str, Int64, Int64] | None] = msgspec.field(default_factory=list)
    modules: dict[str, tuple[str, Int64 | None]] = msgspec.field(default_factory=dict)


class OomRow(OpenRow):
    """An out-of-memory event, as in the rank's OOM file; a row of the manifest lacks what is long."""

    number: Int64 | None = None
    time_ns: Int64 | None = None
    memory: str | None = None
    device: str | None = None
    seen: str | None = None
    ended_run: bool = False
    exception: str | None = None
    step: Int64 | None = None
    global_step: Int64 | None = None
    epoch: Int64 | None = None
    phase: str | None = None
    point: str | None = None
    function: str | None = None
    stage: str | None = None
    window: Int64 | None = None
    thread: str | None = None
    module: str | None = None
    module_class: str | None = None
    asked_bytes: Int64 | None = None
    asked_source: str | None = None
    limit_bytes: Int64 | None = None
    total_bytes: Int64 | None = None
    free_bytes: Int64 | None = None
    snapshot: str | None = None
    stack: list[tuple[str, Int64, str]] = msgspec.field(default_factory=list)
    statistics: dict[str, Int64] | None = None
    host: OomHost = msgspec.field(default_factory=OomHost)
    held: OomHeld | None = None
    tensors: list[OomTensor] | None = None
    forwards: OomForwards = msgspec.field(default_factory=OomForwards)
    unavailable: dict[str, str] = msgspec.field(default_factory=dict)


class WindowRow(Row, tag_field="kind", tag="window"):
    """A window that opens (with its planned steps) or closes (with its recorded steps)."""

    window: Int64 | None = None
    event: str | None = None
    warmup_steps: list[Int64] = msgspec.field(default_factory=list)
    active_steps: list[Int64] = msgspec.field(default_factory=list)
    steps: list[Int64] = msgspec.field(default_factory=list)
    truncated: bool | None = None
    reason: str | None = None

    @property
    def is_closed(self) -> bool:
        """Whether the window has ended."""
        return self.event == "close"


class ArtifactRow(Row, tag_field="kind", tag="artifact"):
    """A file; ``path`` is relative to the run's root, with ``/``, or absolute."""

    path: str | None = None
    type: str = "blob"
    collector: str = "?"
    window: Int64 | None = None
    size_bytes: Int64 | None = None
    sha256: str | None = None


class RemovedRow(Row, tag_field="kind", tag="removed"):
    """The files of a window that a budget removed."""

    window: Int64 | None = None
    paths: list[str] = msgspec.field(default_factory=list)
    reason: str = "no reason given"


class PauseRow(Row, tag_field="kind", tag="pause"):
    """The profiler's work between two steps that took ``ns`` up to ``time_ns``: other ranks wait for it."""

    time_ns: Int64 = 0
    ns: Int64 = 0


class ErrorRow(Row, tag_field="kind", tag="error"):
    """A collector that failed and was disabled."""

    collector: str = "?"
    where: str = "?"
    window: Int64 | None = None
    message: str = "no message"
    traceback: str = ""


class UnavailableRow(Row, tag_field="kind", tag="unavailable", omit_defaults=True):
    """A collector that cannot record here."""

    collector: str = "?"
    window: Int64 | None = None
    reason: str = "no reason given"


class NoteRow(Row, tag_field="kind", tag="note"):
    """A warning for the reader of the run."""

    collector: str = "?"
    message: str = ""


class BudgetRow(Row, tag_field="kind", tag="budget"):
    """A reduction of the next windows that keeps a budget."""

    window: Int64 | None = None
    level: str | None = None
    active_steps: Int64 | None = None
    reason: str | None = None


class OverheadFacts(Row):
    """The profiler overhead in nanoseconds: wall time, and for the pulse also CPU time of the training thread."""

    pulse_ns: Int64 | None = None
    pulse_cpu_ns: Int64 | None = None
    windows_ns: Int64 | None = None
    collectors_ns: dict[str, Int64] = msgspec.field(default_factory=dict)


class EndRow(Row, tag_field="kind", tag="end"):
    """The end of a rank's run; ``exception`` is the text of the exception that ended it, if any.

    ``peak_rss_bytes`` is the kernel's high-water mark of the process, including the time before the run.
    """

    status: str | None = None
    exception: str | None = None
    steps: Int64 | None = None
    peak_rss_bytes: Int64 | None = None
    overhead: OverheadFacts | None = None


_KINDS: Final[Mapping[str, type[Row]]] = {
    "run": RunFacts, "training": TrainingFacts, "oom": OomRow, "window": WindowRow, "artifact": ArtifactRow,
    "removed": RemovedRow, "error": ErrorRow, "unavailable": UnavailableRow, "note": NoteRow, "budget": BudgetRow,
    "pause": PauseRow, "end": EndRow,
}  # fmt: skip
# The rows that have no open-ended fields, and nearly all rows of a manifest.
_decode: Final = msgspec.json.Decoder(
    WindowRow | ArtifactRow | RemovedRow | ErrorRow | UnavailableRow | NoteRow | BudgetRow | PauseRow | EndRow
).decode
R = TypeVar("R", bound=Row)


class ManifestWriter:
    """Append facts to a rank's manifest.

    Every row is one ``write`` to a descriptor that was opened for appending: a process that dies loses no row that
    was written before, and tears at most the last one. Safe to use from several threads. A disk that refuses a row
    is logged once; it never stops the training. What was refused is written with the next row that the disk takes.

    Args:
        path: the file; created where it is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._lock = threading.Lock()
        self._refused = False
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)

    def append(self, kind: Row | str, **facts: Any) -> None:
        """Write one row: a typed one, or the facts of an open kind.

        Values that JSON does not know are written as their ``str``, free texts without secrets.
        """
        if isinstance(kind, Row):
            facts = msgspec.to_builtins(kind, enc_hook=str)
            kind, _ = facts.pop("kind"), facts.pop("time_ns", None)
        if texts := [name for name in FREE_TEXTS.intersection(facts) if isinstance(facts[name], str)]:
            mask = masking()
            facts |= {name: mask(facts[name]) for name in texts}
        row = {"kind": kind, "time_ns": time.time_ns(), **facts}
        line = (json.dumps(row, default=str, separators=(",", ":")) + "\n").encode()
        with self._lock:
            if self._fd < 0:
                return
            self._waiting.append(line)
            self._write_waiting()

    def close(self) -> None:
        """Release the file; further rows are dropped."""
        with self._lock:
            if self._fd >= 0:
                self._write_waiting()
                os.close(self._fd)
                self._fd = -1

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                self._write(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if not self._refused:
                log.warning(
                    "%s cannot be written (%s); facts of this run are lost where it stays so",
                    self.path, error.strerror,
                )  # fmt: skip
            self._refused = True

    def _write(self, line: bytes) -> None:
        written = os.write(self._fd, line)
        if written < len(line):
            # Half a line with another behind it would make the whole file unreadable.
            os.ftruncate(self._fd, os.lseek(self._fd, 0, os.SEEK_CUR) - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Manifest(msgspec.Struct, frozen=True, dict=True):
    """The readable rows of one rank's manifest, oldest first; ``damage`` is its first problem.

    There are no rows where a newer version wrote it.
    """

    path: Path
    rows: list[Row]
    damage: str | None = None

    def of(self, kind: type[R]) -> list[R]:
        """Return the rows of one kind."""
        return [row for row in self.rows if isinstance(row, kind)]

    @property
    def run(self) -> RunFacts | None:
        """The first ``run`` row."""
        return next(iter(self.of(RunFacts)), None)

    @property
    def training(self) -> TrainingFacts | None:
        """The last ``training`` row."""
        return next(reversed(self.of(TrainingFacts)), None)

    @property
    def end(self) -> EndRow | None:
        """The last ``end`` row."""
        return next(reversed(self.of(EndRow)), None)

    @cached_property
    def artifacts(self) -> dict[str, list[ArtifactRow]]:
        """The rows of each file by its path, without the files that the run removed with their window."""
        present: dict[str, list[ArtifactRow]] = {}
        for row in self.rows:
            if isinstance(row, ArtifactRow) and row.path:
                present.setdefault(row.path, []).append(row)
            elif isinstance(row, RemovedRow):
                # A file that was written again later is present.
                for path in row.paths:
                    present.pop(path, None)
        return present


def read_manifest(path: Path, *, with_artifacts: bool = True) -> Manifest:
    """Read one rank's manifest as far as it can be read, at most ``MOST_LINES`` lines.

    Args:
        path: the file.
        with_artifacts: whether its list of files is read, nine tenths of a manifest.
    """
    try:
        # A list of all lines takes twenty times as much memory as a file of short lines.
        lines = io.BytesIO(read_plain(path))
    except OSError as error:
        return Manifest(path, [], f"{path}: cannot be read ({error.strerror}); is the run directory complete?")
    rows: list[Row] = []
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        if number > MOST_LINES:
            problems.append(f"it has more than {format_count(MOST_LINES, 'line')}; the rest is not read")
            break
        if not line.endswith(b"\n"):
            problems.append("its last line is truncated: it is being written, or the process died while it wrote")
        elif with_artifacts or not any(words in line for words in _ARTIFACT):
            try:
                row = decode_fact(line)
            except DAMAGE as error:
                problems.append(f"{path}:{number}: {error}")
            else:
                rows += [row] if row is not None else []
    run = next((row for row in rows if isinstance(row, RunFacts)), None)
    if run is None:
        none = f"{path}: has no run: it is not a manifest of lightning-memprof, or its process died at once"
        return Manifest(path, rows, next(iter(problems), none))
    version = run.fields.get("schema_version")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        newer = f"is newer than {SCHEMA_VERSION}; upgrade lightning-memprof"
        problem = newer if isinstance(version, int) else "is not a number; the file is damaged, or another program's"
        return Manifest(path, [], f"{path}: schema version {version!r} {problem}")
    return Manifest(path, rows, next(iter(problems), None))


def decode_fact(line: bytes) -> Row | None:
    """Return a line of a manifest as a row; None for an unknown kind.

    Raises:
        ValueError: it is not a JSON object.
    """
    with suppress(*DAMAGE):
        return _decode(line)  # type: ignore[no-any-return]
    row = decode_object(line)
    name = row.get("kind")
    kind = _KINDS.get(name) if isinstance(name, str) else None
    return None if kind is None else salvaged(row, kind)
