"""Steps that do not end: the place of each rank in them, the stacks of its threads, and its last collectives."""

from __future__ import annotations

import json
import linecache
import os
import socket
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, ClassVar, Final, Literal

import torch

from lightning_memprof.artifacts.naming import (
    collectives_name,
    hang_stacks_name,
    hangs_name,
    heartbeat_name,
)
from lightning_memprof.artifacts.rows import decode_rows
from lightning_memprof.artifacts.series import CollectiveRow, HangRow, columns_of, encode_rows
from lightning_memprof.artifacts.sink import ArtifactSpec
from lightning_memprof.capture.base import Collector
from lightning_memprof.capture.faults import describe
from lightning_memprof.capture.loader_workers import counted_workers, stuck_workers
from lightning_memprof.capture.sources.assignments import is_library
from lightning_memprof.capture.sources.proc import read_file
from lightning_memprof.capture.threads import calls_of_error, calls_of_thread, is_program, line_of, running_threads
from lightning_memprof.capture.torch_internals import _dump_fr_trace_json, _dump_nccl_trace_json
from lightning_memprof.errors import ConfigError
from lightning_memprof.packages import PACKAGES
from lightning_memprof.units import format_ns, quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from lightning_memprof.artifacts.series import SeriesRow
    from lightning_memprof.capture.base import OnException, OnStep, RunContext, StepRecord
    from lightning_memprof.capture.threads import Call


_SECOND_NS: Final = 1_000_000_000
_LEAST_NS: Final = 60 * _SECOND_NS
# The first steps compile, choose kernels and start workers.
_FIRST_NS: Final = 600 * _SECOND_NS
_FIRST_STEPS: Final = 3
# Of the median step, and of the longest step with a validation or a checkpoint.
_TIMES: Final = 10
_TIMES_UNUSUAL: Final = 3
_RECENT: Final = 65
_CHECKS: Final = 4
_LONGEST_SLEEP: Final = 5.0
# More ranks write their heartbeats less often: the file system is shared.
_MANY_RANKS: Final = 256
# Ranks of one machine have close numbers; a job of thousands must not read all heartbeats.
_NEAR: Final = 15
_BEAT_BYTES: Final = 512
# The time of this empty file asks all ranks for their place.
_MARKER: Final = "hang_reported"
# This one ends them.
_ABORTED: Final = "hang_aborted"
# As EX_TEMPFAIL of sysexits.h: to be tried again.
ABORTED: Final = 75
_LAST_COLLECTIVES: Final = 100
_LOADER: Final = "torch.utils.data.dataloader"
_VALIDATION: Final = ".loops.evaluation_loop"


class Hangs(Collector):
    """Writes the place of each rank when a step does not end or one rank raises, and continues to watch.

    The place is the line, the Python stacks of all threads, and the last collectives of torch's flight recorder. A
    thread compares the time since the start of the step with a limit, four times per limit. By default the limit is
    10 times the median step and at least 60 s; 10 minutes in the first 3 steps. A step with a validation, a checkpoint
    or the end of an epoch has 10 times as long, and at least 3 times the longest such step before it. C code that
    holds the interpreter's lock delays the stacks until it releases it.

    Args:
        max_step_seconds: the limit of a step without validation, checkpoint or end of an epoch; None for the default.
        on_hang: ``dump`` only writes; ``abort`` also ends every rank with exit code 75, for a scheduler to restart the
            job, if the step still has not ended when all ranks have had the time to report.

    Raises:
        ConfigError: the limit is not a positive number, or ``on_hang`` is neither of these.
    """

    name: ClassVar[str] = "hangs"
    every_rank: ClassVar[bool] = True

    def __init__(self, *, max_step_seconds: float | None = None, on_hang: Literal["dump", "abort"] = "dump") -> None:
        if on_hang not in ("dump", "abort"):
            raise ConfigError(f'Hangs(on_hang={on_hang!r}): must be "dump" or "abort"')
        if max_step_seconds is not None and (
            type(max_step_seconds) not in (int, float) or not 0 < max_step_seconds < threading.TIMEOUT_MAX
        ):
            raise ConfigError(
                f"Hangs(max_step_seconds={max_step_seconds!r}): must be a number of seconds above 0, or None for 10 "
                "times the median step"
            )
        self._seconds = max_step_seconds
        self._aborts = on_hang == "abort"

    @contextmanager
    def follow(self, run: RunContext) -> Iterator[OnStep | None]:
        """Watch the steps of the run; about 0.2 µs each."""
        limit_ns = None if self._seconds is None else round(self._seconds * _SECOND_NS)
        watch = _Watch(run, limit_ns, aborts=self._aborts)
        watch.start()
        try:
            yield watch.step
        finally:
            watch.stop()
            watch.reports.list_files()

    @contextmanager
    def guard(self, run: RunContext) -> Iterator[OnException | None]:
        """Write where a rank raises, before its process group is destroyed and the other ranks fail too.

        Workers that start meanwhile answer with their stacks.
        """
        with counted_workers():
            yield _Reports(run).exception if run.world_size > 1 else None


