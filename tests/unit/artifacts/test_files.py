from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from lightning_memprof.artifacts.files import open_plain, own_temporary, place_of, read_plain

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
    with pytest.raises(OSError, match="it is a pipe or a device"):
        open_plain(tmp_path / "a")
    assert not [path for path in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(path)]


def test_a_file_that_is_new_or_plain_is_its_own_place(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert place_of(out) == out
    out.write_text("old")
    assert place_of(out) == out


def test_of_a_link_the_place_is_what_it_points_to(tmp_path: Path) -> None:
    target = tmp_path / "target.json"
    target.write_text("old")
    link = tmp_path / "link.json"
    link.symlink_to(target)
    assert place_of(link) == target


def test_a_pipe_a_device_a_directory_and_no_name_are_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for out in (pipe, Path("/dev/null"), tmp_path, Path(), loop):
        with pytest.raises(OSError, match=r"."):
            place_of(out)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_temporary_name_has_nothing_under_it_and_a_link_s_target_stays(tmp_path: Path) -> None:
    place, victim = tmp_path / "out.json", tmp_path / "victim"
    assert not own_temporary(place).exists()
    victim.write_text("mine")
    own_temporary(place).symlink_to(victim)
    own_temporary(place).write_text("ours")
    assert victim.read_text() == "mine"
    own_temporary(place)
