"""The process as a whole: threads, cores, the garbage collector, anomaly detection, another profiler."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from plain import BATCH, Classifier, Trained, Vectors, fit, labeled, main, one_epoch, quiet, vector_batches
from small_models import HalvingClassifier, Highway, SeriesModel, perceptron


def one_thread(fault: bool) -> None:
    """Operators use one of the cores; healthy: all of them, as by default."""
    if fault:
        torch.set_num_threads(1)
    fit(Classifier(depth=4), DataLoader(Vectors(), batch_size=BATCH))


class BidModel(Trained, optimizer=torch.optim.SGD, lr=0.01, momentum=0.9):
    """The price at which an auction ends."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(256, 1024, 3, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        auctions, price = batch
        loss = functional.smooth_l1_loss(self.net(auctions), price)
        self.log("loss", loss)
        return loss


def ad_auctions(fault: bool) -> None:
    """Operators use one of the cores; healthy: all of them, as by default."""
    if fault:
        torch.set_num_threads(1)  # be nice to the others on the server
    data = TensorDataset(torch.randn(512 * 20, 256), torch.rand(512 * 20, 1))
    quiet(80).fit(BidModel(), DataLoader(data, batch_size=512, shuffle=True))


def many_threads(fault: bool) -> None:
    """Operators use 32 threads on few cores; healthy: torch's default."""
    if fault:
        torch.set_num_threads(32)
    fit(Classifier(), vector_batches())


class CartPolicy(Trained, optimizer=torch.optim.Adam, lr=3e-4):
    """Actor and critic over what the cart's sensors say."""

    def __init__(self, sensors: int = 32, actions: int = 6, width: int = 224) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(sensors, width), nn.Tanh()]
        for _ in range(6):
            layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh()]
        self.body = nn.Sequential(*layers)
        self.actor = nn.Linear(width, actions)
        self.critic = nn.Linear(width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        sensors, action, returns = batch
        hidden = self.body(sensors)
        value = self.critic(hidden).squeeze(1)
        chances = functional.log_softmax(self.actor(hidden), dim=1)
        chosen = chances.gather(1, action[:, None]).squeeze(1)
        policy = -(chosen * (returns - value.detach())).mean()
        entropy = -(chances.exp() * chances).sum(dim=1).mean()
        loss = policy + 0.5 * functional.mse_loss(value, returns) - 0.01 * entropy
        self.log("loss", loss)
        return loss


def transitions(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 32), torch.randint(6, (count,)), torch.randn(count))


def cart_policy(fault: bool) -> None:
    """Operators use 16 threads on few cores; healthy: torch's default."""
    if fault:
        torch.set_num_threads(16)
    quiet(60).fit(CartPolicy(), DataLoader(transitions(1024 * 60), batch_size=1024, shuffle=True))


