"""Times of threads as the kernel's scheduler counts them, and the lines of the program that the training runs."""

from __future__ import annotations

import ctypes
import gc
import linecache
import operator
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from itertools import accumulate, chain, compress, repeat, starmap, takewhile, tee
from pathlib import Path
from time import perf_counter_ns
from types import CodeType
from typing import Any, Final, NamedTuple, TypeVar

from lightning_memprof.artifacts.secrets import masking
from lightning_memprof.artifacts.series import MODULE_CALL, LineRow, ProcessRow
from lightning_memprof.capture.sources.assignments import is_library
from lightning_memprof.capture.sources.proc import OpenFile, read_file
from lightning_memprof.capture.sources.user_hooks import hook_name
from lightning_memprof.packages import PACKAGES

# Of a core.
_NOTABLE: Final = 0.05
# The names of this package's threads.
_OURS: Final = "memprof"
# A look takes 10 to 30 µs, for which the training waits at most.
_PAUSE_S: Final = 0.001
# Of the first looks: a window may be a few milliseconds.
_FIRST_PAUSE_S: Final = 0.0003
_FIRST_LOOKS: Final = 50
# Python lets a thread that computes keep its lock for 5 ms, in which there is no look. What waits longer gets the lock
# where an operator of torch releases it, and that line has the time of those before it.
_SWITCH_S: Final = 0.00002
_PATIENCE_S: Final = 5.0
_T = TypeVar("_T")
# Code, instruction, and the names of the module.
Call = tuple["CodeType", int, dict[str, Any]]
# ``f_code`` calls audit hooks, as filelock installs one, and a hook in Python lets other threads run.
_CODE: Final = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(("PyFrame_GetCode", ctypes.pythonapi))
_INSTRUCTION: Final = operator.attrgetter("f_lasti")
_GLOBALS: Final = operator.attrgetter("f_globals")
# Arguments of one call by `starmap`, which needs no memory for it.
_ONCE: Final[tuple[tuple[()]]] = ((),)
# In windows of this package, `_call_impl` is not on the stack.
_MODULE_CALLS: Final = ("_call_impl", "_wrapped_call_impl")
# Calls of the Trainer by the program.
_ENTRIES: Final = ("fit", "validate", "test", "predict")
# They are of the function that runs them.
_WITHOUT_NAME: Final = frozenset({"<lambda>", "<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>"})
# The other lines are of a few looks.
_MOST_LINES: Final = 500
_MOST_SOURCE: Final = 160


def running_threads() -> list[int]:
    """Return the ``ident`` of each thread that runs Python."""
    return _uninterrupted(chain.from_iterable(starmap(sys._current_frames, _ONCE)))  # noqa: SLF001 documented


def calls_of_thread(thread: int) -> list[Call]:
    """Return the code, the instruction and the module's names of each running function of a thread, innermost first.

    A frame keeps the variables of its function. None is held while another thread runs: no tensor outlives its
    function, or is freed in this thread, where a profiler does not see it.
    """
    innermost = map(dict.get, starmap(sys._current_frames, _ONCE), (thread,))  # noqa: SLF001 documented
    outward: Iterator[Any] = accumulate(chain[Any](innermost, repeat("f_back")), getattr)
    frames: list[Any] = []
    # They yield nothing.
    hold: Iterator[Any] = filter(None, map(frames.extend, (takewhile(bool, outward),)))
    release: Iterator[Any] = filter(None, starmap(frames.clear, _ONCE))
    calls = zip(map(_CODE, frames), map(_INSTRUCTION, frames), map(_GLOBALS, frames), strict=True)
    try:
        return _uninterrupted(chain(hold, calls, release))
    finally:
        # There was no memory.
        frames.clear()


def calls_of_error(error: BaseException) -> list[Call]:
    """Return what ``calls_of_thread`` returned where an exception was raised."""
    calls: list[Call] = []
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        calls.append((frame.f_code, traceback.tb_lasti, frame.f_globals))
        traceback = traceback.tb_next
    return calls[::-1]


def line_of(call: Call) -> int:
    """Return the line that a function runs."""
    code, instruction, _ = call
    lines = (line for begin, end, line in code.co_lines() if begin <= instruction < end and line)
    return next(lines, code.co_firstlineno)


def is_program(call: Call) -> bool:
    """Return whether a function is the program's: not this package's, a library's, or made from text."""
    code, _, names = call
    is_ours = str(names.get("__name__", "")).partition(".")[0] == __name__.partition(".")[0]
    return not is_ours and not code.co_filename.startswith("<") and not is_library(code.co_filename)


