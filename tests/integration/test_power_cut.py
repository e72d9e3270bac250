"""A crash between two file operations, or within one. All of them: ``python tests/torture/power_cut.py``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

# A script: its directory is on the path while it runs.
sys.path.append(str(Path(__file__).parents[1] / "torture"))

from power_cut import record

from crash_judge import judge
from file_operations import Photograph, State, crashes, lost_data

pytestmark = pytest.mark.extended
# Prime, so that it meets operations of every kind.
EVERY = 17


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> list[Photograph]:
    return record(tmp_path_factory.mktemp("recorded"), 2)


@pytest.fixture
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # What is unfinished below tmp_path is taken for what a test has left behind.
    return tmp_path_factory.mktemp("crash") / "room"


def test_the_operations_of_a_fit_are_recorded(photographs: list[Photograph]) -> None:
    kinds = {photograph.operation.kind for photograph in photographs if photograph.operation is not None}
    assert kinds >= {"create", "write", "rename", "remove", "mkdir", "rmdir"}
    said = {str(photograph.operation).rpartition("/")[2] for photograph in photographs}
    assert {"manifest.rank00000.jsonl", "rank00000.hooks.jsonl"} <= said


@pytest.mark.slow
def test_after_a_crash_at_any_operation_closed_windows_are_whole_and_what_is_torn_is_named(
    photographs: list[Photograph], room: Path
) -> None:
    closed = torn = 0
    for state in list(crashes(photographs))[::EVERY]:
        verdict = judge(state, room)
        assert verdict.faults == [], state.said
        closed += verdict.closed
        torn += verdict.torn
    assert closed > 3
    assert torn > 3


def test_a_file_whose_content_was_lost_behind_its_name_is_named(photographs: list[Photograph], room: Path) -> None:
    for lost, state in list(lost_data(photographs))[::EVERY]:
        assert judge(state, room, lost=lost).faults == [], state.said


def spoiled(state: State, ending: str, content: bytes | None) -> State:
    (name,) = [name for name in state.files if name.endswith(ending)]
    files = {key: value for key, value in state.files.items() if key != name}
    return replace(state, files=files if content is None else files | {name: content})


@pytest.mark.parametrize("ending", [".trace.json.gz", "rank00000.host.jsonl"])
@pytest.mark.parametrize("content", [None, b"torn"])
def test_a_window_that_is_not_whole_is_found(
    photographs: list[Photograph], room: Path, ending: str, content: bytes | None
) -> None:
    *_, last = crashes(photographs)
    assert judge(last, room).faults == []
    assert len(judge(spoiled(last, ending, content), room).faults) == 1
