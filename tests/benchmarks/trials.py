"""How far a trial can be trusted: equal programs, and one that is 5% slower, measured in turns as `try` does.

    python tests/benchmarks/trials.py --rounds 40

Each round runs the program twice as it is and once with a delay in each step, in processes that alternate. Every five
consecutive rounds are then one trial of five rounds; a trial without a number of rounds begins with each round, and
ends where `try` ends it. The cost of the measuring callback is that of a fit to which it is added and removed in turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import lightning.pytorch as pl
import torch
from part import Target, judged, publish, targets
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memprof.compare.significance import FEWEST_PAIRS, PairedChange, paired_change
from lightning_memprof.compare.trial import Equality, Measured, Outcome, outcome
from lightning_memprof.trial.meter import Meter
from lightning_memprof.trial.process import run_in_turns, started
from lightning_memprof.trial.task import Task
from measured import progress, table

TRAINING: Final = "training"
SLOWER: Final = 0.05
# Of the delay: 5% of a step of the machine on which this was written, and of any other less or more.
STEP_S: Final = 0.022
# Half a second.
TURN: Final = 20
KINDS: Final = ("", "again", "slower")


class Busy(pl.LightningModule):
    """A step of some 25 ms, nearly all in operators."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8)))
        self.delay_s = delay_s

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        began = time.perf_counter()
        while time.perf_counter() - began < self.delay_s:
            pass
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def train(kind: str) -> None:
    """Run the measured program."""
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    data = DataLoader(TensorDataset(torch.randn(4096, 512)), batch_size=256)
    trainer.fit(Busy(SLOWER * STEP_S if kind == "slower" else 0.0), data)


def measured(rounds: int, steps: int, minutes: float) -> tuple[dict[str, list[float]], float]:
    """Return the mean step times in ns by kind and round, and the share of a core that the process takes that waits."""
    began, wall = time.process_time(), time.perf_counter()
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as place, progress() as bar:
        shown = bar.add_task("trials", total=rounds)
        for number in range(rounds):
            if time.perf_counter() - wall > 60 * minutes:
                break
            tasks = [Task(directory=str(Path(place, f"{number}-{kind}")), steps=steps, turn=TURN) for kind in KINDS]
            pairs = zip(KINDS, tasks, strict=True)
            with ExitStack() as running:
                processes = [
                    running.enter_context(started([__file__, TRAINING, kind], task, 300.0, {})) for kind, task in pairs
                ]
                runs = run_in_turns(processes)
            for kind, run in zip(KINDS, runs, strict=True):
                if run.problem:
                    raise SystemExit(run.problem)
                found[kind].append(run.step_ns)
            bar.update(shown, advance=1, refresh=True)
    return found, (time.process_time() - began) / (time.perf_counter() - wall)


class Toggle(pl.Callback):
    """Adds and removes another callback every few steps, and notes the CPU time of each such block in s per step."""

    def __init__(self, other: pl.Callback) -> None:
        self.other = other
        self.blocks: dict[bool, list[float]] = {True: [], False: []}
        self.since = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: object, number: int) -> None:
        if number % TURN:
            return
        callbacks = trainer.callbacks
        is_there = self.other in callbacks
        self.blocks[is_there].append((time.thread_time() - self.since) / TURN)
        if is_there:
            callbacks.remove(self.other)
        else:
            callbacks.append(self.other)
        self.since = time.thread_time()