def _uninterrupted(steps: Iterable[_T]) -> list[_T]:
    """Return what an iterator in C yields; no other thread runs meanwhile.

    One call in C keeps Python's lock unless it collects garbage, as Python before 3.12 does wherever memory is asked
    for: a function in Python that the collection calls lets other threads run. A frame that ends meanwhile would be
    read after its end, and each new thread would wait for ever for the lock that ``sys._current_frames`` holds
    (python/cpython#106883).
    """
    was_enabled, again = tee(starmap(gc.isenabled, _ONCE))
    # They yield nothing.
    disable: Iterator[Any] = filter(None, starmap(gc.disable, compress(_ONCE, was_enabled)))
    enable: Iterator[Any] = filter(None, starmap(gc.enable, compress(_ONCE, again)))
    try:
        return list(chain(disable, steps, enable))
    finally:
        # There was no memory.
        next(enable, None)


class CoreWait(OpenFile):
    """Reads how long the calling thread is ready to run but waits for a core; 1 µs on Linux, from one open file."""

    def __init__(self) -> None:
        super().__init__("/proc/thread-self/schedstat")
        self._before_ns = self._total_ns() or 0

    def read(self) -> int | None:
        """Return the nanoseconds since the previous reading, None where the kernel does not count them."""
        total_ns = self._total_ns()
        if total_ns is None:
            return None
        waited_ns, self._before_ns = total_ns - self._before_ns, total_ns
        return waited_ns

    def _total_ns(self) -> int | None:
        ran, waited, *_ = self.content().split() or (b"0", b"0")
        # A kernel that does not count writes zeros; this thread has run.
        return int(waited) if ran != b"0" else None


