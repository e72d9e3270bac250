"""What a tracked step costs on 302 modules: our tracker and torch's own MemTracker, beside the bare step.

    python tests/benchmarks/tracker.py [--quick]

The three take turns, step by step, on one model; each ratio is that of a step to the bare one before it. The totals of
both trackers must be equal at every module and at the peak, or the program fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import networks
import part
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from lightning_memprof.capture.tracker.tracker import ModuleTracker
from measured import table

OURS_LIMIT = 15
CPU = torch.device("cpu")
Totals = dict[tuple[str, str, int], int]


class Training:
    """One model that is stepped without any Trainer."""

    def __init__(self, blocks: int) -> None:
        torch.manual_seed(0)
        # The network and not its LightningModule: torch's own names modules from the first one that is called.
        self.model = networks.Regression(blocks).network
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batch = torch.randn(networks.ROWS, networks.WIDTH)

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.model(self.batch), self.batch.flip(0))
        loss.backward()
        self.optimizer.step()

    def bare(self) -> Totals:
        self.step()
        return {}

    def ours(self) -> Totals:
        tracker = ModuleTracker(self.model)
        with tracker.tracking(self.model, [self.optimizer], self.batch):
            self.step()
            report = tracker.report()
        if tracker.guard.failure is not None:
            raise tracker.guard.failure
        found = {(each.name, each.state, each.call): each.figures[0].total_bytes for each in report.modules}
        return found | {("", "peak", 1): report.peak[0].total_bytes}

    def torchs(self) -> Totals:
        tracker: Any = MemTracker()
        tracker.track_external(self.model, self.optimizer, self.batch)
        with tracker:
            self.step()
        found = {
            (stats.mod_fqn, state.value, call): snapshot[CPU]["Total"]
            for stats in tracker.memory_tracking.values()
            for state, snapshots in stats.snapshots.items()
            for call, snapshot in enumerate(snapshots, start=1)
        }
        return found | {("", "peak", 1): tracker.get_tracker_snapshot("peak")[CPU]["Total"]}


def timed(step: Callable[[], Totals]) -> tuple[float, Totals]:
    begun = time.process_time()
    totals = step()
    return time.process_time() - begun, totals


def measure(training: Training, rounds: int) -> tuple[dict[str, list[float]], Totals]:
    """Give milliseconds of CPU of the bare steps, ratios to it of the others, and the totals that both found.

    Raises:
        SystemExit: the totals differ.

    """
    training.step()
    training.ours()
    found: dict[str, list[float]] = {"bare": [], "ours": [], "torch": []}
    totals: Totals = {}
    with part.progress() as bar:
        task = bar.add_task("tracked steps", total=rounds)
        for _ in range(rounds):
            bare, ours = quiet_bare(training), timed(training.ours)
            again, torchs = quiet_bare(training), timed(training.torchs)
            found["bare"] += [1000 * bare, 1000 * again]
            found["ours"].append(ours[0] / bare)
            found["torch"].append(torchs[0] / again)
            totals = same(ours[1], torchs[1])
            bar.update(task, advance=1)
            bar.refresh()
    return found, totals


def quiet_bare(training: Training) -> float:
    """Give the median of three bare steps; the one before them finds what a tracked step left in the caches."""
    training.bare()
    return sorted(timed(training.bare)[0] for _ in range(3))[1]


def same(ours: Totals, torchs: Totals) -> Totals:
    """Give the totals of both.

    Raises:
        SystemExit: they differ; the message names one that does.

    """
    differing = [key for key in ours.keys() | torchs.keys() if ours.get(key) != torchs.get(key)]
    if differing:
        key = min(differing)
        sys.exit(f"{len(differing)} totals differ; {key}: ours {ours.get(key)}, torch's {torchs.get(key)} bytes")
    return ours


def fragment(found: Mapping[str, list[float]], totals: Totals, modules: int, *, trial: bool = False) -> str:
    bare, ours, torchs = found["bare"], found["ours"], found["torch"]
    rows = [
        ["bare", f"{part.spread(bare, '.1f')} ms", "1"],
        ["our tracker", "", part.spread(ours, ".1f")],
        ["torch's MemTracker", "", part.spread(torchs, ".1f")],
    ]
    verdict = part.Target(
        f"a tracked step on {modules} modules: at most {OURS_LIMIT} x bare",
        f"{part.spread(ours, '.1f')}; torch's own {part.spread(torchs, '.1f')}",
        sorted(ours)[len(ours) // 2] <= OURS_LIMIT,
    )
    equal = part.Target("the same totals as torch's", f"{len(totals):,} totals equal to the byte", met=True)
    return "\n\n".join(
        [
            table(["a step", "CPU time", "ratio to bare"], rows),
            f"Median ± half of the range over {len(ours)} rounds.",
            part.targets(part.judged([verdict, equal], trial=trial)),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="default 9; with --quick 2")
    parser.add_argument("--quick", action="store_true", help="two rounds; nothing is judged, nothing written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    training = Training(networks.BLOCKS)
    found, totals = measure(training, options.rounds or (2 if options.quick else 9))
    body = fragment(found, totals, len(list(training.model.modules())), trial=options.quick)
    part.publish({"tracker": body}, trial=options.quick)


if __name__ == "__main__":
    main()
