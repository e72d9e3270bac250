"""``lightning-memprof try`` on real programs in processes of their own."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from lightning_memprof.cli.main import main
from lightning_memprof.compare.trial import Measured
from lightning_memprof.errors import MemprofError
from lightning_memprof.trial.process import run_in_turns, run_task, started
from lightning_memprof.trial.runner import TrialOptions, try_program
from lightning_memprof.trial.task import Task
from lightning_memprof.units import MIB
from warm_python import WarmPython

PROGRAM = Path(__file__).parents[1] / "support" / "tried.py"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: None) -> str:
    """The program alone in the working directory, and temporary files beside it.

    Its processes need not import Lightning each time; those of commands in processes of their own do.
    """
    place, scratch = tmp_path / "work", tmp_path / "scratch"
    place.mkdir()
    scratch.mkdir()
    shutil.copy(PROGRAM, place / "train.py")
    monkeypatch.chdir(place)
    # Of this process alone: sockets of workers need a short path.
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    return "train.py"


def left_behind(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*") if "__pycache__" not in path.parts)


def test_a_remedy_is_measured_compared_and_shown_and_nothing_of_the_users_is_written(program, tmp_path, capsys):
    options = ["--remedy", "workers=2", "--remedy", "pin_memory", "--rounds", "3", "--steps", "5", "--format", "json"]
    page = tmp_path / "page.html"
    assert main(["try", *options, "--output", str(page), program]) == 0
    found = json.loads(capsys.readouterr().out)
    workers, refused = found["outcomes"]
    assert workers["equality"]["name"] == "bit-equal"
    assert workers["time"]["low"] < workers["time"]["change"] < workers["time"]["high"]
    assert workers["code"] == ["DataLoader(..., num_workers=2, persistent_workers=True)"]
    assert refused["problem"] == "the training is on the CPU: nothing is copied to a device"
    assert (found["steps"], found["rounds"], found["compared"]) == (5, 3, 10)
    # The code to paste is shown where the machine found a gain.
    assert "workers=2" in page.read_text()
    assert left_behind(tmp_path) == ["page.html", "scratch", "work", "work/train.py"]


def test_a_recorded_run_advises_the_remedies_to_try(program, capsys):
    assert main(["try", "--rounds", "3", "--steps", "4", "--format", "json", program, "waits"]) == 0
    found = json.loads(capsys.readouterr().out)
    workers = next(tried for tried in found["outcomes"] if tried["remedy"].startswith("workers="))
    assert workers["promised"][0] <= workers["promised"][1]
    assert workers["equality"]["name"] == "bit-equal"


def compared(program: str, tmp_path: Path, name: str, *remedies: str, fault: str = "") -> Measured:
    task = Task(directory=str(tmp_path / name), steps=6, remedies=remedies, is_check=True)
    return run_task([program, *([fault] if fault else [])], task, 120.0)


def test_two_ranks_are_changed_alike(program, tmp_path):
    bare = compared(program, tmp_path, "bare", fault="ranks")
    changed = compared(program, tmp_path, "changed", "static_graph", fault="ranks")
    assert (bare.problem, changed.problem, len(bare.losses)) == ("", "", 11)
    assert (bare.losses, bare.weights) == (changed.losses, changed.weights)
    assert left_behind(Path()) == ["train.py"]


def test_a_remedy_that_changes_the_losses_is_seen(program, tmp_path):
    bare = compared(program, tmp_path, "bare")
    changed = compared(program, tmp_path, "changed", "precision=bf16-mixed")
    assert (bare.problem, changed.problem) == ("", "")
    assert bare.losses != changed.losses


def test_batches_that_replace_one_are_one_step(program, tmp_path):
    bare = compared(program, tmp_path, "bare", fault="exact")
    changed = compared(program, tmp_path, "changed", "accumulate=2", fault="exact")
    assert (bare.problem, changed.problem, len(bare.losses)) == ("", "", 11)
    assert changed.losses == pytest.approx(bare.losses, rel=1e-4)
    timed = run_task(
        [program, "exact"], Task(directory=str(tmp_path / "timed"), steps=6, remedies=("accumulate=2",)), 60.0
    )
    assert (timed.problem, timed.steps) == ("", 6)
    # Four samples of two milliseconds.
    assert timed.step_ns > 8e6


def test_the_largest_batch_is_found_by_runs_within_a_limit(program, tmp_path, capsys):
    bare = run_task([program, "large"], Task(directory=str(tmp_path / "bare"), steps=5), 60.0)
    limit = round(bare.peak_bytes / MIB) + 120
    options = ["--batch-size", "max", "--limit", f"{limit}MiB", "--format", "json"]
    assert main(["try", *options, program, "large"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (bare.samples, found["samples"], found["limit_bytes"]) == (4, 4, limit * MIB)
    assert found["best"] > 4
    refused = [row for row in found["tried"] if not row["fits"]]
    assert all(row["peak_bytes"] <= limit * MIB for row in found["tried"] if row["fits"])
    assert all(row["problem"] or row["peak_bytes"] > limit * MIB for row in refused)
    assert 1 <= min(row["samples"] for row in refused) / found["best"] - 1e-9 <= 1.5
    assert left_behind(tmp_path / "scratch") == []


def test_a_program_that_needs_more_than_the_limit_is_ended(program, tmp_path):
    task = Task(directory=str(tmp_path / "run"), steps=5, host_limit_bytes=MIB)
    assert run_task([program, "hang"], task, 60.0).problem == "needs more than 1.00 MiB"


def test_a_batch_has_no_more_samples_than_the_data(program, tmp_path):
    task = Task(directory=str(tmp_path / "run"), steps=5, samples=25)
    assert run_task([program], task, 60.0).problem == "the data have 24 samples"


def test_remedies_of_the_model_wait_until_it_has_its_modules(program, tmp_path):
    bare = compared(program, tmp_path, "bare", fault="configure")
    changed = compared(program, tmp_path, "changed", "compile", fault="configure")
    assert (bare.problem, changed.problem) == ("", "")
    assert changed.losses == pytest.approx(bare.losses, rel=1e-4)
    missing = compared(program, tmp_path, "missing", "checkpointing", fault="configure")
    assert missing.problem == "the model has no repeated blocks"


def test_a_compiled_module_another_logger_and_a_shuffled_validation_are_measured(program, tmp_path):
    bare = compared(program, tmp_path, "bare", fault="unusual")
    changed = compared(program, tmp_path, "changed", "workers=2", fault="unusual")
    assert (bare.problem, changed.problem) == ("", "")
    assert (bare.losses, bare.weights) == (changed.losses, changed.weights)
    assert left_behind(Path()) == ["train.py"]


@pytest.mark.parametrize(
    ("remedy", "fault", "reason"),
    [
        ("workers=2", "list", "the training data do not come from a torch.utils.data.DataLoader"),
        ("persistent_workers", "", "the DataLoader has no workers"),
        ("accumulate=3", "", "3 does not divide the batch size, 4"),
    ],
)
def test_data_that_a_remedy_cannot_change_are_its_reason(program, tmp_path, remedy, fault, reason):
    assert compared(program, tmp_path, "changed", remedy, fault=fault).problem == reason


def test_programs_that_alternate_never_run_at_the_same_time(program, tmp_path):
    tasks = [Task(directory=str(tmp_path / name), steps=9, turn=4) for name in ("a", "b")]
    with ExitStack() as running:
        found = run_in_turns([running.enter_context(started([program, "logged"], task, 60.0, {})) for task in tasks])
    # A turn is measured whole, after its first step: 3 x 4 steps.
    assert [(run.problem, run.steps) for run in found] == [("", 12), ("", 12)]
    rows = sorted(tuple(map(int, line.split())) for line in Path("steps.txt").read_text().splitlines())
    pids = [pid for _, pid in rows]
    # Both warm up at first; the last of the warm-up ends with the first turn.
    turns = [len(list(group)) for _, group in itertools.groupby(pids[-6 * 5 :])]
    assert turns == [5] * 6
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("none", "the program ended without Trainer.fit (fast_dev_run"),
        ("raise", "RuntimeError: the data are gone"),
        ("kill", "ended by SIGKILL: "),
        ("input", "EOFError: EOF when reading a line"),
    ],
)
def test_a_program_that_cannot_be_measured_is_one_clear_line(program, tmp_path, fault, words):
    with pytest.raises(MemprofError) as raised:
        try_program([program, fault], TrialOptions(remedies=("workers=2",)))
    assert str(raised.value).startswith(f"try: {program} {fault}: {words}")
    assert left_behind(tmp_path / "work") == ["train.py"]
    assert left_behind(tmp_path / "scratch") == []


def test_a_program_that_hangs_is_ended_at_its_limit(program, tmp_path):
    with pytest.raises(MemprofError, match=r"did not reach its last step within 12 s: change --steps or --time-limit$"):
        try_program([program, "hang"], TrialOptions(remedies=("workers=2",), time_limit_s=12.0))
    assert left_behind(tmp_path / "scratch") == []


def test_a_program_whose_first_run_takes_longer_than_the_minutes_is_ended_then(program, tmp_path, capsys):
    assert main(["try", "--remedy", "workers=2", "--minutes", "0.05", program, "hang"]) == 0
    assert "Ended at the limit of 0.05 minutes (--minutes)." in capsys.readouterr().out
    assert main(["try", "--minutes", "0.05", program, "hang"]) == 1
    assert "raise --minutes" in capsys.readouterr().err
    assert left_behind(tmp_path / "scratch") == []


def test_a_training_with_nan_losses_a_scalar_parameter_and_a_profiler_of_ours_is_tried(program, tmp_path, capsys):
    options = ["--remedy", "workers=2", "--rounds", "3", "--steps", "4", "--format", "json"]
    assert main(["try", *options, program, "own"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["outcomes"]
    assert (found["problem"], found["equality"]["name"]) == ("", "bit-equal")
    assert compared(program, tmp_path, "bare", fault="own").losses[3] is None
    recorded = run_task([program, "own"], Task(directory=str(tmp_path / "run"), steps=8, is_recorded=True), 120.0)
    assert recorded.problem == ""
    assert list((tmp_path / "run").rglob("manifest*"))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_stopped_program_ends_with_a_killed_command(program, tmp_path, environment):
    code = f"""
        import time
        from lightning_memprof.trial.process import Process
        from lightning_memprof.trial.task import Task

        task = Task(directory={str(tmp_path / "run")!r}, steps=9, turn=4)
        process = Process([{program!r}, "logged"], task, 60.0, {{}})
        process.until_turn_ends()
        print("stopped", flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", dedent(code)]
    started = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "stopped\n"
    pid = int(Path("steps.txt").read_text().split()[1])
    assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
    started.kill()
    started.wait()
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(20)


def test_ctrl_c_amid_a_start_ends_the_process(program, tmp_path, monkeypatch):
    pids: list[int] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *given: object, **named: object) -> None:
            super().__init__(*given, **named)  # type: ignore[call-overload]  # as given
            pids.append(self.pid)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_task([program, "hang"], Task(directory=str(tmp_path / "run"), steps=3), 60.0)
    assert pids
    assert not psutil.pid_exists(pids[0])


