from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from lightning_memprof.artifacts.naming import manifest_name
from recorded_rows import read_rows

SAY_WHAT_I_AM = """
import json, os, sys
json.dump({
    "argv": [os.fsencode(argument).hex() for argument in sys.argv],
    "pid": os.getpid(),
    "switch": os.environ.get("LIGHTNING_MEMPROF"),
    "stdin": sys.stdin.read(),
    "name": __name__,
    "path": sys.path[0],
    "executable": sys.executable,
    "loaded": sorted(name for name in sys.modules if name.startswith("lightning_memprof")),
}, sys.stdout)
"""

TRAIN = """
import sys
from pathlib import Path
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = Trainer(max_steps=6, accelerator="cpu", logger=CSVLogger(sys.argv[1], name=""), enable_checkpointing=False)
trainer.fit(Model(), DataLoader(torch.ones(64, 4), batch_size=4))
sys.exit(5)
"""


@pytest.fixture
def command(tmp_path, environment):
    """Start ``lightning-memprof run ...`` in ``tmp_path`` as a shell would: ``command(*arguments)`` gives a Popen."""
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_memprof", "run", *arguments],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def script(tmp_path):
    def write(text, name="program.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return name

    return write


def finished(process, given=b""):
    out, err = process.communicate(given, timeout=240)
    return process.returncode, out, err


def test_the_programs_uncaught_exception_is_shown_by_python_itself(command, script):
    status, out, err = finished(command(script("raise ValueError('mine')")))
    assert (status, out) == (1, b"")
    assert err.startswith(b"Traceback")
    assert err.endswith(b"ValueError: mine\n")
    assert b"lightning_memprof" not in err


def test_arguments_input_and_process_are_the_programs_own(command, script, tmp_path):
    arguments = [
        "--config",
        "x.yaml",
        "--help",
        "--debug",
        "--",
        "-m",
        "",
        " a b ",
        "--format=json",
        "\udcff\n'\"$HOME",
    ]
    process = command(script(SAY_WHAT_I_AM), *arguments)
    status, out, err = finished(process, b"from the terminal")
    said = json.loads(out)
    assert (status, err) == (0, b"")
    assert said["argv"] == [os.fsencode(argument).hex() for argument in ["program.py", *arguments]]
    assert said["pid"] == process.pid
    assert said["stdin"] == "from the terminal"
    assert said["name"] == "__main__"
    assert said["path"] == str(tmp_path)
    assert said["executable"] == sys.executable
    assert said["switch"] == "1"
    assert said["loaded"] == []


def test_a_module_runs_as_python_m_would_run_it(command, script, tmp_path):
    script("", "package/__init__.py")
    script(SAY_WHAT_I_AM, "package/train.py")
    status, out, err = finished(command("-m", "package.train", "-m", "--config", "x"))
    said = json.loads(out)
    assert (status, err) == (0, b"")
    assert [bytes.fromhex(argument).decode() for argument in said["argv"]] == [
        str(tmp_path / "package" / "train.py"), "-m", "--config", "x",
    ]  # fmt: skip
    assert said["name"] == "__main__"
    assert said["switch"] == "1"


def test_the_configuration_is_handed_on_as_an_absolute_path(command, script, tmp_path):
    script("schedule: {wait: 1}", "memprof.yaml")
    _, out, _ = finished(command("--config", "memprof.yaml", script(SAY_WHAT_I_AM), "--config", "theirs.yaml"))
    assert json.loads(out)["switch"] == str(tmp_path / "memprof.yaml")


def test_every_trainer_of_an_unchanged_program_is_recorded_and_loads_nothing_that_only_a_page_needs(
    command, script, tmp_path
):
    seldom = {"bokeh", "jinja2", "pandas", "tensorboard", "torch_tb_profiler", "viztracer", "werkzeug"}
    said = f"import atexit; atexit.register(lambda: print(sorted({seldom} & set(sys.modules))))\n"
    status, out, err = finished(command(script(f"import sys\n{said}{TRAIN}"), "logs"))
    assert status == 5, err.decode()
    run = tmp_path / "logs" / "version_0" / "memprofiler"
    rows = read_rows(run / manifest_name(0))[0]
    assert [row["status"] for row in rows if row["kind"] == "end"] == ["finished"]
    assert [row["steps"] for row in rows if row["kind"] == "window" and row["event"] == "close"] == [[2, 3]]
    assert {row["type"] for row in rows if row["kind"] == "artifact"} >= {"series", "trace", "pulse"}
    assert b"lightning-memprof show" in err
    assert b"lightning-memprof" not in out
    assert out.endswith(b"[]\n")
