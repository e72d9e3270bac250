from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_memprof.capture.threads import CoreWait, ThreadTimes


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
