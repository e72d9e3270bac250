"""Memory of this process and its DataLoader workers as the operating system sees it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import get_ident
from time import perf_counter_ns, thread_time_ns
from typing import Any, ClassVar, Final

import psutil

from lightning_memprof.artifacts.naming import processes_name
from lightning_memprof.artifacts.series import (
    BEFORE_STEPS,
    ActionMemoryRow,
    HostRow,
    LoaderQueueRow,
    ProcessRow,
    WorkerBatchRow,
    columns_of,
    encode_rows,
)
from lightning_memprof.artifacts.sink import ArtifactSpec
from lightning_memprof.capture.base import Collector, OnException, OnMark, OnStep, RunContext, StepRecord
from lightning_memprof.capture.loader_workers import (
    counted_workers,
    exit_code,
    new_workers,
    worker_batches,
    worker_counts,
    worker_memory,
    worker_pids,
    worker_times,
)
from lightning_memprof.capture.observe import Link, wrapped
from lightning_memprof.capture.sources.memory import HeapSize, ResidentSize, peak_rss_bytes
from lightning_memprof.capture.threads import ThreadTimes
from lightning_memprof.capture.torch_internals import _MultiProcessingDataLoaderIter, _utils
from lightning_memprof.schedule import Mark, Point, Window
from lightning_memprof.units import MIB

_SIZES: Final = Path("/proc/self/smaps_rollup")
_HEAP_NS: Final = 50_000
# Workers that fill a cache do so in the first seconds; later a sample every 10 s shows a leak.
_FIRST_S: Final = (1, 2, 4, 8)
_EVERY_S: Final = 10
# Reading walks the page tables, 40 to 70 ms per GiB: at most 1% of a core.
_SHARE: Final = 0.01
# In a shorter time, such as a window of two short steps, a thread may work for once.
_THREADS_NS: Final = 300_000_000
_SAMPLES: Final = 32
_MOST_VALIDATIONS: Final = 1000
# A smaller rise of the peak RSS outside the training steps is the allocator's.
_RISE: Final = 16 * MIB
_MOST_PEAKS: Final = 100
_OWNERS: Final = ("[Callback]", "[LightningModule]")
_FETCH: Final = ".train_dataloader_next"


class HostMemory(Collector):
    """Resident, unique and virtual size of this process at every mark, its peak RSS, and what changes it.

    In recorded steps RSS and the C allocator's bytes are read around each hook that a callback or the module overrides,
    and around fetches. Over the whole run RSS is read at the batches of a validation inside fit; memory and times of
    DataLoader workers are read at the ends of steps, of one worker in each, at windows and at most every 10 s after the
    first ones; in a run of some seconds also at its end. In windows the processor time of other Python threads is read.

    The unique size (``uss_bytes``) walks the process's page tables, some 40 to 70 ms per GiB: a thread reads it once
    a window, after the last step, while the other collectors save their data.
    """

    name: ClassVar[str] = "host"
    every_rank: ClassVar[bool] = True

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Sample at every mark, and around the program's hooks."""
        process = psutil.Process()
        actions = ActionMemory({*(name for name, _ in run.clock.actions), *run.clock.within}, run.resident)
        with (
            run.sink.series(window, self.name) as write,
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="memprof-uss") as thread,
            ExitStack() as last,
        ):
            last.callback(run.sink.write_rows, window, ActionMemoryRow.series, actions.rows)
            last.callback(_save_batches, run, window, perf_counter_ns())
            last.enter_context(_queue_watched(run, window))
            last.enter_context(run.actions.listen(actions.start, actions.stop))

            def sample(mark: Mark) -> None:
                actions.mark = mark
                size = process.memory_info()
                row = HostRow(rss_bytes=size.rss, vms_bytes=size.vms, peak_rss_bytes=peak_rss_bytes(size.rss))
                write(mark, row)
                if mark.point is Point.STEP_END and window.active[-1:] == (mark.step,):
                    unique = thread.submit(lambda: int(process.memory_full_info().uss))
                    last.callback(lambda: setattr(row, "uss_bytes", unique.result()))

            yield sample

    @contextmanager
    def guard(self, run: RunContext) -> Iterator[OnException | None]:  # noqa: ARG002 the workers of this process
        """Let workers count from before their start."""
        with counted_workers():
            yield None

    @contextmanager
    def follow(self, run: RunContext) -> Iterator[OnStep | None]:
        """Sample workers and validations over the whole run."""
        path = run.sink.place.directory / processes_name(run.rank)
        log = ProcessLog(path, run.unix_offset_ns, run.resident, partial(run.charge, self.name))
        run.validation_batch = run.guarded(log.validation_batch, collector=self.name)
        run.rare_action = run.guarded(log.rare_action, collector=self.name)
        try:
            log.begin()
            yield log.on_step
        finally:
            run.validation_batch = run.rare_action = None
            if log.close():
                run.sink.list_artifact(ArtifactSpec(path=path, type="series", collector=self.name))
            if log.is_unreadable:
                run.note_unavailable(self.name, "DataLoader workers: /proc/PID/smaps_rollup cannot be read here")


