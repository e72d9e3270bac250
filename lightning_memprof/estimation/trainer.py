"""Lightning's own ``Trainer.fit`` on the simulated device."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_memprof.capture.observe import wrapped
from lightning_memprof.capture.sources.tensors import tensors_in
from lightning_memprof.estimation.construction import LargeOnMeta
from lightning_memprof.estimation.simulated_device import NAME, without_data
from lightning_memprof.estimation.storages import StorageTracer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from lightning_memprof.estimation.simulated_device import Target

__all__ = ["STEPS", "SimulatedStrategy", "trainer_options"]

STEPS: Final = 3
"""The second step has the optimizer's state; the third has the allocator's cache of a whole one before it."""


class _SimulatedAccelerator(Accelerator):
    """One device of which Lightning asks nothing."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return [0]

    @staticmethod
    def get_parallel_devices(devices: Any) -> Any:
        return [torch.device("cpu")]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME


class _Repeated:
    """A loader that gives one real batch again and again."""

    def __init__(self, loader: Any, resize: Callable[[Any], Any]) -> None:
        self.batch = resize(next(iter(loader)))

    def __len__(self) -> int:
        return 1_000_000

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.batch


class SimulatedStrategy(SingleDeviceStrategy):
    """One device; everything from the model's setup to the end of the fit runs without data.

    Attributes:
        tracer: the requests of the fit.
        batch: shapes and dtypes of the batch.

    Args:
        target: the device to imitate.
        resize: returns the batch to train on, from the loader's first one.

    """

    def __init__(self, target: Target, resize: Callable[[Any], Any]) -> None:
        super().__init__(accelerator=_SimulatedAccelerator(), device="cpu")
        self.tracer: StorageTracer
        self.batch: Any = None
        self._target = target
        self._resize = resize
        self._simulation = ExitStack()

    def setup(self, trainer: Trainer) -> None:
        # The program's data are real: its loaders are set up before.
        trainer.fit_loop.setup_data()
        device = self._simulation.enter_context(self._target.simulated())
        self._root_device = device
        tracer = StorageTracer(device, self._target.granule, self._target.workspace_bytes)
        self.tracer = self._simulation.enter_context(tracer)
        for name in ("log", "log_dict"):
            # Lightning copies what is logged, which tensors without data refuse; it is a few numbers.
            self._simulation.enter_context(wrapped(LightningModule, name, lambda _: _ignore))
        super().setup(trainer)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with LargeOnMeta(everywhere=True):
            yield

    def process_dataloader(self, dataloader: object) -> object:
        loader = _Repeated(dataloader, self._resize)
        self.batch = loader.batch
        return loader

    def model_to_device(self) -> None:
        assert self.model is not None
        without_data(self.model, self.root_device)
        for module in self.model.modules():
            if isinstance(module, LightningModule):
                module._device = self.root_device  # noqa: SLF001 what its .to() does
        self.tracer.name_modules(self.model)
        self.tracer.label(_owned(self.model.named_parameters()), "parameter")
        self.tracer.label(_owned(self.model.named_buffers()), "buffer")
        for path, parameter in _owned(self.model.named_parameters()):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda owner, path=path: self.tracer.label([(path, owner.grad)], "gradient")
                )

    def teardown(self) -> None:
        self._simulation.close()


def _owned(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield tensors with the path of their module instead of their name."""
    for name, tensor in named:
        yield name.rpartition(".")[0], tensor


class _Parts(Callback):
    """Tells the tracer the parts of each step and what its tensors are."""

    def __init__(self, strategy: SimulatedStrategy) -> None:
        self._strategy = strategy

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._mark(trainer, "forward")
        self._strategy.tracer.label(((None, tensor) for tensor in tensors_in(batch)), "input")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        self._mark(trainer, "backward")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._mark(trainer, "optimizer")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        paths = {id(tensor): path for path, tensor in _owned(pl_module.named_parameters())}
        states = (
            (paths.get(id(parameter)), tensor)
            for optimizer in trainer.optimizers
            for parameter, state in optimizer.state.items()
            for tensor in tensors_in(state)
        )
        self._strategy.tracer.label(states, "optimizer_state")

    def _mark(self, trainer: Trainer, part: str) -> None:
        self._strategy.tracer.mark(trainer.global_step, part)


def _ignore(*_: object, **__: object) -> None:
    """Do nothing."""


def trainer_options(given: Mapping[str, Any], strategy: SimulatedStrategy, target: Target) -> dict[str, Any]:
    """Return the arguments of a Trainer that trains :data:`STEPS` steps on the simulated device.

    Args:
        given: the program's arguments by name; what decides no bytes is replaced.
        strategy: replaces the program's.

    """
    callbacks = given.get("callbacks") or []
    callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    kept = [callback for callback in callbacks if not isinstance(callback, (Checkpoint, ProgressBar))]
    options = {
        name: given[name]
        for name in ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "overfit_batches")
        if given.get(name) is not None
    }
    precision = str(given.get("precision") or "32-true")
    options |= _precision(precision, target.kind)
    return {
        **options,
        "strategy": strategy,
        "max_steps": STEPS,
        "callbacks": [*kept, _Parts(strategy)],
        "logger": DummyLogger(),
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def _precision(precision: str, kind: str) -> dict[str, Any]:
    mixed = {"16": "16-mixed", "bf16": "bf16-mixed"}.get(precision, precision)
    if not mixed.endswith("-mixed"):
        return {"precision": precision}
    scaler = torch.amp.GradScaler("cpu", enabled=False) if mixed == "16-mixed" else None
    return {"plugins": MixedPrecision(mixed, kind, scaler)}  # type: ignore[arg-type]