def overhead(steps: int) -> float:
    """Return the CPU time in s that the measuring callback takes per step; steps are short and on one core."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        toggle = Toggle(Meter(Task(directory=place, steps=sys.maxsize)))
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, max_steps=steps, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[toggle],
        )  # fmt: skip
        trainer.fit(Busy(0.0), DataLoader(TensorDataset(torch.randn(steps, 512)), batch_size=1))
    # The first block was before the first step.
    pairs = zip(toggle.blocks[True], toggle.blocks[False][1:], strict=False)
    return statistics.median(with_meter - without for with_meter, without in pairs)


def decided(bare: Sequence[float], changed: Sequence[float]) -> Outcome:
    """Return the outcome of rounds that go on until they decide, as those of `try`, or to the end of the given ones."""
    runs = [[Measured(step_ns=step_ns, rss_bytes=1) for step_ns in side] for side in (bare, changed)]
    found = Outcome(remedy="")
    for count in range(FEWEST_PAIRS, len(bare) + 1):
        before, after = (side[:count] for side in runs)
        found = outcome(Outcome(remedy=""), before, after, Equality(name="bit-equal"))
        if found.is_clear:
            break
    return found


def trials(bare: Sequence[float], changed: Sequence[float], length: int) -> list[PairedChange]:
    """Return the change of every trial of consecutive rounds."""
    starts = range(len(bare) - length + 1)
    return [paired_change(bare[start : start + length], changed[start : start + length]) for start in starts]


def adaptive(bare: Sequence[float], changed: Sequence[float]) -> list[Outcome]:
    """Return the outcome of a trial from each round on, where there are rounds enough for it to end by itself."""
    starts = range(len(bare) - FEWEST_PAIRS + 1)
    return [found for start in starts if (found := decided(bare[start:], changed[start:])).is_clear]


def fragment(found: dict[str, list[float]], waiting: float, extra_s: float, *, trial: bool) -> str:
    bare = found[""]
    rows, goals = [], []
    for length in (5, 10):
        equal, slower = trials(bare, found["again"], length), trials(bare, found["slower"], length)
        holds = sum(change.low <= 0 <= change.high for change in equal)
        sees = sum(change.low > 0 for change in slower)
        reach = sorted((change.high - change.low) / 2 for change in equal)[len(equal) // 2]
        rows.append([str(length), f"{holds} of {len(equal)}", f"{sees} of {len(slower)}", f"±{reach:.1%}"])
        goals.append(Target(f"{length} rounds: 0 in 93% of equal programs", rows[-1][1], holds >= 0.93 * len(equal)))
        goals.append(Target(f"{length} rounds: 5% found in 90%", rows[-1][2], sees >= 0.9 * len(slower)))
    # The slower program as the unchanged one: the equal one then is a remedy that gains 5%.
    equals, gains = adaptive(bare, found["again"]), adaptive(found["slower"], bare)
    intervals = [change.time for change in equals if change.time is not None]
    holds, sees = sum(time.low <= 0 <= time.high for time in intervals), sum(change.is_faster for change in gains)
    if intervals and gains:
        needed = statistics.mean(change.rounds for change in [*equals, *gains])
        reach = statistics.median((time.high - time.low) / 2 for time in intervals)
        words = f"until decided, {needed:.1f} in the mean"
        rows.append([words, f"{holds} of {len(equals)}", f"{sees} of {len(gains)}", f"±{reach:.1%}"])
        goals.append(Target("until decided: 0 in 93% of equal programs", rows[-1][1], holds >= 0.93 * len(equals)))
        goals.append(Target("until decided: 5% found in 90%", rows[-1][2], sees >= 0.9 * len(gains)))
    share = 1e9 * extra_s / min(bare)
    goals.append(Target("cost of `try` per step: below 1%", f"{share:.2%}", share < 0.01))
    heading = ["rounds", "equal programs whose interval has 0", "slower programs found", "median half interval"]
    true = sum(found["slower"]) / sum(bare) - 1
    spread = (max(bare) - min(bare)) / min(bare)
    words = (
        f"{len(bare)} rounds; a step takes {min(bare) / 1e6:.1f} ms in the fastest unchanged run, {spread:.0%} more in "
        f"the slowest; the delay is {true:.1%} of the mean. Trials of consecutive rounds overlap. The callback that "
        f"measures takes {1e6 * extra_s:.0f} µs of CPU time per step, "
        f"the process that waits for the runs {waiting:.1%} of a core."
    )
    return "\n\n".join([targets(judged(goals, trial=trial)), words, table(heading, rows)])


def main() -> None:
    if sys.argv[1:2] == [TRAINING]:
        train(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, metavar="N", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=1e9, metavar="M", help="begin no further round after these")
    parser.add_argument("--quick", action="store_true", help="12 rounds of 20 steps: nothing is judged or written")
    options = parser.parse_args()
    rounds, steps = (12, 20) if options.quick else (options.rounds, options.steps)
    extra_s = overhead(400 if options.quick else 8000)
    publish(
        {"trials": fragment(*measured(rounds, steps, options.minutes), extra_s, trial=options.quick)},
        trial=options.quick,
    )


if __name__ == "__main__":
    main()