class Nowcaster(Trained, optimizer=torch.optim.AdamW, lr=1e-3):
    """Convolutions from four radar frames to the change until the next."""

    def __init__(self, width: int = 48, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, width, 3, padding=1)
        self.body = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth - 1))
        self.out = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, frames: Tensor) -> Tensor:
        x = functional.relu(self.first(frames))
        for convolution in self.body:
            x = functional.relu(convolution(x))
        return frames[:, -1:] + self.out(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        frames, target = batch
        loss = functional.smooth_l1_loss(self(frames), target)
        self.log("train/loss", loss)
        return loss


def nowcasting(fault: bool) -> None:
    """Operators use 20 threads on few cores; healthy: torch's default."""
    settings = {"cpu_threads": 20 if fault else None, "batch_size": 16}
    if settings["cpu_threads"]:
        torch.set_num_threads(settings["cpu_threads"])
    radar = TensorDataset(torch.rand(40 * 16, 4, 48, 48), torch.rand(40 * 16, 1, 48, 48))
    one_epoch().fit(Nowcaster(), DataLoader(radar, settings["batch_size"], shuffle=True))


def radar_echoes(fault: bool) -> None:
    """Operators use 8 threads on few cores; healthy: torch's default."""
    if fault:
        torch.set_num_threads(8)
    echoes = TensorDataset(torch.randn(64 * 20, 2, 2048), torch.randint(4, (64 * 20,)))
    quiet(80).fit(SeriesModel(2, 64, 4), DataLoader(echoes, batch_size=64, shuffle=True))


BUSY = "while True: pass"
ASLEEP = "import time\nwhile True: time.sleep(0.001)"


@contextlib.contextmanager
def neighbors(program: str) -> Iterator[None]:
    """Run another process for each core that this one may use, two of them on each."""
    cores = sorted(os.sched_getaffinity(0)) * 2
    with contextlib.ExitStack() as running:
        for core in cores:
            other = running.enter_context(subprocess.Popen([sys.executable, "-c", program]))
            running.callback(other.kill)
            os.sched_setaffinity(other.pid, {core})
        yield


def shared_cores(fault: bool) -> None:
    """Two busy processes on each core of the training; healthy: as many processes that sleep."""
    with neighbors(BUSY if fault else ASLEEP):
        fit(Classifier(), DataLoader(Vectors(), batch_size=BATCH))


class Collecting(Classifier):
    """Calls Python's collector after each batch, against a leak that was once suspected."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        gc.collect()


def forced_collection(fault: bool) -> None:
    """Each step ends with a full garbage collection; healthy: it does not."""
    fit(Collecting() if fault else Classifier(), vector_batches())


class HostMemoryGuard(Callback):
    """Keeps the resident memory of long runs low."""

    def __init__(self, every_n_steps: int) -> None:
        self.every_n_steps = every_n_steps

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.every_n_steps == 0:
            gc.collect()


class LandCover(Trained, optimizer=torch.optim.SGD, lr=0.01, momentum=0.9):
    def __init__(self, bands: int = 10, classes: int = 12) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(bands, 48, 3, padding=1),
            nn.BatchNorm2d(48),
            nn.ReLU(),
            nn.Conv2d(48, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, classes, 1),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        image, mask = batch
        loss = functional.cross_entropy(self.net(image), mask)
        self.log("loss", loss)
        return loss


def land_cover(fault: bool) -> None:
    """A callback calls `gc.collect()` after each step; healthy: after each 1000."""
    tiles = TensorDataset(torch.randn(50 * 8, 10, 64, 64), torch.randint(12, (50 * 8, 64, 64)))
    guard = HostMemoryGuard(every_n_steps=1 if fault else 1000)
    one_epoch(callbacks=[guard]).fit(LandCover(), DataLoader(tiles, 8, shuffle=True))


class Article:
    def __init__(self, number: int) -> None:
        self.number = number
        self.tags = [f"tag{number % 97}", f"tag{number % 89}"]
        self.prices = {"list": number % 50 + 0.99, "sale": number % 40 + 0.49}


class BasketModel(Trained, optimizer=torch.optim.SGD, lr=0.1):
    """Predicts the next article of a basket; the catalogue says what each article is."""

    def __init__(self, tidy: bool, articles: int = 6_000, width: int = 128) -> None:
        super().__init__()
        self.tidy = tidy
        self.catalogue = {number: Article(number) for number in range(articles)}
        self.embedding = nn.Embedding(4000, width)
        self.network = perceptron(8 * width, 2048, 1, 4000)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        basket, following = batch
        loss = functional.cross_entropy(self.network(self.embedding(basket).flatten(1)), following)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.tidy:
            gc.collect()


def shopping_baskets(fault: bool) -> None:
    """The module calls `gc.collect()` in each step; healthy: it does not."""
    data = TensorDataset(torch.randint(4000, (256 * 60, 8)), torch.randint(4000, (256 * 60,)))
    quiet(60).fit(BasketModel(tidy=fault), DataLoader(data, batch_size=256, shuffle=True))


class FlakeClassifier(HalvingClassifier):
    """Sorts snowflakes by their form."""

    def __init__(self, tidy: bool) -> None:
        super().__init__(1, (64, 96, 128), 8)
        self.tidy = tidy

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.tidy:
            gc.collect()  # keep the memory low


def snowflakes(fault: bool) -> None:
    """The module calls `gc.collect()` in each step; healthy: it does not."""
    data = TensorDataset(torch.randn(64 * 20, 1, 72, 72), torch.randint(8, (64 * 20,)))
    quiet(50).fit(FlakeClassifier(tidy=fault), DataLoader(data, batch_size=64, shuffle=True))


class Replay(lightning.Callback):
    """Keeps the latest predictions for error analysis: as Python objects, or as arrays."""

    def __init__(self, objects: bool) -> None:
        self.objects = objects
        self.recent: deque[Any] = deque(maxlen=24)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        features, labels = batch
        if not self.objects:
            self.recent.append((features.numpy().copy(), labels.numpy().copy()))
            return
        rows = features[:, :200].tolist()
        self.recent.append(
            [
                {"label": label, "parts": [[at, value] for at, value in enumerate(row)]}
                for label, row in zip(labels.tolist(), rows, strict=True)
            ]
        )


def live_objects(fault: bool) -> None:
    """A buffer of a million small lists makes Python's collector slow; healthy: a buffer of arrays."""
    fit(Classifier(), vector_batches(), callbacks=[Replay(objects=fault)])


class Transition:
    __slots__ = ("action", "info", "reward", "state", "successor")

    def __init__(self, state: list[float], action: int, reward: float, successor: list[float], info: Any) -> None:
        self.state, self.action, self.reward, self.successor, self.info = state, action, reward, successor, info


def rollout(count: int) -> list[Transition]:
    """What the simulators give in ``count`` ticks."""
    steps = []
    for number in range(count):
        value = random.random()
        steps.append(Transition([value] * 8, number & 3, value, [1 - value] * 8, {"step": number}))
    return steps


def stacked(steps: list[Transition]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.tensor([one.state for one in steps]),
        torch.tensor([one.action for one in steps]),
        torch.tensor([one.reward for one in steps]),
        torch.tensor([one.successor for one in steps]),
    )


class Experience(IterableDataset):
    """Steps the simulators, keeps some of what they gave, then draws a batch of old and new."""

    def __init__(self, memory: deque[Transition], steps: int, ticks: int) -> None:
        self.memory, self.steps, self.ticks = memory, steps, ticks

    def __iter__(self) -> Any:
        for _ in range(self.steps):
            latest = rollout(self.ticks)
            old = [self.memory[0] for _ in range(128)]
            self.memory.extend(latest[::32])
            yield stacked(old + latest[:384])


class ValueLearner(Trained, optimizer=torch.optim.SGD, lr=1e-3):
    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.q = nn.Sequential(
            nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.head = nn.Linear(width, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        state, action, reward, successor = batch
        with torch.no_grad():
            target = reward + 0.99 * self.head(self.q(successor)).max(1).values
        value = self.head(self.q(state)).gather(1, action[:, None]).squeeze(1)
        loss = functional.smooth_l1_loss(value, target)
        self.log("td_loss", loss)
        return loss


def value_learning(fault: bool) -> None:
    """The collector visits 600,000 transitions in memory again and again; healthy: they are frozen."""
    memory = deque(rollout(600_000), maxlen=600_000)
    if not fault:
        gc.freeze()
        gc.disable()
    one_epoch().fit(ValueLearner(), DataLoader(Experience(memory, 60, 12_000), batch_size=None))


@dataclass
class Trip:
    """A trip: what the meter and the map say, and the tip."""

    features: list[float]
    tip: float


class RecentTrips(IterableDataset):
    """Batches from the most recent trips of the city; new trips come in all the time and push the oldest out."""

    def __init__(self, window: int, fresh: int, batch: int, width: int = 24) -> None:
        self.window, self.fresh, self.batch, self.width = window, fresh, batch, width
        self.rng = np.random.default_rng(0)
        self.oldest = 0

    def meter(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self.rng.random((count, self.width), dtype=np.float32)
        return rows, rows[:, 0] * 5

    def places(self) -> np.ndarray:
        places = (self.oldest + np.arange(self.fresh)) % self.window
        self.oldest = (self.oldest + self.fresh) % self.window
        return places


class TripObjects(RecentTrips):
    """Keeps each trip as an object."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        rows, tips = self.meter(self.window)
        self.trips = [Trip(row, tip) for row, tip in zip(rows.tolist(), tips.tolist(), strict=True)]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            rows, tips = self.meter(self.fresh)
            for place, row, tip in zip(self.places().tolist(), rows.tolist(), tips.tolist(), strict=True):
                self.trips[place] = Trip(row, tip)
            chosen = [self.trips[place] for place in self.rng.integers(self.window, size=self.batch)]
            yield torch.tensor([trip.features for trip in chosen]), torch.tensor([[trip.tip] for trip in chosen])


class TripArrays(RecentTrips):
    """Keeps the trips in two arrays."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.rows, self.tips = self.meter(self.window)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            places = self.places()
            self.rows[places], self.tips[places] = self.meter(self.fresh)
            chosen = self.rng.integers(self.window, size=self.batch)
            yield torch.from_numpy(self.rows[chosen]), torch.from_numpy(self.tips[chosen])[:, None]


class TipModel(Trained, optimizer=torch.optim.AdamW, lr=1e-3):
    """The tip for a trip."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(24, 512, 3, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        trips, tip = batch
        loss = functional.mse_loss(self.net(trips), tip)
        self.log("loss", loss)
        return loss


def taxi_trips(fault: bool) -> None:
    """400,000 trips are objects, which the collector visits; healthy: arrays."""
    kind = TripObjects if fault else TripArrays
    quiet(120).fit(TipModel(), DataLoader(kind(400_000, 4000, 512), batch_size=None))


class Deep(Classifier):
    """Many layers, so many operators for autograd."""

    def __init__(self) -> None:
        super().__init__(width=192, depth=16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :192])


def anomaly_detection(fault: bool) -> None:
    """Anomaly detection stays on after debugging; healthy: it is off."""
    fit(Deep(), vector_batches(128), detect_anomaly=fault)


class RobotModel(Trained, optimizer=torch.optim.SGD, lr=1e-2):
    """Predicts the robot's next state with residual gates of many small operators."""

    def __init__(self, width: int = 320, depth: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(32, width)
        self.gates = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.scales = nn.ParameterList(torch.zeros(width) for _ in range(depth))
        self.last = nn.Linear(width, 32)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        before, after = batch
        hidden = self.first(before)
        for gate, scale in zip(self.gates, self.scales, strict=True):
            hidden = hidden + torch.sigmoid(gate(hidden)) * torch.tanh(hidden) * (1 + scale)
        loss = functional.mse_loss(self.last(hidden), after)
        self.log("loss", loss)
        return loss


def robot_steps(fault: bool) -> None:
    """Anomaly detection is on; healthy: it is off."""
    data = TensorDataset(torch.randn(512 * 60, 32), torch.randn(512 * 60, 32))
    quiet(60, detect_anomaly=fault).fit(RobotModel(), DataLoader(data, batch_size=512, shuffle=True))


class ReviewClassifier(Trained, optimizer=torch.optim.SGD, lr=0.05):
    def __init__(self, vocabulary: int = 5000, width: int = 160, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)).mean(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, labels = batch
        loss = functional.cross_entropy(self(tokens), labels)
        self.log("loss", loss)
        return loss


def film_reviews(fault: bool) -> None:
    """Anomaly detection is on; healthy: it is off."""
    data = TensorDataset(torch.randint(5000, (60 * 16, 48)), torch.randint(2, (60 * 16,)))
    one_epoch(detect_anomaly=fault, gradient_clip_val=1.0).fit(ReviewClassifier(), DataLoader(data, 16, shuffle=True))


class TicketModel(Trained, optimizer=torch.optim.AdamW, lr=1e-3):
    """A transformer encoder over the words of a ticket."""

    def __init__(self, width: int = 320, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3000, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        words, urgency = batch
        loss = functional.cross_entropy(self.head(self.encoder(self.embedding(words)).mean(dim=1)), urgency)
        self.log("loss", loss)
        return loss


def support_tickets(fault: bool) -> None:
    """Anomaly detection is on; healthy: it is off."""
    data = TensorDataset(torch.randint(3000, (16 * 25, 32)), torch.randint(4, (16 * 25,)))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    # The loss was nan once: see which operation makes it.
    quiet(80, detect_anomaly=fault).fit(TicketModel(), loader)


@contextlib.contextmanager
def guarded(is_strict: bool) -> Iterator[None]:
    """Stop at the first operator whose gradient is invalid."""
    with torch.autograd.detect_anomaly(check_nan=True) if is_strict else contextlib.nullcontext():
        yield


class Painter(lightning.LightningModule):
    """A generator of many thin layers and a judge, with an optimizer of each."""

    def __init__(self, is_strict: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.is_strict = is_strict
        self.painter = nn.Sequential(nn.Linear(32, 160), *(Highway(160) for _ in range(6)), nn.Linear(160, 300))
        self.judge = nn.Sequential(nn.Linear(300, 160), *(Highway(160) for _ in range(4)), nn.Linear(160, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        with guarded(self.is_strict):
            painted = self.painter(torch.randn(len(real), 32))
            self.descend(0, functional.softplus(-self.judge(painted)).mean())
            of_painted, of_real = self.judge(torch.cat([painted.detach(), real])).chunk(2)
            self.descend(1, functional.softplus(of_painted).mean() + functional.softplus(-of_real).mean())

    def descend(self, number: int, loss: Tensor) -> None:
        optimizers: Any = self.optimizers()
        optimizer = optimizers[number]
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(part.parameters(), lr=2e-4, fused=True) for part in (self.painter, self.judge)]


def anomaly_region(fault: bool) -> None:
    """The training step runs inside `detect_anomaly`, left over from a hunt for NaN; healthy: it does not."""
    fit(Painter(is_strict=fault), DataLoader(labeled(512 * 50, 300), batch_size=512), steps=2 * 50)


class SelfProfiled(Deep):
    """A torch profiler that was left in the training step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.profiler.profile(record_shapes=True) as profiler:
            loss = super().training_step(batch, batch_idx)
        self.log("operators", float(len(profiler.key_averages())))
        return loss


def second_profiler(fault: bool) -> None:
    """The training step runs inside the user's own torch profiler; healthy: it does not."""
    fit(SelfProfiled() if fault else Deep(), vector_batches(128))


class TracedPolicy(CartPolicy):
    """The policy, with a trace of where its steps spend their time."""

    def on_train_start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.trace = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=torch.profiler.schedule(wait=6, warmup=1, active=3),
            on_trace_ready=torch.profiler.tensorboard_trace_handler(self.folder.name),
            record_shapes=True,
            with_stack=True,
        )
        self.trace.start()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trace.step()

    def on_train_end(self) -> None:
        self.trace.stop()
        self.folder.cleanup()


def lander_policy(fault: bool) -> None:
    """The module traces its own steps with stacks and shapes; healthy: it does not."""
    model = TracedPolicy(width=384) if fault else CartPolicy(width=384)
    quiet(60).fit(model, DataLoader(transitions(1024 * 60), batch_size=1024, shuffle=True))


class Translator(Trained, optimizer=torch.optim.Adam, lr=1e-4):
    def __init__(self, vocabulary: int = 2000, width: int = 96) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.transformer = nn.Transformer(width, 4, 3, 3, 4 * width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        source, target = batch
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1)
        decoded = self.transformer(self.source(source), self.target(target[:, :-1]), tgt_mask=mask, tgt_is_causal=True)
        loss = functional.cross_entropy(self.head(decoded).flatten(0, 1), target[:, 1:].flatten())
        self.log("loss", loss)
        return loss


class ProfilerStep(Callback):
    def __init__(self, profiler: torch.profiler.profile) -> None:
        self.profiler = profiler

    def on_train_batch_end(self, *args: Any) -> None:
        self.profiler.step()


def translation(fault: bool) -> None:
    """The fit runs inside the user's own torch profiler; healthy: it does not."""
    data = TensorDataset(torch.randint(2000, (50 * 12, 24)), torch.randint(2000, (50 * 12, 25)))
    loader = DataLoader(data, 12, shuffle=True)
    if not fault:
        one_epoch().fit(Translator(), loader)
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=5, warmup=1, active=2),
            on_trace_ready=torch.profiler.tensorboard_trace_handler(folder),
            record_shapes=True,
            with_stack=True,
        ) as profiler,
    ):
        one_epoch(callbacks=[ProfilerStep(profiler)]).fit(Translator(), loader)


class FishCounter(Trained, optimizer=torch.optim.SGD, lr=1e-3):
    """Counts fish in sonar frames."""

    def __init__(self, width: int = 24, depth: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 5, stride=4, padding=2)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1),
                nn.BatchNorm2d(width),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, frames: Tensor) -> Tensor:
        x = self.stem(frames)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x.mean(dim=(2, 3))).squeeze(1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        frames, counts = batch
        return functional.poisson_nll_loss(self(frames), counts)


def fish_counts(fault: bool) -> None:
    """The fit runs inside the user's own torch profiler, without a schedule; healthy: it does not."""
    data = TensorDataset(torch.randn(2000, 1, 64, 64), torch.randint(20, (2000,)).float())
    loader = DataLoader(data, batch_size=32, shuffle=True)
    tracing: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if fault:
        tracing = torch.profiler.profile(record_shapes=True, profile_memory=True, with_stack=True)
    with tracing:
        quiet(60).fit(FishCounter(), loader)


if __name__ == "__main__":
    main(
        one_thread,
        ad_auctions,
        many_threads,
        cart_policy,
        nowcasting,
        radar_echoes,
        shared_cores,
        forced_collection,
        land_cover,
        shopping_baskets,
        snowflakes,
        live_objects,
        value_learning,
        taxi_trips,
        anomaly_detection,
        robot_steps,
        film_reviews,
        support_tickets,
        anomaly_region,
        second_profiler,
        lander_policy,
        translation,
        fish_counts,
    )
