from __future__ import annotations

import copy
import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from lightning_memprof.artifacts.series import MODULE_CALL, LineRow, ProcessRow
from lightning_memprof.capture.sources.module_calls import module_calls
from lightning_memprof.capture.threads import CoreWait, LineSampler, ThreadTimes, calls_of_thread, running_threads


@pytest.mark.skipif(CoreWait().read() is None, reason="the kernel does not count the times of threads")
def test_a_thread_that_computes_is_read_with_its_function_and_the_sleep_of_the_reader() -> None:
    times = ThreadTimes()
    assert times.read() == []
    ended = threading.Event()

    def spin() -> None:
        while not ended.is_set():
            sum(range(1000))

    spinning = threading.Thread(target=spin, name="spinning")
    waiting = threading.Thread(target=ended.wait, name="waiting")
    ours = threading.Thread(target=spin, name="memprof-spin")
    for thread in (spinning, waiting, ours):
        thread.start()
    rows: list[ProcessRow] = []
    until = time.monotonic() + 60
    while not rows and time.monotonic() < until:
        time.sleep(0.3)
        rows = times.read()
    ended.set()
    for thread in (spinning, waiting, ours):
        thread.join()
    assert [row.kind for row in rows] == ["thread"]
    assert (rows[0].thread or "").startswith("spin (test_threads.py:")
    assert 0 < (rows[0].cpu_ns or 0) <= (rows[0].elapsed_ns or 0)
    assert (rows[0].asleep_ns or 0) >= 0.5 * (rows[0].elapsed_ns or 0)
    assert times.read() == []


@pytest.mark.skipif(CoreWait().read() is None, reason="the kernel does not count the times of threads")
def test_what_a_thread_did_before_the_first_reading_does_not_count() -> None:
    ended, begun = threading.Event(), threading.Event()

    def compute_once() -> None:
        sum(range(5_000_000))
        begun.set()
        ended.wait()

    thread = threading.Thread(target=compute_once)
    thread.start()
    begun.wait()
    times = ThreadTimes()
    assert times.read() == []
    time.sleep(0.1)
    assert times.read() == []
    ended.set()
    thread.join()


@pytest.mark.skipif(CoreWait().read() is None, reason="the kernel does not count the times of threads")
def test_a_thread_that_a_library_started_has_its_own_name() -> None:
    times = ThreadTimes()
    assert times.read() == []
    with ThreadPoolExecutor(1, "decoding") as pool:
        done = pool.submit(lambda: sum(range(10_000_000)))
        time.sleep(0.2)
        rows = times.read()
        done.result()
    assert [row.thread for row in rows] == ["decoding_0"]


class Sorter(torch.nn.Module):
    """Sorts in Python until it is told to stop."""

    def forward(self, seconds: float) -> None:
        spin(seconds)


def spin(seconds: float) -> None:
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        sorted(range(1000), key=lambda number: -number)


def looked_at(work: Callable[[], object], *, is_open: bool = True) -> list[LineRow]:
    sampler = LineSampler()
    with sampler:
        sampler.is_open = is_open
        work()
    return sampler.rows()


def test_the_lines_of_the_program_have_the_time_of_the_thread_that_runs_them() -> None:
    def work() -> None:
        spin(0.1)
        Sorter()(0.2)

    began = time.perf_counter_ns()
    rows = looked_at(work)
    elapsed = time.perf_counter_ns() - began
    in_spin = [row for row in rows if row.functions[-1] == "spin"]
    assert 0 < sum(row.ns or 0 for row in in_spin) < elapsed
    # By looks: one during a stall has all its time.
    spinning = sum(row.looks or 0 for row in in_spin)
    assert spinning > 0.3 * sum(row.looks or 0 for row in rows)
    inside = [row for row in in_spin if MODULE_CALL in row.functions]
    assert 0.3 * spinning < sum(row.looks or 0 for row in inside) < spinning
    called = {tuple(row.functions[row.functions.index(MODULE_CALL) :]) for row in inside}
    assert called == {(MODULE_CALL, "Sorter.forward", "spin")}
    assert "sorted(range(1000), key=lambda number: -number)" in {row.source for row in inside}
    assert all((row.place or "").startswith("test_threads.py:") for row in inside)


