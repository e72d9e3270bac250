"""DataLoader workers: their memory and times as the operating system sees them, and counters that they keep themselves.

torch starts a worker with its function ``_worker_loop``. While :func:`counted_workers` is open it starts
:func:`worker_loop` instead, which is pickled by name as torch's is: nothing else is pickled. The worker counts in a
page of memory, an open file without a name, which the parent reads while the worker lives.
"""

from __future__ import annotations

import faulthandler
import inspect
import json
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from mmap import mmap
from multiprocessing import process
from multiprocessing.process import BaseProcess
from pathlib import Path
from struct import pack, unpack_from
from time import perf_counter_ns, process_time_ns, sleep
from types import TracebackType
from typing import Any, Final, NamedTuple

from lightning_memprof.capture import loader_calls, observe
from lightning_memprof.capture.loader_calls import Calls, name_of, timed_calls
from lightning_memprof.capture.observe import Link, wrapped
from lightning_memprof.capture.sources.assignments import is_library
from lightning_memprof.capture.threads import Call, calls_of_thread, line_of
from lightning_memprof.capture.torch_internals import _IterableDatasetFetcher, _MapDatasetFetcher, _utils
from lightning_memprof.units import KIB

# Bound when no worker has started: in a forked one torch's module has ours.
_TORCH_LOOP: Final[Any] = getattr(getattr(_utils, "worker", None), "_worker_loop", None)
_LOOP: Final = "_worker_loop"
_PAGE: Final = "lightning-memprof-worker"
# The counters of a page, each an int64, then the name of the data set, then the last batches: start and duration, and
# the line at which it waits for locks. ``watch`` is the parent's: the number of a window in which the worker times its
# calls and writes them behind, as JSON.
_COUNTERS: Final = (
    "worker", "batches", "fetch_ns", "fetch_cpu_ns", "collate_ns", "queue_wait_ns", "waits_since_ns",
    "looks", "lock_waits", "watch", "calls_watch", "calls_bytes",
)  # fmt: skip
_OF_CALLS: Final = 3
_NAME_AT: Final = 8 * len(_COUNTERS)
_BATCHES_AT: Final = 512
_LAST_BATCHES: Final = 64
_LOCK_AT: Final = _BATCHES_AT + 16 * _LAST_BATCHES
_LOCK_BYTES: Final = 256
_CALLS_AT: Final = _LOCK_AT + _LOCK_BYTES
_PAGE_BYTES: Final = _CALLS_AT + 8 * KIB
_MOST_CALLS: Final = 48
_LONGEST_NAME: Final = 100
_FETCH: Final = ""
# A look takes about 5 µs; these are 10 s of fetches.
_LOOK_S: Final = 0.05
_LOOKS: Final = 200
# The calls of the kernel that take a lock: futex (of semaphores too), flock, and fcntl, by machine.
_LOCK_CALLS: Final = {"x86_64": (202, 73, 72), "aarch64": (98, 32, 25)}
_PRIVATE_FUTEX: Final = 0x80
_WAITS_FOR_LOCK: Final = (7, 38)  # F_SETLKW, F_OFD_SETLKW
# A worker answers it with its stack; no other library is known to use it. None where there are no such signals.
_STACK_SIGNAL: Final = signal.SIGRTMAX - 11 if sys.platform == "linux" else None
_OUR_FILES: Final = frozenset({__file__, loader_calls.__file__, observe.__file__})
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_ANSWERS_IN_S: Final = 1.0
_TICK_NS: Final = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
# Fields of proc(5)'s stat after the command: utime, stime and delayacct_blkio_ticks.
_UTIME, _STIME, _BLKIO = 11, 12, 39
_DELAYS: Final = Path("/proc/sys/kernel/task_delayacct")


class WorkerMemory(NamedTuple):
    """A process's proportional set size, the bytes that no other process shares, and those that others share."""

    pss_bytes: int
    private_bytes: int
    shared_bytes: int


def workers() -> list[BaseProcess]:
    """Return this process's daemonic children, which DataLoader workers are, in the order of their start.

    ``multiprocessing.active_children`` would also reap ended ones, whose exit status the DataLoader waits for.
    """
    children: Any = tuple(getattr(process, "_children", ()))
    return sorted((child for child in children if child.daemon and child.pid is not None), key=lambda child: child.pid)


