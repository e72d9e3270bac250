from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_memprof.capture.triggers.watch import Usr2


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR2)
    yield
    signal.signal(signal.SIGUSR2, before)


def send() -> None:
    os.kill(os.getpid(), signal.SIGUSR2)


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_the_signal_is_noted_and_what_was_there_comes_back(before: Any) -> None:
    signal.signal(signal.SIGUSR2, before)
    usr2 = Usr2()
    assert usr2.install() is None
    send()
    assert usr2.received
    usr2.remove()
    assert signal.getsignal(signal.SIGUSR2) == before


def test_a_handler_that_was_there_is_called_too() -> None:
    heard: list[Any] = []

    def own(number: int, frame: Any) -> None:
        heard.append((number, frame is not None))

    signal.signal(signal.SIGUSR2, own)
    usr2 = Usr2()
    usr2.install()
    send()
    usr2.remove()
    assert usr2.received
    assert heard == [(signal.SIGUSR2, True)]
    assert signal.getsignal(signal.SIGUSR2) is own


def test_a_handler_that_came_later_stays_and_still_reaches_the_first() -> None:
    heard: list[str] = []
    signal.signal(signal.SIGUSR2, lambda *_: heard.append("first"))
    usr2 = Usr2()
    usr2.install()
    ours: Any = signal.getsignal(signal.SIGUSR2)

    def later(number: int, frame: Any) -> None:
        heard.append("later")
        ours(number, frame)

    signal.signal(signal.SIGUSR2, later)
    usr2.remove()
    assert signal.getsignal(signal.SIGUSR2) is later
    send()
    assert heard == ["later", "first"]


def test_one_run_inside_another_both_hear_it() -> None:
    outer, inner = Usr2(), Usr2()
    outer.install()
    inner.install()
    send()
    inner.remove()
    assert (outer.received, inner.received) == (True, True)
    outer.remove()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of handlers that are not Python's")
def test_a_handler_of_c_is_left_alone() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    with Path(os.devnull).open("w") as nowhere:
        faulthandler.register(signal.SIGUSR2, file=nowhere)
        try:
            assert Usr2().install() == "a handler outside Python is installed"
        finally:
            faulthandler.unregister(signal.SIGUSR2)


def test_outside_of_the_main_thread_nothing_is_installed() -> None:
    said: list[str | None] = []
    before = signal.getsignal(signal.SIGUSR2)
    thread = threading.Thread(target=lambda: said.append(Usr2().install()))
    thread.start()
    thread.join()
    assert said == ["the training does not run in the main thread"]
    assert signal.getsignal(signal.SIGUSR2) is before