def test_ctrl_c_ends_what_runs_and_leaves_nothing(program, tmp_path, environment):
    command = [sys.executable, "-m", "lightning_memprof", "try", "--remedy", "workers=2", program, "hang"]
    scratch = tmp_path / "scratch"
    started = subprocess.Popen(command, env={**environment, "TMPDIR": str(scratch)}, stderr=subprocess.DEVNULL)
    listed = Path(f"/proc/{started.pid}/task/{started.pid}/children")
    # Its output file is there before the process is.
    while not (children := listed.read_text().split()) or not list(scratch.rglob("output.txt")):
        assert started.poll() is None
        time.sleep(0.1)
    started.send_signal(signal.SIGINT)
    assert started.wait(60) == 130
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert left_behind(scratch) == []


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_shows_the_results_so_far_and_a_log_the_current_run(program, environment, end):
    options = ["--remedy", "gc_freeze", "--remedy", "pin_memory", "--rounds", "99", "--steps", "2"]
    command = [sys.executable, "-m", "lightning_memprof", "try", *options, program]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = subprocess.Popen(command, env=environment, text=True, **pipes)  # type: ignore[call-overload]  # pipes
    assert started.stderr is not None
    lines = []
    for line in started.stderr:
        lines.append(line)
        shown = re.match(r"memprof: round (\d+): gc_freeze, about [\d,]+0 seconds left$", line)
        if shown is not None and int(shown[1]) > 3:
            break
    started.send_signal(end)
    page, _ = started.communicate(timeout=60)
    assert started.returncode == 130, lines
    assert lines[0].startswith("memprof: comparison of losses: unchanged")
    assert re.search(r"gc_freeze +[+-]?\d+%", page)
    assert "the training is on the CPU" in page
    assert "Stopped before its end." in page


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--minutes", "0"], "--minutes 0: must be more than 0"),
        (["--rounds", "2"], "--rounds 2: must be at least 3"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--time-limit", "0"], "--time-limit 0: must be more than 0 seconds"),
        (["--remedy", "faster"], "--remedy faster: unknown"),
        (["--output", "missing/page.html"], "--output missing/page.html: there is no folder missing"),
    ],
)
def test_wrong_options_are_found_before_anything_runs(program, options, words, capsys):
    assert main(["try", *options, program]) == 1
    assert words in capsys.readouterr().err


