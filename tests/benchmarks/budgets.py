"""Whether budgets in tests are exact: the same training against its baseline many times, and a larger one.

python tests/benchmarks/budgets.py                  1,000 runs of each, in ``docs/measured/budgets.md``
python tests/benchmarks/budgets.py --quick          20 of each; nothing is written
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from part import Target, judged, progress, publish, targets

from measured import table

# With 1% more features activations grow by 1%, parameters by 2%.
WIDTHS: Final = (1000, 1010)
TESTS: Final = """
import os

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

WIDTH = int(os.environ["WIDTH"])


class Narrow(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def training_step(self, batch):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


@pytest.mark.parametrize("number", range(int(os.environ["RUNS"])))
@pytest.mark.memprof(baseline="baseline.json", tolerance="0.9%")
def test_training(number):
    without = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(accelerator="cpu", max_steps=4, **dict.fromkeys(without, False))
    trainer.fit(Narrow(), DataLoader(torch.zeros(32, WIDTH), batch_size=8))
"""


def counts(directory: Path, width: int, runs: int, *options: str) -> tuple[int, int]:
    """Run the tests of a folder with a width of the model; return how many pass and fail."""
    environment = os.environ | {"WIDTH": str(width), "RUNS": str(runs), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", *options]
    ran = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    last = ran.stdout.splitlines()[-1]
    passed, failed = (re.search(rf"(\d+) {word}", last) for word in ("passed", "failed"))
    return int(passed[1]) if passed else 0, int(failed[1]) if failed else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 runs of each; nothing is judged, nothing written")
    is_trial = parser.parse_args().quick
    runs = 20 if is_trial else 1000
    with tempfile.TemporaryDirectory() as folder, progress() as bar:
        directory = Path(folder)
        (directory / "test_budgets.py").write_text(TESTS, encoding="utf-8")
        task = bar.add_task("budgets", total=3)
        rows = []
        for says, width, options in (
            ("writes its baseline", WIDTHS[0], ("--memprof-update",)),
            ("the same again", WIDTHS[0], ()),
            ("1% more", WIDTHS[1], ()),
        ):
            rows.append((says, *counts(directory, width, runs, *options)))
            bar.advance(task)
            bar.refresh()
    (_, written, _), (_, same, wrong), (_, _, found) = rows
    aims = [
        Target("equal runs: no failure", f"{wrong} of {runs:,}", written == same == runs and not wrong),
        Target("1% more: always a failure", f"{found:,} of {runs:,}", found == runs),
    ]
    shown = table(["runs", "passed", "failed"], [[says, f"{good:,}", f"{bad:,}"] for says, good, bad in rows])
    publish({"budgets": f"{targets(judged(aims, trial=is_trial))}\n\n{shown}"}, trial=is_trial)


if __name__ == "__main__":
    main()