def new_workers(seen: set[BaseProcess]) -> list[BaseProcess]:
    """Return the workers if a child has started since the last call, else nothing; ``seen`` has the known children.

    About 0.2 µs without a new one.
    """
    children: Any = tuple(getattr(process, "_children", ()))
    if seen.issuperset(children):
        return []
    seen.clear()
    seen.update(children)
    return workers()


def worker_pids() -> list[int]:
    """Return the process ids of the workers; about 1 µs each."""
    return [child.pid for child in workers() if child.pid is not None]


def worker_memory(pid: int) -> WorkerMemory | None:
    """Return the memory of a process; None if unknown.

    Source: ``smaps_rollup`` of proc(5), which walks the page tables: 40 to 70 ms per GiB, without the GIL.
    """
    lines = _read(f"/proc/{pid}/smaps_rollup").splitlines()
    sizes = {name: int(rest.split()[0]) * KIB for name, _, rest in (line.partition(b":") for line in lines[1:]) if rest}
    if b"Pss" not in sizes:
        return None
    private, shared = (
        sum(sizes.get(kind + state, 0) for state in (b"_Clean", b"_Dirty")) for kind in (b"Private", b"Shared")
    )
    return WorkerMemory(sizes[b"Pss"], private, shared)


def worker_times(pid: int) -> dict[str, int]:
    """Return processor time, and where the kernel has them time without a core, waits for disks and bytes read.

    Since the start of the process, in columns of a ``ProcessRow``. Sources: ``stat`` of proc(5), all threads, in ticks
    of 10 ms; ``schedstat``, its first thread; ``io``. About 40 µs.
    """
    found: dict[str, int] = {}
    if fields := _read(f"/proc/{pid}/stat").rpartition(b")")[2].split():
        found["cpu_ns"] = (int(fields[_UTIME]) + int(fields[_STIME])) * _TICK_NS
        if _read(_DELAYS).strip() == b"1":
            found["io_wait_ns"] = int(fields[_BLKIO]) * _TICK_NS
    if ready := _read(f"/proc/{pid}/schedstat").split():
        found["core_wait_ns"] = int(ready[1])
    if (read := _read(f"/proc/{pid}/io")).startswith(b"rchar:"):
        found["read_bytes"] = int(read.split(maxsplit=2)[1])
    return found


def _read(path: str | Path) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 a Path doubles the cost
            return file.read()
    except OSError:
        return b""


def exit_code(child: BaseProcess) -> int | None:
    """Return the exit code of a process, minus the signal that killed it; None while it runs or where it is unknown.

    The process is not reaped: the DataLoader waits for its exit status.
    """
    code: int | None = getattr(getattr(child, "_popen", None), "returncode", None)
    if code is not None or child.pid is None:
        return code
    with suppress(OSError, AttributeError):
        ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    return None


def worker_counts(pid: int) -> dict[str, Any]:
    """Return what a worker has counted since its start, in columns of a ``ProcessRow``; empty if it does not count."""
    page = _page_of(pid)
    if len(page) < _PAGE_BYTES:
        return {}
    names = _COUNTERS[:-_OF_CALLS]
    found: dict[str, Any] = dict(zip(names, unpack_from(f"={len(names)}q", page), strict=True))
    if since := found.pop("waits_since_ns"):
        found["queue_wait_ns"] += max(perf_counter_ns() - since, 0)
    for name, start, end in (("dataset", _NAME_AT, _BATCHES_AT), ("lock", _LOCK_AT, _CALLS_AT)):
        found[name] = page[start:end].rstrip(b"\0").decode("utf-8", "replace") or None
    return found


def worker_batches(pid: int) -> list[tuple[int, int]]:
    """Return start, as of ``perf_counter_ns``, and duration of a worker's last batches, at most 64, in ns."""
    page = _page_of(pid)
    if len(page) < _PAGE_BYTES:
        return []
    values = unpack_from(f"={2 * _LAST_BATCHES}q", page, _BATCHES_AT)
    return sorted((start, ns) for start, ns in zip(values[::2], values[1::2], strict=True) if start)


