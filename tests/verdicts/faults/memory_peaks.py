"""Memory that is held needlessly at the peak: activations, optimizer state, copies, data."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import (
    BATCH,
    STEPS,
    Classifier,
    Counted,
    LanguageModel,
    Tokens,
    Trained,
    Vectors,
    fit,
    main,
    one_epoch,
    quiet,
    trainer,
)
from small_models import convolution


class LongContext(LanguageModel):
    """A language model over 512 tokens that may recompute its layers in backward."""

    def __init__(self, recompute: bool) -> None:
        super().__init__(layers=16, width=64)
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.recompute else layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def activations(fault: bool) -> None:
    """Sixteen layers save the activations of long sequences; healthy: activation checkpointing."""
    fit(LongContext(recompute=not fault), DataLoader(Tokens(STEPS * 4, 513), batch_size=4), steps=40)


class FrameBlock(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, width)
        self.depthwise = nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation, groups=width)
        self.pointwise = nn.Conv1d(width, width, 1)
        self.act = nn.SiLU()

    def forward(self, frames: Tensor) -> Tensor:
        return frames + self.pointwise(self.act(self.depthwise(self.norm(frames))))


class PhonemeTagger(Trained, optimizer=torch.optim.SGD, lr=0.05):
    def __init__(self, recompute: bool, width: int = 32, depth: int = 10, phonemes: int = 40) -> None:
        super().__init__()
        self.recompute = recompute
        self.stem = nn.Conv1d(20, width, 3, padding=1)
        self.blocks = nn.ModuleList(FrameBlock(width, dilation=2 ** (number % 4)) for number in range(depth))
        self.head = nn.Conv1d(width, phonemes, 4, stride=4)

    def forward(self, frames: Tensor) -> Tensor:
        frames = self.stem(frames)
        for block in self.blocks:
            frames = checkpoint(block, frames, use_reentrant=False) if self.recompute else block(frames)
        return self.head(frames)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        frames, phonemes = batch
        loss = functional.cross_entropy(self(frames), phonemes)
        self.log("loss", loss)
        return loss


class Utterances(Counted[tuple[Tensor, Tensor]]):
    def __init__(self, samples: int, frames: int) -> None:
        self.samples = samples
        self.frames = torch.randn(32, 20, frames)
        self.phonemes = torch.randint(40, (32, frames // 4))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.frames[index % 32], self.phonemes[index % 32]


def speech(fault: bool) -> None:
    """Ten blocks save their activations for backward; healthy: activation checkpointing."""
    one_epoch().fit(PhonemeTagger(recompute=not fault), DataLoader(Utterances(40 * 16, frames=2400), batch_size=16))


class Plankton(Trained, optimizer=torch.optim.SGD, lr=0.01):
    def __init__(self) -> None:
        super().__init__()
        self.stem = convolution(1, 16)
        self.blocks = nn.Sequential(*(convolution(16, 16) for _ in range(5)))
        self.head = nn.Linear(16, 40)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, species = batch
        loss = functional.cross_entropy(self.head(self.blocks(self.stem(images)).mean((2, 3))), species)
        self.log("loss", loss)
        return loss


def plankton(fault: bool) -> None:
    """96 images per batch, with the activations of all; healthy: 4 times 24."""
    data = TensorDataset(torch.rand(768, 1, 40, 40), torch.randint(40, (768,)))
    batch, parts, steps = (96, 1, 40) if fault else (24, 4, 15)
    loader = DataLoader(data, batch_size=batch, shuffle=True)
    trainer(steps, accumulate_grad_batches=parts).fit(Plankton(), loader)


class MosaicMatcher(Trained, optimizer=torch.optim.SGD, lr=0.01):
    """Matches the patches of two photos of a mosaic: each patch finds its partner among all patches of a batch."""

    def __init__(self, at_once: bool) -> None:
        super().__init__()
        self.at_once = at_once
        self.encoder = nn.Sequential(nn.Linear(192, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 64))

    def rows_loss(self, rows: Tensor, others: Tensor, partners: Tensor) -> Tensor:
        similarity = rows @ others.T / 0.1
        return functional.cross_entropy(similarity, partners, reduction="sum")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        first, second = (functional.normalize(self.encoder(photo.flatten(0, 1)), dim=1) for photo in batch)
        partners = torch.arange(len(first))
        if self.at_once:
            return self.rows_loss(first, second, partners) / len(first)
        total = torch.zeros(())
        for rows, targets in zip(first.split(512), partners.split(512), strict=True):
            total = total + checkpoint(self.rows_loss, rows, second, targets, use_reentrant=False)
        return total / len(first)


def mosaics(fault: bool) -> None:
    """The similarities of all patches are held at once; healthy: they are computed part by part."""
    data = TensorDataset(torch.rand(480, 64, 192), torch.rand(480, 64, 192))
    quiet(60).fit(MosaicMatcher(at_once=fault), DataLoader(data, batch_size=48, shuffle=True))


class PaletteNetwork(Trained, optimizer=torch.optim.SGD, lr=1e-3):
    """Predicts how often each of 24 tones occurs in a picture, per channel; each epoch tints the pictures anew."""

    def __init__(self, pictures: Tensor, at_once: int, bins: int = 24) -> None:
        super().__init__()
        self.pictures = pictures
        self.wanted = torch.empty(len(pictures), 3, bins)
        self.at_once = at_once
        self.bins = bins
        self.network = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 128, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, 3 * bins),
        )

    def soft_histogram(self, pictures: Tensor) -> Tensor:
        centers = torch.linspace(0, 1, self.bins)
        near = torch.relu(1 - self.bins * (pictures.flatten(2)[..., None] - centers).abs())
        histogram = near.sum(dim=2)
        return histogram / histogram.sum(dim=-1, keepdim=True)

    def on_train_epoch_start(self) -> None:
        self.tint = torch.rand(1, 3, 1, 1)
        with torch.no_grad():
            parts = self.pictures.split(self.at_once)
            self.wanted = torch.cat([self.soft_histogram(part * self.tint) for part in parts])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        pictures, numbers = batch
        predicted = self.network(pictures * self.tint).view(-1, 3, self.bins)
        loss = functional.kl_div(predicted.log_softmax(-1), self.wanted[numbers], reduction="batchmean")
        self.log("kl", loss)
        return loss


def palettes(fault: bool) -> None:
    """Histograms of all pictures are made at once; healthy: of five at a time."""
    pictures = torch.rand(200, 3, 64, 64)
    loader = DataLoader(TensorDataset(pictures, torch.arange(200)), batch_size=8, shuffle=True)
    one_epoch(max_epochs=2).fit(PaletteNetwork(pictures, at_once=200 if fault else 5), loader)


class Segmenter(Trained, optimizer=torch.optim.SGD, lr=0.01):
    """Segments scans; a batch goes through the network in parts to save memory.

    Fault: the parts' losses are summed and go backward at the end; healthy: each part goes backward at once.
    """

    def __init__(self, *, fault: bool, parts: int = 12, width: int = 24, classes: int = 4) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.fault = fault
        self.parts = parts
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, classes, 1),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        optimizer.zero_grad()
        total = torch.zeros(())
        for scans, masks in zip(*(part.chunk(self.parts) for part in batch), strict=True):
            loss = functional.cross_entropy(self.layers(scans), masks) / self.parts
            if self.fault:
                total = total + loss
            else:
                self.manual_backward(loss)
                total = total + loss.detach()
        if self.fault:
            self.manual_backward(total)
        optimizer.step()
        self.log("loss", total.detach())


def summed_parts(fault: bool) -> None:
    """The graphs of all parts of a batch live until one backward; healthy: a backward after each part."""
    scans = TensorDataset(torch.randn(48, 1, 128, 128), torch.randint(4, (48, 128, 128)))
    fit(Segmenter(fault=fault), DataLoader(scans, batch_size=24, shuffle=True), steps=40)


class Comparing(Trained, optimizer=torch.optim.SGD, lr=0.01):
    """Compares a loss with the one before: the tensor with its graph, or a number."""

    def __init__(self, retain: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.retain = retain
        self.network = Classifier(width=128, depth=8)
        self.previous: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        features, labels = batch
        optimizer = self.optimizers()
        loss = functional.cross_entropy(self.network(features.view(-1, 128)), labels.repeat_interleave(4))
        optimizer.zero_grad()
        self.manual_backward(loss, retain_graph=self.retain)
        optimizer.step()
        if self.previous is not None:
            self.log("improvement", float(self.previous) - float(loss))
        self.previous = loss if self.retain else float(loss)


def retained_graph(fault: bool) -> None:
    """`retain_graph=True` and the loss on the module keep a step's activations during the next; healthy: neither."""
    fit(Comparing(retain=fault), DataLoader(Vectors(40, 800), batch_size=800), steps=40)


