"""GPU trainings with one fault of time each: speech, contrastive, distillation, detection."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import Attention, Layer, Trained, fit, main
from ready import GPU, OPTIONS, ready_loader, sized


class LogMel:
    """Log-mel features of waveforms, on whatever device the waveforms are."""

    def __init__(self, bands: int = 80, window: int = 512, hop: int = 160) -> None:
        self.window = window
        self.hop = hop
        bins = window // 2 + 1
        centers = torch.linspace(0, 1, bands + 2).square() * bins
        places = torch.arange(bins).unsqueeze(1)
        rising = (places - centers[:-2]) / (centers[1:-1] - centers[:-2]).clamp(min=1)
        falling = (centers[2:] - places) / (centers[2:] - centers[1:-1]).clamp(min=1)
        self.tables = {torch.device("cpu"): (torch.hann_window(window), torch.minimum(rising, falling).clamp(min=0))}

    def __call__(self, waveforms: Tensor) -> Tensor:
        device = waveforms.device
        if device not in self.tables:
            shape, bank = self.tables[torch.device("cpu")]
            self.tables[device] = (shape.to(device), bank.to(device))
        shape, bank = self.tables[device]
        spectrum = torch.stft(waveforms, self.window, self.hop, window=shape, return_complex=True)
        power = spectrum.abs().square()[..., :-1].transpose(1, 2)
        features = (power @ bank).clamp(min=1e-6).log()
        return features - features.mean(dim=1, keepdim=True)


class Recognizer(Trained, optimizer=torch.optim.AdamW, lr=3e-4, fused=GPU):
    """Waveforms to characters: log-mel features, a convolution, a stack of LSTMs and CTC."""

    def __init__(self, width: int, layers: int, characters: int, *, early: bool) -> None:
        super().__init__()
        self.early = early
        self.log_mel = LogMel()
        self.shorten = nn.Conv1d(80, width, 5, stride=2, padding=2)
        self.recurrent = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, characters)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        waveforms, texts = batch
        return (self.log_mel(waveforms), texts) if self.early else batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        waveforms, texts = batch
        return batch if self.early else (self.log_mel(waveforms), texts)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        features, texts = batch
        short = functional.gelu(self.shorten(features.transpose(1, 2))).transpose(1, 2)
        hidden, _ = self.recurrent(short)
        logs = self.head(hidden).float().log_softmax(-1).transpose(0, 1)
        count = len(texts)
        lengths, text_lengths = (logs.shape[0],) * count, (texts.shape[1],) * count
        loss = functional.ctc_loss(logs, texts, lengths, text_lengths, zero_infinity=True)  # type: ignore[arg-type]
        self.log("loss", loss)
        return loss


def spoken_features(fault: bool) -> None:
    """Fault: log-mel features are made on the host, before a batch's transfer; healthy: on the GPU, after it."""
    batch, samples, characters = sized(48, 2), sized(160_000, 8_000), 40
    waveforms = torch.randn(4, batch, samples)
    texts = torch.randint(1, characters, (4, batch, sized(80, 6)))
    steps = sized(50, 40)
    model = Recognizer(sized(1024, 32), sized(4, 1), characters, early=fault)
    fit(model, ready_loader(steps, waveforms, texts), steps=steps, **OPTIONS)


class TwoSidedAttention(Attention):
    """Self-attention without the causal mask."""

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value)


