"""``record`` as a program calls it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_memprof import ConfigError, MemProfilerCallback, load_run, record
from lightning_memprof.collectors import Pulse
from lightning_memprof.judge import Finding
from plain_loops import EVERY, QUIET, a_rank, batches, plain_epoch, seeded
from training import Perceptron, loader


def test_an_exception_of_the_loop_is_raised_as_it_is_and_ends_the_run_with_it(tmp_path: Path) -> None:
    model = seeded()
    error = ValueError("mine")

    def fails() -> None:
        with record(model, dirpath=tmp_path, schedule=EVERY, output=QUIET) as recording:
            for number, batch in enumerate(recording.steps(batches())):
                model(batch).backward()
                if number == 3:
                    raise error

    with pytest.raises(ValueError, match="mine") as raised:
        fails()
    assert raised.value is error
    run = load_run(tmp_path)
    assert (run.status, run.lead.exception) == ("exception", "ValueError: mine")
    assert type(torch.autograd.backward).__name__ == "function"


def test_a_second_recording_inside_is_refused_and_one_after_it_has_its_own_directory(tmp_path: Path) -> None:
    model = seeded()
    for number in (1, 2):
        with record(model, dirpath=tmp_path, collectors=[Pulse()], output=QUIET) as recording:
            with pytest.raises(ConfigError, match="another run is being recorded"), record(model, dirpath=tmp_path):
                pass
            plain_epoch(recording, model)
        assert recording.run_directory == tmp_path / ("memprofiler" if number == 1 else "memprofiler-2")


def test_a_trainer_inside_trains_unrecorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = MemProfilerCallback()
    with record(seeded(), dirpath=tmp_path / "loop", collectors=[Pulse()], output=QUIET):
        Trainer(
            max_steps=2, callbacks=[callback], logger=False, enable_checkpointing=False, enable_progress_bar=False,
            default_root_dir=tmp_path / "fit", accelerator="cpu",
        ).fit(Perceptron(), loader(2))  # fmt: skip
    assert callback.run_directory is None
    assert "record() records the program around it" in caplog.text


def test_remedies_are_those_of_a_loop(tmp_path: Path) -> None:
    torch.autograd.set_detect_anomaly(True)
    try:
        model = seeded()
        with record(model, dirpath=tmp_path, output=QUIET) as recording:
            for _ in range(10):
                plain_epoch(recording, model)
    finally:
        torch.autograd.set_detect_anomaly(False)
    found: dict[str, Finding] = {finding.rule: finding for finding in load_run(tmp_path).findings()}
    assert not any("Trainer(" in step for finding in found.values() for step in finding.next_steps)
    assert found["anomaly_detection"].next_steps


def test_an_option_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"collector=.*its options are schedule, collectors, ranks"):
        record(seeded(), collector=[])


def test_values_of_a_wrong_type_are_refused_before_the_loop() -> None:
    with pytest.raises(ConfigError, match=r"must be a torch\.nn\.Module"):
        record(torch.nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"must be a torch\.optim\.Optimizer"):
        record(seeded(), "adam")  # type: ignore[arg-type]


def test_two_ranks_share_a_directory(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(a_rank, (port, str(tmp_path)), nprocs=2)
    run = load_run(tmp_path)
    assert [(rank.rank, rank.steps, rank.facts.strategy) for rank in run.ranks] == [
        (0, 12, "DistributedDataParallel"), (1, 12, "DistributedDataParallel"),
    ]  # fmt: skip


def test_lightning_is_not_loaded(tmp_path: Path, run_python: Callable[..., Any]) -> None:
    program = (
        "import sys, torch\n"
        "from lightning_memprof import record\n"
        "model = torch.nn.Linear(2, 1)\n"
        f"with record(model, dirpath={str(tmp_path)!r}) as recording:\n"
        "    for batch in recording.steps([torch.ones(3, 2)] * 4):\n"
        "        model(batch).sum().backward()\n"
        "print(sorted({'lightning', 'pytorch_lightning', 'tensorboard'} & set(sys.modules)))\n"
    )
    done = run_python("-c", program)
    assert done.stdout.endswith("[]\n"), done.stderr
    assert "verdict" in done.stdout
