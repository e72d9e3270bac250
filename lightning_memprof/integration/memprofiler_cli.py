"""finetuning-scheduler's ``memprofiler_cfg`` on the command line, in YAML and on a Trainer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from jsonargparse.typing import class_from_function
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_warn

from lightning_memprof.capture.collectors.functions import FunctionMemory
from lightning_memprof.capture.sources.methods import memprofilable
from lightning_memprof.capture.tracker.fsdp import FSDPMemory
from lightning_memprof.errors import ConfigError
from lightning_memprof.integration.callback import MemProfilerCallback
from lightning_memprof.integration.memprofiler_cfg import MemProfilerCfg, collectors_for, dirpath_for, schedule_for
from lightning_memprof.integration.output import Output

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser
    from lightning.pytorch import Trainer

    from lightning_memprof.capture.base import Collector
    from lightning_memprof.integration.settings import Settings

__all__ = ["MemProfiler", "MemProfilerCLI", "add_memprofiler_arguments"]

_CONFIGURATION: Final = "memprofiler_cfg"
_CALLBACK: Final = "memprofiler"


class MemProfiler(MemProfilerCallback):
    """finetuning-scheduler's MemProfiler as a callback: a :class:`MemProfilerCallback` made of its configuration.

    Args:
        memprofiler_cfg: what to record; with ``enabled=False`` the callback does nothing.

    Raises:
        ConfigError: a dotted name does not resolve, or a value is not usable.

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
                output=Output(dirpath=dirpath_for(memprofiler_cfg)),
            )
        else:
            super().__init__(collectors=[])

    def settings(self, trainer: Trainer) -> Settings:
        """Say what is wanted of this run; what it cannot have is left out, as finetuning-scheduler leaves it out."""
        settings = super().settings(trainer)
        fitting = [_fitting(collector, trainer) for collector, _ in settings.collectors]
        # None is asked for: what turns out to be unavailable is said, and the rest is recorded.
        return replace(settings, collectors=[(collector, False) for collector in fitting if collector is not None])

    def leads(self, trainer: Trainer) -> bool:
        """Only where it is enabled."""
        return self.memprofiler_cfg.enabled

    def steps_aside(self, trainer: Trainer) -> bool:
        """Where it is not enabled."""
        return not self.memprofiler_cfg.enabled


class MemProfilerCLI(LightningCLI):
    """LightningCLI with the arguments of ``memprofiler_cfg``; what they ask for is recorded."""

    # Where the core arguments are: `add_arguments_to_parser` is for users, who need not call what they override.
    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add Lightning's arguments and ours."""
        super().add_core_arguments_to_parser(parser)
        add_memprofiler_arguments(parser)


def add_memprofiler_arguments(parser: ArgumentParser) -> None:
    """Add the arguments ``memprofiler_cfg`` to a parser, and the callback that they make.

    A LightningCLI gives the callback to its Trainer by itself. With a parser of another kind it is the value
    ``memprofiler`` of what the parser instantiates: ``Trainer(callbacks=[instantiated.memprofiler])``.

    Args:
        parser: of jsonargparse; in a LightningCLI the one that ``add_arguments_to_parser`` is given.

    """
    parser.add_class_arguments(MemProfilerCfg, _CONFIGURATION, sub_configs=True)
    if isinstance(parser, LightningArgumentParser):
        parser.add_lightning_class_args(_configured, _CALLBACK)
    else:
        parser.add_class_arguments(class_from_function(_configured), _CALLBACK)
    parser.link_arguments(_CONFIGURATION, f"{_CALLBACK}.memprofiler_cfg", apply_on="instantiate")


def _fitting(collector: Collector, trainer: Trainer) -> Collector | None:
    """Return what of a collector this run can have, if anything."""
    if isinstance(collector, FSDPMemory):
        return collector if trainer.state.fn == "fit" else None
    if not isinstance(collector, FunctionMemory):
        return collector
    module = trainer.lightning_module
    missing = [name for name in collector.functions if not hasattr(type(module), name) and name not in vars(module)]
    if missing:
        rank_zero_warn(
            f"memprofiler_cfg names {', '.join(missing)}, which {type(module).__name__} does not have; "
            "a method of another object is recorded where it is marked with @memprofilable"
        )
    snapshots = collector.allocator_snapshots
    device = trainer.strategy.root_device
    if snapshots and device.type != "cuda":
        rank_zero_warn(f"memprofiler_cfg asks for CUDA memory, and the model is on {device}: the rest is recorded")
        snapshots = False
    functions = tuple(name for name in collector.functions if name not in missing)
    return replace(collector, functions=functions, allocator_snapshots=snapshots)


# Typed Any, or the parser would show every argument a second time.
def _configured(memprofiler_cfg: Any = None) -> MemProfiler:
    """Make the callback of ``memprofiler_cfg``."""
    return MemProfiler(memprofiler_cfg)
