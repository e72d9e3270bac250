"""The short form of the matrix of faults, and what its judge says of a cell that is not right."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.collectors import HostMemory, OperatorTrace, Pulse
from training import Perceptron, loader, trainer

TORTURE = Path(__file__).parents[1] / "torture"
pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> list[dict[str, Any]]:
    told = tmp_path_factory.mktemp("torture") / "results.jsonl"
    done = subprocess.run(
        [sys.executable, str(TORTURE / "matrix.py"), "--quick", "--results", str(told)],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in told.read_text().splitlines()]


def test_a_dozen_faults_change_no_training_and_lose_no_window(results: list[dict[str, Any]]) -> None:
    assert len(results) == 12
    assert {result["moment"] for result in results} == {"before", "warmup", "active", "save", "teardown"}
    assert {result["world"] for result in results} == {1, 2}
    assert [result for result in results if result["red"]] == []
    assert sum(result["lost"] for result in results) == 0
    # Every cell but the one before the first window has at least that one to lose.
    assert sum(result["windows"] for result in results) > 15


def test_what_a_killed_process_leaves_half_done_is_named(results: list[dict[str, Any]]) -> None:
    (killed,) = [result for result in results if result["fault"] == "SIGKILL of all ranks"]
    assert "rank 0: window 1 is not closed" in killed["named"]


def test_a_collector_that_hangs_is_named(results: list[dict[str, Any]]) -> None:
    (hung,) = [result for result in results if result["fault"] == "a collector hangs (waits)"]
    assert any("CollectorHungError" in text for text in hung["named"])


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy fit, in the form in which a cell leaves its own."""
    directory = tmp_path_factory.mktemp("healthy") / "ours"
    collectors = [Pulse(), HostMemory(), OperatorTrace()]
    callback = MemProfilerCallback(
        Schedule(wait=2, warmup=1, active=2, repeat=0), collectors, output=OutputOptions(summary=False, report=False)
    )
    trainer(directory, callback).fit(Perceptron(), loader(15))
    (directory / "trail.rank0").write_text('[0, "a"]\n[1, "b"]\n')
    (directory / "struck.rank0").touch()
    return directory


def right() -> dict[str, Any]:
    return {"error": "StrikeError: mine", "code": 1, "weights": "w", "leaks": ["a variable: 17"], "after": "next"}


def torn(directory: Path) -> None:
    (directory / "log/memprofiler/window000/rank00000.host.jsonl").unlink()


def other_bytes(directory: Path) -> None:
    path = directory / "log/memprofiler/window000/rank00000.host.jsonl"
    path.write_bytes(path.read_bytes().replace(b"rss_bytes", b"rss_bytez"))


def without_rows(directory: Path, word: str) -> None:
    path = directory / "log/memprofiler/manifest.rank00000.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if word not in line))


def unlisted(directory: Path) -> None:
    without_rows(directory, '"trace"')


def no_end(directory: Path) -> None:
    without_rows(directory, '"kind":"end"')


def unclosed(directory: Path) -> None:
    without_rows(directory, '"close"')


def unfinished(directory: Path) -> None:
    (directory / "log/elsewhere").mkdir()
    (directory / "log/elsewhere/file.tmp").touch()


def other_weights(directory: Path) -> None:
    (directory / "trail.rank0").write_text('[0, "a"]\n[1, "c"]\n')


def gone(directory: Path) -> None:
    shutil.rmtree(directory / "log/memprofiler")


def test_the_judge_finds_nothing_where_nothing_is(lived: Path, torture: Any) -> None:
    healthy = torture.judge.Healthy.of(torture.judge.Lived(lived, [0], [right()], []))
    verdict = judged(torture, lived, lived, healthy)
    assert (verdict.red, verdict.named, verdict.lost, verdict.windows) == ([], [], 0, 3)
    assert verdict.files > 5


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (torn, "no|missing"),
        (other_bytes, "has other bytes than were listed"),
        (unlisted, "no trace of operator_trace"),
        (no_end, "ended by itself and is called running or killed"),
        (unclosed, "0 windows are closed, 1 were"),
        (unfinished, "file.tmp is unfinished, and `show` does not say so"),
        (other_weights, "the weights after the steps differ"),
        (gone, "no run can be read"),
    ],
)
def test_the_judge_sees_what_is_lost_or_torn(
    lived: Path, tmp_path: Path, torture: Any, harm: Callable[[Path], None], told: str
) -> None:
    bare, ours = tmp_path / "bare", tmp_path / "ours"
    bare.symlink_to(lived)
    shutil.copytree(lived, ours)
    healthy = torture.judge.Healthy.of(torture.judge.Lived(bare, [0], [right()], []))
    harm(ours)
    verdict = judged(torture, bare, ours, healthy)
    assert re.search(told, "\n".join(verdict.red))
    assert verdict.lost == (harm in {torn, other_bytes, unlisted})


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"error": None}, "error is None, bare 'StrikeError: mine'"),
        ({"weights": "v"}, "weights is 'v'"),
        ({"after": "the next fit ended with ValueError"}, "after is 'the next fit"),
        ({"leaks": ["a variable: 18", "thread still running"]}, "left behind: thread still running"),
    ],
)
def test_the_judge_sees_another_outcome(
    lived: Path, tmp_path: Path, torture: Any, changed: dict[str, Any], told: str
) -> None:
    shutil.copytree(lived, tmp_path / "ours")
    healthy = torture.judge.Healthy.of(torture.judge.Lived(lived, [0], [right()], []))
    (red,) = judged(torture, lived, tmp_path / "ours", healthy, **changed).red
    assert told in red


def test_the_judge_sees_an_exit_code_a_process_that_runs_on_and_a_fault_that_did_not_strike(
    lived: Path, tmp_path: Path, torture: Any
) -> None:
    judge, calm = torture.judge, right() | {"error": None}
    shutil.copytree(lived, tmp_path / "ours")
    (tmp_path / "ours/struck.rank0").unlink()
    healthy = judge.Healthy.of(judge.Lived(lived, [0], [calm], []))
    bare = judge.Lived(lived, [1], [calm], [])
    hung = judge.Lived(tmp_path / "ours", [None], [calm], ["sleep 60"])
    red = judge.judge(torture.fault, torture.moments.moment("active"), bare, hung, healthy).red
    assert "rank 0: exit code None, bare 1" in red
    assert "still running: sleep 60" in red
    assert "the fault did not strike in ours" in red
    assert "rank 0 was killed and is called finished" in red


def judged(torture: Any, bare: Path, ours: Path, healthy: Any, **changed: Any) -> Any:
    judge = torture.judge
    return judge.judge(
        torture.fault,
        torture.moments.moment("active"),
        judge.Lived(bare, [1], [right()], []),
        judge.Lived(ours, [1], [right() | changed], []),
        healthy,
    )


@pytest.fixture
def torture(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the matrix, by the names by which its programs know them; forgotten afterwards."""
    monkeypatch.syspath_prepend(str(TORTURE))
    names = ("moments", "fault", "judge", "data")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    moments, fault, judge, _ = (importlib.import_module(name) for name in names)
    row = fault.Fault(name="mine", says="", place="training_step", strike=lambda cell: None)
    yield SimpleNamespace(moments=moments, judge=judge, fault=row)
    for name in names:
        sys.modules.pop(name, None)
