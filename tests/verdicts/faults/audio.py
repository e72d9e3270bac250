"""Training scripts around sound: spoken keywords, utterances, bird calls in an archive of recordings."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import main, quiet

BANDS = 40


class SoundNet(lightning.LightningModule):
    """Convolutions over time of frames with ``BANDS`` values, and a mean over the frames that count."""

    def __init__(self, width: int = 192, depth: int = 3, classes: int = 20) -> None:
        super().__init__()
        self.first = nn.Linear(BANDS, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, frames: Tensor, mask: Tensor) -> Tensor:
        hidden = self.first(frames).transpose(1, 2)
        for layer in self.layers:
            hidden = hidden + functional.relu(layer(hidden))
        hidden = hidden * mask[:, None]
        return self.head(hidden.sum(dim=2) / mask.sum(dim=1, keepdim=True))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mask = torch.arange(batch["frames"].shape[1])[None] < batch["lengths"][:, None]
        loss = functional.cross_entropy(self(batch["frames"], mask.float()), batch["label"])
        self.log("loss", loss, batch_size=len(mask))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class RemoteKeywords(Dataset):
    """One-second clips that the file server of the lab delivers."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.window = np.hanning(400).astype(np.float32)

    def __len__(self) -> int:
        return self.count

    def receive(self, index: int) -> np.ndarray:
        time.sleep(0.004)  # the way to the server and back
        return np.random.default_rng(index).standard_normal(8000, dtype=np.float32)

    def __getitem__(self, index: int) -> dict[str, Any]:
        wave = self.receive(index)
        frames = np.lib.stride_tricks.sliding_window_view(wave, 400)[::160] * self.window
        power = np.abs(np.fft.rfft(frames, axis=1))[:, :200].reshape(len(frames), BANDS, 5).mean(axis=2)
        return {
            "frames": torch.from_numpy(np.log1p(power).astype(np.float32)),
            "lengths": len(frames),
            "label": index % 20,
        }


def keyword_clips(fault: bool) -> None:
    loader = DataLoader(RemoteKeywords(32 * 60), batch_size=32, num_workers=1 if fault else 4)
    quiet(60).fit(SoundNet(width=256), loader)


class Utterances(Dataset):
    """Utterances of very different lengths: most are short, a few are long."""

    def __init__(self, count: int) -> None:
        rng = np.random.default_rng(3)
        lengths = np.clip(rng.lognormal(4.2, 0.2, count), 20, 160).astype(int)
        lengths[:: count // 3] = 240
        self.lengths = lengths
        self.frames = [torch.randn(int(length), BANDS) for length in lengths]

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.frames[index], index % 20


class PadCollator:
    """Pads utterances to a common number of frames: a given one, or that of the batch."""

    def __init__(self, frames: int | None) -> None:
        self.frames = frames

    def __call__(self, rows: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
        lengths = torch.tensor([len(frames) for frames, _ in rows])
        size = self.frames or int(lengths.max())
        padded = torch.zeros(len(rows), size, BANDS)
        for row, (frames, _) in zip(padded, rows, strict=True):
            row[: len(frames)] = frames
        return {"frames": padded, "lengths": lengths, "label": torch.tensor([label for _, label in rows])}


def utterances(fault: bool) -> None:
    data = Utterances(16 * 60)
    collate = PadCollator(int(data.lengths.max()) if fault else None)
    quiet(60).fit(SoundNet(width=160), DataLoader(data, batch_size=16, shuffle=True, collate_fn=collate))


class BirdArchive(Dataset):
    """Frames of field recordings, one archive per evening; consecutive items lie in the same archive."""

    def __init__(self, folder: Path, evenings: int, clips: int, packed: bool) -> None:
        self.clips = clips
        self.packed = packed
        self.paths = []
        rng = np.random.default_rng(5)
        frames = rng.standard_normal((clips, 100, BANDS), dtype=np.float32)
        first = folder / f"evening{'.npz' if packed else '.npy'}"
        if packed:
            np.savez_compressed(first, frames=frames, raw=rng.integers(-90, 90, (clips, 48000)).astype(np.int16))
        else:
            np.save(first, frames)
        for evening in range(evenings):
            self.paths.append(Path(shutil.copy(first, folder / f"{evening:03d}{first.suffix}")))
        self.current = -1
        self.frames: Any = None

    def __len__(self) -> int:
        return self.clips * len(self.paths)

    def open_evening(self, evening: int) -> None:
        if self.packed:
            with np.load(self.paths[evening]) as archive:
                self.frames = archive["frames"]
                self.raw = archive["raw"]
        else:
            self.frames = np.load(self.paths[evening], mmap_mode="r")
        self.current = evening

    def __getitem__(self, index: int) -> dict[str, Any]:
        evening, clip = divmod(index, self.clips)
        if evening != self.current:
            self.open_evening(evening)
        return {"frames": torch.from_numpy(self.frames[clip].copy()), "lengths": 100, "label": index % 20}


def bird_calls(fault: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = BirdArchive(Path(folder), evenings=6, clips=10 * 32, packed=fault)
        quiet(60).fit(SoundNet(width=128), DataLoader(data, batch_size=32))


if __name__ == "__main__":
    main(keyword_clips, utterances, bird_calls)
