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
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from ctypes import Structure, c_char, c_int64, sizeof
from itertools import takewhile
from mmap import mmap
from multiprocessing import process
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from time import perf_counter_ns, process_time_ns, sleep
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.capture.observe import Link, hide_wrappers, wrapped
from lightning_memprof.capture.sources.proc import handles_signal, read_file
from lightning_memprof.capture.threads import Call, calls_of_thread, is_program, line_of, qualified_name
from lightning_memprof.capture.torch_internals import _IterableDatasetFetcher, _MapDatasetFetcher, _utils
from lightning_memprof.units import KIB

# Bound when no worker has started: in a forked one torch's module has ours.
_TORCH_LOOP: Final[Any] = getattr(getattr(_utils, "worker", None), "_worker_loop", None)
_LOOP: Final = "_worker_loop"
_PAGE: Final = "lightning-memprof-worker"
_COUNTERS: Final = (
    "worker", "batches", "fetch_ns", "fetch_cpu_ns", "collate_ns", "queue_wait_ns", "looks", "lock_waits",
)  # fmt: skip
_NAME_BYTES: Final = 256
_FUNCTIONS_BYTES: Final = 8 * KIB
_LAST_BATCHES: Final = 64
_MOST_FUNCTIONS: Final = 48
_LONGEST_NAME: Final = 100
# A look takes about 50 µs; these are 10 s of fetches.
_LOOK_S: Final = 0.01
_LOOKS: Final = 1000
# Python lets a thread that computes keep its lock for 5 ms: a short fetch would end before the look.
_SWITCH_S: Final = 0.0002
# The methods by which data sets, transforms and modules of libraries are called; their other functions are in them.
_METHODS: Final = frozenset({"__call__", "__getitem__", "__getitems__", "__iter__", "__next__", "forward"})
_FETCH: Final = _MapDatasetFetcher.__module__
# The calls of the kernel that take a lock: futex (of semaphores too), flock, and fcntl, by machine.
_LOCK_CALLS: Final = {"x86_64": (202, 73, 72), "aarch64": (98, 32, 25)}
_PRIVATE_FUTEX: Final = 0x80
_WAITS_FOR_LOCK: Final = (7, 38)  # F_SETLKW, F_OFD_SETLKW
# A worker answers it with its stack; no other library is known to use it. None where there are no such signals.
_STACK_SIGNAL: Final = signal.SIGRTMAX - 11 if sys.platform == "linux" else None
_OUR_FILES: Final = f"{Path(__file__).parent}{os.sep}"
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_ANSWERS_IN_S: Final = 1.0
_TICK_NS: Final = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
# Fields of proc(5)'s stat after the command: utime, stime and delayacct_blkio_ticks.
_UTIME, _STIME, _BLKIO = 11, 12, 39
_DELAYS: Final = Path("/proc/sys/kernel/task_delayacct")


class _Page(Structure):
    """What a worker counts, and in UTF-8 the name of its data set and the line at which it waits for locks.

    ``waits_since_ns`` is the time at which it began to wait for an index, 0 in a fetch; ``last`` has start and duration
    of the last batches; ``functions`` self and total time of each function in fetches, as JSON.
    """

    _fields_ = (
        *((name, c_int64) for name in (*_COUNTERS, "waits_since_ns")),
        *((name, c_char * _NAME_BYTES) for name in ("dataset", "lock")),
        ("last", c_int64 * (2 * _LAST_BATCHES)),
        ("functions", c_char * _FUNCTIONS_BYTES),
    )

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


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


def worker_memory(pid: int) -> dict[str, int]:
    """Return a process's proportional set size, the bytes that no other process shares, and those that others share.

    In columns of a ``ProcessRow``; empty if unknown. Source: ``smaps_rollup`` of proc(5), which walks the page tables:
    40 to 70 ms per GiB, without the GIL.
    """
    lines = read_file(f"/proc/{pid}/smaps_rollup").splitlines()
    sizes = {name: int(rest.split()[0]) * KIB for name, _, rest in (line.partition(b":") for line in lines[1:]) if rest}
    if b"Pss" not in sizes:
        return {}
    private, shared = (
        sum(sizes.get(kind + state, 0) for state in (b"_Clean", b"_Dirty")) for kind in (b"Private", b"Shared")
    )
    return {"pss_bytes": sizes[b"Pss"], "private_bytes": private, "shared_bytes": shared}


