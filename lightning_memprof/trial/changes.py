"""The remedies: how each is applied to a training run from outside, what it may change, and the code to paste."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.errors import ConfigError
from lightning_memprof.trial.change import Change, RefusedError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn
    from torch.utils.data import DataLoader


# Reductions add in another order; the loss of a training run that is sensitive to it drifts by less within 25 steps.
_ROUNDING: Final = 0.01
# 8 bits of mantissa.
_LOW_PRECISION: Final = 0.05
# Of the mean of 25 losses: dropout that draws other numbers changes it by less.
_OTHER_NUMBERS: Final = 0.05
_MOST_VALUE: Final = 1024
# Batches from one to the next that a rare callback sees: as rarely as Lightning logs.
_RARELY: Final = 50
_BATCH_HOOKS: Final = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end",
)  # fmt: skip


class _Number(Change):
    example = "4"

    def is_valid(self, value: str) -> bool:
        return value.isascii() and value.isdecimal() and 1 <= int(value) <= _MOST_VALUE


class _Workers(_Number):
    name = "workers"
    paste = "DataLoader(..., num_workers={value}{names})"
    names = ", persistent_workers=True"

    def on_loader(self, loader: DataLoader[Any]) -> None:
        had = loader.num_workers
        loader.num_workers = int(self.value)
        if had:
            self.names = ""
        else:
            loader.prefetch_factor = 2
            _set_persistent(loader)


class _PersistentWorkers(Change):
    name = "persistent_workers"
    paste = "DataLoader(..., persistent_workers=True)"
    is_per_epoch = True

    def on_loader(self, loader: DataLoader[Any]) -> None:
        _require_workers(loader)
        _set_persistent(loader)


class _Prefetch(_Number):
    name = "prefetch"
    paste = "DataLoader(..., prefetch_factor={value})"

    def on_loader(self, loader: DataLoader[Any]) -> None:
        _require_workers(loader)
        loader.prefetch_factor = int(self.value)


class _PinMemory(Change):
    name = "pin_memory"
    paste = "DataLoader(..., pin_memory=True)"

    def on_fit(self, trainer: Trainer, model: LightningModule) -> None:  # noqa: ARG002 the interface
        if trainer.strategy.root_device.type == "cpu":
            raise RefusedError("the training is on the CPU: nothing is copied to a device")

    def on_loader(self, loader: DataLoader[Any]) -> None:
        loader.pin_memory = True


class _OptimizerFlag(Change):
    names = "AdamW"
    family = "optimizer"
    tolerance = _ROUNDING

    @property
    def code(self) -> tuple[str, ...]:
        flag = self.name.partition("_")[0]
        return tuple(f"torch.optim.{name}(..., {flag}=True)" for name in self.names.split())

    def on_start(self, trainer: Trainer, model: LightningModule) -> None:  # noqa: ARG002 the interface
        flag = self.name.partition("_")[0]
        found = [optimizer for optimizer in trainer.optimizers if flag in optimizer.defaults]
        if not found:
            names = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers)
            raise RefusedError(f"{names or 'the training'} has no {flag} implementation")
        self.names = " ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in found))
        for optimizer in found:
            for group in optimizer.param_groups:
                group.update({"foreach": False, "fused": False, flag: True})


class _FusedOptimizer(_OptimizerFlag):
    name = "fused_optimizer"


class _ForeachOptimizer(_OptimizerFlag):
    name = "foreach_optimizer"


class _Threads(_Number):
    name = "threads"
    paste = "torch.set_num_threads({value})"
    tolerance = _ROUNDING

    def on_start(self, trainer: Trainer, model: LightningModule) -> None:  # noqa: ARG002 the interface
        import torch

        # Lightning sets its own number where it starts the ranks.
        torch.set_num_threads(int(self.value))


class _Precision(Change):
    name = "precision"
    example = "bf16-mixed"
    paste = 'Trainer(..., precision="{value}")'
    tolerance = _LOW_PRECISION

    def is_valid(self, value: str) -> bool:
        return value in {"bf16-mixed", "16-mixed"}

    def on_fit(self, trainer: Trainer, model: LightningModule) -> None:  # noqa: ARG002 the interface
        from lightning.pytorch.plugins.precision import MixedPrecision, Precision

        strategy = trainer.strategy
        if type(strategy.precision_plugin) is not Precision:
            raise RefusedError(f"the Trainer has precision={trainer.precision}")
        device = strategy.root_device.type
        if device == "cpu" and self.value == "16-mixed":
            raise RefusedError("16-mixed needs a GPU")
        strategy.precision_plugin = MixedPrecision(self.value, device)  # type: ignore[arg-type]  # a literal


class _MatmulPrecision(Change):
    name = "matmul_precision"
    example = "high"
    paste = 'torch.set_float32_matmul_precision("{value}")'
    tolerance = _LOW_PRECISION

    def is_valid(self, value: str) -> bool:
        return value in {"high", "medium"}

    def on_start(self, trainer: Trainer, model: LightningModule) -> None:  # noqa: ARG002 the interface
        import torch

        torch.set_float32_matmul_precision(self.value)


class _Compile(Change):
    name = "compile"
    paste = (
        "# at the end of the LightningModule's __init__, or of configure_model\n"
        "for child in [{names}]: child.forward = torch.compile(child.forward)"
    )
    names = "*self.children()"
    tolerance = _ROUNDING

    def make_comparable(self) -> None:
        import torch._inductor.config

        torch._inductor.config.fallback_random = True  # noqa: SLF001 its documented place

    def on_model(self, model: LightningModule) -> None:
        import torch

        children = [child for child in _called(model) if any(True for _ in child.parameters())]
        if not children:
            raise RefusedError("the module has no children with parameters")
        self.names = ", ".join(_expressions(model, children))
        for child in children:
            # Module.compile() does not compile torch's own containers, such as Sequential.
            child.forward = torch.compile(child.forward)


class _Checkpointing(Change):
    name = "checkpointing"
    paste = (
        "# at the end of the LightningModule's __init__, or of configure_model\n"
        "from functools import partial; from torch.utils.checkpoint import checkpoint\n"
        "for block in [{names}]: block.forward = partial(checkpoint, block.forward, use_reentrant=False)"
    )
    names = "*self.blocks"

    def on_model(self, model: LightningModule) -> None:
        from lightning_memprof.estimation.changes import checkpoint_blocks, repeated_blocks

        self.names = ", ".join(_expressions(model, repeated_blocks(model)))
        if not checkpoint_blocks(model):
            raise RefusedError("the model has no repeated blocks")


class _Accumulate(_Number):
    name = "accumulate"
    example = "2"
    paste = "Trainer(..., accumulate_grad_batches={value})  # and 1/{value} of the batch size"
    tolerance = _OTHER_NUMBERS
    is_random = True

    @property
    def batches(self) -> int:
        return int(self.value)

    def on_fit(self, trainer: Trainer, model: LightningModule) -> None:
        if not model.automatic_optimization:
            raise RefusedError("the module optimizes manually")
        if trainer.accumulate_grad_batches > 1:
            raise RefusedError(f"the Trainer has accumulate_grad_batches={trainer.accumulate_grad_batches}")
        trainer.accumulate_grad_batches = self.batches

    def on_loader(self, loader: DataLoader[Any]) -> None:
        samples = batch_samples(loader)
        if samples is not None and samples % self.batches:
            raise RefusedError(f"{self.value} does not divide the batch size, {samples}")
        set_batch_samples(loader, (samples or 0) // self.batches)


class _ChannelsLast(Change):
    name = "channels_last"
    paste = "model.to(memory_format=torch.channels_last)"
    tolerance = _ROUNDING

    def on_model(self, model: LightningModule) -> None:
        import torch

        model.to(memory_format=torch.channels_last)


class _NoAnomalyDetection(Change):
    name = "no_anomaly_detection"
    paste = "Trainer(..., detect_anomaly=False)  # and no torch.autograd.set_detect_anomaly(True)"

    def on_fit(self, trainer: Trainer, model: LightningModule) -> None:  # noqa: ARG002 the interface
        import torch

        trainer._detect_anomaly = False  # noqa: SLF001 it has no setter
        torch.autograd.set_detect_anomaly(mode=False)


class _WithoutCallback(Change):
    name = "without_callback"
    example = "MyCallback"
    paste = "Trainer(callbacks=[...])  # without {value}"
    family = "callback"

    def is_valid(self, value: str) -> bool:
        return value.isidentifier()

    def on_fit(self, trainer: Trainer, model: LightningModule) -> None:  # noqa: ARG002 the interface
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        kept = [callback for callback in callbacks if type(callback).__name__ != self.value]
        if len(kept) == len(callbacks):
            raise RefusedError(f"the Trainer has no callback of a class {self.value}")
        callbacks[:] = kept


class _RareCallback(Change):
    name = "rare_callback"
    example = "MyCallback"
    family = "callback"

    def __init__(self, value: str = "") -> None:
        super().__init__(value)
        self._hooks = [("trainer", f"{value}.on_train_batch_end")]

    @property
    def code(self) -> tuple[str, ...]:
        return tuple(
            f"if {place}.fit_loop.batch_idx % {_RARELY}: return  # first in {hook}" for place, hook in self._hooks
        )

    def is_valid(self, value: str) -> bool:
        return value.isidentifier()

    def on_fit(self, trainer: Trainer, model: LightningModule) -> None:
        from lightning.pytorch import Callback, LightningModule

        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        owners = [(owner, Callback, "trainer") for owner in callbacks] + [(model, LightningModule, "self.trainer")]
        found = [
            (owner, hook, place)
            for owner, base, place in owners
            for hook in _BATCH_HOOKS
            if type(owner).__name__ == self.value and getattr(type(owner), hook) is not getattr(base, hook)
        ]
        if not found:
            raise RefusedError(f"neither a callback nor the module is a {self.value} with hooks in each batch")
        self._hooks = [(place, f"{self.value}.{hook}") for _, hook, place in found]
        for owner, hook, _ in found:
            vars(owner)[hook] = partial(_rarely, trainer, owner, hook)


class _LogEvery(_Number):
    name = "log_every"
    example = "50"
    paste = "Trainer(..., log_every_n_steps={value})"

    def on_fit(self, trainer: Trainer, model: LightningModule) -> None:  # noqa: ARG002 the interface
        trainer.log_every_n_steps = int(self.value)  # type: ignore[attr-defined]  # set by a connector


class _FreezeGarbage(Change):
    name = "gc_freeze"
    paste = "gc.collect(); gc.freeze()  # in on_train_start"

    def on_start(self, trainer: Trainer, model: LightningModule) -> None:  # noqa: ARG002 the interface
        gc.collect()
        gc.freeze()


class _StaticGraph(Change):
    name = "static_graph"
    paste = "Trainer(..., strategy=DDPStrategy(static_graph=True, find_unused_parameters=False))"

    def on_fit(self, trainer: Trainer, model: LightningModule) -> None:  # noqa: ARG002 the interface
        from lightning.pytorch.strategies import DDPStrategy

        strategy = trainer.strategy
        if not isinstance(strategy, DDPStrategy):
            raise RefusedError(f"the strategy is {type(strategy).__name__}, not DDPStrategy")
        strategy._ddp_kwargs.update(static_graph=True, find_unused_parameters=False)  # noqa: SLF001 it has no setter


class _ExpandableSegments(Change):
    name = "expandable_segments"
    paste = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"

    def environment(self) -> Mapping[str, str]:
        name = "PYTORCH_CUDA_ALLOC_CONF"
        given = os.environ.get(name, "")
        return {name: f"{given},expandable_segments:True" if given else "expandable_segments:True"}

    def on_fit(self, trainer: Trainer, model: LightningModule) -> None:  # noqa: ARG002 the interface
        if trainer.strategy.root_device.type != "cuda":
            raise RefusedError("the training is not on a CUDA device")


CHANGES: Final[tuple[type[Change], ...]] = (
    _Workers, _PersistentWorkers, _Prefetch, _PinMemory, _FusedOptimizer, _ForeachOptimizer, _Threads, _Precision,
    _MatmulPrecision, _Compile, _Checkpointing, _Accumulate, _ChannelsLast, _NoAnomalyDetection,
    _WithoutCallback, _RareCallback, _LogEvery, _FreezeGarbage, _StaticGraph, _ExpandableSegments,
)  # fmt: skip


def parse_change(text: str) -> Change:
    """Return a remedy from the command line, such as ``workers=4``.

    Raises:
        ConfigError: there is no such remedy, or its value is invalid.
    """
    name, _, value = text.partition("=")
    for kind in CHANGES:
        if kind.name == name:
            return kind(value)
    known = ", ".join(f"{kind.name}={kind.example}" if kind.example else kind.name for kind in CHANGES)
    raise ConfigError(f"--remedy {text}: unknown; known are {known}")


def _rarely(trainer: Trainer, owner: Any, hook: str, *given: Any) -> None:
    if trainer.fit_loop.batch_idx % _RARELY == 0:
        getattr(type(owner), hook)(owner, *given)


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children, and those of containers without a forward."""
    for child in module.children():
        if type(child).__name__ in {"ModuleList", "ModuleDict"}:
            yield from _called(child)
        else:
            yield child


