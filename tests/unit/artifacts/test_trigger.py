"""What lies in the run directory in place of a request may be anything."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lightning_memprof.artifacts.naming import TRIGGER_REQUEST
from lightning_memprof.artifacts.trigger import Request, read_request, write_request
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