def worker_times(pid: int) -> dict[str, int]:
    """Return processor time, and where the kernel has them time without a core, waits for disks and bytes read.

    Since the start of the process, in columns of a ``ProcessRow``. Sources: ``stat`` of proc(5), all threads, in ticks
    of 10 ms; ``schedstat``, its first thread; ``io``. About 40 µs.
    """
    found: dict[str, int] = {}
    if fields := read_file(f"/proc/{pid}/stat").rpartition(b")")[2].split():
        found["cpu_ns"] = (int(fields[_UTIME]) + int(fields[_STIME])) * _TICK_NS
        if read_file(_DELAYS).strip() == b"1":
            found["io_wait_ns"] = int(fields[_BLKIO]) * _TICK_NS
    if ready := read_file(f"/proc/{pid}/schedstat").split():
        found["core_wait_ns"] = int(ready[1])
    if (read := read_file(f"/proc/{pid}/io")).startswith(b"rchar:"):
        found["read_bytes"] = int(read.split(maxsplit=2)[1])
    return found


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
    if page is None:
        return {}
    found: dict[str, Any] = {name: getattr(page, name) for name in _COUNTERS}
    if page.waits_since_ns:
        found["queue_wait_ns"] += max(perf_counter_ns() - page.waits_since_ns, 0)
    # The worker may be writing.
    with suppress(ValueError):
        found["functions"] = json.loads(page.functions or b"{}")
    return found | {name: getattr(page, name).decode("utf-8", "replace") or None for name in ("dataset", "lock")}


def worker_batches(pid: int) -> list[tuple[int, int]]:
    """Return start, as of ``perf_counter_ns``, and duration of a worker's last batches, at most 64, in ns."""
    page = _page_of(pid)
    return [] if page is None else sorted(pair for pair in zip(page.last[::2], page.last[1::2], strict=True) if pair[0])


def stuck_workers() -> Iterator[tuple[int, list[tuple[str, int, str]]]]:
    """Yield the workers that are in a fetch, and their stack: file, line and function, the innermost first.

    A worker writes it by a signal handler of ``faulthandler``, which needs no lock of the interpreter; at most a second
    for all of them.
    """
    until = perf_counter_ns() + round(_ANSWERS_IN_S * 1e9)
    for pid in worker_pids():
        page = _page_of(pid)
        if page is None or page.waits_since_ns:
            continue
        # Unhandled, it would end the worker.
        if _STACK_SIGNAL is None or not handles_signal(_STACK_SIGNAL, pid):
            continue
        with suppress(OSError):
            os.kill(pid, _STACK_SIGNAL)
        text = b""
        while perf_counter_ns() < until and _TORCH_LOOP.__name__.encode() not in text:
            sleep(0.01)
            text = read_file(_path_of(pid))[sizeof(_Page) :]
        text = text.partition(f" in {_TORCH_LOOP.__name__}".encode())[0]
        frames = [(file, int(line), name) for file, line, name in _FRAME.findall(text.decode("utf-8", "replace"))]
        if frames := [frame for frame in frames if not frame[0].startswith(_OUR_FILES)]:
            yield page.worker, frames


def _page_of(pid: int) -> _Page | None:
    """Return a copy of the page of a worker; None if it has none, or has ended."""
    data = read_file(_path_of(pid))
    return _Page.from_buffer_copy(data) if len(data) >= sizeof(_Page) else None


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
            _Counting(bound["worker_id"], bound["dataset"]).start(bound["index_queue"], counting)
        _TORCH_LOOP(*arguments, **keywords)


def waits_for_lock(call: str) -> bool:
    """Return whether a thread waits for a lock that other processes use too, by ``syscall`` of proc(5)."""
    number, *arguments = call.split()[:3] or [""]
    futex, flock, fcntl = _LOCK_CALLS.get(os.uname().machine, (-1, -1, -1))
    if number == str(futex):
        return not int(arguments[1], 16) & _PRIVATE_FUTEX
    return number == str(flock) or (number == str(fcntl) and int(arguments[1], 16) in _WAITS_FOR_LOCK)


def _line(calls: Iterable[Call]) -> str:
    """Return the innermost line of the program, with its function."""
    for call in filter(is_program, calls):
        return f"{call[0].co_name} ({Path(call[0].co_filename).name}:{line_of(call)})"
    return ""


def _hidden(link: Link) -> Callable[..., None]:
    """Leave our functions out of the traceback that a worker sends as the message of its exception."""

    def init(wrapper: Any, exc_info: Any = None, *arguments: Any, **keywords: Any) -> None:
        exc_info = exc_info or sys.exc_info()
        hide_wrappers(exc_info[1])
        link.call(wrapper, exc_info, *arguments, **keywords)

    return init


