"""Programs that pickle and copy what has a Trainer, and so what this package has put in its place."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from every_collector import every_collector
from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
from training import Perceptron, loader, manifest, only_run, program, rows_of, trainer

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_unpickle_the_trainer_start_in_every_epoch_and_validation(
    tmp_path: Path, run_python: Callable[..., Any], method: str
) -> None:
    (tmp_path / "spawning.py").write_text(
        program(f"""
        import torch
        from lightning.pytorch import LightningDataModule
        from torch.utils.data import DataLoader, Sampler
        from lightning_memprof import MemProfilerCallback, Schedule

        class Order(Sampler):
            def __init__(self, data):
                self.data = data
            def __len__(self):
                return 16
            def __iter__(self):
                return iter(range(16))

        class Data(LightningDataModule):
            def collate(self, items):
                return torch.stack(items)
            def start(self, worker):
                assert self.trainer is not None
            def batches(self):
                return DataLoader(
                    torch.randn(16, 8), batch_size=4, sampler=Order(self), num_workers=1,
                    multiprocessing_context={method!r}, collate_fn=self.collate, worker_init_fn=self.start,
                )
            train_dataloader = val_dataloader = batches

        if __name__ == "__main__":
            # The window is open while the workers of the validation and of the second epoch start.
            ours = MemProfilerCallback(schedule=Schedule(wait=1, active=100))
            run = trainer(
                Path("run"), ours, profiler="fts_extended", max_epochs=2, num_sanity_val_steps=0, limit_val_batches=1
            )
            run.fit(Perceptron(), datamodule=Data())
            assert run.global_step == 8
        """)
    )
    done = run_python("spawning.py")
    assert done.returncode == 0, done.stderr[-2000:]
    end = manifest(only_run(tmp_path))[-1]
    assert (end["status"], end["steps"]) == ("finished", 8)


class Copying(Perceptron):
    """Copies and pickles its Trainer, and with it itself and its logger, in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[pl.Trainer] = []
        self.attributes: list[set[str]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for copied in (copy.deepcopy(self.trainer), pickle.loads(pickle.dumps(self.trainer))):  # noqa: S301 our own
            profiler = copied.profiler
            model: Any = copied.lightning_module
            loop = copied.fit_loop
            validation, logger = loop.epoch_loop.val_loop, copied.logger
            self.attributes += [set(vars(profiler)), *(set(vars(each)) for each in (model, loop, validation, logger))]
            assert type(profiler).profile.__get__(profiler) == profiler.profile
            assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
            assert torch.equal(model.eval().loss(batch), model.loss(batch))
        torch.jit.script(self.net)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("profiler", ["fts_extended", "simple", None])
def test_a_trainer_is_copied_and_pickled_in_and_outside_of_windows_with_its_own_attributes_only(
    tmp_path: Path, profiler: str | None
) -> None:
    bare, ours = Copying(), Copying()
    trainer(tmp_path / "bare", profiler="simple" if profiler == "simple" else None).fit(bare, loader(6))
    callback = MemProfilerCallback(
        schedule=Schedule(wait=1, warmup=1, active=2),
        collectors=every_collector(),
        output=OutputOptions(summary=False, on_error="raise"),
    )
    trainer(tmp_path / "ours", callback, profiler=profiler).fit(ours, loader(6))
    assert rows_of(only_run(tmp_path), "error") == []
    # The profiler of this package has attributes of its own.
    is_own = profiler == "fts_extended"
    assert [names for index, names in enumerate(bare.attributes) if index % 5 or not is_own] == [
        names for index, names in enumerate(ours.attributes) if index % 5 or not is_own
    ]


def test_a_compiled_method_of_the_model_is_copied_as_the_program_made_it(tmp_path: Path) -> None:
    class Compiled(Perceptron):
        def __init__(self) -> None:
            super().__init__()
            self.training_step = torch.compile(self.training_step, backend="eager")  # type: ignore[method-assign]
            self.seen: list[Any] = []

        def on_train_batch_end(self, *_: Any) -> None:
            self.seen.append(vars(copy.copy(self))["training_step"])
            self.seen.append(copy.deepcopy(vars(self)["training_step"]))

    model = Compiled()
    own = vars(model)["training_step"]
    callback = MemProfilerCallback(schedule=Schedule(wait=1, active=2), output=OutputOptions(summary=False))
    trainer(tmp_path, callback).fit(model, loader(4))
    assert all(getattr(each, "__code__", None) is own.__code__ for each in model.seen[1::2])
