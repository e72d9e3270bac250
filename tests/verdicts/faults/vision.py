"""Training scripts around pictures: leaf diseases, an autoencoder, a texture network and a detector."""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import main, quiet

SIDE = 256
CROP = 96


def photos(count: int) -> list[bytes]:
    """JPEG files of smooth pictures with some noise, as a phone camera writes them."""
    rng = np.random.default_rng(0)
    files = []
    for _ in range(count):
        coarse = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        picture = Image.fromarray(coarse).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        noisy = np.clip(np.asarray(picture, dtype=np.int16) + rng.integers(-12, 12, (SIDE, SIDE, 3)), 0, 255)
        buffer = io.BytesIO()
        Image.fromarray(noisy.astype(np.uint8)).save(buffer, format="JPEG", quality=92)
        files.append(buffer.getvalue())
    return files


def to_pixels(file: bytes) -> np.ndarray:
    picture = Image.open(io.BytesIO(file)).convert("RGB").resize((CROP, CROP), Image.Resampling.BILINEAR)
    return np.asarray(picture)


class LeafDataset(Dataset):
    """Leaves and their disease."""

    def __init__(self, count: int, ready: bool) -> None:
        self.files = photos(count)
        self.pixels = np.stack([to_pixels(file) for file in self.files]) if ready else None
        self.labels = np.random.default_rng(1).integers(0, 12, count)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = to_pixels(self.files[index]) if self.pixels is None else self.pixels[index]
        picture = torch.from_numpy(pixels.copy()).permute(2, 0, 1).float().div(255)
        return picture, int(self.labels[index])


