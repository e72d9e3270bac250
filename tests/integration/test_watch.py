"""A training in another process is watched while it goes on."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
import lightning.pytorch as pl
from lightning_memprof import MemProfilerCallback, Schedule
from training import Perceptron, loader, trainer

class Slow(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        time.sleep(0.05)
        if index == 80:
            while not Path(sys.argv[1], "seen").exists():
                time.sleep(0.05)

profiler = MemProfilerCallback(schedule=Schedule(wait=2, warmup=1, active=2, repeat=1))
trainer(Path(sys.argv[1]), Slow(), profiler).fit(Perceptron(), loader(90))
"""
SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.timeout(120)
def test_a_training_is_watched_from_its_files_until_it_ends(tmp_path: Path, environment: dict[str, str]) -> None:
    training = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(SUPPORT)],
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    watching = None
    try:
        run = tmp_path / "log"
        until(lambda: any(run.glob("memprofiler/manifest.*")), training)
        watching = subprocess.Popen(
            [sys.executable, "-m", "lightning_memprof", "watch", str(run), "--interval", "0.1"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert watching.stdout is not None
        lines = []
        for line in watching.stdout:
            lines.append(line)
            # It is seen while it goes on: the training waits at step 80 until it was.
            if line.startswith("steps "):
                (tmp_path / "seen").touch()
        assert watching.wait(30) == 0
        _, errors = training.communicate(timeout=30)
        assert training.returncode == 0, errors
    finally:
        for process in (training, watching):
            if process is not None:
                process.kill()
                process.wait()
                for stream in (process.stdout, process.stderr):
                    if stream is not None:
                        stream.close()
    seen = [line for line in lines if line.startswith("steps ")]
    assert "ago" in seen[0]
    assert seen[-1].startswith("steps 90 of 90 (100%) · ")
    assert seen[-1].rstrip().endswith("finished")
    assert len({line.split(" · ")[0] for line in seen}) > 1
    assert any("callback" in line for line in lines)


def until(met: object, training: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not (callable(met) and met()):
        assert training.poll() is None, training.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
