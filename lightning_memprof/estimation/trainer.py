"""Lightning's own ``Trainer.fit`` on the simulated device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final

import msgspec
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BasePredictionWriter,
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from lightning_memprof.capture.observe import wrapped
from lightning_memprof.capture.sources.tensors import dense_parts, tensors_in
from lightning_memprof.estimation.construction import (
    LargeOnMeta,
    OnMeta,
    batch_tensors,
    empty_like,
    with_tensors,
    without_data,
)
from lightning_memprof.estimation.ranks import DDPBuckets, Ranks, offloaded
from lightning_memprof.estimation.simulated_device import NAME, Target
from lightning_memprof.estimation.storages import StorageTracer, Values
from lightning_memprof.integration.callback import MemProfilerCallback
from lightning_memprof.units import format_bytes

STEPS: Final = 3
"""The second step has the optimizer's state; the third has the allocator's cache of a whole one before it."""


_MANY: Final = 1_000_000
# Lightning's default without max_steps.
_EPOCHS: Final = 1_000
_KEPT: Final = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "overfit_batches")
# They write files, read values, or watch a real device; none keeps tensors.
_LEFT_OUT: Final = (
    BasePredictionWriter, Checkpoint, DeviceStatsMonitor, EarlyStopping, LearningRateMonitor, MemProfilerCallback,
    ModelSummary, ProgressBar, SaveConfigCallback, Timer,
)  # fmt: skip


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """A call of ``Trainer.fit``.

    Attributes:
        trainer: the Trainer's arguments by name.
        model: what is trained.
        data: further arguments of ``fit`` by name.
        program: what the call belongs to, in words.
        called_at: file and line of a program's call; empty where Lightning calls.
    """

    trainer: Mapping[str, Any]
    model: LightningModule
    data: Mapping[str, Any]
    program: str
    called_at: str = ""


class _SimulatedAccelerator(CPUAccelerator):
    """One device of which Lightning asks nothing."""

    @staticmethod
    def name() -> str:
        return NAME


class Ended(BaseException):
    """The steps are done. It takes the callbacks from the Trainer: they must not hear of an exception."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.callbacks, trainer.callbacks = trainer.callbacks, []


class _Repeated:
    """A loader that gives a batch like the first one again and again, made in a context and without its values."""

    def __init__(self, loader: Any, making: Callable[[], AbstractContextManager[None]]) -> None:
        self.batch = next(iter(loader))
        self._making = making

    def __len__(self) -> int:
        return _MANY

    def __iter__(self) -> Iterator[Any]:
        while True:
            with self._making():
                batch = with_tensors(self.batch, lambda tensor: empty_like(tensor, torch.device("cpu")))
            yield batch


