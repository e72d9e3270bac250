"""Builds the context of a run: its device, its feeds, its files, and the collectors that are available."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Final

import torch
from lightning.fabric.utilities.throughput import get_available_flops

from lightning_memprof.artifacts.series import LIGHTNING_PROFILER
from lightning_memprof.artifacts.sink import RunPlace, Sink
from lightning_memprof.capture.base import RunContext, TimedPart, no_training_step
from lightning_memprof.capture.budget import Ledger
from lightning_memprof.capture.clock import device_timer
from lightning_memprof.capture.faults import Faults
from lightning_memprof.capture.sources.methods import unsupported_method
from lightning_memprof.errors import ConfigError
from lightning_memprof.integration.driver import stage_function
from lightning_memprof.integration.facts import run_facts
from lightning_memprof.integration.settings import choice_note, group_timeout_seconds
from lightning_memprof.logs import logger_of
from lightning_memprof.packages import lightning_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lightning.pytorch import Trainer

    from lightning_memprof.capture.base import Collector
    from lightning_memprof.integration.feeds import ActionTap, TensorFeed
    from lightning_memprof.integration.settings import Settings


log = logger_of(__name__)

_DTYPES: Final = (
    ("bf16", torch.bfloat16),
    ("16", torch.float16),
    ("32", torch.float32),
)
_PRECISION: Final = ("convert_input", "pre_backward", "backward", "post_backward", "optimizer_step", "clip_gradients")
_STRATEGY: Final = ("save_checkpoint",)
# Methods that wait for other ranks. Not `reduce`: `self.log` compares the bound methods of two calls, and raises where
# they differ, as they would between a step in a window and a step before it.
_COLLECTIVES: Final = ("barrier", "broadcast", "all_gather")
# Metrics are computed here, and passed to every logger.
_LOGGING: Final = (
    "update_train_step_metrics", "update_train_epoch_metrics", "update_eval_step_metrics", "log_eval_end_metrics",
)  # fmt: skip


def build_context(
    trainer: Trainer, stage: str, settings: Settings, place: RunPlace, tap: ActionTap, tensors: TensorFeed
) -> RunContext:
    """Return the context of a run, with an open sink and manifest.

    Args:
        trainer: in its ``setup``: ranks are known.
        stage: ``fit``, ``validate``, ``test`` or ``predict``.
        settings: the settings of this rank.
        place: where the files of the run go.
        tap: the tap on the Trainer's profiler, installed while the stage runs.
        tensors: the batches and losses of the Trainer's hooks.
    """
    device = trainer.strategy.root_device
    sink = Sink(place, trainer.global_rank)
    return RunContext(
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        stage=stage,
        function=stage_function(stage),
        strategy=type(trainer.strategy).__name__,
        device=device,
        model=trainer.lightning_module,
        actions=tap,
        training=tensors,
        sink=sink,
        faults=Faults(sink.manifest, settings.output.on_error),
        timer=device_timer(device),
        peak_flops=peak_flops(trainer),
        ledger=Ledger(settings.budget, group_timeout_seconds(trainer)),
        parts=lambda: unprofiled_parts(trainer, stage),
        profiler_conflict=_profiler_conflict(trainer.profiler),  # type: ignore[attr-defined]
    )


def available_collectors(run: RunContext, trainer: Trainer, settings: Settings) -> list[Collector]:
    """Return the collectors that are available, and write the facts of the run to the manifest.

    Raises:
        ConfigError: a collector that the user requires is not available.
    """
    manifest, place = run.sink.manifest, run.sink.place
    reasons = [(collector, asked, _unavailable(collector, run)) for collector, asked in settings.collectors]
    available = [collector for collector, _, reason in reasons if reason is None]
    manifest.append(
        "run",
        **run_facts(trainer, run.stage, place.url or str(place.root), settings.schedule, available),
        every_collector=settings.every_collector,
        triggers=settings.triggers.file,
        operator_table=settings.table.chosen(),
    )
    if trainer.is_global_zero and (note := choice_note(settings.ranks, trainer.world_size)):
        manifest.append("note", collector="ranks", message=note)
    missing = [(collector, asked, reason) for collector, asked, reason in reasons if reason is not None]
    # A collector for the fit must not stop the test after it.
    wrong = [(collector, why) for collector, asked, why in missing if asked and why != no_training_step(run)]
    if refused := [f"{type(collector).__name__} ({why})" for collector, why in wrong]:
        raise ConfigError(f"not available in this run: {', '.join(refused)}; remove it from `collectors`")
    for collector, _, reason in missing:
        manifest.append("unavailable", collector=collector.name, reason=reason)
        if trainer.is_global_zero:
            # The page has it in its notes; most machines lack something.
            log.debug("%s: collector %s is disabled", reason, collector.name)
    return available


def _unavailable(collector: Collector, run: RunContext) -> str | None:
    with run.faults.caught(collector.name, "enter"):
        return collector.unavailable(run)
    return None


def _profiler_conflict(profiler: Any) -> str | None:
    if lightning_class(profiler, "PyTorchProfiler") and not getattr(profiler, "idle_actions", False):
        return LIGHTNING_PROFILER
    return None


def unprofiled_parts(trainer: Trainer, stage: str) -> list[TimedPart]:
    """Return the methods of a Trainer whose time is not an action of its profiler.

    They are named as Lightning names its actions: ``[Precision]MixedPrecision.optimizer_step``,
    ``[Optimizer]AdamW.step``, ``[Logger]CSVLogger.log_metrics``, ``[CheckpointIO]TorchCheckpointIO.save_checkpoint``,
    ``[LightningModule]Net.log``,
    and ``logging`` and ``run_validation`` for actions that contain others, as ``run_training_batch`` does.
    """
    strategy, module = trainer.strategy, trainer.lightning_module
    can_log = hasattr(module, "log") and not unsupported_method(module, "log")
    several = trainer.world_size > 1
    shared = _COLLECTIVES if several else ()
    parts = [
        *_of("Precision", strategy.precision_plugin, _PRECISION),
        *_of("Strategy", strategy, _STRATEGY),
        *_of("Strategy", strategy, shared, always=True, meets=True),
        *_of("CheckpointIO", strategy.checkpoint_io, ("save_checkpoint", "remove_checkpoint")),
        *(part for logger in trainer.loggers for part in _of("Logger", logger, ("log_metrics", "save"), always=True)),
        *(part for metric in _metrics(trainer) for part in _of("Metric", metric, ("update",), always=True)),
        *(
            part
            for metric in _metrics(trainer)
            for part in _of("Metric", metric, ("compute",), always=True, meets=several)
        ),
        *(TimedPart(trainer._logger_connector, method, "logging") for method in _LOGGING),
        *(_of("LightningModule", module, ("log",), always=several, meets=several) if can_log else ()),
    ]
    if stage == "fit":
        loop = trainer.fit_loop.epoch_loop
        parts += [
            *(part for optimizer in trainer.optimizers for part in _of("Optimizer", optimizer, ("step", "zero_grad"))),
            TimedPart(loop.val_loop, "run", "run_validation", always=True),
        ]
        if shared:
            action = f"[Strategy]{type(strategy).__name__}.broadcast_sigterm"
            parts.append(TimedPart(loop, "_broadcast_sigterm_tensor", action, always=True))
    return [part for part in parts if callable(getattr(part.owner, part.method, None))]


def _metrics(trainer: Trainer) -> list[torch.nn.Module]:
    """Return the module's metrics by torchmetrics, which this package does not import."""
    modules: Iterable[torch.nn.Module] = getattr(trainer.lightning_module, "modules", tuple)()
    kind = ("torchmetrics.metric", "Metric")
    return [module for module in modules if any((b.__module__, b.__name__) == kind for b in type(module).__mro__)]


def _of(
    kind: str, owner: object, methods: Iterable[str], *, always: bool = False, meets: bool = False
) -> Iterator[TimedPart]:
    for method in methods:
        yield TimedPart(owner, method, f"[{kind}]{type(owner).__name__}.{method}", always, meets)


def peak_flops(trainer: Trainer) -> float | None:
    """Return floating-point operations per second of the rank's device in the Trainer's precision.

    None where Lightning does not know the device (every CPU) or the precision. Source:
    ``lightning.fabric.utilities.throughput.get_available_flops``, the vendors' figures for dense matrices.
    """
    precision = str(trainer.precision)
    dtype = next((dtype for prefix, dtype in _DTYPES if precision.startswith(prefix)), None)
    if dtype is None or trainer.strategy.root_device.type != "cuda":
        return None
    try:
        with warnings.catch_warnings():
            # It warns about an unknown device, which the report shows.
            warnings.simplefilter("ignore")
            peak = get_available_flops(trainer.strategy.root_device, dtype)
    except Exception:  # noqa: BLE001 a missing precision raises various errors, and the run continues without the figure
        return None
    return None if peak is None else float(peak)