class _Counting:
    """Counts in this worker, in a file of memory that is gone with the process, however that ends."""

    def __init__(self, worker: int, dataset: Any) -> None:
        # Open as long as the worker lives: the parent finds it among the worker's files.
        file = os.memfd_create(_PAGE)
        os.ftruncate(file, sizeof(_Page))
        self._page = _Page.from_buffer(mmap(file, sizeof(_Page)))
        self._page.worker, self._page.dataset = worker, _encoded(type(dataset).__name__, _NAME_BYTES)
        if _STACK_SIGNAL is not None:
            # Stacks follow the page.
            os.lseek(file, sizeof(_Page), os.SEEK_SET)
            faulthandler.register(_STACK_SIGNAL, file, all_threads=False)
        # The start of the running fetch, 0 outside.
        self._began_ns = 0

    def start(self, index_queue: Any, counting: ExitStack) -> None:
        """Count until the context ends."""
        counting.enter_context(wrapped(index_queue, "get", self._waits))
        for fetcher in (_MapDatasetFetcher, _IterableDatasetFetcher):
            counting.enter_context(wrapped(fetcher, "fetch", self._fetches))
        counting.enter_context(wrapped(_utils.worker.ExceptionWrapper, "__init__", _hidden))
        threading.Thread(
            target=self._look, args=(threading.get_ident(), threading.get_native_id()), daemon=True
        ).start()

    def _look(self, ident: int, thread: int) -> None:
        """Look now and then at the functions of a thread's fetches, and at which line it waits for a lock; then end.

        The time of fetches since the previous look belongs to the functions of this one.
        """
        page, places, times = self._page, Counter[str](), dict[str, list[int]]()
        before_ns = 0
        switch_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        with suppress(OSError, ValueError):
            chance = Random()  # noqa: S311 its own state, not the program's  # nosec B311
            while page.looks < _LOOKS:
                # Looks at equal distances meet work that repeats at the same place each time.
                sleep(chance.uniform(0.5, 1.5) * _LOOK_S)
                if not (began_ns := self._began_ns):
                    continue
                calls, now_ns = calls_of_thread(ident), page.fetch_ns + perf_counter_ns() - began_ns
                if not any(map(_is_fetch, calls)):
                    # It has ended.
                    continue
                page.looks += 1
                # The first batch opens files and imports modules.
                if page.batches:
                    _add(times, list(_functions(calls)), now_ns - (before_ns or page.fetch_ns))
                    longest = sorted(times.items(), key=lambda item: -item[1][0])[:_MOST_FUNCTIONS]
                    page.functions = _encoded(json.dumps(dict(longest), ensure_ascii=False), _FUNCTIONS_BYTES)
                    before_ns = now_ns
                if waits_for_lock(read_file(f"/proc/self/task/{thread}/syscall").decode()):
                    page.lock_waits += 1
                    places[_line(calls)] += 1
                    page.lock = _encoded(places.most_common(1)[0][0], _NAME_BYTES)
        # The program's own setting stays.
        if round(sys.getswitchinterval(), 6) == _SWITCH_S:
            sys.setswitchinterval(switch_s)

    def _waits(self, link: Link) -> Callable[..., Any]:
        """Return a queue's ``get`` that counts the time until it returns."""
        page = self._page

        def get(*arguments: Any, **keywords: Any) -> Any:
            __tracebackhide__ = True
            page.waits_since_ns = began = perf_counter_ns()
            try:
                return link.call(*arguments, **keywords)
            finally:
                page.waits_since_ns = 0
                page.queue_wait_ns += perf_counter_ns() - began

        return get

    def _fetches(self, link: Link) -> Callable[..., Any]:
        """Return a fetcher's ``fetch`` that counts batches and their time; all counters take about 5 µs per batch."""
        page, last = self._page, self._page.last

        def fetch(fetcher: Any, *arguments: Any, **keywords: Any) -> Any:
            __tracebackhide__ = True
            cpu_began = process_time_ns()
            self._began_ns = began = perf_counter_ns()
            try:
                with wrapped(fetcher, "collate_fn", self._collates):
                    return link.call(fetcher, *arguments, **keywords)
            finally:
                self._began_ns = 0
                elapsed = perf_counter_ns() - began
                page.fetch_cpu_ns += process_time_ns() - cpu_began
                page.fetch_ns += elapsed
                place = 2 * (page.batches % _LAST_BATCHES)
                last[place], last[place + 1] = began, elapsed
                page.batches += 1

        return fetch

    def _collates(self, link: Link) -> Callable[..., Any]:
        page = self._page

        def collate(*arguments: Any, **keywords: Any) -> Any:
            __tracebackhide__ = True
            began = perf_counter_ns()
            try:
                return link.call(*arguments, **keywords)
            finally:
                page.collate_ns += perf_counter_ns() - began

        return collate


def _functions(calls: Iterable[Call]) -> Iterator[str]:
    """Yield the program's functions in a fetch, innermost first, and of libraries what a program would name."""
    inside = [call for call in takewhile(lambda call: not _is_fetch(call), calls) if not _is_ours(call)]
    for call in inside:
        name = call[0].co_name
        # Lambdas and comprehensions are of the function that runs them.
        if name in _METHODS or call is inside[-1] or (is_program(call) and not name.startswith("<")):
            yield qualified_name(call[0])[:_LONGEST_NAME]


def _is_fetch(call: Call) -> bool:
    return bool(call[2].get("__name__") == _FETCH)


def _is_ours(call: Call) -> bool:
    return call[0].co_filename.startswith(_OUR_FILES)


def _add(times: dict[str, list[int]], names: list[str], ns: int) -> None:
    """Add time to the functions of a look: self time to the innermost one, total time to each."""
    for name in {*names} or {"fetch"}:
        times.setdefault(name, [0, 0])[1] += ns
    times[names[0] if names else "fetch"][0] += ns


def _encoded(text: str, most: int) -> bytes:
    return text.encode("utf-8", "replace")[:most]