class SimulatedStrategy(SingleDeviceStrategy):
    """One device, of one or several ranks; all from the model's setup to the end of the fit runs without data.

    Attributes:
        tracer: the storages of the fit.
        batch: shapes and dtypes of the batch; a list where there are several loaders.
        world_size: number of ranks.
        offloads: whether parameters are in host memory.
        units: number of modules whose parameters FSDP gathers together.

    Args:
        target: the device to imitate.
        ranks: the devices that train together.
        resize: returns the batches to use, from the first ones of the training's loaders and then of the validation's.
        optimizers: returns the optimizers to train with, from the program's.
        values: assumed where the program reads those of tensors.
        prepare: changes the model, which then has all its modules.
    """

    def __init__(
        self,
        target: Target,
        ranks: Ranks,
        resize: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
        optimizers: Callable[[Iterable[Optimizer]], list[Optimizer]],
        values: Values,
        *,
        prepare: Callable[[nn.Module], None],
    ) -> None:
        super().__init__(accelerator=_SimulatedAccelerator(), device="cpu")
        self.tracer: StorageTracer
        self.batch: Any = None
        self.world_size, self.global_rank = ranks.count, ranks.rank
        self.local_rank = ranks.rank % (ranks.count // ranks.nodes)
        self.offloads = False
        self.units = 0
        self._target = target
        self._ranks = ranks
        self._mesh: DeviceMesh | None = None
        self._buckets: DDPBuckets | None = None
        self._resize = resize
        self._replaced = optimizers
        self._values = values
        self._prepare = prepare
        self._simulation = ExitStack()
        self._loaders: list[_Repeated] = []

    @property
    def is_global_zero(self) -> bool:
        """Whether rank 0 is simulated."""
        return self.global_rank == 0

    def setup_environment(self) -> None:
        """Make the process group, and the mesh that ``configure_model`` asks for."""
        super().setup_environment()
        self._target.register()
        self._mesh = self._simulation.enter_context(self._ranks.group(self._target.kind))
        model: Any = self.lightning_module
        if self._ranks.kind == "fsdp2":
            model._device_mesh = self._mesh  # noqa: SLF001 what ModelParallelStrategy does
        if self._ranks.is_sharded:
            without_data(model, torch.device("meta"))

    def setup(self, trainer: Trainer) -> None:
        """Set up the program's loaders, whose data are real, and then the model without data."""
        trainer.fit_loop.setup_data()
        trained = len(self._loaders)
        if trainer.enable_validation:
            trainer.fit_loop.epoch_loop.val_loop.setup_data()
        given = [loader.batch for loader in self._loaders]
        batches = self._resize(given[:trained], given[trained:])
        for loader, batch in zip(self._loaders, batches, strict=True):
            loader.batch = batch
        self.batch = batches[0] if trained == 1 else list(batches[:trained])
        self._prepare(trainer.lightning_module)
        if isinstance(self.precision_plugin, (DoublePrecision, HalfPrecision)) and not self._ranks.is_sharded:
            # Module.to keeps weights tied only outside of the simulation.
            model: Any = self.lightning_module
            without_data(model, torch.device("meta"))
            self.precision_plugin.convert_module(model)
        device = self._simulation.enter_context(self._target.simulated())
        self._root_device = device
        tracer = StorageTracer(device, self._target, self._values)
        self.tracer = self._simulation.enter_context(tracer)
        # Lightning copies what is logged, which tensors without data refuse.
        self._simulation.enter_context(wrapped(LightningModule, "log", lambda _: _keep))
        # Weights without data must not replace a file.
        ignored: list[tuple[Any, str]] = [(torch, "save"), (Trainer, "save_checkpoint")]
        if hasattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor"):
            # Ranks tell each other of a SIGTERM by a value, which a tensor without data does not have.
            ignored.append((_TrainingEpochLoop, "_broadcast_sigterm_tensor"))
        for owner, name in ignored:
            self._simulation.enter_context(wrapped(owner, name, lambda _: _ignore))
        for average in _averages(trainer):
            without_data(average, device)
        super().setup(trainer)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:  # noqa: ARG002, FBT001 Lightning's
        """Let ``configure_model`` make large tensors without data; those to be sharded all, as Lightning does."""
        if not self._ranks.is_sharded:
            with LargeOnMeta(everywhere=True):
                yield
            return
        # fully_shard makes tensors on the mesh's device.
        with torch.device("meta"), OnMeta(NAME):
            yield

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Let ``configure_model`` shard modules with FSDP1's ``wrap``."""
        with self._ranks.wrapping(self._mesh):
            yield

    def process_dataloader(self, dataloader: object) -> object:
        """Read one batch, and repeat it."""
        # The loader's batches are not the training's host memory.
        self._loaders.append(
            _Repeated(dataloader, lambda: self.tracer.paused() if self._target.is_gpu else nullcontext())
        )
        return self._loaders[-1]

    def model_to_device(self) -> None:
        """Replace the model's tensors, and tell the tracer what they are."""
        model: Any = self.model
        # Lightning's FSDPStrategy gathers parameters before a step, its ModelParallelStrategy before forward() only.
        is_own = self._ranks.kind == "fsdp2" and isinstance(model, FSDPModule)
        self._ranks.shard(model, self._mesh)
        for name in () if is_own else ("training_step", "validation_step"):
            register_fsdp_forward_method(model, name)
        self.units = sum(isinstance(module, FSDPModule) for module in model.modules())
        on_host = offloaded(model)
        self.offloads = bool(on_host)
        without_data(model, self.root_device, on_host)
        for module in model.modules():
            if isinstance(module, LightningModule):
                module._device = self.root_device  # noqa: SLF001 what its .to() does
        self.tracer.name_modules(model)
        self.tracer.label(_owned(model.named_parameters()), "parameter")
        self.tracer.label(_owned(model.named_buffers()), "buffer")
        self._simulation.enter_context(self._ranks.labelled(self.tracer))
        for path, parameter in _owned(model.named_parameters()):
            # torch copies the gradients of offloaded ones in another way where a hook reads them.
            if parameter.requires_grad and parameter.device.type == self.root_device.type:
                parameter.register_post_accumulate_grad_hook(
                    lambda owner, path=path: self.tracer.label([(path, owner.grad)], "gradient")
                )
        loop: Any = model.trainer.fit_loop
        # Lightning switches the exchange off while it accumulates.
        self._buckets = self._ranks.buckets(model, self.tracer, lambda: not loop._should_accumulate())  # noqa: SLF001 same

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Begin a step of DDP's buckets, and call the module's ``training_step``."""
        module: Any = self.lightning_module
        if self._buckets is not None:
            self._buckets.begin_step(module.trainer.global_step)
        return super().training_step(*args, **kwargs)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the program's optimizers, and replace them."""
        super().setup_optimizers(trainer)
        self.optimizers = self._replaced(self.optimizers)

    def teardown(self) -> None:
        """End the simulation."""
        self._buckets = None
        self._simulation.close()


class _Parts(Callback):
    """Tells the tracer the parts of each step and what its tensors are."""

    def __init__(self, tracer: Callable[[], StorageTracer]) -> None:
        self._tracer = tracer
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization:
            # The forward for the next optimizer follows.
            for optimizer in trainer.optimizers:
                optimizer.register_step_post_hook(lambda *_: self._mark("forward"))

    def on_train_batch_start(self, trainer: Trainer, _module: LightningModule, batch: Any, _index: int) -> None:
        # Lightning counts the step of each optimizer.
        self._step = trainer.global_step
        self._mark("forward")
        self._tracer().label(((None, tensor) for tensor in batch_tensors(batch)), "input")

    def on_validation_batch_start(self, _trainer: Trainer, _module: LightningModule, batch: Any, *_: Any) -> None:
        self._mark("validation")
        self._tracer().label(((None, tensor) for tensor in batch_tensors(batch)), "input")

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        raise Ended(trainer)

    def on_before_backward(self, _trainer: Trainer, pl_module: LightningModule, _loss: Any) -> None:
        self._mark("backward")
        # FSDP2 pads its shards in the first forward; other parameters are gathered ones now.
        shards = (
            (path, tensor) for path, tensor in _owned(pl_module.named_parameters()) if isinstance(tensor, DTensor)
        )
        self._tracer().label(shards, "parameter")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._mark("optimizer")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        paths = {id(tensor): path for path, tensor in _owned(pl_module.named_parameters())}
        states = (
            (paths.get(id(parameter)), tensor)
            for optimizer in trainer.optimizers
            # ZeroRedundancyOptimizer has the state of this rank's parameters in another optimizer.
            for parameter, state in getattr(optimizer, "optim", optimizer).state.items()
            for tensor in tensors_in(state)
        )
        self._tracer().label(states, "optimizer_state")

    def _mark(self, part: str) -> None:
        self._tracer().mark(self._step, part)


def _owned(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield tensors with the path of their module instead of their name."""
    for name, tensor in named:
        yield name.rpartition(".")[0], tensor


def trainer_options(
    given: Mapping[str, Any], strategy: SimulatedStrategy, target: Target, *, validates: bool
) -> dict[str, Any]:
    """Return the arguments of a Trainer that trains :data:`STEPS` steps on the simulated device.

    Args:
        given: the program's arguments by name; what decides no bytes is replaced.
        strategy: replaces the program's.
        target: the device to imitate.
        validates: whether a batch of validation runs before and between the steps.
    """
    kept = [callback for callback in _callbacks(given) if not isinstance(callback, _LEFT_OUT)]
    return {
        **{name: given[name] for name in _KEPT if given.get(name) is not None},
        **_precision(given, target.kind),
        "strategy": strategy,
        "max_steps": STEPS,
        "max_epochs": given.get("max_epochs") or _EPOCHS,
        # First, so that it ends the fit before they act on an epoch's end.
        "callbacks": [_Parts(lambda: strategy.tracer), *kept],
        "logger": DummyLogger(),
        "limit_val_batches": int(validates),
        "num_sanity_val_steps": int(validates and given.get("num_sanity_val_steps") != 0),
        "val_check_interval": given.get("accumulate_grad_batches") or 1,
        # Inference tensors cannot be without data.
        "inference_mode": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def _averages(trainer: Any) -> Iterator[torch.nn.Module]:
    """Yield the copies of the model that callbacks average, and make on its device before it is there."""
    for callback in trainer.callbacks:
        if getattr(callback, "_device", None) is None:
            yield from (value for value in vars(callback).values() if isinstance(value, AveragedModel))


def held_by_callbacks(callbacks: Iterable[Callback], model: nn.Module, kind: str) -> Iterator[str]:
    """Yield a sentence for each callback that keeps tensors of its own on a kind of device, beside the model's."""
    known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}  # noqa: SLF001
    for callback in callbacks:
        kept_by = [vars(callback)]
        kept_by += [copy.state_dict() for copy in kept_by[0].values() if isinstance(copy, AveragedModel)]
        parts = (part for tensor in tensors_in(kept_by) for part in dense_parts(tensor))
        storages = [part.untyped_storage() for part in parts if part.device.type == kind]
        sizes = {storage._cdata: storage.nbytes() for storage in storages}  # noqa: SLF001 no public one
        if kept := sum(size for key, size in sizes.items() if key not in known):
            yield f"{type(callback).__name__} keeps {format_bytes(kept)} on the device, which is included"


def later_needs(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the Trainer's callbacks do after the simulated steps, a sentence each."""
    for callback in _callbacks(given):
        name = type(callback).__name__
        if isinstance(callback, BaseFinetuning):
            yield f"{name} may train more parameters later, which needs more memory"
        if isinstance(callback, StochasticWeightAveraging):
            yield f"{name} averages on the device later, which needs another copy of the parameters"


def _callbacks(given: Mapping[str, Any]) -> list[Callback]:
    callbacks = given.get("callbacks") or []
    return [callbacks] if isinstance(callbacks, Callback) else list(callbacks)


def _precision(given: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the arguments of the precision; mixed precision names the device."""
    plugins = given.get("plugins") or []
    plugins = list(plugins) if isinstance(plugins, (list, tuple)) else [plugins]
    plugin = next((plugin for plugin in plugins if isinstance(plugin, Precision)), None)
    if plugin is not None and not isinstance(plugin, MixedPrecision):
        return {"plugins": plugin}
    precision = str(plugin.precision if plugin is not None else given.get("precision") or "32-true")
    precision = {"16": "16-mixed", "bf16": "bf16-mixed"}.get(precision, precision)
    if not precision.endswith("-mixed"):
        return {"precision": precision}
    # A scaler keeps a few numbers, and would read values.
    scaler = torch.amp.GradScaler("cpu", enabled=False) if precision == "16-mixed" else None
    return {"plugins": MixedPrecision(precision, kind, scaler)}  # type: ignore[arg-type]


def _ignore(*_: object, **__: object) -> None:
    """Do nothing."""


def _keep(module: LightningModule, name: str, value: Any, *_: object, **__: object) -> None:
    """Let callbacks and hooks read a logged value."""
    module.trainer.callback_metrics[name] = value.detach() if isinstance(value, torch.Tensor) else value
