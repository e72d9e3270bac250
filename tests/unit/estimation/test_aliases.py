"""Programs of ``pytorch_lightning``, and models of it in Python."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from importlib import metadata
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import pytorch_lightning
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_memprof import estimate
from lightning_memprof.errors import MemprofError
from lightning_memprof.estimation.aliases import replaced_packages
from lightning_memprof.estimation.estimator import estimate_program
from lightning_memprof.estimation.program import run_program
from lightning_memprof.estimation.wanted import Wanted
from training import Package, loader

FORKS = pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="estimates need a platform that can fork"
)
PROGRAM = dedent("""
    import torch
    import {package} as pl
    from {package}.callbacks import ModelCheckpoint, StochasticWeightAveraging
    from {fabric}.plugins.environments import LightningEnvironment
    from torch.utils.data import DataLoader

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(256, 256)

        def training_step(self, batch):
            return self.layer(batch).sum()

        def validation_step(self, batch):
            self.log("val", self.layer(batch).sum())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    callbacks = [StochasticWeightAveraging(1e-3), ModelCheckpoint(dirpath="checkpoints")]
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, plugins=[LightningEnvironment()], callbacks=callbacks)
    trainer.fit(Net(), DataLoader(torch.zeros(8, 256), batch_size=4), DataLoader(torch.zeros(4, 256)))
    open("after.txt", "w").close()
    """)


@FORKS
@pytest.mark.slow
def test_a_program_is_estimated_as_with_lightning_and_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = []
    for package, fabric in (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric")):
        Path("train.py").write_text(PROGRAM.format(package=package, fabric=fabric))
        found.append(estimate_program(["train.py"], Wanted(device="L4", what_if=("none",))))
    assert found[0].categories["parameter"] == 256 * 256 * 4 + 1024
    assert (found[1].allocated_bytes, found[1].categories) == (found[0].allocated_bytes, found[0].categories)
    assert found[1].assumptions == found[0].assumptions
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.slow
def test_a_model_of_the_other_package_is_refused_with_the_way_out() -> None:
    model = Package("pytorch_lightning").Perceptron()
    with pytest.raises(MemprofError, match=r"Perceptron derives from pytorch_lightning.*estimate"):
        estimate(model, loader(2), device="L4")


def test_replaced_modules_are_lightnings_own_and_keep_their_specs() -> None:
    with replaced_packages():
        classes: Any = importlib.import_module("pytorch_lightning.callbacks.model_checkpoint")
        expected = importlib.import_module("lightning.pytorch.callbacks.model_checkpoint")
        assert classes is expected
        assert expected.__spec__ is not None
        assert expected.__spec__.name == "lightning.pytorch.callbacks.model_checkpoint"
        assert importlib.import_module("lightning_fabric") is importlib.import_module("lightning.fabric")
        with pytest.raises(ModuleNotFoundError, match=r"pytorch_lightning\.nothing"):
            importlib.import_module("pytorch_lightning.nothing")


def test_the_installed_packages_are_as_before_after_a_program(tmp_path: Path) -> None:
    path, finders = list(sys.path), list(sys.meta_path)
    modules = {name: module for name, module in sys.modules.items() if name.startswith("pytorch_lightning")}
    (tmp_path / "train.py").write_text(
        "import pytorch_lightning.callbacks, lightning.pytorch as used\nassert pytorch_lightning is used\n"
    )
    run_program([str(tmp_path / "train.py")])
    assert (sys.path, sys.meta_path) == (path, finders)
    assert modules.keys() == {name for name in sys.modules if name.startswith("pytorch_lightning")}
    assert sys.modules["pytorch_lightning"] is pytorch_lightning
    assert importlib.import_module("pytorch_lightning.callbacks").ModelCheckpoint is ModelCheckpoint


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(metadata, "version", {"pytorch_lightning": "2.4.0", "lightning": "2.6.6"}.__getitem__)
    with replaced_packages():
        importlib.import_module("pytorch_lightning")
        importlib.import_module("lightning_fabric")
    assert capsys.readouterr().err == "memprof: pytorch_lightning 2.4.0 runs as lightning.pytorch 2.6.6\n"
