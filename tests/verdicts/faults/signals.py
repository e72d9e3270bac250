"""Trainings on measurements: earthquakes, rivers, hives, bridges, electricity meters, radar and milk."""

from __future__ import annotations

import bz2
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import Residual, main, quiet


class SeriesModel(lightning.LightningModule):
    """Convolutions along the time, for a class."""

    def __init__(self, channels: int, width: int, classes: int, stride: int = 4) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(channels, width, 7, stride=stride, padding=3),
            nn.ReLU(),
            nn.Conv1d(width, width, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(width, classes),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        series, label = batch
        loss = functional.cross_entropy(self.net(series), label)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


# --- earthquakes -----------------------------------------------------------------------------------------------------


class StationFiles(Dataset):
    """Traces of earthquakes in one file for each station, read in their order; keeps the file that is in use."""

    def __init__(self, folder: Path, files: int, traces: int) -> None:
        self.folder, self.files, self.traces = folder, files, traces
        self.opened = -1
        self.station = np.empty(0)

    def __len__(self) -> int:
        return self.files * self.traces

    def read(self, number: int) -> np.ndarray:
        packed = self.folder / f"station_{number}.bz2"
        if packed.exists():
            return np.frombuffer(bz2.decompress(packed.read_bytes()), dtype=np.int16).reshape(self.traces, 1, -1)
        return np.load(self.folder / f"station_{number}.npy", mmap_mode="r")

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        number, row = divmod(index, self.traces)
        if number != self.opened:
            self.station = self.read(number)
            self.opened = number
        return torch.from_numpy(self.station[row] / np.float32(1000)), index % 3


def record_stations(folder: Path, files: int, traces: int, samples: int, packed: bool) -> None:
    """Write the files of the stations; all of them have seen the same earthquakes."""
    swarm = np.random.default_rng(0).normal(0, 300, (traces, 1, samples)).astype(np.int16)
    first = folder / ("station_0.bz2" if packed else "station_0.npy")
    if packed:
        first.write_bytes(bz2.compress(swarm.tobytes(), 1))
    else:
        np.save(first, swarm)
    for number in range(1, files):
        shutil.copy(first, folder / f"station_{number}{first.suffix}")


def seismic_traces(fault: bool) -> None:
    files, traces, samples = 6, 64 * 20, 3000
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        record_stations(folder, files, traces, samples, packed=fault)
        loader = DataLoader(StationFiles(folder, files, traces), batch_size=64)
        quiet(20 * files).fit(SeriesModel(1, 64, 3), loader)


# --- rivers ----------------------------------------------------------------------------------------------------------


class GaugeModel(lightning.LightningModule):
    """The water level of tomorrow at each gauge of a river basin."""

    def __init__(self, gauges: int, log_each: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3 * gauges, 512), Residual(512), Residual(512), nn.Linear(512, gauges))
        self.log_each = log_each

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        week, tomorrow = batch
        error = (self.net(week) - tomorrow).abs()
        if self.log_each:
            for gauge, value in enumerate(error.mean(dim=0)):
                self.log(f"error/gauge_{gauge}", value)
        loss = error.mean()
        self.log("error", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def river_gauges(fault: bool) -> None:
    gauges = 150
    data = TensorDataset(torch.randn(384 * 20, 3 * gauges), torch.randn(384 * 20, gauges))
    quiet(80).fit(GaugeModel(gauges, log_each=fault), DataLoader(data, batch_size=384, shuffle=True))


# --- hives -----------------------------------------------------------------------------------------------------------


class HiveModel(SeriesModel):
    """Whether a hive is about to swarm; gives the probabilities with the loss."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        hum, swarms = batch
        logits = self.net(hum)
        loss = functional.cross_entropy(logits, swarms)
        self.log("train_loss", loss)
        return {"loss": loss, "swarm": logits.detach().softmax(dim=1)[:, 1]}


class HiveReport(lightning.Callback):
    """Writes what the model says about the hives of each batch, for the web page of the beekeepers."""

    def __init__(self, path: Path, whole: bool) -> None:
        self.path, self.whole = path, whole
        self.steps: list[dict[str, Any]] = []

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        swarm = outputs["swarm"].tolist()
        step = {"step": trainer.global_step, "loss": outputs["loss"].item(), "swarm": swarm}
        if self.whole:
            self.steps.append(step)
            with self.path.open("w") as file:
                json.dump(self.steps, file, indent=1)
        else:
            with self.path.open("a") as file:
                file.write(json.dumps(step) + "\n")


def bee_hives(fault: bool) -> None:
    data = TensorDataset(torch.randn(64 * 20, 2, 1024), torch.randint(2, (64 * 20,)))
    with tempfile.TemporaryDirectory(dir=".") as folder:
        report = HiveReport(Path(folder) / "hives.json", whole=fault)
        quiet(200, callbacks=[report]).fit(HiveModel(2, 48, 2), DataLoader(data, batch_size=64, shuffle=True))


# --- bridges ---------------------------------------------------------------------------------------------------------


class StrainModel(lightning.LightningModule):
    """Whether the strain of a bridge is as it should be; watches what its layers put out."""

    def __init__(self, watch: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(240, 512), Residual(512), Residual(512), nn.Linear(512, 2))
        self.spreads: dict[str, list[float]] = {}
        if watch:
            for name, layer in self.net.named_modules():
                if isinstance(layer, nn.Linear):
                    layer.register_forward_hook(self.watch(name))

    def watch(self, name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            values = output.detach().numpy()
            low, middle, high = np.percentile(values, (1, 50, 99))
            self.spreads[name] = [float(low), float(middle), float(high)]

        return hook

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        strain, state = batch
        loss = functional.cross_entropy(self.net(strain), state)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def bridge_strain(fault: bool) -> None:
    data = TensorDataset(torch.randn(256 * 20, 240), torch.randint(2, (256 * 20,)))
    quiet(80).fit(StrainModel(watch=fault), DataLoader(data, batch_size=256, shuffle=True))


# --- electricity meters ----------------------------------------------------------------------------------------------


class MeterWeeks(Dataset):
    """Weeks of some houses: 8 circuits, a value each quarter of an hour."""

    def __init__(self, count: int) -> None:
        self.weeks = torch.randn(count, 8, 672)
        self.kinds = torch.randint(5, (count,)).tolist()

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.weeks[index], self.kinds[index]


def smart_meters(fault: bool) -> None:
    workers = 16 if fault else 0
    loader = DataLoader(MeterWeeks(128 * 25), batch_size=128, shuffle=True, num_workers=workers)
    quiet(100).fit(SeriesModel(8, 64, 5), loader)


# --- radar -----------------------------------------------------------------------------------------------------------


def radar_echoes(fault: bool) -> None:
    if fault:
        torch.set_num_threads(8)
    echoes = TensorDataset(torch.randn(64 * 20, 2, 2048), torch.randint(4, (64 * 20,)))
    quiet(80).fit(SeriesModel(2, 64, 4), DataLoader(echoes, batch_size=64, shuffle=True))


# --- milk: fat and protein from near-infrared spectra


class MilkSpectra(Dataset[tuple[Tensor, Tensor]]):
    """Spectra without their baseline, which is fitted with broad bumps over the wavelengths."""

    def __init__(self, samples: int, once: bool) -> None:
        self.wavelengths = np.linspace(900, 1700, 512)
        self.spectra = np.random.default_rng(1).normal(size=(samples, 512)).astype(np.float32)
        self.content = torch.randint(2, (samples,))
        self.baseline = self.solver() if once else None

    def solver(self) -> tuple[np.ndarray, np.ndarray]:
        centers = np.linspace(900, 1700, 16)
        bumps = np.exp(-(((self.wavelengths[:, None] - centers) / 40) ** 2)).astype(np.float32)
        return bumps, np.linalg.pinv(bumps)

    def __len__(self) -> int:
        return len(self.spectra)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        bumps, inverse = self.baseline if self.baseline is not None else self.solver()
        spectrum = self.spectra[index]
        return torch.from_numpy(spectrum - bumps @ (inverse @ spectrum))[None], self.content[index]


def milk_spectra(fault: bool) -> None:
    milk = MilkSpectra(6400, once=not fault)
    quiet(100).fit(SeriesModel(1, 192, 2, stride=2), DataLoader(milk, batch_size=64, shuffle=True))


if __name__ == "__main__":
    main(seismic_traces, river_gauges, bee_hives, bridge_strain, smart_meters, radar_echoes, milk_spectra)