@pytest.mark.skipif(CoreWait().read() is None, reason="the kernel does not count the times of threads")
def test_a_line_that_sleeps_has_its_sleep_and_one_that_computes_has_none() -> None:
    def compute() -> None:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            sum(range(1000))

    def work() -> None:
        for _ in range(20):
            time.sleep(0.02)
            compute()

    rows = looked_at(work)
    asleep = {row.source: (row.asleep_ns or 0) / (row.ns or 1) for row in rows if (row.looks or 0) > 5}
    assert asleep["time.sleep(0.02)"] > 0.5
    assert asleep["sum(range(1000))"] < 0.25


@pytest.mark.skipif(not Path("/proc/self/timerslack_ns").exists(), reason="waits end late on this system")
def test_a_module_is_seen_in_a_window_that_listens_to_its_forwards() -> None:
    model = Sorter()
    with module_calls(model, lambda *_: None, lambda *_: None):
        rows = looked_at(partial(model, 0.1))
    assert (MODULE_CALL, "Sorter.forward", "spin") in {tuple(row.functions[-3:]) for row in rows}


def test_a_function_of_short_calls_has_its_time_and_not_the_operator_that_releases_the_lock_next() -> None:
    catalog, bought = set(range(12_000)), set(range(40))

    def draw() -> list[int]:
        return list(catalog - bought)[:4]

    def work() -> None:
        ends = time.perf_counter() + 60
        while sampler._looks.total() < 200 and time.perf_counter() < ends:
            torch.tensor(draw())

    sampler = LineSampler()
    with sampler:
        sampler.is_open = True
        work()
    looks = Counter[str]()
    for row in sampler.rows():
        looks[row.functions[-1]] += row.looks or 0
    # It takes fifty times as long; a tenth of the looks would be in it.
    assert 2 * looks["draw"] > looks["work"], looks


def test_the_switch_interval_is_as_before_or_what_the_program_has_set_meanwhile() -> None:
    before = sys.getswitchinterval()
    during: list[float] = []
    looked_at(lambda: during.append(sys.getswitchinterval()))
    assert during[0] < before == sys.getswitchinterval()
    try:
        looked_at(lambda: sys.setswitchinterval(0.01))
        assert sys.getswitchinterval() == pytest.approx(0.01)
    finally:
        sys.setswitchinterval(before)


def test_between_steps_nothing_is_looked_at() -> None:
    assert looked_at(lambda: spin(0.05), is_open=False) == []


@pytest.mark.slow
def test_a_call_that_keeps_the_lock_has_its_whole_time() -> None:
    numbers = [*range(3_000_000)]
    rows = looked_at(lambda: kept(numbers))
    sorting = (row.ns or 0 for row in rows if (row.source or "").startswith("numbers.sort"))
    assert sum(sorting) > 0.5 * sum(row.ns or 0 for row in rows)


def kept(numbers: list[int]) -> None:
    numbers.reverse()
    for _ in range(20):
        numbers.reverse()
    # Several: where other programs have the cores, a look may come a whole call late.
    for factor in (7919, 104_729, 1_299_709):
        numbers.sort(key=lambda number: number * factor % 1_000_003)


def test_the_function_of_a_library_that_a_line_calls_is_named() -> None:
    rows = looked_at(lambda: [copied() for _ in range(3)])
    (row,) = {(row.functions[-1], row.called) for row in rows if row.called == "deepcopy"}
    assert row == ("copied", "deepcopy")


def copied() -> object:
    return copy.deepcopy([[number] for number in range(30_000)])