def worker_calls(pid: int, watch: int) -> dict[str, list[int]]:
    """Return what a worker has timed since :func:`watch_workers` with this number; empty if nothing yet.

    For each function its count, self time and total time; under an empty name those of whole fetches.
    """
    for _ in range(3):
        page = _page_of(pid)
        if len(page) < _PAGE_BYTES:
            break
        found, size = unpack_from("=2q", page, 8 * _COUNTERS.index("calls_watch"))
        # The worker may be writing.
        with suppress(ValueError):
            return dict(json.loads(page[_CALLS_AT : _CALLS_AT + size])) if found == watch and size else {}
    return {}


def stuck_workers() -> Iterator[tuple[int, list[tuple[str, int, str]]]]:
    """Yield the workers that are in a fetch, and their stack: file, line and function, the innermost first.

    A worker writes it by a signal handler of ``faulthandler``, which needs no lock of the interpreter; at most a second
    for all of them.
    """
    until = perf_counter_ns() + round(_ANSWERS_IN_S * 1e9)
    for pid in worker_pids():
        page = _page_of(pid)
        if len(page) < _PAGE_BYTES or unpack_from("=q", page, 8 * _COUNTERS.index("waits_since_ns"))[0]:
            continue
        handled = re.search(rb"^SigCgt:\s*(\w+)", _read(f"/proc/{pid}/status"), re.MULTILINE)
        # Unhandled, it would end the worker.
        if _STACK_SIGNAL is None or handled is None or not int(handled[1], 16) >> (_STACK_SIGNAL - 1) & 1:
            continue
        with suppress(OSError):
            os.kill(pid, _STACK_SIGNAL)
        text = b""
        while perf_counter_ns() < until and _TORCH_LOOP.__name__.encode() not in text:
            sleep(0.01)
            text = _page_of(pid)[len(page) :]
        text = text.partition(f" in {_TORCH_LOOP.__name__}".encode())[0]
        frames = [(file, int(line), name) for file, line, name in _FRAME.findall(text.decode("utf-8", "replace"))]
        if frames := [frame for frame in frames if frame[0] not in _OUR_FILES]:
            yield unpack_from("=q", page, 8 * _COUNTERS.index("worker"))[0], frames


def watch_workers(watch: int, watched: set[int]) -> None:
    """Let workers time their calls from their next fetches on; 0.03 ms each.

    Args:
        watch: a number of this window, see :func:`worker_calls`; its negative ends it after one such fetch.
        watched: the workers that have this number already; it adds the others.
    """
    for pid in worker_pids():
        if pid not in watched:
            # It has not started to count yet, or has ended.
            with suppress(OSError), open(_path_of(pid), "r+b", buffering=0) as file:  # noqa: PTH123 as in _read
                file.seek(8 * _COUNTERS.index("watch"))
                file.write(pack("=q", watch))
                watched.add(pid)


def _page_of(pid: int) -> bytes:
    """Return the page of a worker; empty if it has none, or has ended."""
    return _read(_path_of(pid))


def _path_of(pid: int) -> str:
    """Return where the page of a worker is; empty if it has none, or has ended. About 3 µs per open file of it."""
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as files:
        return next((file.path for file in files if _is_page(file.path)), "")
    return ""


def _is_page(path: str) -> bool:
    # The file may be closed meanwhile.
    with suppress(OSError):
        return _PAGE in os.readlink(path)  # noqa: PTH115 a Path doubles the cost
    return False


@contextmanager
def counted_workers() -> Iterator[None]:
    """Let workers that start while the context is open count their batches and times."""
    place = getattr(_utils, "worker", None)
    # Another program's replacement stays.
    if _TORCH_LOOP is None or vars(place).get(_LOOP) is not _TORCH_LOOP:
        yield
        return
    setattr(place, _LOOP, worker_loop)
    try:
        yield
    finally:
        if vars(place).get(_LOOP) is worker_loop:
            setattr(place, _LOOP, _TORCH_LOOP)


def worker_loop(*arguments: Any, **keywords: Any) -> None:
    """Run torch's loop of a worker, and count."""
    with ExitStack() as counting:
        # Loading works without counters.
        with suppress(Exception):
            bound = inspect.signature(_TORCH_LOOP).bind(*arguments, **keywords).arguments
            _count(bound, counting)
        _TORCH_LOOP(*arguments, **keywords)


