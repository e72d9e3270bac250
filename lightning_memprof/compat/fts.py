"""The names of finetuning-scheduler: its memory profiler as a callback, in a CLI, and its configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from jsonargparse.typing import class_from_function
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_warn

from lightning_memprof.capture.collectors.functions import FunctionMemory
from lightning_memprof.capture.sources.methods import memprofilable
from lightning_memprof.capture.tracker.fsdp import FSDPMemory
from lightning_memprof.compat.fts_config import MemProfilerCfg as MemProfilerCfg
from lightning_memprof.compat.fts_config import MemProfilerFuncs as MemProfilerFuncs
from lightning_memprof.compat.fts_config import MemProfilerHooks as MemProfilerHooks
from lightning_memprof.compat.fts_config import MemProfilerSchedule as MemProfilerSchedule
from lightning_memprof.compat.fts_config import collectors_for, dirpath_for, schedule_for
from lightning_memprof.errors import ConfigError
from lightning_memprof.integration.callback import MemProfilerCallback
from lightning_memprof.integration.settings import OutputOptions

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser
    from lightning.pytorch import Trainer

    from lightning_memprof.capture.base import Collector
    from lightning_memprof.integration.settings import Settings

_CONFIGURATION: Final = "memprofiler_cfg"
_CALLBACK: Final = "memprofiler"


class MemProfiler(MemProfilerCallback):
    """finetuning-scheduler's MemProfiler: a :class:`MemProfilerCallback` made from its configuration.

    Args:
        memprofiler_cfg: the configuration; with ``enabled=False`` the callback does nothing.

    Raises:
        ConfigError: a dotted name cannot be imported, or a value is invalid.

    """

    memprofilable = staticmethod(memprofilable)

    def __init__(self, memprofiler_cfg: MemProfilerCfg) -> None:
        if not isinstance(memprofiler_cfg, MemProfilerCfg):
            msg = f"memprofiler_cfg={memprofiler_cfg!r}: must be a MemProfilerCfg"
            raise ConfigError(msg)
        self.memprofiler_cfg = memprofiler_cfg
        if memprofiler_cfg.enabled:
            super().__init__(
                schedule_for(memprofiler_cfg),
                collectors_for(memprofiler_cfg),
                output=OutputOptions(dirpath=dirpath_for(memprofiler_cfg)),
            )
        else:
            super().__init__(collectors=[])

    def settings(self, trainer: Trainer) -> Settings:
        """Return the settings of this run, without collectors that it does not support, as in finetuning-scheduler."""
        settings = super().settings(trainer)
        fitting = [_fitting(collector, trainer) for collector, _ in settings.collectors]
        # No collector is required: one that is not available is reported, and the others record.
        return replace(settings, collectors=[(collector, False) for collector in fitting if collector is not None])

    def leads(self, trainer: Trainer) -> bool:
        """Whether it is enabled."""
        return self.memprofiler_cfg.enabled

    def steps_aside(self, trainer: Trainer) -> bool:
        """Whether it is disabled."""
        return not self.memprofiler_cfg.enabled


class MemProfilerCLI(LightningCLI):
    """LightningCLI with the arguments of ``memprofiler_cfg`` and the callback made from them."""

    # Not `add_arguments_to_parser`: users override that, and need not call super.
    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the arguments of Lightning and of ``memprofiler_cfg``."""
        super().add_core_arguments_to_parser(parser)
        add_memprofiler_arguments(parser)


def add_memprofiler_arguments(parser: ArgumentParser) -> None:
    """Add the arguments ``memprofiler_cfg`` to a parser, and the callback made from them.

    A LightningCLI passes the callback to its Trainer. Another parser instantiates it as ``memprofiler``:
    ``Trainer(callbacks=[instantiated.memprofiler])``.

    Args:
        parser: a parser of jsonargparse; in a LightningCLI the argument of ``add_arguments_to_parser``.

    """
    parser.add_class_arguments(MemProfilerCfg, _CONFIGURATION, sub_configs=True)
    if isinstance(parser, LightningArgumentParser):
        parser.add_lightning_class_args(_configured, _CALLBACK)
    else:
        parser.add_class_arguments(class_from_function(_configured), _CALLBACK)
    parser.link_arguments(_CONFIGURATION, f"{_CALLBACK}.memprofiler_cfg", apply_on="instantiate")


def _fitting(collector: Collector, trainer: Trainer) -> Collector | None:
    """Return the collector without the parts that this run does not support, or None."""
    if isinstance(collector, FSDPMemory):
        return collector if trainer.state.fn == "fit" else None
    if not isinstance(collector, FunctionMemory):
        return collector
    module = trainer.lightning_module
    missing = [name for name in collector.functions if not hasattr(type(module), name) and name not in vars(module)]
    if missing:
        rank_zero_warn(
            f"memprofiler_cfg names {', '.join(missing)}, which {type(module).__name__} does not have; "
            "mark a method of another object with @memprofilable to record it"
        )
    snapshots = collector.allocator_snapshots
    device = trainer.strategy.root_device
    if snapshots and device.type != "cuda":
        rank_zero_warn(
            f"memprofiler_cfg requests CUDA memory, but the model is on {device}: everything else is recorded"
        )
        snapshots = False
    functions = tuple(name for name in collector.functions if name not in missing)
    return replace(collector, functions=functions, allocator_snapshots=snapshots)


# Typed Any: with the class, the parser would show every argument twice.
def _configured(memprofiler_cfg: Any = None) -> MemProfiler:
    """Return the callback for ``memprofiler_cfg``."""
    return MemProfiler(memprofiler_cfg)