def test_a_missing_program_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["try", "absent.py"]) == 1
    assert "try: absent.py: no such file" in capsys.readouterr().err
    assert main(["try"]) == 2
    assert "name a program" in capsys.readouterr().err


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython, environment: dict[str, str]) -> Path:
    """The log directory of a recorded run of the program."""
    place = tmp_path_factory.mktemp("recorded")
    shutil.copy(PROGRAM, place / "train.py")
    done = warm_python.run(["-m", "lightning_memprof", "run", "train.py", "waits"], place, environment, 240)
    assert done.returncode == 0, done.stderr
    assert (place / "after.txt").exists()
    return place / "logs"


@pytest.fixture
def recorded(recording: Path, program: str) -> Path:
    """The run's directory in the log directory, which is in the working directory."""
    shutil.copytree(recording, "logs")
    return next(Path("logs").rglob("memprofiler"))


def test_the_remedies_of_a_recorded_run_are_listed(recorded, capsys):
    assert main(["try", "--list", "logs"]) == 0
    page = capsys.readouterr().out
    assert "workers=" in page
    assert "num_workers=" in page
    # Programs and their arguments are not recorded.
    # A long command goes on in the next line of the shell.
    commands = " ".join(page.replace("\\\n", " ").split())
    assert re.search(r"lightning-memprof try --remedy workers=.* SCRIPT ARGS\.\.\.", commands)
    assert main(["try", "--list", "logs", "train.py", "two words"]) == 0
    assert "train.py 'two words'" in " ".join(capsys.readouterr().out.split())


def test_the_page_of_a_run_shows_what_its_remedies_gained(recorded, program, capsys):
    options = ["--run", "logs", "--remedy", "gc_freeze", "--rounds", "3", "--steps", "3", "--format", "json"]
    assert main(["try", *options, program]) == 0
    measured = json.loads((recorded / "tried.json").read_text())
    assert measured == json.loads(capsys.readouterr().out)
    for outcome in measured["outcomes"]:
        outcome["rule"] = "input_bound"
    (recorded / "tried.json").write_text(json.dumps(measured))
    assert main(["show", "logs", "--all"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "Tried gc_freeze: " in page
    assert "train.py ran in rounds of 3 steps, unchanged and with each remedy." in page


def test_a_damaged_trial_hides_nothing_of_a_run(recorded, capsys):
    (recorded / "tried.json").write_text('{"program": 5}')
    assert main(["show", "logs", "--all"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "(input_bound)" in page
    assert "tried.json: not a trial" in page