def step_limit(durations: Sequence[int], longest_unusual: int, chosen: int | None, *, is_usual: bool) -> int:
    """Return the limit of a step in nanoseconds.

    Args:
        durations: of the last usual steps, in ns.
        longest_unusual: of the steps with a validation, a checkpoint or the end of an epoch, in ns.
        chosen: limit of a usual step in ns; None for :class:`Hangs`' default.
        is_usual: whether the step has none of these so far.
    """
    limit = chosen
    if limit is None:
        is_known = len(durations) >= _FIRST_STEPS
        limit = max(_LEAST_NS, round(_TIMES * statistics.median(durations))) if is_known else _FIRST_NS
    return limit if is_usual else max(_TIMES * limit, _TIMES_UNUSUAL * longest_unusual)


class _Watch:
    """Watches the current step of the thread that creates it.

    Args:
        run: the run.
        limit_ns: see :class:`Hangs`.
        aborts: whether a rank that hangs ends, and all others with it.
    """

    def __init__(self, run: RunContext, limit_ns: int | None, *, aborts: bool = False) -> None:
        self._aborts = aborts
        self._reported_at_ns = 0
        self.reports = _Reports(run)
        self._run = run
        self._limit_ns = limit_ns
        self._training = threading.get_ident()
        self._durations: deque[int] = deque(maxlen=_RECENT)
        self._longest_unusual = 0
        # By their start, as of the clock: the step that was reported, and the last one that ended. Until the next one
        # starts the clock, it has that of the last.
        self._reported_ns = 0
        self._reported = ""
        self._ended_ns = 0
        self._step = 0
        # A report is complete before its step can end.
        self._reporting = threading.Lock()
        self._done = threading.Event()
        self._longest_sleep = _LONGEST_SLEEP * max(1.0, run.world_size / _MANY_RANKS)
        self._thread = threading.Thread(target=self._watch, name="memprof-hangs", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._done.set()
        self._thread.join()
        self.reports.remove_heartbeat()

    def step(self, record: StepRecord) -> None:
        """Add a finished step; about 0.2 µs."""
        if record.usual:
            self._durations.append(record.duration_ns)
        else:
            self._longest_unusual = max(self._longest_unusual, record.duration_ns)
        self._ended_ns = record.start_ns - self._run.unix_offset_ns
        self._step = record.step
        if self._reported_ns:
            with self._reporting:
                self._reported_ns = 0
                self.reports.write(HangRow(kind="end", step=record.step, waited_ns=record.duration_ns))

    def _limit(self) -> int:
        # Other than iterating, copying a deque is one step for other threads.
        durations = self._durations.copy()
        is_usual = self._run.is_usual
        return step_limit(durations, self._longest_unusual, self._limit_ns, is_usual=is_usual)

    def _watch(self) -> None:
        try:
            self._check()
            while not self._done.wait(min(self._limit() / _SECOND_NS / _CHECKS, self._longest_sleep)):
                if self._run.training.is_over():
                    # No hook of the Trainer has ended the run, and the program continues.
                    return
                self._check()
                if self._aborts:
                    self._abort()
        except Exception as error:  # noqa: BLE001 a full disk, or a step that ends meanwhile, must not end the training
            self._run.faults.report(Hangs.name, "mark", None, error)

    def _check(self) -> None:
        # A full disk or a missing directory costs the heartbeat only.
        with suppress(OSError):
            self.reports.beat(self._place())
        # Writing and asking take time: the place is that of the report, and the limit that of its step.
        asked, row = self.reports.asked(), self._place()
        limit = self._limit()
        # The clock of a step that has ended is that of the last one until the next one starts.
        start = 0 if row.waited_ns is None else self._run.clock.start_ns
        is_late = bool(start) and (row.waited_ns or 0) > limit
        kind = "hang" if is_late else "asked" if asked else ""
        if not kind or (start and start == self._reported_ns and kind == self._reported):
            return
        with self._reporting:
            self._reported_ns, self._reported = start, kind
            # Set before it is compared: a step that ends from here on waits for the report.
            if start and (start == self._ended_ns or start != self._run.clock.start_ns):
                self._reported_ns = 0
                return
            row.kind, row.limit_ns, self._reported_at_ns = kind, limit, perf_counter_ns()
            self.reports.stand(row, self._training)

    def _abort(self) -> None:
        """End the process if its step has not ended since its report, or if another rank's has not."""
        with self._reporting:
            is_stuck = self._reported == "hang" and 0 < self._reported_ns == self._run.clock.start_ns
        aborted = self.reports.aborted
        # Until then all ranks have reported.
        is_due = is_stuck and perf_counter_ns() - self._reported_at_ns > 2 * self._longest_sleep * _SECOND_NS
        if is_due and not aborted.exists():
            aborted.touch()
        if aborted.exists():
            # All at once: a rank whose neighbour has ended raises for its connection.
            time.sleep(max(0.0, aborted.stat().st_mtime + 1.5 * self._longest_sleep - time.time()))
            message = f"a step does not end: rank {self._run.rank} ends with exit code {ABORTED} (on_hang='abort')"
            print(f"memprof: {message}; lightning-memprof show {quoted(aborted.parent)}", file=sys.stderr, flush=True)  # noqa: T201
            # No cleanup: it would wait for the other ranks.
            os._exit(ABORTED)

    def _place(self) -> HangRow:
        """Return the step and the phase at this moment; between steps the step that comes next."""
        position, clock, now = self._run.position, self._run.clock, perf_counter_ns()
        row = HangRow(kind="heartbeat", time_ns=now + self._run.unix_offset_ns)
        if position is None or clock.start_ns == self._ended_ns:
            row.step, row.phase = self._step + bool(self._ended_ns), "between_steps"
        else:
            row.step, row.global_step, row.phase = position.step, position.global_step, clock.phase()
            row.waited_ns = now - clock.start_ns
        return row


class _Reports:
    """The files of a rank: its heartbeat, and its reports.

    Args:
        run: the run.
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._directory = run.sink.place.directory
        self._rows, self._stacks, self._collectives, self._beats = (
            self._directory / name(run.rank)
            for name in (hangs_name, hang_stacks_name, collectives_name, heartbeat_name)
        )
        self._marker = self._directory / _MARKER
        self.aborted = self._directory / _ABORTED
        self._marked_ns = self._marker_ns()
        self._host = _host()

    def list_files(self) -> None:
        """List the files in the manifest."""
        for path in (self._rows, self._collectives, self._stacks):
            if path.exists():
                kind: Literal["blob", "series"] = "blob" if path == self._stacks else "series"
                self._run.sink.list_artifact(ArtifactSpec(path=path, type=kind, collector=Hangs.name))

    def beat(self, row: HangRow) -> None:
        """Overwrite the heartbeat in place, about 30 µs: other ranks read it if this process is stopped or killed."""
        row.pid, row.host = os.getpid(), self._host
        line = encode_rows([columns_of(row)]).strip().ljust(_BEAT_BYTES - 1) + "\n"
        file = os.open(self._beats, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    def remove_heartbeat(self) -> None:
        """Remove the heartbeat of a rank that ends."""
        with suppress(OSError):
            self._beats.unlink()

    def asked(self) -> bool:
        """Return whether another rank has reported since the last call."""
        before, self._marked_ns = self._marked_ns, self._marker_ns()
        return self._marked_ns > before

    def exception(self, error: BaseException) -> bool:
        """Write where an exception was raised; ended by Ctrl-C or a signal a rank has not failed."""
        if isinstance(error, Exception):
            position, clock = self._run.position, self._run.clock
            row = HangRow(kind="exception", time_ns=perf_counter_ns() + self._run.unix_offset_ns, error=describe(error))
            if position is not None:
                row.step, row.global_step, row.phase = position.step, position.global_step, clock.phase(raised=True)
                row.waited_ns = perf_counter_ns() - clock.start_ns
            _set_place(row, calls_of_error(error))
            with self._run.faults.caught(Hangs.name, "mark"):
                self._write_place(row)
        return False

    def stand(self, row: HangRow, training: int) -> None:
        """Write where the threads of this rank are."""
        calls = {thread: calls_of_thread(thread) for thread in {training, *running_threads()}}
        _set_place(row, calls[training])
        del calls[threading.get_ident()]
        limit = "" if row.kind == "asked" else f" (limit {format_ns(row.limit_ns or 0)})"
        with self._stacks.open("a", encoding="utf-8") as file:
            file.write(f"Step {row.step} has not ended after {format_ns(row.waited_ns or 0)}{limit}.\n")
            file.writelines(_stacks(calls, training))
            if _waits_for_loader(calls[training]):
                file.writelines(_worker_stacks(row))
        self._write_place(row)

    def write(self, *rows: HangRow) -> None:
        """Add rows to the reports."""
        with self._rows.open("a", encoding="utf-8") as file:
            file.write(encode_rows(columns_of(row) for row in rows))

    def _write_place(self, row: HangRow) -> None:
        """Write the row, and what else is known at this moment."""
        row.pid, row.host = os.getpid(), self._host
        if self._run.world_size > 1:
            if row.kind != "asked":
                self._marker.touch()
                self._marked_ns = self._marker_ns()
            # Before the row: a page without its collectives may blame a rank that waits.
            with self._run.faults.caught(Hangs.name, "mark"):
                if rows := list(_collectives()):
                    self._collectives.write_text(encode_rows(map(columns_of, rows)), encoding="utf-8")
        self.write(row, *self._others(row.time_ns or 0))

    def _marker_ns(self) -> int:
        try:
            return self._marker.stat().st_mtime_ns
        except OSError:
            return 0

    def _others(self, now_ns: int) -> Iterator[HangRow]:
        """Yield the last heartbeat of the other ranks of this machine, and the state of their processes."""
        run = self._run
        for rank in range(max(run.rank - _NEAR, 0), min(run.rank + _NEAR + 1, run.world_size)):
            beats: list[HangRow] = []
            with suppress(OSError):
                beats, _ = decode_rows((self._directory / heartbeat_name(rank)).read_bytes(), HangRow)
            if rank != run.rank and beats and beats[0].host == self._host:
                row = beats[0]
                row.kind, row.peer, row.state = "other", rank, _state(row.pid or 0)
                row.waited_ns = now_ns - (row.time_ns or now_ns)
                yield row


def _host() -> str:
    """Return the machine and its namespace of process ids: ranks in other containers have other processes."""
    with suppress(OSError):
        return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
    return f"{socket.gethostname()} {os.getpid()}"


def _state(pid: int) -> str:
    """Return whether a process is ``running``, ``stopped`` by a signal, or ``gone``; source: proc(5)."""
    state = read_file(f"/proc/{pid}/stat").rpartition(b") ")[2][:1]
    return {b"T": "stopped", b"t": "stopped", b"Z": "gone", b"X": "gone", b"": "gone"}.get(state, "running")


def _collectives() -> Iterator[SeriesRow]:
    """Yield the last collectives of each process group, as torch's flight recorder has them."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    dumps = [json.loads(text) for dump in (_dump_fr_trace_json, _dump_nccl_trace_json) if (text := dump())]
    for dump in dumps:
        groups: dict[str, deque[CollectiveRow]] = {}
        for entry in dump["entries"]:
            if entry["is_p2p"]:
                continue
            tensors = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
            group = entry["process_group"][0]
            is_done = entry["retired"] or entry["state"] == "completed"
            groups.setdefault(group, deque(maxlen=_LAST_COLLECTIVES)).append(
                CollectiveRow(
                    time_ns=entry["time_created_ns"],
                    group=group,
                    number=entry["collective_seq_id"],
                    operation=entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
                    tensors=", ".join(f"{kind}{sizes}" for kind, sizes in tensors),
                    state="completed" if is_done else "waiting",
                )
            )
        for rows in groups.values():
            yield from rows


def _set_place(row: HangRow, calls: Sequence[Call]) -> None:
    """Set the innermost function and line of ``calls``, and a phase that the clock does not have."""
    names = (str(names.get("__name__", "")) for _, _, names in calls)
    if row.phase == "other" and any(name.endswith(_VALIDATION) for name in names):
        row.phase = "validation"
    if calls:
        row.function, (row.place, row.source) = _function(calls[0]), _place(calls)


def _worker_stacks(row: HangRow) -> Iterator[str]:
    """Set the place to that of the first worker that is in a fetch, and yield the stacks of all of them."""
    for worker, stack in stuck_workers():
        if row.worker is None:
            row.worker, (file, line, name) = worker, stack[0]
            row.function, row.place, row.source = f"{name} ({Path(file).name}:{line})", None, None
            for file, line, name in stack:
                if not is_library(file):
                    row.place = f"{Path(file).name}:{line} in {name}"
                    row.source = linecache.getline(file, line).strip() or None
                    break
        yield f"\nWorker {worker} of a DataLoader, in a fetch:\n"
        yield from (f'  File "{file}", line {line}, in {name}\n' for file, line, name in reversed(stack))


def _function(call: Call) -> str:
    """Return the module and the name of a function."""
    code, _, names = call
    name = code.co_qualname if sys.version_info >= (3, 11) else code.co_name
    return f"{names.get('__name__', '?')}.{name}"


def _place(calls: Iterable[Call]) -> tuple[str | None, str | None]:
    """Return the innermost line of the program, with its function, and its source; None where the Trainer runs it."""
    found: tuple[str, str | None] | None = None
    for call in calls:
        code, _, names = call
        package = str(names.get("__name__", "")).partition(".")[0]
        if found is not None and package in PACKAGES:
            return found
        if found is None and is_program(call):
            line = line_of(call)
            source = linecache.getline(code.co_filename, line).strip()
            found = f"{Path(code.co_filename).name}:{line} in {code.co_name}", source or None
    return None, None


def _waits_for_loader(calls: Iterable[Call]) -> bool:
    """Return whether a DataLoader waits, not the program in a fetch of this process."""
    within = takewhile(lambda call: not is_program(call), calls)
    return any(names.get("__name__") == _LOADER for _, _, names in within)


def _stacks(calls: Mapping[int, Sequence[Call]], training: int) -> Iterator[str]:
    """Yield the stacks of all threads, that of the training first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident in sorted(calls, key=lambda ident: ident != training):
        yield f"\nThread {names.get(ident, ident)}{', the training' if ident == training else ''}:\n"
        lines = [(call[0].co_filename, line_of(call), call[0].co_name, None) for call in reversed(calls[ident])]
        yield from traceback.StackSummary.from_list(lines).format()
    yield "\n"
