"""A run's page compares its measured peak with the estimate that was made for it."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from lightning_memprof.cli.main import main

PROGRAM = """
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning_memprof import MemProfilerCallback
from lightning_memprof.collectors import ModuleMemory

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    def training_step(self, batch):
        return self.net(batch[0]).sum()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

callback = MemProfilerCallback(collectors=COLLECTORS)
trainer = Trainer(
    max_steps=8, accelerator="cpu", callbacks=[callback], default_root_dir="logs", logger=False,
    enable_checkpointing=False, enable_progress_bar=False,
)
trainer.fit(Net(), DataLoader(TensorDataset(torch.zeros(256, 64)), batch_size=32))
"""


def compared(capsys: pytest.CaptureFixture[str]) -> list[list[Any]]:
    """Return the rows of the table that compares: memory, estimated, measured, difference."""
    capsys.readouterr()
    assert main(["show", "logs", "--section", "memory", "--format", "json"]) == 0
    (section,) = json.loads(capsys.readouterr().out)["sections"]
    tables = [part for part in section["parts"] if part.get("id") == "estimated"]
    return [[cell["value"] for cell in row] for table in tables for row in table["rows"]]


@pytest.mark.parametrize(("collectors", "is_whole"), [("None", False), ("[ModuleMemory()]", True)])
def test_the_page_of_a_run_compares_its_peak_with_its_estimate(
    collectors: str, is_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    program = PROGRAM.replace("COLLECTORS", collectors)
    Path("train.py").write_text(program, encoding="utf-8")
    runpy.run_path("train.py")
    assert compared(capsys) == []
    assert main(["estimate", "--what-if", "none", "--against", "logs", "train.py"]) == 0
    assert "lightning-memprof show logs --section memory" in capsys.readouterr().err
    rows = {name: values for name, *values in compared(capsys)}
    # Without a tracker the loss, 4 bytes, counts among the estimated activations only.
    assert all(abs(difference or 0) <= (0 if is_whole else 4) for *_, difference in rows.values())
    assert rows["parameter"] == [2 * (64 * 64 + 64) * 4, 2 * (64 * 64 + 64) * 4, 0]
    assert ("all tensors" in rows) == is_whole


@pytest.mark.slow
def test_the_page_is_where_the_command_was_started_if_the_program_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    away = "import os; os.mkdir('away'); os.chdir('away')\n"
    Path("train.py").write_text(away + PROGRAM.replace("COLLECTORS", "None"), encoding="utf-8")
    assert main(["estimate", "--what-if", "none", "-o", "page.html", "train.py"]) == 0
    assert (tmp_path / "page.html").exists()


def test_a_damaged_estimate_hides_nothing_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM.replace("COLLECTORS", "None"), encoding="utf-8")
    runpy.run_path("train.py")
    (file,) = [path.with_name("estimate.json") for path in Path("logs").rglob("manifest.rank00000.jsonl")]
    file.write_text('{"allocated_bytes": "many"}', encoding="utf-8")
    assert compared(capsys) == []
    assert main(["show", "logs", "--all"]) == 0
    assert "estimate.json: not an estimate" in " ".join(capsys.readouterr().out.split())