def stage(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class LeafNet(lightning.LightningModule):
    def __init__(self, width: int = 16, classes: int = 12) -> None:
        super().__init__()
        self.features = nn.Sequential(
            stage(3, width, 2), stage(width, 2 * width, 2), stage(2 * width, 2 * width), stage(2 * width, 4 * width, 2)
        )
        self.classifier = nn.Linear(4 * width, classes)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.classifier(self.features(pictures).mean(dim=(2, 3)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        pictures, labels = batch
        loss = functional.cross_entropy(self(pictures), labels)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def leaf_photos(fault: bool) -> None:
    loader = DataLoader(LeafDataset(512, ready=not fault), batch_size=32, shuffle=True, drop_last=True)
    quiet(48).fit(LeafNet(), loader)


class Autoencoder(lightning.LightningModule):
    """Compresses small satellite tiles."""

    def __init__(self, width: int = 18) -> None:
        super().__init__()
        self.encoder = nn.Sequential(stage(3, width, 2), stage(width, 2 * width, 2), stage(2 * width, 4 * width, 2))
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 2, stride=2),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 2, stride=2),
        )

    def forward(self, tiles: Tensor) -> Tensor:
        return self.decoder(self.encoder(tiles)).sigmoid()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        (tiles,) = batch
        restored = self(tiles)
        loss = functional.mse_loss(restored, tiles)
        self.log("mse", loss)
        return {"loss": loss, "restored": restored.detach()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class ReconstructionSheet(lightning.Callback):
    """Saves the tiles of a batch beside their reconstructions."""

    def __init__(self, folder: Path, every: int) -> None:
        self.folder = folder
        self.every = every

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % self.every:
            return
        pairs = torch.cat([batch[0], outputs["restored"]], dim=3).clamp(0, 1)
        rows = pairs.mul(255).byte().permute(0, 2, 3, 1).numpy()
        sheet = np.concatenate([np.concatenate(list(rows[start : start + 4]), axis=1) for start in range(0, 32, 4)])
        Image.fromarray(sheet).save(self.folder / f"step_{trainer.global_step:05d}.png")


def tile_compression(fault: bool) -> None:
    tiles = torch.rand(640, 3, 12, 12).repeat_interleave(8, dim=2).repeat_interleave(8, dim=3)
    loader = DataLoader(TensorDataset(tiles), batch_size=32, shuffle=True)
    with tempfile.TemporaryDirectory() as folder:
        sheets = ReconstructionSheet(Path(folder), every=1 if fault else 50)
        quiet(50, callbacks=[sheets]).fit(Autoencoder(), loader)


class ActivationStatistics:
    """Distribution of what each watched layer puts out."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, float]] = {}

    def watch(self, network: nn.Module) -> None:
        for name, layer in network.named_modules():
            if isinstance(layer, nn.ReLU):
                layer.register_forward_hook(self.recorder(name))

    def recorder(self, name: str) -> Any:
        def record(layer: nn.Module, inputs: Any, output: Tensor) -> None:
            values = output.detach().flatten()
            counts = torch.histc(values, bins=64, min=0.0, max=6.0)
            self.rows[name] = {
                "mean": values.mean().item(),
                "std": values.std().item(),
                "dead": (values == 0).float().mean().item(),
                "low": (counts[:8].sum() / len(values)).item(),
                "high": (counts[-8:].sum() / len(values)).item(),
            }

        return record


def texture_network(fault: bool) -> None:
    loader = DataLoader(
        TensorDataset(torch.rand(640, 3, 64, 64), torch.randint(12, (640,))), batch_size=64, shuffle=True
    )
    model = LeafNet(width=24)
    if fault:
        ActivationStatistics().watch(model)
    quiet(50).fit(model, loader)


def iou(box: list[float], other: list[float]) -> float:
    width = min(box[2], other[2]) - max(box[0], other[0])
    height = min(box[3], other[3]) - max(box[1], other[1])
    if width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    area = (box[2] - box[0]) * (box[3] - box[1]) + (other[2] - other[0]) * (other[3] - other[1])
    return shared / (area - shared)


def overlaps(boxes: Tensor, anchors: Tensor) -> Tensor:
    """IoU of all boxes (batch x boxes x 4) with all anchors."""
    boxes, anchors = boxes[:, :, None], anchors[None, None]
    size = torch.minimum(boxes[..., 2:], anchors[..., 2:]) - torch.maximum(boxes[..., :2], anchors[..., :2])
    shared = size.clamp(min=0).prod(dim=-1)
    area = (boxes[..., 2:] - boxes[..., :2]).prod(dim=-1) + (anchors[..., 2:] - anchors[..., :2]).prod(dim=-1)
    return shared / (area - shared)


class PedestrianDetector(lightning.LightningModule):
    """One box per anchor on a grid of 8 x 8."""

    def __init__(self, plain_lists: bool) -> None:
        super().__init__()
        self.plain_lists = plain_lists
        self.backbone = nn.Sequential(stage(3, 24, 2), stage(24, 48, 2), stage(48, 64), stage(64, 96, 2))
        self.head = nn.Conv2d(96, 3, 1)
        centers = torch.stack(torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij"), dim=-1).view(-1, 2)
        sizes = torch.tensor([[1.0, 2.0], [2.0, 3.0], [3.0, 4.0]])
        corners = [torch.cat([centers + 0.5 - size / 2, centers + 0.5 + size / 2], dim=1) for size in sizes]
        self.anchors: Tensor
        self.register_buffer("anchors", torch.stack(corners, dim=1).view(-1, 4) / 8)

    def assign(self, boxes: Tensor) -> Tensor:
        if not self.plain_lists:
            return (overlaps(boxes, self.anchors).amax(dim=1) > 0.4).float()
        anchors = self.anchors.tolist()
        targets = []
        for image_boxes in boxes.tolist():
            row = []
            for anchor in anchors:
                best = max(iou(box, anchor) for box in image_boxes)
                row.append(1.0 if best > 0.4 else 0.0)
            targets.append(row)
        return torch.tensor(targets)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        pictures, boxes = batch
        scores = self.head(self.backbone(pictures)).permute(0, 2, 3, 1).flatten(1)
        loss = functional.binary_cross_entropy_with_logits(scores, self.assign(boxes))
        self.log("objectness", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def pedestrians(fault: bool) -> None:
    corner = torch.rand(1600, 6, 2) * 0.7
    boxes = torch.cat([corner, corner + 0.1 + 0.2 * torch.rand(1600, 6, 2)], dim=-1)
    loader = DataLoader(TensorDataset(torch.rand(1600, 3, 64, 64), boxes), batch_size=32, shuffle=True)
    quiet(50).fit(PedestrianDetector(plain_lists=fault), loader)


if __name__ == "__main__":
    main(leaf_photos, tile_compression, texture_network, pedestrians)
