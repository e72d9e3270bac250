from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_memprof.artifacts.manifest import ManifestWriter
from lightning_memprof.artifacts.trigger import Plan, Request, read_plan, read_request, write_plan, write_request
from lightning_memprof.cli.main import main
from lightning_memprof.errors import ArtifactError, ConfigError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that goes on: its manifest says that it began."""
    return began(tmp_path)


def began(root: Path, **facts: Any) -> Path:
    directory = root / "memprofiler"
    directory.mkdir()
    manifest = ManifestWriter(directory / "manifest.rank00000.jsonl")
    manifest.append("run", **{"schema_version": 1, "world_size": 4, "stage": "fit", **facts})
    manifest.close()
    return directory


def answer(directory: Path, step: int) -> threading.Thread:
    """Be rank 0 once."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        while (request := read_request(directory)) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert request is not None
        plan = Plan(request.id, request.cause, step + 20, request.warmup or 0, request.active or 3, step)
        write_plan(directory, plan)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_it_says_what_the_ranks_will_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "a b"
    root.mkdir()
    run = began(root)
    rank = answer(run, 100)
    assert main(["trigger", str(root), "--active", "3", "--warmup", "1"]) == 0
    rank.join()
    first, second = capsys.readouterr().out.splitlines()
    assert first == "rank 0 is at step 100: all 4 ranks will record steps 121-123, warming up from step 120"
    assert second == f"next: lightning-memprof show '{run}'"


def test_one_rank_and_one_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rank = answer(began(tmp_path, world_size=1), 5)
    assert main(["trigger", str(tmp_path), "--active", "1"]) == 0
    rank.join()
    assert capsys.readouterr().out.startswith("rank 0 is at step 5: rank 0 will record step 25\n")


@pytest.mark.parametrize("options", [[], ["--leaks"]])
def test_a_request_for_holders_reaches_the_run(tmp_path: Path, options: list[str]) -> None:
    directory = began(tmp_path)
    rank = answer(directory, 5)
    assert main(["trigger", str(tmp_path), *options]) == 0
    rank.join()
    request = read_request(directory)
    assert request is not None
    assert request.leaks == bool(options)


def test_the_answer_to_another_is_not_taken_for_ones_own(run: Path) -> None:
    write_plan(run, Plan("other", "somebody", 20, 1, 3, 0))
    with pytest.raises(ArtifactError, match=r"rank 0 has not begun a step for 0\.3 s; the request stays pending"):
        main(["--debug", "trigger", str(run), "--timeout", "0.3"])
    assert (run / "trigger.request.json").exists()


def test_a_run_that_has_ended_is_not_asked(run: Path) -> None:
    with (run / "manifest.rank00000.jsonl").open("a") as manifest:
        manifest.write(json.dumps({"kind": "end", "status": "finished"}) + "\n")
    with pytest.raises(ArtifactError, match="this run has ended; only a running job can record"):
        main(["--debug", "trigger", str(run)])
    assert not (run / "trigger.request.json").exists()


def test_a_run_that_ends_while_one_waits_takes_the_request_with_it(run: Path) -> None:
    def end() -> None:
        time.sleep(0.3)
        with (run / "manifest.rank00000.jsonl").open("a") as manifest:
            manifest.write(json.dumps({"kind": "end"}) + "\n")

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(ArtifactError, match="has ended"):
        main(["--debug", "trigger", str(run), "--timeout", "20"])
    thread.join()
    assert not (run / "trigger.request.json").exists()


def test_a_run_that_does_not_look_for_files_says_what_to_do_instead(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"Triggers\(file=False\)"):
        main(["--debug", "trigger", str(began(tmp_path, triggers=False))])


@pytest.mark.parametrize("option", ["--active=0", "--warmup=-1", "--active=10001"])
def test_numbers_out_of_range_are_refused(run: Path, option: str) -> None:
    with pytest.raises(ConfigError, match="must be from"):
        main(["--debug", "trigger", str(run), option])


def test_no_run_is_one_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trigger", str(tmp_path)]) == 1
    assert "no run is in it" in capsys.readouterr().err


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_request(tmp_path) is None
    assert read_plan(tmp_path) is None
    request, plan = Request("a", "who", None, 0), Plan("a", "who", 20, 1, 3, 0)
    write_request(tmp_path, request)
    write_plan(tmp_path, plan)
    assert (read_request(tmp_path), read_plan(tmp_path)) == (request, plan)
    assert plan.recorded == (21, 23)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trigger.plan.json", "trigger.request.json"]


@pytest.mark.slow
def test_asking_needs_neither_torch_nor_lightning(run: Path) -> None:
    program = (
        "import sys\nsys.modules.update(dict.fromkeys(('torch', 'lightning', 'pytorch_lightning')))\n"
        "from lightning_memprof.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "trigger", str(run), "--timeout", "0.1"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "rank 0 has not begun a step" in done.stderr


def test_a_run_that_every_user_may_write_into_is_not_asked(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run.chmod(0o777)
    assert main(["trigger", str(run)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "every user may write into it (mode 0777)" in line
    assert not (run / "trigger.request.json").exists()