def _count(bound: Mapping[str, Any], counting: ExitStack) -> None:
    page = _Page()
    page.begin(bound["worker_id"], type(bound["dataset"]).__name__)
    counting.enter_context(wrapped(bound["index_queue"], "get", page.waits))
    for fetcher in (_MapDatasetFetcher, _IterableDatasetFetcher):
        counting.enter_context(wrapped(fetcher, "fetch", page.fetches))
    threading.Thread(target=page.look, args=(threading.get_ident(), threading.get_native_id()), daemon=True).start()
    counting.enter_context(wrapped(_utils.worker.ExceptionWrapper, "__init__", _hidden))


def waits_for_lock(call: str) -> bool:
    """Return whether a thread waits for a lock that other processes use too, by ``syscall`` of proc(5)."""
    number, *arguments = call.split()[:3] or [""]
    futex, flock, fcntl = _LOCK_CALLS.get(os.uname().machine, (-1, -1, -1))
    if number == str(futex):
        return not int(arguments[1], 16) & _PRIVATE_FUTEX
    return number == str(flock) or (number == str(fcntl) and int(arguments[1], 16) in _WAITS_FOR_LOCK)


def _line(calls: Iterable[Call]) -> str:
    """Return the innermost line of the program, with its function."""
    for call in calls:
        code, _, _ = call
        if not is_library(code.co_filename) and code.co_filename not in _OUR_FILES:
            return f"{code.co_name} ({Path(code.co_filename).name}:{line_of(call)})"
    return ""


