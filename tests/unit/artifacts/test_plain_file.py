from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_memprof.artifacts.plain_file import open_plain, read_plain

pytestmark = pytest.mark.timeout(20)


def test_a_plain_file_and_a_link_to_one_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").symlink_to("a")
    with open_plain(tmp_path / "b") as stream:
        assert stream.read() == b"abc"
    assert read_plain(tmp_path / "a", 3) == b"abc"


def test_a_pipe_a_device_and_a_directory_are_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="it is a pipe or a device, not a file"):
            open_plain(path)
    with pytest.raises(IsADirectoryError):
        open_plain(tmp_path)


def test_what_is_longer_than_it_may_be_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="it is larger than 512 MiB"):
        read_plain(tmp_path / "a")


def test_a_file_that_a_pipe_takes_the_place_of_between_two_looks_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "a")
    (tmp_path / "plain").touch()
    status = (tmp_path / "plain").stat()
    monkeypatch.setattr(os, "stat", lambda path: status)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="it is a pipe or a device"):
        open_plain(tmp_path / "a")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