class Encoder(nn.Module):
    """Transformer layers over embedded inputs; gives one vector per sample."""

    def __init__(self, embed: nn.Module, length: int, *, layers: int, width: int, heads: int, outputs: int) -> None:
        super().__init__()
        self.embed = embed
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.Sequential(*(Layer(TwoSidedAttention(width, heads), width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layers(self.embed(inputs) + self.positions)
        vectors: Tensor = self.head(self.norm(hidden).mean(dim=1))
        return vectors


class ImageText(Trained, optimizer=torch.optim.AdamW, lr=1e-4, fused=GPU):
    """Contrastive training of an image and a text encoder, with a look at the gradients before each update."""

    def __init__(self, images: Encoder, texts: Encoder, *, every: int) -> None:
        super().__init__()
        self.images = images
        self.texts = texts
        self.scale = nn.Parameter(torch.tensor(2.6))
        self.every = every
        self.broken: list[str] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        patches, tokens = batch
        image = functional.normalize(self.images(patches).float(), dim=-1)
        text = functional.normalize(self.texts(tokens).float(), dim=-1)
        logits = self.scale.exp() * image @ text.T
        pairs = torch.arange(len(logits), device=self.device)
        loss = (functional.cross_entropy(logits, pairs) + functional.cross_entropy(logits.T, pairs)) / 2
        self.log("loss", loss)
        return loss

    def on_after_backward(self) -> None:
        if self.global_step % self.every:
            return
        for name, parameter in self.named_parameters():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                self.broken.append(name)
                parameter.grad = None


def guarded_gradients(fault: bool) -> None:
    """Fault: each step, an `if` on isfinite of each gradient makes the host wait; healthy: every 50 steps."""
    batch, patches, words, outputs = sized(96, 4), sized(196, 9), sized(64, 8), sized(512, 16)
    layers, vocabulary, pixels = sized(12, 2), sized(30_000, 100), sized(768, 48)
    width, text_width = sized(768, 32), sized(512, 32)
    image_encoder = Encoder(
        nn.Linear(pixels, width), patches, layers=layers, width=width, heads=sized(12, 4), outputs=outputs
    )
    text_encoder = Encoder(
        nn.Embedding(vocabulary, text_width),
        words,
        layers=layers,
        width=text_width,
        heads=sized(8, 4),
        outputs=outputs,
    )
    images = torch.randn(4, batch, patches, pixels).to(torch.bfloat16)
    texts = torch.randint(vocabulary, (4, batch, words))
    steps = sized(80, 40)
    model = ImageText(image_encoder, text_encoder, every=1 if fault else 50)
    fit(model, ready_loader(steps, images, texts), steps=steps, **OPTIONS)


class Distilled(lightning.LightningModule):
    """A small encoder learns the answers of a large one, which can make room on the GPU in between."""

    def __init__(self, student: Encoder, teacher: Encoder, *, shuttles: bool) -> None:
        super().__init__()
        self.student = student
        self.teacher = teacher.eval().requires_grad_(False)
        self.shuttles = shuttles

    @torch.no_grad()
    def taught(self, tokens: Tensor) -> Tensor:
        if self.shuttles:
            self.teacher.to(self.device)
        answers: Tensor = self.teacher(tokens).float().softmax(-1)
        if self.shuttles:
            self.teacher.cpu()
        return answers

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, labels = batch
        answers = self.taught(tokens)
        logits = self.student(tokens).float()
        loss = 0.5 * functional.cross_entropy(logits, answers) + 0.5 * functional.cross_entropy(logits, labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.student.parameters(), lr=3e-4, fused=GPU)


def absent_teacher(fault: bool) -> None:
    """Fault: the teacher moves to the GPU and back to the host in every step; healthy: it stays on the GPU."""
    batch, length, vocabulary, classes = sized(256, 4), sized(384, 16), sized(8_000, 100), 64

    def encoder(layers: int, width: int, heads: int) -> Encoder:
        return Encoder(
            nn.Embedding(vocabulary, width), length, layers=layers, width=width, heads=heads, outputs=classes
        )

    tokens = torch.randint(vocabulary, (8, batch, length))
    labels = torch.randint(classes, (8, batch))
    steps = sized(60, 40)
    student = encoder(sized(6, 1), sized(384, 32), sized(6, 4))
    teacher = encoder(sized(8, 2), sized(512, 64), sized(8, 4))
    model = Distilled(student, teacher, shuttles=fault)
    fit(model, ready_loader(steps, tokens, labels), steps=steps, **OPTIONS)


def normalized(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Make a 3x3 convolution with its normalization and activation."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class DenseDetector(Trained, optimizer=torch.optim.SGD, lr=0.01, momentum=0.9):
    """A one-stage detector with a class and a box per place; the images' size changes as the training goes on."""

    def __init__(self, width: int, classes: int, sides: list[int], period: int) -> None:
        super().__init__()
        stages: list[nn.Module] = [normalized(3, width // 2, 2)]
        inputs = width // 2
        for stage in range(3):
            outputs = width << stage
            stages += [normalized(inputs, outputs, 2), *(normalized(outputs, outputs) for _ in range(3))]
            inputs = outputs
        self.trunk = nn.Sequential(*stages)
        self.tower = nn.Sequential(*(normalized(inputs, inputs) for _ in range(2)))
        self.classes = nn.Conv2d(inputs, classes, 3, padding=1)
        self.boxes = nn.Conv2d(inputs, 4, 3, padding=1)
        self.sides = sides
        self.period = period

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels, boxes = batch
        side = self.sides[batch_idx // self.period % len(self.sides)]
        resized = functional.interpolate(images.float() / 255, (side, side), mode="bilinear")
        hidden = self.tower(self.trunk(resized.contiguous(memory_format=torch.channels_last)))
        places = hidden.shape[-2:]
        labels = functional.interpolate(labels.float().unsqueeze(1), places).squeeze(1).long()
        boxes = functional.interpolate(boxes, places)
        found = functional.cross_entropy(self.classes(hidden), labels)
        placed = functional.smooth_l1_loss(self.boxes(hidden).float(), boxes)
        loss = found + placed
        self.log("loss", loss)
        return loss


def multiscale_detector(fault: bool) -> None:
    """Fault: Trainer(benchmark=True) tries cuDNN's algorithms anew for each image size; healthy: it is off."""
    batch, full, classes = sized(64, 2), sized(512, 96), 21
    images = torch.randint(256, (4, batch, 3, full, full), dtype=torch.uint8)
    labels = torch.randint(classes, (4, batch, 16, 16))
    boxes = torch.rand(4, batch, 4, 16, 16)
    sides = list(range(full // 2, full, 16))
    random.Random(1).shuffle(sides)
    steps = sized(96, 40)
    model = DenseDetector(sized(128, 8), classes, sides, period=8)
    model = model.to(memory_format=torch.channels_last)
    fit(model, ready_loader(steps, images, labels, boxes), steps=steps, benchmark=fault, **OPTIONS)


if __name__ == "__main__":
    main(spoken_features, guarded_gradients, absent_teacher, multiscale_detector)
