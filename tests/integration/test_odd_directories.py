"""Runs in directories whose names a shell, a template, a terminal or torch reads otherwise, or that are relative."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from markupsafe import escape

from free_cores import with_free_cores
from lightning_memprof import ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions
from lightning_memprof.cli.main import main
from lightning_memprof.judge import facts
from lightning_memprof.tensorboard.runs import RunList
from training import Perceptron, loader, manifest, rows_of, trainer
from waiting import wait_until

NAMES = [
    "a\nb",
    "a\\b",
    "x%d{}y",
    "[lr=0.1]{x}*?'\"\\$HOME#%41&;`ü",
    "a\x1b[31mb\tc\r",
    "\udcff",
    "-dash ~[red]x",
]


def artifacts(run: Path) -> list[Path]:
    """Give the listed files; each is there, and as large as listed."""
    files = []
    for row in rows_of(run, "artifact"):
        files.append(run.parent / row["path"])
        assert files[-1].stat().st_size == row["size_bytes"], row["path"]
    return files


def trace_of(files: list[Path]) -> dict[str, Any]:
    (trace,) = [file for file in files if file.name.endswith(".pt.trace.json.gz")]
    read: dict[str, Any] = json.loads(gzip.decompress(trace.read_bytes()))
    return read


def is_inert(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


class Away(Callback):
    """Changes the working directory in a step of a recorded window."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def on_train_batch_start(self, *args: Any) -> None:
        if args[-1] == 2:
            self._directory.mkdir(parents=True)
            os.chdir(self._directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, id=ascii(name), marks=() if "[" in name else pytest.mark.extended) for name in NAMES]
)
def test_a_run_in_a_directory_of_any_name_is_whole_and_every_command_reads_it(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    callback = MemProfilerCallback(output=OutputOptions(report=False))
    root = tmp_path / name
    trainer(root, callback, default_root_dir=root, profiler="fts_extended", logger=False).fit(Perceptron(), loader())
    run = root / "memprofiler"
    assert callback.run_directory == run
    assert rows_of(run, "error") == []
    assert trace_of(artifacts(run))["traceEvents"]
    printed = capfd.readouterr()
    assert "verdict" in printed.out
    assert is_inert("".join(line for line in printed.err.splitlines(keepends=True) if line.startswith("memprof")))
    out = tmp_path / f"out {name}"
    out.mkdir()
    target = name if not name.startswith("-") else f"./{name}"
    for command in (
        ["show", target, "--all"],
        ["show", target, "--format", "markdown"],
        ["show", target, "--format", "json"],
        ["report", target],
        ["report", target, "-o", str(out / "page.html")],
        ["compare", target, target],
        ["merge", target, "-o", str(out / "merged.json")],
        ["export", target, "--to", "csv", "-o", str(out / "tables")],
        ["export", target, "--to", "speedscope", "-o", str(out / "stacks.json")],
    ):
        assert main(command) == 0, command
        assert is_inert(capfd.readouterr().out), command
    assert main(["show", f"{target}/nothing"]) == 1
    assert len(capfd.readouterr().err.splitlines()) == 1
    assert (run / "report.html").stat().st_size > 100_000
    assert (out / "page.html").stat().st_size > 100_000
    assert json.loads((out / "merged.json").read_bytes())["traceEvents"]
    (listed,) = json.loads(json.dumps(RunList({"": tmp_path}).document()))["runs"]
    assert (listed["label"], listed["state"]) == (name, "finished")


@pytest.mark.slow
def test_a_relative_directory_stays_where_it_is_if_the_program_changes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    callback = MemProfilerCallback(output=OutputOptions(dirpath="runs", summary=False, report=True))
    profiler = ExtendedPyTorchProfiler(dirpath="traces")
    away = tmp_path / "away" / "far"
    trainer(tmp_path, callback, Away(away), profiler=profiler).fit(Perceptron(), loader())
    run = tmp_path / "runs" / "memprofiler"
    assert (Path.cwd(), callback.run_directory) == (away, run)
    assert list(away.iterdir()) == []
    assert rows_of(run, "error") == []
    assert manifest(run)[-1]["steps"] == 12
    assert len((run / "pulse.rank00000.csv").read_text().splitlines()) == 13
    artifacts(run)
    # Written by a process of its own.
    wait_until((run / "report.html").exists)
    assert (run / "report.html").exists()
    assert trace_of(list((tmp_path / "traces").iterdir()))["traceEvents"]


ODD = "x{}%d{0}[red]\\a'b`|<i>\"größe"
# Lightning writes the settings of a callback behind its name, in braces.
ODD_CALLBACK = ODD.replace("{", "").replace("}", "")


class OddNames(Perceptron):
    """Has a module with an odd name, and raises an exception with an odd text."""

    def __init__(self, recorder: MemProfilerCallback) -> None:
        super().__init__()
        self.recorder = recorder
        self.add_module(ODD, torch.nn.Linear(1, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 16:
            raise ValueError(f"{ODD}\n{ODD}")
        with self.recorder.region(ODD):
            return self.get_submodule(ODD)(self.net(batch)).square().mean()


@pytest.mark.slow
def test_names_of_the_program_are_values_in_every_format(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "run_ledger", with_free_cores)
    callback = MemProfilerCallback(output=OutputOptions(report=False))
    slow = type(ODD_CALLBACK, (Callback,), {"on_train_batch_end": lambda *_: time.sleep(0.05)})
    training = trainer(tmp_path, callback, slow(), profiler="fts_extended")
    with pytest.raises(ValueError, match="red"):
        training.fit(OddNames(callback), loader(24))
    run = callback.run_directory
    assert run is not None
    assert rows_of(run, "error") == []
    names = {event.get("name", "") for event in trace_of(artifacts(run))["traceEvents"]}
    assert f"[pl][module]torch.nn.modules.linear.Linear: {ODD}" in names
    assert f"[pl][profile][Callback]{ODD_CALLBACK}.on_train_batch_end" in names
    assert ODD in names
    capfd.readouterr()
    for command in (["show", str(run), "--all"], ["show", str(run), "--format", "markdown"]):
        assert main(command) == 0
        assert is_inert(capfd.readouterr().out), command
    assert main(["show", str(run), "--format", "json"]) == 0
    assert f"{json.dumps(ODD_CALLBACK)[1:-1]}.on_train_batch_end takes" in capfd.readouterr().out
    assert main(["report", str(run)]) == 0
    assert escape(ODD) in (run / "report.html").read_text()