def _expressions(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[str]:
    """Yield modules as Python in a method of the model, those of a whole container at once."""
    wanted = set(map(id, modules))
    for path, parent in model.named_modules():
        place = "self" + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in path.split(".") if part)
        inside = [(name, child) for name, child in parent.named_children() if id(child) in wanted]
        if (
            inside
            and type(parent).__name__ in {"ModuleList", "Sequential"}
            and len(inside) == len([*parent.children()])
        ):
            yield f"*{place}"
        elif type(parent).__name__ == "ModuleDict":
            yield from (f"{place}[{name!r}]" for name, _ in inside)
        else:
            yield from (f"{place}[{name}]" if name.isdecimal() else f"{place}.{name}" for name, _ in inside)


def batch_samples(loader: DataLoader[Any]) -> int | None:
    """Return the samples in a batch of a loader; None where its batch sampler does not say."""
    samples = getattr(loader.batch_sampler, "batch_size", None)
    return samples if isinstance(samples, int) else None


def set_batch_samples(loader: DataLoader[Any], samples: int) -> None:
    """Change the samples in a batch of a loader before its first batch.

    Raises:
        RefusedError: its batch sampler is not torch's, or there are fewer data.
    """
    data = loader.dataset
    if hasattr(data, "__len__") and samples > len(data):
        raise RefusedError(f"the data have {len(data)} samples")
    if batch_samples(loader) is None:
        raise RefusedError("the batch size is not that of a BatchSampler")
    vars(loader.batch_sampler)["batch_size"] = samples
    if loader.batch_size is not None:
        # DataLoader refuses to set it after construction.
        vars(loader)["batch_size"] = samples


def _require_workers(loader: DataLoader[Any]) -> None:
    if not loader.num_workers:
        raise RefusedError("the DataLoader has no workers")


def _set_persistent(loader: DataLoader[Any]) -> None:
    # DataLoader refuses to set it after construction; its iterators read it when they start.
    vars(loader)["persistent_workers"] = True