def _save_batches(run: RunContext, window: Window, since_ns: int) -> None:
    rows = []
    for pid in worker_pids():
        counts = worker_counts(pid)
        rows += [
            WorkerBatchRow(
                pid=pid,
                worker=counts.get("worker"),
                dataset=counts.get("dataset"),
                start_ns=start + run.unix_offset_ns,
                duration_ns=duration,
                recorded=True,
            )
            for start, duration in worker_batches(pid)
            if start + duration > since_ns
        ]
    run.sink.write_rows(window, WorkerBatchRow.series, rows)


@contextmanager
def _queue_watched(run: RunContext, window: Window) -> Iterator[None]:
    """Count ready batches and time pinning."""
    queue: list[LoaderQueueRow] = []
    pinning_threads, pinned_ns = set[int](), list[int]()

    def asks(link: Link) -> Callable[..., Any]:
        def next_data(loader: Any) -> Any:
            __tracebackhide__ = True
            # Queues of some systems have no size.
            with suppress(Exception):
                parts = vars(loader)
                ordered, queues = parts["_task_info"], {parts["_worker_result_queue"], parts["_data_queue"]}
                ready = sum(len(batch) > 1 for batch in ordered.values()) + sum(waiting.qsize() for waiting in queues)
                name, now = type(parts["_dataset"]).__name__, perf_counter_ns() + run.unix_offset_ns
                queue.append(LoaderQueueRow(time_ns=now, dataset=name, ready=ready, ordered=len(ordered)))
            return link.call(loader)

        return next_data

    def pinning(link: Link) -> Callable[..., Any]:
        def pin_memory(*arguments: Any, **keywords: Any) -> Any:
            __tracebackhide__ = True
            thread = get_ident()
            if thread in pinning_threads:
                # A part of the batch.
                return link.call(*arguments, **keywords)
            pinning_threads.add(thread)
            began = perf_counter_ns()
            try:
                return link.call(*arguments, **keywords)
            finally:
                pinned_ns.append(perf_counter_ns() - began)
                pinning_threads.discard(thread)

        return pin_memory

    try:
        with (
            wrapped(_MultiProcessingDataLoaderIter, "_next_data", asks),
            wrapped(_utils.pin_memory, "pin_memory", pinning),
        ):
            yield
    finally:
        if pinned_ns:
            queue.append(LoaderQueueRow(pinned=len(pinned_ns), pinning_ns=sum(pinned_ns)))
        run.sink.write_rows(window, LoaderQueueRow.series, queue)


class ActionMemory:
    """Reads RSS and the C allocator's bytes around the program's own actions, some 6 µs each.

    Args:
        known: actions with a slot in the step's clock: hooks that the program overrides.
        resident: reads the RSS.

    Attributes:
        rows: of the actions so far.
        mark: the last one, for the step.
    """

    def __init__(self, known: set[str], resident: ResidentSize) -> None:
        self.rows: list[ActionMemoryRow] = []
        self.mark: Mark | None = None
        # The module's optimizer step contains forward and backward.
        self._known = {
            name
            for name in known
            if name.endswith(_FETCH) or (name.startswith(_OWNERS) and not name.endswith(".optimizer_step"))
        }
        self._resident = resident
        # Some hooks and callbacks of a step have it read twice.
        self._heap = HeapSize(most_ns=_HEAP_NS)
        self._open: list[tuple[str, int, int | None]] = []

    def start(self, name: str) -> None:
        """Read memory before an action."""
        if name in self._known:
            self._open.append((name, self._resident.read(), self._heap.read()))

    def stop(self, name: str) -> None:
        """Write the change over the action that ends."""
        if name not in self._known or not self._open or self._open[-1][0] != name:
            return
        _, resident, heap = self._open.pop()
        mark = self.mark
        if mark is not None:
            allocated = self._heap.read()
            row = ActionMemoryRow(
                action=name,
                rss_change_bytes=self._resident.read() - resident,
                heap_change_bytes=None if heap is None or allocated is None else allocated - heap,
                step=mark.step,
                global_step=mark.global_step,
                recorded=mark.recorded,
            )
            self.rows.append(row)


