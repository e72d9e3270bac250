"""Composer's Trainer, with its profiler and without: compared with itself, for it trains in its own loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import absent
import networks
import schedule
import torch
import workload
from torch import nn

WORKLOAD: Final = "composer"


def recording(directory: Path) -> dict[str, Any]:
    """Give Composer's profiler as it is by default: torch's operators, the machine, and a trace of its own events."""
    from composer.profiler import JSONTraceHandler, Profiler, cyclic_schedule

    when = cyclic_schedule(
        skip_first=0, wait=schedule.WAIT, warmup=schedule.WARMUP, active=schedule.ACTIVE, repeat=1
    )  # fmt: skip
    return {
        "profiler": Profiler(
            trace_handlers=[JSONTraceHandler(folder=str(directory / "composer"), overwrite=True)],
            schedule=when,
            torch_prof_folder=str(directory / "torch"),
            torch_prof_overwrite=True,
            torch_prof_remote_file_name=None,
            torch_prof_memory_remote_file_name=None,
            sys_prof_cpu=True,
            sys_prof_memory=True,
        )
    }


def fit(
    job: workload.Job,
    configure: Callable[[Path], dict[str, Any]],
    pause: Callable[[], None],
    directory: Path,
    watch: workload.StopWatch | None = None,
) -> workload.Fit:
    """Train the network of 302 modules in Composer's loop; parameters as of :func:`workload.fit`."""
    absent.stand_in(absent.OF_COMPOSER)
    from composer import Callback, ComposerModel, DataSpec, Trainer

    class Regression(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.network = networks.Network(networks.BLOCKS)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.network(batch)

        def loss(self, outputs: torch.Tensor, batch: torch.Tensor, *args: Any) -> torch.Tensor:
            return nn.functional.mse_loss(outputs, batch.flip(0))

    clock = workload.Clock(pause, job.turn, job.profiled)

    class First(Callback):
        def batch_start(self, state: Any, logger: Any) -> None:
            clock.batch()

    torch.manual_seed(0)
    model = Regression()
    loader = networks.workloads()["network"].loader(job.steps)

    def train() -> None:
        # Its profiler ends with `close`, and so it is part of the fit.
        trainer = Trainer(
            model=model,
            train_dataloader=DataSpec(
                loader,
                get_num_samples_in_batch=len,
                split_batch=lambda batch, _size: [batch],
            ),
            device_train_microbatch_size=networks.ROWS,
            max_duration=f"{job.steps}ba",
            optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
            device="cpu",
            callbacks=[First()],
            progress_bar=False,
            log_to_console=False,
            save_folder=None,
            **configure(directory),
        )
        trainer.fit()
        trainer.close()

    return workload.measured(job.name, clock, train, watch)
