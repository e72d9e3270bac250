from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from lightning_memprof.artifacts.placing import own_temporary, place_of


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