class ProcessLog:
    """Samples of the DataLoader workers, of validations and threads, in a file that begins with the first sample.

    Args:
        path: the file.
        offset_ns: of the run's times.
        resident: reads the RSS.
        spent: called with the nanoseconds of reading a worker.
    """

    def __init__(
        self, path: Path, offset_ns: int, resident: ResidentSize, spent: Callable[[int], None] = lambda _: None
    ) -> None:
        self._path = path
        self._spent = spent
        self._offset_ns = offset_ns
        self._resident = resident
        self._file: Any = None
        self._began_ns = self._last_ns = perf_counter_ns()
        self._due_ns = self._began_ns + _FIRST_S[0] * 1_000_000_000
        self._taken = 0
        # The last step and its global step, and the sampled one.
        self._at: tuple[int, int] | None = None
        self._sampled: tuple[int, int] | None = None
        # Of the sample that is being taken: processes to read, sizes read, and the time for it.
        self._left: list[int] = []
        self._sizes_of: list[dict[str, int]] = []
        self._spent_ns = 0
        # Workers by process id, and their last rows.
        self._known: dict[int, BaseProcess] = {}
        self._seen: set[BaseProcess] = set()
        self._last: dict[int, ProcessRow] = {}
        self._batches = 0
        self._stride = 1
        self._sizes: list[tuple[int, int | None]] = []
        self._heap = HeapSize()
        self._validations = 0
        # Actions that have begun, the peak RSS at the last start or end of one, and the rows of peaks.
        self._open: list[str] = []
        self._peak = peak_rss_bytes(0)
        self._peaks = 0
        self._threads = ThreadTimes()
        self._busy: list[ProcessRow] = []

    @property
    def is_unreadable(self) -> bool:
        """Whether there were workers, on a system without their sizes, as all but Linux."""
        return bool(self._taken) and not _SIZES.exists()

    def begin(self) -> None:
        """Write the peak RSS of what ran before, if it is freed by now."""
        resident = self._resident.read()
        if self._peak - resident >= _RISE:
            self._write(ProcessRow(kind="peak", action=BEFORE_STEPS, rss_bytes=[resident, self._peak]), None, None)

    def validation_batch(self) -> None:
        """Read memory at a batch of a validation inside fit; of many batches at every second, fourth, ... one."""
        if self._batches % self._stride == 0:
            if len(self._sizes) == _SAMPLES:
                del self._sizes[1::2]
                self._stride *= 2
            self._sizes.append((self._resident.read(), self._heap.read()))
        self._batches += 1

    def rare_action(self, action: str | None) -> None:
        """Read the peak RSS where an action starts, or with None where it ends: its rise is of the innermost one.

        About 30 µs.
        """
        before, self._peak = self._peak, peak_rss_bytes(0)
        if self._open and self._peak - before >= _RISE and self._peaks < _MOST_PEAKS:
            self._peaks += 1
            row = ProcessRow(kind="peak", action=self._open[-1], rss_bytes=[before, self._peak])
            self._write(row, *(self._at or (None, None)))
        if action is not None:
            self._open.append(action)
        elif self._open:
            self._open.pop()

    def on_step(self, record: StepRecord) -> None:
        """Write the validation of a step, and sample the workers where it is time: one in each step."""
        if self._batches:
            self._end_validation(record.step, record.global_step)
        self._at = (record.step, record.global_step)
        if record.window is not None:
            self._busy = self._threads.read()
        elif self._busy and self._threads.elapsed_ns >= _THREADS_NS:
            self._write_threads()
        for child in new_workers(self._seen):
            if child.pid is not None:
                self._known[child.pid] = child
        if self._left:
            self._read_next()
            return
        now = perf_counter_ns()
        in_window = record.window is not None and now - self._last_ns > 1_000_000_000
        if now >= self._due_ns or in_window:
            self._begin(now)
            if self._left:
                self._read_next()
            elif self._taken < len(_FIRST_S):
                self._due_ns = now + _FIRST_S[0] * 1_000_000_000

    def close(self) -> bool:
        """Finish, in a short run with a last sample of the workers; return whether anything was written."""
        if self._batches:
            self._end_validation(None, None)
        if not self._left and self._at is not None and self._taken <= len(_FIRST_S) and self._sampled != self._at:
            self._begin(perf_counter_ns())
        while self._left:
            self._read_next()
        self._write_threads()
        self._report_deaths()
        if self._file is not None:
            self._file.close()
        return self._file is not None

    def _write_threads(self) -> None:
        if not self._busy:
            return
        # Threads that have ended are not read again.
        busy, self._busy = self._threads.read() or self._busy, []
        for row in busy:
            self._write(row, *(self._at or (None, None)))

    def _begin(self, now: int) -> None:
        """Begin a sample of the workers that there are."""
        self._report_deaths()
        self._left = sorted(self._known)
        self._last_ns, self._sampled, self._sizes_of, self._spent_ns = now, self._at, [], 0
        self._due_ns = now + _EVERY_S * 1_000_000_000
        if self._left and not self._taken:
            # The first step may come long after the start of the run.
            self._began_ns = now

    def _read_next(self) -> None:
        """Read one worker; after the last one write the sums."""
        start, cpu_start = perf_counter_ns(), thread_time_ns()
        pid = self._left.pop(0)
        size = worker_memory(pid)
        if size and self._sampled is not None:
            self._sizes_of.append(size)
            columns: dict[str, Any] = size | worker_times(pid) | worker_counts(pid)
            row = ProcessRow(kind="worker", pid=pid, **columns)
            self._last[pid] = row
            self._write(row, *self._sampled)
        # Without a wait for a core: where others compute, a run of seconds would have too few samples.
        self._spent_ns += thread_time_ns() - cpu_start
        self._spent(perf_counter_ns() - start)
        if not self._left:
            self._end_sample(start)

    def _end_sample(self, now: int) -> None:
        following = [s for s in _FIRST_S if s * 1_000_000_000 > now - self._began_ns]
        self._taken += 1
        wait_ns = (following[0] * 1_000_000_000 - (now - self._began_ns)) if following else _EVERY_S * 1_000_000_000
        self._due_ns = now + max(wait_ns, round(self._spent_ns / _SHARE))
        if self._sizes_of and self._sampled is not None:
            sums: dict[str, Any] = {name: sum(size[name] for size in self._sizes_of) for name in self._sizes_of[0]}
            self._write(ProcessRow(kind="workers", workers=len(self._sizes_of), **sums), *self._sampled)

    def _report_deaths(self) -> None:
        """Write the exit codes of workers that died, and forget those that ended."""
        for pid, child in list(self._known.items()):
            code = exit_code(child)
            if code is None:
                continue
            # The DataLoader terminates workers that do not end in time.
            if code not in {0, -signal.SIGTERM}:
                row = self._last.get(pid) or ProcessRow(kind="worker", pid=pid)
                row.exit_code = code
                self._write(row, *(self._at or (None, None)))
            self._last.pop(pid, None)
            del self._known[pid]

    def _end_validation(self, step: int | None, global_step: int | None) -> None:
        heap = [size for _, size in self._sizes if size is not None]
        row = ProcessRow(
            kind="validation",
            batches=self._batches,
            rss_bytes=[size for size, _ in self._sizes],
            heap_bytes=heap if len(heap) == len(self._sizes) else [],
        )
        self._batches, self._stride, self._sizes = 0, 1, []
        self._validations += 1
        if self._validations <= _MOST_VALIDATIONS:
            self._write(row, step, global_step)

    def _write(self, row: ProcessRow, step: int | None, global_step: int | None) -> None:
        row.step, row.global_step, row.time_ns = step, global_step, perf_counter_ns() + self._offset_ns
        if self._file is None:
            self._file = self._path.open("x", encoding="utf-8", buffering=1)
        # One call, so that a reader sees whole lines.
        self._file.write(encode_rows([columns_of(row)]))
