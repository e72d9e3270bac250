from __future__ import annotations

import json

import pytest

from lightning_memprof.account.memory.allocations import run_allocations
from lightning_memprof.artifacts.naming import manifest_name
from lightning_memprof.demo.train import train_demo
from lightning_memprof.errors import ConfigError
from lightning_memprof.read.run.load import load_run
from recorded_rows import read_rows

STEPS = 8
DEMO = f"""
import sys
from pathlib import Path
from lightning_memprof.cli.demo import demo
sys.exit(demo(Path(sys.argv[1]), steps={STEPS}))
"""

# A job in the background is started with Ctrl-C switched off. Ctrl-C comes when some steps have been measured, however
# fast the machine is.
INTERRUPTED_DEMO = """
import signal, sys
from lightning_memprof.cli.main import main
from lightning_memprof.demo.train import LitGPT

step = LitGPT.training_step

def interrupted(self, batch):
    if self.trainer.global_step == 6:
        signal.raise_signal(signal.SIGINT)
    return step(self, batch)

LitGPT.training_step = interrupted
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(["demo", "--out", "out"]))
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory, warm_python, environment):
    """Run a short demo in a process of its own: its directory and its output."""
    out = tmp_path_factory.mktemp("demo") / "memprof-demo"
    return out, run_demo(out, warm_python, environment)


def run_demo(out, warm_python, environment):
    (out.parent / "run_demo.py").write_text(DEMO)
    ended = warm_python.run(["run_demo.py", out.name], out.parent, environment | {"COLUMNS": "80"}, 240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


@pytest.fixture(scope="module")
def rows(demo):
    return read_rows(demo[0] / "version_0" / "memprofiler" / manifest_name(0))[0]


def test_two_windows_of_two_steps_were_closed_and_the_run_finished(rows):
    closed = [row for row in rows if row["kind"] == "window" and row["event"] == "close"]
    assert [(row["window"], row["steps"], row["truncated"]) for row in closed] == [
        (0, [1, 2], False),
        (1, [4, 5], False),
    ]
    assert [row["status"] for row in rows if row["kind"] == "end"] == ["finished"]
    assert [row for row in rows if row["kind"] == "error"] == []


def test_the_demo_says_where_the_run_lies_and_what_to_type_next(demo):
    out = demo[1].stdout
    assert "Recorded in memprof-demo/version_0\n" in out
    assert "lightning-memprof show memprof-demo/version_0" in out
    assert "lightning-memprof report memprof-demo/version_0" in out


def test_the_demo_shows_its_progress_and_nothing_irrelevant(demo):
    ended = demo[1]
    assert f"{STEPS}/{STEPS}" in ended.stdout
    assert "loss" in ended.stdout
    for chatter in (
        "GPU available",
        "Tip",
        "Warning",
        "deprecated",
        "does not have many workers",
        "`Trainer.fit` stopped",
    ):
        assert chatter not in ended.stdout + ended.stderr


def test_the_demos_run_can_be_shown(demo, run_python):
    shown = run_python("-m", "lightning_memprof", "show", str(demo[0] / "version_0"), "--format", "json")
    assert shown.returncode == 0, shown.stderr
    page = json.loads(shown.stdout)
    assert page["pulse"]["steps"] == STEPS
    assert [[step["step"] for step in window["steps"]] for window in page["windows"]] == [[1, 2], [4, 5]]
    assert page["errors"] == []


def test_a_second_demo_lies_beside_the_first(demo, warm_python, environment):
    ended = run_demo(demo[0], warm_python, environment)
    assert "Recorded in memprof-demo/version_1\n" in ended.stdout
    assert (demo[0] / "version_1" / "memprofiler" / manifest_name(0)).is_file()


def test_ctrl_c_ends_the_demo_with_exit_code_130_and_keeps_what_was_recorded(tmp_path, run_python):
    ended = run_python("-c", INTERRUPTED_DEMO)
    assert ended.returncode == 130, ended.stdout + ended.stderr
    assert any(line.startswith("verdict") for line in ended.stderr.splitlines()), ended.stderr
    assert "Traceback" not in ended.stderr
    rows = read_rows(tmp_path / "out" / "version_0" / "memprofiler" / manifest_name(0))[0]
    assert rows[-1]["kind"] == "end"
    assert rows[-1]["exception"].startswith("KeyboardInterrupt")


def test_too_few_steps_for_two_windows_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="steps=5"):
        train_demo(tmp_path, steps=5)


def test_a_place_that_cannot_be_written_is_one_line(tmp_path, run_python):
    (tmp_path / "file").touch()
    ended = run_python("-m", "lightning_memprof", "demo", "--out", "file/below")
    assert ended.returncode == 1
    assert ended.stderr.startswith("lightning-memprof: error: demo: --out 'file/below'")
    assert ended.stderr.count("\n") == 1


def test_nearly_all_that_is_live_at_the_peak_has_its_operator(demo):
    windows = run_allocations(load_run(demo[0] / "version_0"))
    devices = [device for window in windows for device in window.devices]
    assert len(devices) >= 2
    assert all(device.unattributed_bytes < 0.05 * device.peak_bytes for device in devices)
