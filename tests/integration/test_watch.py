"""A training in another process is shown while it goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from training import program
from waiting import wait_until

PROGRAM = program("""
import time
import lightning.pytorch as pl
from lightning_memprof import MemProfilerCallback, Schedule

class Slow(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        time.sleep(0.05)
        if index == 80:
            while not Path(sys.argv[1], "seen").exists():
                time.sleep(0.05)

profiler = MemProfilerCallback(schedule=Schedule(wait=2, warmup=1, active=2, repeat=1))
trainer(Path(sys.argv[1]), Slow(), profiler).fit(Perceptron(), loader(90))
""")


@pytest.mark.timeout(120)
def test_a_training_is_watched_from_its_files_until_it_ends(tmp_path: Path, environment: dict[str, str]) -> None:
    training = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    watching = None
    try:
        run = tmp_path / "log"
        wait_until(lambda: any(run.glob("memprofiler/manifest.*")) or training.poll() is not None)
        watching = subprocess.Popen(
            [sys.executable, "-m", "lightning_memprof", "show", str(run), "--watch"],
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
    page = "".join(lines).partition("\nverdict ")[2]
    assert "callback" in page
    assert "90 steps · finished" in " ".join(page.split())