class MaskedAttention(nn.Module):
    """Self-attention with a mask that is a buffer, as large as the longest sequence that the model could take."""

    bias: Tensor

    def __init__(self, width: int, heads: int, longest: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("bias", torch.ones(longest, longest).tril().log()[None, None])

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.project(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, self.bias[..., :length, :length])
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return projected


class Music(Trained, optimizer=torch.optim.AdamW, lr=3e-4):
    """Predicts the next note."""

    def __init__(self, longest: int, layers: int = 5, width: int = 96) -> None:
        super().__init__()
        self.notes = nn.Embedding(128, width)
        self.attentions = nn.ModuleList(MaskedAttention(width, 4, longest) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.next_note = nn.Linear(width, 128)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (notes,) = batch
        hidden = self.notes(notes[:, :-1])
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            hidden = hidden + attention(norm(hidden))
        return functional.cross_entropy(self.next_note(hidden).mT, notes[:, 1:])


def mask_per_layer(fault: bool) -> None:
    """Each of 5 layers has a mask for 3072 positions, 36 MiB each; healthy: for the 64 that occur."""
    notes = TensorDataset(torch.randint(128, (16 * 60, 65)))
    fit(Music(longest=3072 if fault else 64), DataLoader(notes, batch_size=16), steps=60)


class Wide(Classifier):
    """25 million parameters and an optimizer with or without state."""

    def __init__(self, state: bool) -> None:
        super().__init__(width=1024, depth=3)
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([x, x], dim=1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.state:
            return torch.optim.Adam(self.parameters(), lr=1e-4, fused=True)
        return torch.optim.SGD(self.parameters(), lr=0.01, fused=True)


def optimizer_state(fault: bool) -> None:
    """Adam's state takes twice as much as the parameters; healthy: SGD has none."""
    fit(Wide(state=fault), DataLoader(Vectors(batch=64), batch_size=64), steps=50)


class GeneAutoencoder(lightning.LightningModule):
    def __init__(self, adam: bool, genes: int = 18_000, width: int = 768) -> None:
        super().__init__()
        self.adam = adam
        self.encode = nn.Sequential(nn.Linear(genes, width), nn.ReLU(), nn.Linear(width, 64))
        self.decode = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, genes))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (expression,) = batch
        loss = functional.mse_loss(self.decode(self.encode(expression)), expression)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def genes(fault: bool) -> None:
    """Adam's state takes twice as much as the parameters; healthy: SGD has none."""
    cells = torch.randn(160, 18_000)
    one_epoch(max_epochs=10).fit(GeneAutoencoder(adam=fault), DataLoader(TensorDataset(cells), batch_size=32))


class Vocoder(lightning.LightningModule):
    def __init__(self, adaptive: bool, width: int = 4096) -> None:
        super().__init__()
        self.adaptive = adaptive
        self.net = nn.Sequential(
            nn.Linear(512, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 2048)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> STEP_OUTPUT:
        mel, wave = batch
        loss = functional.mse_loss(self.net(mel), wave)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.adaptive:
            return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)
        return torch.optim.SGD(self.parameters(), lr=1e-3, fused=True)


def vocoder(fault: bool) -> None:
    """Adam's state takes twice as much as the parameters; healthy: SGD has none."""
    data = TensorDataset(torch.randn(2048, 512), torch.randn(2048, 2048))
    fit(Vocoder(adaptive=fault), DataLoader(data, batch_size=96, shuffle=True), steps=40)


class Evaluated(Classifier):
    """Compares the hidden features of all validation batches at the end: complete, or as a mean per batch."""

    def __init__(self, complete: bool) -> None:
        super().__init__()
        self.complete = complete
        self.outputs: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hidden = self.blocks[0].get_submodule("expand")(batch[0])
        self.outputs.append(hidden if self.complete else hidden.mean(0, keepdim=True))

    def on_validation_epoch_end(self) -> None:
        self.log("feature_mean", torch.cat(self.outputs).mean())
        self.outputs.clear()


def validation_outputs(fault: bool) -> None:
    """Validation keeps 2 MiB of features per batch until its end; healthy: their mean."""
    training, validation = DataLoader(Vectors(), batch_size=BATCH), DataLoader(Vectors(60), batch_size=BATCH)
    fit(Evaluated(complete=fault), training, validation, val_check_interval=30)


class Restorer(Trained, optimizer=torch.optim.Adam, lr=1e-3):
    def __init__(self, collect: bool) -> None:
        super().__init__()
        self.collect = collect
        self.validation_outputs: list[dict[str, Tensor]] = []
        self.errors: list[float] = []
        self.network = nn.Sequential(
            nn.Conv2d(3, 24, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, 24, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, 3, 3, padding=1),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noisy, clean = batch
        loss = functional.l1_loss(noisy + self.network(noisy), clean)
        self.log("train_l1", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        noisy, clean = batch
        restored = noisy + self.network(noisy)
        if self.collect:
            self.validation_outputs.append({"restored": restored, "clean": clean})
        else:
            # The tensor that mse_loss returns keeps memory for all elements.
            self.errors.append(functional.mse_loss(restored, clean).item())

    def on_validation_epoch_end(self) -> None:
        if self.collect:
            restored = torch.cat([output["restored"] for output in self.validation_outputs])
            clean = torch.cat([output["clean"] for output in self.validation_outputs])
            error = functional.mse_loss(restored, clean)
            self.validation_outputs.clear()
        else:
            error = torch.tensor(self.errors).mean()
            self.errors.clear()
        self.log("psnr", -10 * error.log10())


class NoisyPictures(Counted[tuple[Tensor, Tensor]]):
    def __init__(self, samples: int, side: int = 96) -> None:
        self.samples = samples
        self.clean = torch.rand(32, 3, side, side)
        self.noisy = self.clean + 0.1 * torch.randn_like(self.clean)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.noisy[index % 32], self.clean[index % 32]


def restoration(fault: bool) -> None:
    """Validation keeps each restored picture until its end; healthy: its error."""
    training = DataLoader(NoisyPictures(30 * 8), batch_size=8)
    validation = DataLoader(NoisyPictures(32 * 24), batch_size=24)
    one_epoch(max_epochs=2, num_sanity_val_steps=0).fit(Restorer(collect=fault), training, validation)


class Beats(Dataset[tuple[Tensor, Tensor]]):
    """Recordings of hearts, in memory."""

    def __init__(self, samples: int, length: int = 1000) -> None:
        self.signals = torch.randn(samples, 1, length)
        self.kinds = torch.randint(5, (samples,))

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.signals[index], self.kinds[index]


class Hearts(lightning.LightningDataModule):
    """Recordings of hearts. Fault: ``setup`` loads the data of every stage; healthy: that of the stage it is given."""

    def __init__(self, *, fault: bool) -> None:
        super().__init__()
        self.fault = fault

    def setup(self, stage: str) -> None:
        if self.fault or stage == "fit":
            self.training = Beats(15_000)
            self.validation = Beats(2_000)
        if self.fault or stage == "test":
            self.testing = Beats(30_000)
        if self.fault or stage == "predict":
            self.unlabeled = Beats(40_000)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.training, batch_size=128, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation, batch_size=128)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.testing, batch_size=128)

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(self.unlabeled, batch_size=128)


class Rhythm(Trained, optimizer=torch.optim.AdamW, lr=1e-3):
    """A convolutional network over recordings of hearts."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, width, 9, stride=2, padding=4),
            nn.ReLU(),
            nn.Conv1d(width, 2 * width, 9, stride=2, padding=4),
            nn.ReLU(),
            nn.Conv1d(2 * width, 4 * width, 9, stride=2, padding=4),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(4 * width, 5),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        signals, kinds = batch
        loss = functional.cross_entropy(self.layers(signals), kinds)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        signals, kinds = batch
        self.log("val_loss", functional.cross_entropy(self.layers(signals), kinds))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        kinds: Tensor = self.layers(batch[0]).argmax(dim=1)
        return kinds

    test_step = validation_step


def every_stage(fault: bool) -> None:
    """``setup`` holds the test and prediction data during the fit; healthy: it loads what the fit needs."""
    quiet(80).fit(Rhythm(), datamodule=Hearts(fault=fault))


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


class Gestures(Trained, optimizer=torch.optim.SGD, lr=0.01):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(convolution(3, 16, 2), convolution(16, 32, 2), convolution(32, 64))
        self.head = nn.Linear(64, 12)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = functional.cross_entropy(self.head(self.net(images).mean((2, 3))), labels)
        self.log("loss", loss)
        return loss


def gesture_video(fault: bool) -> None:
    """All frames are held as float32; healthy: as bytes, converted when they are read."""
    data = (NormalizedFrames if fault else Frames)(9000, 64)
    trainer(60).fit(Gestures(), DataLoader(data, batch_size=48, shuffle=True))


class Strides(Counted[Tensor]):
    """Overlapping windows of a recording of movements.

    Fault: every window is a copy, so that each value is held 256 times; healthy: windows are cut when they are read.
    """

    def __init__(self, samples: int, length: int = 256, channels: int = 6, *, fault: bool) -> None:
        self.samples = samples
        self.length = length
        self.recording = torch.randn(samples + length, channels)
        self.windows: Tensor | None = None
        if fault:
            self.windows = torch.stack([self.window(start) for start in range(samples)])

    def window(self, start: int) -> Tensor:
        return self.recording[start : start + self.length]

    def __getitem__(self, index: int) -> Tensor:
        return self.window(index) if self.windows is None else self.windows[index]


class Gait(Trained, optimizer=torch.optim.AdamW, lr=1e-3):
    """Reconstructs windows of movements from a short code."""

    def __init__(self, channels: int = 6, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(channels, width, 8, stride=4, padding=2),
            nn.ReLU(),
            nn.Conv1d(width, 16, 8, stride=4, padding=2),
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose1d(16, width, 8, stride=4, padding=2),
            nn.ReLU(),
            nn.ConvTranspose1d(width, channels, 8, stride=4, padding=2),
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        movements = batch.transpose(1, 2)
        loss = functional.mse_loss(self.decoder(self.encoder(movements)), movements)
        self.log("loss", loss)
        return loss


def copied_windows(fault: bool) -> None:
    """All overlapping windows of a series are stacked in memory; healthy: a window is a slice, when read."""
    loader = DataLoader(Strides(40_000, fault=fault), batch_size=64, shuffle=True)
    fit(Gait(), loader, steps=200)


class Ranker(lightning.LightningModule):
    """Ranks articles for readers by pretrained vectors of words.

    Fault: ``save_hyperparameters`` copies the vectors; healthy: it ignores them.
    """

    def __init__(self, vectors: Tensor, width: int = 512, *, fault: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=None if fault else ["vectors"])
        self.words = nn.Embedding.from_pretrained(vectors, freeze=True)
        self.article = nn.Sequential(nn.Linear(vectors.shape[1], width), nn.GELU(), nn.Linear(width, width))
        self.reader = nn.GRUCell(width, width)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        read, offered, clicked = batch
        articles = self.article(self.words(read).mean(dim=2))
        reader = articles[:, 0]
        for place in range(1, articles.shape[1]):
            reader = self.reader(articles[:, place], reader)
        candidates = self.article(self.words(offered).mean(dim=2))
        loss = functional.cross_entropy((candidates @ reader[:, :, None])[:, :, 0], clicked)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.Adam(trained, lr=1e-3)


def copied_argument(fault: bool) -> None:
    """``save_hyperparameters()`` deep-copies the word vectors; healthy: ``ignore=["vectors"]``."""
    vectors = torch.randn(200_000, 200)
    clicks = TensorDataset(
        torch.randint(200_000, (40 * 64, 6, 12)),
        torch.randint(200_000, (40 * 64, 5, 12)),
        torch.randint(5, (40 * 64,)),
    )
    loader = DataLoader(clicks, batch_size=64, shuffle=True)
    fit(Ranker(vectors, fault=fault), loader, steps=120, logger=False)


class KeepBest(Callback):
    """Keeps the model with the best loss of an epoch."""

    def __init__(self) -> None:
        self.best_loss = float("inf")
        self.best_model: lightning.LightningModule | None = None

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        loss = trainer.callback_metrics["loss"].item()
        if loss < self.best_loss:
            self.best_loss = loss
            self.best_model = copy.deepcopy(pl_module)


class CustomsNet(Trained, optimizer=torch.optim.SGD, lr=0.1):
    """Finds the tariff code of a customs form from its word counts."""

    def __init__(self, words: int = 8000, width: int = 4096, codes: int = 500) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(words, width), nn.ReLU(), nn.Linear(width, codes))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        counts, code = batch
        loss = functional.cross_entropy(self.layers(counts), code)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss


def customs_forms(fault: bool) -> None:
    """A callback keeps a copy of the best model in memory; healthy: it does not."""
    data = TensorDataset(torch.rand(1280, 8000), torch.randint(500, (1280,)))
    callbacks = [KeepBest()] if fault else []
    quiet(80, callbacks=callbacks).fit(CustomsNet(), DataLoader(data, batch_size=64, shuffle=True))


if __name__ == "__main__":
    main(
        activations,
        speech,
        plankton,
        mosaics,
        palettes,
        summed_parts,
        retained_graph,
        mask_per_layer,
        optimizer_state,
        genes,
        vocoder,
        validation_outputs,
        restoration,
        every_stage,
        gesture_video,
        copied_windows,
        copied_argument,
        customs_forms,
    )