def _hidden(link: Link) -> Callable[..., None]:
    """Leave our functions out of the traceback that a worker sends as the message of its exception."""

    def init(wrapper: Any, exc_info: Any = None, *arguments: Any, **keywords: Any) -> None:
        kind, error, traceback = exc_info or sys.exc_info()
        link.call(wrapper, (kind, error, _without_ours(traceback)), *arguments, **keywords)

    return init


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    # A loop: that of a RecursionError is as deep as calls can be.
    entries: list[TracebackType] = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    for entry in reversed(entries):
        if entry.tb_frame.f_code.co_filename not in _OUR_FILES:
            traceback = TracebackType(traceback, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return traceback


class _Page:
    """The counters of this worker, in a file of memory that is gone with the process, however that ends."""

    def __init__(self) -> None:
        # Open as long as the worker lives: the parent finds it among the worker's files.
        file = os.memfd_create(_PAGE)
        os.ftruncate(file, _PAGE_BYTES)
        self._bytes = mmap(file, _PAGE_BYTES)
        self._counts = memoryview(self._bytes).cast("q")
        if _STACK_SIGNAL is not None:
            # Stacks follow the page.
            os.lseek(file, _PAGE_BYTES, os.SEEK_SET)
            faulthandler.register(_STACK_SIGNAL, file, all_threads=False)
        self._is_fetching = False
        # The number of the window with times, and the value of ``watch`` for which nothing is left to do.
        self._number = self._followed = 0
        self._calls: Calls | None = None
        self._watching = ExitStack()

    def begin(self, worker: int, dataset: str) -> None:
        """Write who this is."""
        name = dataset.encode()[: _BATCHES_AT - _NAME_AT]
        self._bytes[_NAME_AT : _NAME_AT + len(name)] = name
        self._counts[_COUNTERS.index("worker")] = worker

    def look(self, ident: int, thread: int) -> None:
        """Look now and then whether a thread's fetches wait for a lock, and at which line; then end."""
        counts, places = self._counts, Counter[str]()
        looks, waits = _COUNTERS.index("looks"), _COUNTERS.index("lock_waits")
        # Where the kernel does not tell, nothing is known.
        with suppress(OSError, ValueError):
            while counts[looks] < _LOOKS:
                sleep(_LOOK_S)
                if not self._is_fetching:
                    continue
                counts[looks] += 1
                if waits_for_lock(_read(f"/proc/self/task/{thread}/syscall").decode()):
                    counts[waits] += 1
                    places[_line(calls_of_thread(ident))] += 1
                    line = places.most_common(1)[0][0].encode()[:_LOCK_BYTES]
                    self._bytes[_LOCK_AT:_CALLS_AT] = line.ljust(_LOCK_BYTES, b"\0")

    def waits(self, link: Link) -> Callable[..., Any]:
        """Return a queue's ``get`` that counts the time until it returns."""
        counts = self._counts
        waited, since = _COUNTERS.index("queue_wait_ns"), _COUNTERS.index("waits_since_ns")

        def get(*arguments: Any, **keywords: Any) -> Any:
            counts[since] = began = perf_counter_ns()
            try:
                return link.call(*arguments, **keywords)
            finally:
                counts[since] = 0
                counts[waited] += perf_counter_ns() - began

        return get

    def fetches(self, link: Link) -> Callable[..., Any]:
        """Return a fetcher's ``fetch`` that counts batches and their time; all counters take about 5 µs per batch."""
        counts = self._counts
        batches, wall, cpu, watch = (_COUNTERS.index(name) for name in ("batches", "fetch_ns", "fetch_cpu_ns", "watch"))

        def fetch(fetcher: Any, *arguments: Any, **keywords: Any) -> Any:
            if counts[watch] != self._followed:
                self._follow_watch(fetcher, counts[watch])
            began, cpu_began = perf_counter_ns(), process_time_ns()
            self._is_fetching = True
            try:
                with wrapped(fetcher, "collate_fn", self._collates):
                    if self._calls is None:
                        return link.call(fetcher, *arguments, **keywords)
                    return self._calls.run(_FETCH, link.call, fetcher, *arguments, **keywords)
            finally:
                self._is_fetching = False
                elapsed = perf_counter_ns() - began
                counts[cpu] += process_time_ns() - cpu_began
                counts[wall] += elapsed
                place = _BATCHES_AT // 8 + 2 * (counts[batches] % _LAST_BATCHES)
                counts[place], counts[place + 1] = began, elapsed
                counts[batches] += 1
                if self._calls is not None:
                    with suppress(Exception):
                        self._write_calls(self._calls, fetcher)

        return fetch

    def _collates(self, link: Link) -> Callable[..., Any]:
        counts, spent = self._counts, _COUNTERS.index("collate_ns")
        calls, name = self._calls, name_of(link.below)

        def collate(*arguments: Any, **keywords: Any) -> Any:
            began = perf_counter_ns()
            try:
                if calls is None:
                    return link.call(*arguments, **keywords)
                return calls.run(name, link.call, *arguments, **keywords)
            finally:
                counts[spent] += perf_counter_ns() - began

        return collate

    def _follow_watch(self, fetcher: Any, watch: int) -> None:
        """Begin to time calls, for one fetch if the window has ended before it; end it after the window's end."""
        is_new = abs(watch) != self._number
        self._number = abs(watch)
        self._watching.close()
        self._calls = Calls() if is_new else None
        if watch > 0 or not is_new:
            self._followed = watch
        # Loading works without.
        with suppress(Exception):
            if self._calls is not None:
                self._watching.enter_context(timed_calls(self._calls, fetcher.dataset, fetcher.collate_fn))

    def _write_calls(self, calls: Calls, fetcher: Any) -> None:
        """Write the times of all calls; what the fetch itself takes is the data set's."""
        calls.drop_cheap(_FETCH)
        times = {name: list(parts) for name, parts in calls.times.items()}
        batches, own_ns, fetch_ns = times.pop(_FETCH)
        collate_ns = times.get(name_of(fetcher.collate_fn), [0, 0, 0])[2]
        method = "__getitems__" if getattr(fetcher.dataset, "__getitems__", None) else "__getitem__"
        method = "__iter__" if isinstance(fetcher, _IterableDatasetFetcher) else method
        label = f"{type(fetcher.dataset).__name__}.{method}"
        # Not timed where it is not a function in Python.
        whole = [0, own_ns, own_ns] if label in times else [batches, own_ns, fetch_ns - collate_ns]
        times[label] = [sum(parts) for parts in zip(times.get(label, [0, 0, 0]), whole, strict=True)]
        longest = sorted(times.items(), key=lambda item: -item[1][1])[:_MOST_CALLS]
        found = {_FETCH: [batches, 0, fetch_ns], **{name[:_LONGEST_NAME]: parts for name, parts in longest}}
        text = json.dumps(found, ensure_ascii=False).encode("utf-8", "replace")[: _PAGE_BYTES - _CALLS_AT]
        watched, size = (_COUNTERS.index(name) for name in ("calls_watch", "calls_bytes"))
        self._counts[size] = 0
        self._bytes[_CALLS_AT : _CALLS_AT + len(text)] = text
        self._counts[watched], self._counts[size] = self._number, len(text)