def test_a_collection_that_starts_a_thread_does_not_deadlock_with_a_look_at_all_frames(
    run_python: Callable[..., CompletedProcess[str]],
) -> None:
    done = run_python(
        "-c",
        """if True:
        import _thread, faulthandler, gc
        from lightning_memprof.capture.threads import running_threads

        faulthandler.dump_traceback_later(60, exit=True)
        collections = []

        def start_a_thread(phase, found):
            collections.append(phase)
            _thread.start_new_thread(int, ())

        gc.callbacks.append(start_a_thread)
        # Some of these collections would be inside the look.
        for threshold in range(1, 40):
            gc.set_threshold(threshold)
            running_threads()
        assert collections
        assert gc.isenabled()
        """,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_function_that_ends_while_a_collection_lets_its_thread_run_is_not_read_after_its_end(
    run_python: Callable[..., CompletedProcess[str]],
) -> None:
    done = run_python(
        "-c",
        """if True:
        import gc, sys, threading, time
        from lightning_memprof.capture.threads import calls_of_thread

        training, ended, looks = threading.get_ident(), threading.Event(), []

        def let_the_training_run(phase, found):
            if threading.get_ident() != training:
                time.sleep(1e-4)

        def look():
            try:
                for _ in range(5_000):
                    looks.append([code.co_name for code, _, _ in calls_of_thread(training)])
            finally:
                ended.set()

        def deep(n):
            return deep(n - 1) if n else 0

        def wide(n, a=1, b=2, c=3, d=4):
            e, f, g, h, i, j, k, l = range(8)
            return wide(n - 1) if n else len(str(n)) + sum(x for x in range(30))

        gc.callbacks.append(let_the_training_run)
        gc.set_threshold(50)
        sys.setswitchinterval(1e-6)
        threading.Thread(target=look).start()
        n = 0
        while not ended.is_set():
            n += 1
            deep(n % 17), wide(n % 13)
        assert len(looks) == 5_000
        """,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_look_that_runs_out_of_memory_leaves_the_garbage_collector_enabled(
    run_python: Callable[..., CompletedProcess[str]],
) -> None:
    pytest.importorskip("_testcapi", reason="this Python is built without its tests")
    done = run_python(
        "-c",
        """if True:
        import _testcapi, gc, threading
        from lightning_memprof.capture.threads import calls_of_thread

        training, failed, disabled = threading.get_ident(), [], []

        def look():
            for allocations in range(150):
                try:
                    _testcapi.set_nomemory(allocations, allocations + 3)
                    calls_of_thread(training)
                except MemoryError:
                    failed.append(allocations)
                finally:
                    _testcapi.remove_mem_hooks()
                if not gc.isenabled():
                    disabled.append(allocations)
                gc.enable()

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert failed
        assert not disabled, disabled
        """,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_program_that_has_disabled_the_garbage_collector_finds_it_disabled() -> None:
    gc.disable()
    try:
        assert threading.get_ident() in running_threads()
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("hook", ["", "sys.addaudithook(lambda *_: None)"])
def test_what_a_function_holds_is_freed_in_its_own_thread_while_another_looks_at_its_calls(
    hook: str, run_python: Callable[..., CompletedProcess[str]]
) -> None:
    done = run_python(
        "-c",
        f"""if True:
        import sys, threading
        from lightning_memprof.capture.threads import calls_of_thread

        freed, training, ended = set(), threading.get_ident(), threading.Event()

        class Held:
            def __del__(self):
                freed.add(threading.get_ident())

        def hold():
            held = Held()
            return len(freed) + (held is None)

        def look():
            while not ended.is_set():
                assert calls_of_thread(training)

        {hook}
        sys.setswitchinterval(1e-6)
        looking = threading.Thread(target=look)
        looking.start()
        for _ in range(100_000):
            hold()
        ended.set()
        looking.join()
        assert freed == {{training}}
        """,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert not done.stderr


def test_a_thread_that_has_ended_has_no_calls_and_the_collector_stays_enabled() -> None:
    assert calls_of_thread(1) == []
    assert gc.isenabled()