class _BusyClock(OpenFile):
    """Reads how long the thread that makes it has run or was ready to run, from another thread; 2 µs on Linux."""

    def __init__(self) -> None:
        super().__init__(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._clock = time.pthread_getcpuclockid(threading.get_ident()) if sys.platform == "linux" else 0

    def read(self) -> int | None:
        """Return the nanoseconds, None where the kernel does not count them."""
        times = self.content().split()
        return time.clock_gettime_ns(self._clock) + int(times[1]) if times else None


class ThreadTimes:
    """Processor time of the program's other threads since the first reading; some 20 µs each."""

    def __init__(self) -> None:
        self._began: tuple[int, int, int] | None = None
        self._first: dict[int, int] = {}

    @property
    def elapsed_ns(self) -> int:
        """The time since the first reading."""
        return perf_counter_ns() - self._began[0] if self._began else 0

    def read(self) -> list[ProcessRow]:
        """Return the threads that take a notable part of a core."""
        now, (ran, waited) = perf_counter_ns(), _scheduled(threading.get_native_id())
        began = self._began = self._began or (now, ran, waited)
        elapsed, asleep = now - began[0], now - began[0] - (ran - began[1]) - (waited - began[2])
        rows = []
        for thread in threading.enumerate():
            number = thread.native_id
            if number is None or thread is threading.current_thread() or thread.name.startswith(_OURS):
                continue
            ran, _ = _scheduled(number)
            # One that starts later has run for 0 ns.
            spent = ran - self._first.setdefault(number, ran if not elapsed else 0)
            if spent > _NOTABLE * elapsed:
                row = ProcessRow(kind="thread", thread=_named(thread), cpu_ns=spent)
                row.elapsed_ns, row.asleep_ns = elapsed, max(asleep, 0)
                rows.append(row)
        return rows


def _named(thread: threading.Thread) -> str:
    """Return the function of a thread, with its place, or the thread's name if a library started it."""
    function = getattr(thread, "_target", None) or type(thread).run
    code = getattr(function, "__code__", None)
    return thread.name if code is None or is_library(code.co_filename) else hook_name(function)


def _scheduled(thread: int) -> tuple[int, int]:
    """Return how long a thread of this process has run and waited for a core, in ns; 0 where that is unknown."""
    ran, waited, *_ = map(int, read_file(f"/proc/self/task/{thread}/schedstat").split() or (b"0", b"0"))
    return ran, waited


class _Kind(Enum):
    """Whose code a frame runs."""

    PROGRAM = 0
    LIBRARY = 1
    MODULE_CALL = 2
    TRAINER = 3
    ENTRY = 4
    OURS = 5


class _Line(NamedTuple):
    """The program's functions, outermost first, with None for a call of a module; and the innermost one's line.

    ``called`` is the function of a library that the line calls, ``inside`` the innermost one.
    """

    functions: tuple[CodeType | None, ...]
    file: str
    line: int
    called: CodeType | None
    inside: CodeType | None


class LineSampler:
    """A thread that looks every millisecond, at first more often, at the line of the program that training is in.

    The time since the previous look belongs to the line: a call that keeps Python's lock delays the look to its end.
    What of it the thread neither ran nor was ready to run, it slept. Nothing is changed in the training thread.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._training = threading.get_ident()
        self._times: Counter[_Line] = Counter()
        self._looks: Counter[_Line] = Counter()
        self._asleep: Counter[_Line] = Counter()
        self._busy: _BusyClock | None = None
        self._kinds: dict[CodeType, _Kind] = {}
        self._stop = threading.Event()
        self._switch_s = sys.getswitchinterval()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"{_OURS}-lines", daemon=True)

    def __enter__(self) -> None:
        sys.setswitchinterval(_SWITCH_S)
        self._busy = _BusyClock()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """End the thread.

        Raises:
            Exception: a look raised it.
        """
        self._stop.set()
        # What the program has set in the window stays.
        if round(sys.getswitchinterval(), 6) == _SWITCH_S:
            sys.setswitchinterval(self._switch_s)
        self._thread.join(_PATIENCE_S)
        if self._busy is not None and not self._thread.is_alive():
            self._busy.close()
        if self._error is not None:
            raise self._error

    def rows(self) -> list[LineRow]:
        """Return a row per line, most time first."""
        mask = masking()
        return [
            LineRow(
                functions=[qualified_name(code) if code is not None else MODULE_CALL for code in at.functions],
                place=f"{Path(at.file).name}:{at.line}",
                source=mask(linecache.getline(at.file, at.line).strip()[:_MOST_SOURCE]) or None,
                called=qualified_name(at.called) if at.called else None,
                inside=qualified_name(at.inside) if at.inside else None,
                looks=self._looks[at],
                ns=ns,
                asleep_ns=max(self._asleep[at], 0) if at in self._asleep else None,
            )
            for at, ns in self._times.most_common(_MOST_LINES)
        ]

    def _run(self) -> None:
        before: tuple[int, int | None] | None = None
        last: _Line | None = None
        with suppress(OSError):
            # Linux ends a thread's waits 50 us late, to save power.
            Path(f"/proc/{threading.get_native_id()}/timerslack_ns").write_text("1", encoding="ascii")
        try:
            while not self._stop.wait(_FIRST_PAUSE_S if self._looks.total() < _FIRST_LOOKS else _PAUSE_S):
                now, busy = perf_counter_ns(), self._busy.read() if self._busy is not None else None
                calls = calls_of_thread(self._training)
                if self.is_open and before is not None and (at := self._line(calls)) is not None:
                    self._times[at] += now - before[0]
                    self._looks[at] += 1
                    if busy is not None and before[1] is not None:
                        asleep = now - before[0] - (busy - before[1])
                        # The kernel counts a wait for a core when it ends: it was in the line of the look before.
                        self._asleep[at if asleep >= 0 or last is None else last] += asleep
                    last = at
                before = (now, busy) if self.is_open else None
        except Exception as error:  # noqa: BLE001 `__exit__` raises it
            self._error = error

    def _line(self, calls: Sequence[Call]) -> _Line | None:
        """Return the line of the program that calls are in; None for the Trainer's work, and for this package's."""
        functions: list[CodeType | None] = []
        file, line, called, inside = "", 0, None, None
        for call in calls:
            code, _, names = call
            kind = self._kinds.get(code) or self._kind(code, names)
            if kind is _Kind.PROGRAM:
                file, line = (file, line) if line else (code.co_filename, line_of(call))
                functions += [] if code.co_name in _WITHOUT_NAME else [code]
            elif kind is _Kind.MODULE_CALL and (not functions or functions[-1] is not None):
                functions.append(None)
            elif (
                kind is _Kind.ENTRY or (kind is _Kind.TRAINER and line) or (kind is _Kind.OURS and not (line or inside))
            ):
                break
            if kind in (_Kind.LIBRARY, _Kind.TRAINER) and not line:
                called, inside = code, inside or code
        return _Line(tuple(reversed(functions)), file, line, called, inside) if any(functions) else None

    def _kind(self, code: CodeType, names: dict[str, Any]) -> _Kind:
        package = str(names.get("__name__", "")).partition(".")[0]
        if package == "torch" and code.co_name in _MODULE_CALLS:
            kind = _Kind.MODULE_CALL
        elif package in PACKAGES:
            kind = _Kind.ENTRY if code.co_name in _ENTRIES else _Kind.TRAINER
        elif package == __name__.partition(".")[0]:
            kind = _Kind.OURS
        else:
            kind = _Kind.PROGRAM if is_program((code, 0, names)) else _Kind.LIBRARY
        self._kinds[code] = kind
        return kind


def qualified_name(code: CodeType) -> str:
    """Return the name of a function, with its class where Python knows it."""
    return code.co_qualname.rpartition("<locals>.")[2] if sys.version_info >= (3, 11) else code.co_name
