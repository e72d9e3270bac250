"""What lies in the run directory in place of a request may be anything."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_memprof.artifacts.naming import TRIGGER_PLAN, TRIGGER_REQUEST
from lightning_memprof.artifacts.trigger import Plan, Request, read_plan, read_request, write_plan, write_request
from lightning_memprof.errors import ArtifactError


def test_a_request_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_request(tmp_path) is None
    write_request(tmp_path, Request("a", "somebody", 3, 0))
    assert read_request(tmp_path) == Request("a", "somebody", 3, 0)


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_request_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / TRIGGER_REQUEST)
    with pytest.raises(ArtifactError, match="remove the file and ask again"):
        read_request(tmp_path)


def test_a_file_without_an_end_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / TRIGGER_REQUEST).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ArtifactError, match="remove the file and ask again"):
        read_request(tmp_path)


def test_a_cause_can_always_be_shown(tmp_path: Path) -> None:
    (tmp_path / TRIGGER_REQUEST).write_text(json.dumps({"id": "a", "cause": "\ud800"}))
    request = read_request(tmp_path)
    assert request is not None
    assert request.cause == "?"


@pytest.mark.parametrize(
    "damage",
    [
        {"active": 0}, {"active": True}, {"active": 1.5}, {"active": 10_001}, {"active": "3"}, {"warmup": -1},
        {"warmup": 10_001}, {"id": 1}, {"cause": None},
    ],
)  # fmt: skip
def test_a_value_that_the_command_does_not_write_is_refused(tmp_path: Path, damage: dict[str, object]) -> None:
    request = {"id": "a", "cause": "somebody", "active": 3, "warmup": 0}
    plan = {**request, "step": 4, "seen_at": 2}
    (tmp_path / TRIGGER_REQUEST).write_text(json.dumps(request))
    (tmp_path / TRIGGER_PLAN).write_text(json.dumps(plan))
    assert read_request(tmp_path) == Request("a", "somebody", 3, 0)
    assert read_plan(tmp_path) == Plan("a", "somebody", 4, 0, 3, 2)
    (tmp_path / TRIGGER_REQUEST).write_text(json.dumps(request | damage))
    (tmp_path / TRIGGER_PLAN).write_text(json.dumps(plan | damage))
    for read in (read_request, read_plan):
        with pytest.raises(ArtifactError, match="remove the file and ask again"):
            read(tmp_path)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@needs_root
@pytest.mark.parametrize("read", [read_request, read_plan])
def test_a_file_of_another_user_is_refused_with_who_may_ask(tmp_path: Path, read: Callable[[Path], object]) -> None:
    write_request(tmp_path, Request("a", "somebody"))
    write_plan(tmp_path, Plan("a", "somebody", 1, 0, 1, 0))
    for path in tmp_path.iterdir():
        os.chown(path, 12345, -1)
    with pytest.raises(
        ArtifactError, match=r"belongs to user 12345; only user 0, who trains, and root may ask: remove"
    ):
        read(tmp_path)


@needs_root
def test_root_may_ask_somebody_else_s_training_and_read_the_answer(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    write_request(tmp_path, Request("a", "root"))
    assert read_request(tmp_path) == Request("a", "root")
    write_plan(tmp_path, Plan("a", "root", 1, 0, 1, 0))
    os.chown(tmp_path / TRIGGER_PLAN, 12345, -1)
    assert read_plan(tmp_path) == Plan("a", "root", 1, 0, 1, 0)


def test_where_every_user_may_replace_files_none_is_a_request(tmp_path: Path) -> None:
    write_request(tmp_path, Request("a", "somebody"))
    tmp_path.chmod(0o777)
    with pytest.raises(ArtifactError, match=r"every user may write into it \(mode 0777\).* chmod o-w "):
        read_request(tmp_path)
    # In such a directory only its owner can rename a file.
    tmp_path.chmod(0o1777)
    assert read_request(tmp_path) == Request("a", "somebody")


def test_a_link_in_place_of_a_request_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_request(tmp_path, Request("a", "somebody"))
    (tmp_path / "run" / TRIGGER_REQUEST).symlink_to(tmp_path / TRIGGER_REQUEST)
    with pytest.raises(ArtifactError, match="remove the file and ask again"):
        read_request(tmp_path / "run")


def test_asking_writes_through_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    for name in (TRIGGER_REQUEST, f"{TRIGGER_REQUEST}.{os.getpid()}.partial"):
        (run / name).symlink_to(victim)
    write_request(run, Request("a", "somebody"))
    assert victim.read_text() == "mine"
    assert read_request(run) == Request("a", "somebody")
    (run / f"{TRIGGER_REQUEST}.{os.getpid()}.partial").unlink()
