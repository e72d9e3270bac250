from __future__ import annotations

import faulthandler
import os
import signal
import sys
from contextlib import closing
from pathlib import Path

import pytest

from lightning_memprof.capture.sources.proc import OpenFile, handles_signal, read_file


def test_a_file_that_is_missing_is_empty(tmp_path: Path) -> None:
    assert read_file(tmp_path / "missing") == b""
    with closing(OpenFile(str(tmp_path / "missing"))) as file:
        assert file.content() == b""


def test_an_open_file_has_the_content_of_this_moment(tmp_path: Path) -> None:
    path = tmp_path / "counter"
    path.write_text("1 2 3")
    with closing(OpenFile(str(path))) as file:
        path.write_text("4 5 6")
        assert file.content() == b"4 5 6"
    assert file.content() == b""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_signal_that_c_code_handles_is_told(tmp_path: Path) -> None:
    number = signal.SIGRTMAX - 3
    assert not handles_signal(number)
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.register(number, file)
        try:
            assert handles_signal(number)
            assert handles_signal(number, os.getpid())
        finally:
            faulthandler.unregister(number)
    assert not handles_signal(number, 1 << 30)
