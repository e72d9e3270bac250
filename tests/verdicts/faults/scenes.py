"""Networks over camera images: two tasks at once, super-resolution, contrastive learning, large batches, raw frames."""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import main, trainer


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


# --- drivable area and depth from one trunk ---


class RoadScenes(lightning.LightningModule):
    def __init__(self, balanced: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.balanced = balanced
        self.trunk = nn.Sequential(conv(3, 24, 2), conv(24, 48, 2), conv(48, 64), conv(64, 64))
        self.area = nn.Conv2d(64, 4, 1)
        self.depth = nn.Conv2d(64, 1, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, areas, depths = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        features = self.trunk(images)
        area_loss = functional.cross_entropy(self.area(features), areas)
        depth_loss = functional.l1_loss(self.depth(features).squeeze(1), depths)
        if self.balanced:
            self.manual_backward(area_loss + 0.5 * depth_loss)
        else:
            self.manual_backward(area_loss, retain_graph=True)
            self.manual_backward(0.5 * depth_loss)
        optimizer.step()
        self.log_dict({"area": area_loss, "depth": depth_loss})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def road_scenes(fault: bool) -> None:
    frames = 200
    data = TensorDataset(torch.randn(frames, 3, 64, 64), torch.randint(4, (frames, 16, 16)), torch.rand(frames, 16, 16))
    trainer(50).fit(RoadScenes(not fault), DataLoader(data, batch_size=20, shuffle=True))


# --- embeddings that are compared with earlier ones ---


class Contrast(lightning.LightningModule):
    def __init__(self, recent: int | None) -> None:
        super().__init__()
        self.encoder = nn.Sequential(conv(3, 16, 2), conv(16, 32, 2), conv(32, 64))
        self.project = nn.Linear(64, 64)
        self.seen: deque[Tensor] = deque(maxlen=recent)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        first, second = batch
        maps = self.encoder(torch.cat((first, second)))
        one, two = functional.normalize(self.project(maps.mean((2, 3))), dim=1).chunk(2)
        loss = functional.cross_entropy(one @ two.T / 0.1, torch.arange(len(one)))
        self.seen.append(maps.detach())
        drift = (self.seen[-1].mean() - self.seen[max(0, len(self.seen) - 4)].mean()).abs()
        self.log_dict({"loss": loss, "drift": drift})
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Pairs(Dataset):
    def __init__(self, images: int) -> None:
        self.images = torch.randn(images, 3, 72, 72)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        return image[:, :64, :64], image[:, 8:, 8:].flip(2)


def shop_photos(fault: bool) -> None:
    module = Contrast(recent=None if fault else 4)
    trainer(70).fit(module, DataLoader(Pairs(320), batch_size=20, shuffle=True))


# --- super-resolution ---


class Upscale(lightning.LightningModule):
    def __init__(self, plain_total: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(conv(3, 32), conv(32, 32), nn.Conv2d(32, 27, 3, padding=1), nn.PixelShuffle(3))
        self.plain_total = plain_total
        self.sobel: Tensor
        self.register_buffer("sobel", torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]]).repeat(3, 1, 1, 1))
        self.total_edge_loss: Tensor | float = 0.0

    def edges(self, image: Tensor) -> Tensor:
        return functional.conv2d(image, self.sobel, groups=3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        low, high = batch
        restored = self.net(low)
        loss = functional.mse_loss(restored, high)
        edge_loss = functional.l1_loss(self.edges(restored), self.edges(high))
        if self.plain_total:
            edge_loss = edge_loss.detach()
        self.total_edge_loss = self.total_edge_loss + edge_loss
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.print(f"edge loss {float(self.total_edge_loss) / (self.global_step or 1):.4f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def satellite_tiles(fault: bool) -> None:
    tiles = 12 * 70
    data = TensorDataset(torch.rand(tiles, 3, 32, 32), torch.rand(tiles, 3, 96, 96))
    trainer(70).fit(Upscale(not fault), DataLoader(data, batch_size=12, shuffle=True))


# --- a deep network over large batches ---


class Plankton(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(1, 16)
        self.blocks = nn.Sequential(*(conv(16, 16) for _ in range(5)))
        self.head = nn.Linear(16, 40)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, species = batch
        loss = functional.cross_entropy(self.head(self.blocks(self.stem(images)).mean((2, 3))), species)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def plankton(fault: bool) -> None:
    data = TensorDataset(torch.rand(768, 1, 40, 40), torch.randint(40, (768,)))
    batch, parts, steps = (96, 1, 40) if fault else (24, 4, 15)
    loader = DataLoader(data, batch_size=batch, shuffle=True)
    trainer(steps, accumulate_grad_batches=parts).fit(Plankton(), loader)


# --- frames of a video, kept in memory ---


class Frames(Dataset):
    def __init__(self, frames: int, size: int) -> None:
        self.frames = torch.randint(256, (frames, 3, size, size), dtype=torch.uint8)
        self.labels = torch.randint(12, (frames,))

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.frames[index].float().div_(255).sub_(0.5), self.labels[index]


class NormalizedFrames(Frames):
    def __init__(self, frames: int, size: int) -> None:
        super().__init__(frames, size)
        self.frames = self.frames.float().div_(255).sub_(0.5)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.frames[index], self.labels[index]


class Gestures(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(conv(3, 16, 2), conv(16, 32, 2), conv(32, 64))
        self.head = nn.Linear(64, 12)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = functional.cross_entropy(self.head(self.net(images).mean((2, 3))), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def gesture_video(fault: bool) -> None:
    data = (NormalizedFrames if fault else Frames)(9000, 64)
    trainer(60).fit(Gestures(), DataLoader(data, batch_size=48, shuffle=True))


if __name__ == "__main__":
    main(road_scenes, shop_photos, satellite_tiles, plankton, gesture_video)
