"""The names of finetuning-scheduler: its memory profiler as a callback, in a CLI, and its configuration.

Names, defaults and meaning of the fields are those of ``fts_examples.profiling.config`` in finetuning-scheduler 2.x.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

from jsonargparse import ArgumentParser
from jsonargparse.typing import class_from_function
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_memprof.artifacts.naming import RUN_DIRECTORY
from lightning_memprof.capture.base import Collector
from lightning_memprof.capture.collectors.functions import CallRange, FunctionMemory
from lightning_memprof.capture.collectors.host import HostMemory
from lightning_memprof.capture.collectors.oom import OOMAutopsy
from lightning_memprof.capture.collectors.pulse import Pulse
from lightning_memprof.capture.sources.call_memory import UserHooks
from lightning_memprof.capture.sources.methods import memprofilable
from lightning_memprof.capture.sources.saved_hooks import checked_unpack
from lightning_memprof.capture.tracker.collectors import FSDPMemory
from lightning_memprof.errors import ConfigError
from lightning_memprof.integration.callback import MemProfilerCallback
from lightning_memprof.integration.settings import OutputOptions, Settings
from lightning_memprof.packages import lightning_class
from lightning_memprof.schedule import Schedule

__all__ = [
    "MemProfiler",
    "MemProfilerCLI",
    "MemProfilerCfg",
    "MemProfilerFuncs",
    "MemProfilerHooks",
    "MemProfilerSchedule",
    "add_memprofiler_arguments",
]

Hook = str | Callable[..., Any]
"""A function, or its dotted name."""

_CONFIGURATION: Final = "memprofiler_cfg"
_CALLBACK: Final = "memprofiler"
_STEP: Final = "training_step"
_HOME: Final = "fts_examples"
_HOOKS: Final = f"{_HOME}.profiling.npp_hooks"
# Names of its functions below `_HOME`; this package measures what they do.
_BUILT_IN: Final = frozenset(
    {"_hook_npp_pre_forward", "_hook_npp_post_forward", "_reset_memory_hooks_state", "_npp_hook", "identity_lambda"}
)
HOOK_ATTRIBUTES: Final = (
    "rss_pre_forward", "rss_post_forward", "rss_diff", "npp_pre_forward", "npp_post_forward", "npp_diff",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MemProfilerHooks:
    """Hooks around the forwards of all modules, as dotted names or callables.

    Args:
        pre_forward_hooks: called as ``hook(module, args)`` before each forward.
        post_forward_hooks: called as ``hook(module, args, output)`` after each forward.
        reset_state_hooks: called as ``hook(model, save_hook_attrs)`` at the beginning and after each recorded call.
    """

    pre_forward_hooks: list[Hook] = field(default_factory=lambda: [f"{_HOOKS}._hook_npp_pre_forward"])
    post_forward_hooks: list[Hook] = field(default_factory=lambda: [f"{_HOOKS}._hook_npp_post_forward"])
    reset_state_hooks: list[Hook] = field(default_factory=lambda: [f"{_HOOKS}._reset_memory_hooks_state"])


@dataclass(frozen=True, kw_only=True)
class MemProfilerFuncs:
    """Method names, by the statistics recorded at them.

    Args:
        default: added to each of the other sets.
        cpu: resident and virtual size.
        cuda: statistics of the CUDA allocator.
        cuda_allocator_history: snapshots of the CUDA allocator.
        fsdp: FSDP memory by category; only ``training_step``, with its backward and the optimizer's step.
    """

    default: set[str] = field(default_factory=lambda: {_STEP})
    cpu: set[str] = field(default_factory=set)
    cuda: set[str] = field(default_factory=set)
    cuda_allocator_history: set[str] = field(default_factory=set)
    fsdp: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Accept lists as sets; refuse a single name, whose letters would become names."""
        for option in self.__dataclass_fields__:
            value = getattr(self, option)
            if isinstance(value, str) or not all(isinstance(name, str) and name.isidentifier() for name in value):
                raise ConfigError(
                    f"collect_funcs.{option}={value!r}: must be a set of method names, as in {{'training_step'}}"
                )
            object.__setattr__(self, option, set(value))


@dataclass(frozen=True, kw_only=True)
class MemProfilerSchedule:
    """Which calls of each function are recorded, by the function's own count from 1.

    Args:
        warmup_iters: first calls, not recorded.
        max_iter: last recorded call; None is ``warmup_iters + 1``.
    """

    warmup_iters: int = 1
    max_iter: int | None = None

    def __post_init__(self) -> None:
        """Refuse a range that records nothing."""
        if isinstance(self.warmup_iters, bool) or self.warmup_iters < 0:
            raise ConfigError(f"schedule.warmup_iters={self.warmup_iters!r}: must be an integer of at least 0")
        if self.last <= self.warmup_iters:
            raise ConfigError(
                f"schedule.max_iter={self.max_iter!r}: the last recorded call must be after "
                f"warmup_iters={self.warmup_iters}; omit it to record one call"
            )

    @property
    def last(self) -> int:
        """Number of the last recorded call."""
        return self.warmup_iters + 1 if self.max_iter is None else self.max_iter


@dataclass(frozen=True, kw_only=True)
class MemProfilerCfg:
    """Configuration of :class:`~lightning_memprof.compat.fts.MemProfiler`, field for field finetuning-scheduler's.

    Args:
        enabled: False records nothing and imports no hook.
        collect_funcs: method names, by the statistics recorded at them.
        cuda_allocator_history: keep the CUDA allocator's history and write snapshots.
        track_fsdp_mem: track FSDP2 memory by category.
        fsdp_mem_track_module_depth: levels of modules in the FSDP report.
        fsdp_mem_tracker_tabulate: write the FSDP report as tables.
        fsdp_mem_tracker_units: unit of the FSDP report.
        fsdp_mem_tracker_root_module: path of the module that ``fully_shard`` was applied to; "" is the LightningModule.
        dump_memorystats_pickle: write the statistics as pickle.
        dump_memorystats_yaml: write the statistics as YAML.
        schedule: the calls to record.
        save_dir: directory of all files; None is ``memprofiler`` in the Trainer's ``log_dir``.
        enable_memory_hooks: measure memory around module forwards.
        enable_saved_tensors_hooks: count saved activations.
        memory_hooks: the hooks around module forwards.
        saved_tensors_funcs: pack and unpack function of ``torch.autograd.graph.saved_tensors_hooks``, as dotted names
            or callables; ``identity_lambda`` as unpack function returns the packed value.
        save_hook_attrs: attributes that the hooks write on modules.
        retain_hooks_for_funcs: ignored; the hooks around forwards are removed after the last recorded call.
    """

    enabled: bool = False
    collect_funcs: MemProfilerFuncs = field(default_factory=MemProfilerFuncs)
    cuda_allocator_history: bool = False
    track_fsdp_mem: bool = False
    fsdp_mem_track_module_depth: int = 2
    fsdp_mem_tracker_tabulate: bool = False
    fsdp_mem_tracker_units: str = "MiB"
    fsdp_mem_tracker_root_module: str = ""
    dump_memorystats_pickle: bool = False
    dump_memorystats_yaml: bool = True
    schedule: MemProfilerSchedule = field(default_factory=MemProfilerSchedule)
    save_dir: str | Path | None = None
    enable_memory_hooks: bool = True
    enable_saved_tensors_hooks: bool = True
    memory_hooks: MemProfilerHooks = field(default_factory=MemProfilerHooks)
    saved_tensors_funcs: list[Hook] = field(default_factory=lambda: [f"{_HOOKS}._npp_hook", "identity_lambda"])
    save_hook_attrs: list[str] = field(default_factory=lambda: list(HOOK_ATTRIBUTES))
    retain_hooks_for_funcs: set[str] = field(default_factory=lambda: {_STEP})


def schedule_for(cfg: MemProfilerCfg) -> Schedule:
    """Return the schedule of the collectors that record whole steps."""
    warmup, calls = cfg.schedule.warmup_iters, cfg.schedule.last - cfg.schedule.warmup_iters
    if calls > 1 and _tracks_fsdp(cfg):
        # FSDP memory is tracked in one step per window, and every call has its own report.
        return Schedule(skip_first=warmup, wait=0, warmup=0, active=1, repeat=calls)
    return Schedule(wait=0, warmup=warmup, active=calls, repeat=1)


def dirpath_for(cfg: MemProfilerCfg) -> str | None:
    """Return the directory that gets the run directory, or None for the Trainer's ``log_dir``.

    The run directory is ``save_dir`` where that has the name of a run directory, else a subdirectory of ``save_dir``.
    """
    if cfg.save_dir is None:
        return None
    path = Path(cfg.save_dir)
    return str(path.parent if path.name == RUN_DIRECTORY else path)


def collectors_for(cfg: MemProfilerCfg) -> list[Collector]:
    """Return the collectors that an enabled ``cfg`` requests.

    Raises:
        ConfigError: a dotted name does not resolve, or a value is not usable.
    """
    chosen = (_function_memory(cfg), _fsdp_memory(cfg))
    return [Pulse(), HostMemory(), OOMAutopsy(), *(collector for collector in chosen if collector is not None)]


def _function_memory(cfg: MemProfilerCfg) -> FunctionMemory | None:
    funcs = cfg.collect_funcs
    snapshots = funcs.default | funcs.cuda_allocator_history
    names = snapshots | funcs.cpu | funcs.cuda
    if not names:
        return None
    measured, hooks = _user_hooks(cfg)
    return FunctionMemory(
        functions=tuple(sorted(names)),
        memory_hooks=measured,
        saved_tensors_hooks=cfg.enable_saved_tensors_hooks,
        allocator_snapshots=tuple(sorted(snapshots)) if cfg.cuda_allocator_history else False,
        dump_yaml=cfg.dump_memorystats_yaml,
        dump_pickle=cfg.dump_memorystats_pickle,
        calls=CallRange(cfg.schedule.warmup_iters + 1, cfg.schedule.last),
        user_hooks=hooks,
    )


def _user_hooks(cfg: MemProfilerCfg) -> tuple[bool, UserHooks | None]:
    """Return whether the built-in hooks measure around forwards, and the hooks of the user."""
    pair = saved_tensors_pair(cfg.saved_tensors_funcs) if cfg.enable_saved_tensors_hooks else None
    if not cfg.enable_memory_hooks:
        return False, None if pair is None else UserHooks(saved_tensors_funcs=pair)
    given = (cfg.memory_hooks.pre_forward_hooks, cfg.memory_hooks.post_forward_hooks)
    around = [[resolve(hook) for hook in hooks] for hooks in given]
    measured = any(hook is None for hooks in around for hook in hooks)
    before, after = (tuple(hook for hook in hooks if hook is not None) for hooks in around)
    resets = map(resolve, cfg.memory_hooks.reset_state_hooks)
    reset = tuple(reset_attributes if hook is None else hook for hook in resets)
    if not any((before, after, pair)) and all(hook is reset_attributes for hook in reset):
        return measured, None
    # The built-in measurements have these names in the files already.
    own = tuple(name for name in cfg.save_hook_attrs if not (measured and name in HOOK_ATTRIBUTES))
    return measured, UserHooks(
        pre_forward=before, post_forward=after, reset_state=reset, saved_tensors_funcs=pair, save_attributes=own
    )


def _tracks_fsdp(cfg: MemProfilerCfg) -> bool:
    return cfg.track_fsdp_mem and _STEP in cfg.collect_funcs.default | cfg.collect_funcs.fsdp


def _fsdp_memory(cfg: MemProfilerCfg) -> FSDPMemory | None:
    others = sorted((cfg.collect_funcs.default | cfg.collect_funcs.fsdp) - {_STEP})
    if cfg.track_fsdp_mem and others:
        rank_zero_warn(
            f"memprofiler_cfg: FSDP memory is tracked in whole training steps, not in {', '.join(others)}; "
            "calls inside a training step are part of the report of that step"
        )
    if not _tracks_fsdp(cfg):
        return None
    try:
        return FSDPMemory(
            depth=cfg.fsdp_mem_track_module_depth,
            tabulate=cfg.fsdp_mem_tracker_tabulate,
            units=cfg.fsdp_mem_tracker_units,
            root_module=cfg.fsdp_mem_tracker_root_module,
        )
    except ConfigError as error:
        raise ConfigError(f"memprofiler_cfg, fsdp_mem_track_module_depth or fsdp_mem_tracker_units: {error}") from error


def resolve(hook: Hook) -> Callable[..., Any] | None:
    """Return a function, by its dotted name or as it is; None for one of finetuning-scheduler's own.

    Raises:
        ConfigError: the name cannot be imported, or is not callable.
    """
    name = hook if isinstance(hook, str) else f"{getattr(hook, '__module__', '')}.{getattr(hook, '__name__', '')}"
    if name == "identity_lambda" or (name.startswith(f"{_HOME}.") and name.rpartition(".")[2] in _BUILT_IN):
        return None
    found = _imported(hook) if isinstance(hook, str) else hook
    if not callable(found):
        raise ConfigError(f"memprofiler_cfg names {hook!r}: it is {type(found).__name__}, but must be a function")
    return cast("Callable[..., Any]", found)


def _imported(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ConfigError(
            f"memprofiler_cfg names {name!r}, which cannot be imported ({type(error).__name__}: {error}); "
            "use the dotted name of a function, as in 'package.module.function'"
        ) from error


def reset_attributes(model: nn.Module, names: Sequence[str]) -> None:
    """Set the attributes to 0 on every module: hooks that add to them expect it."""
    for module in model.modules():
        for name in names:
            setattr(module, name, 0)


def identity(value: Any) -> Any:
    """Return ``value``."""
    return value


def saved_tensors_pair(funcs: Sequence[Hook]) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the pack and the unpack function, or None where both are finetuning-scheduler's.

    Raises:
        ConfigError: there are not two functions, or one cannot be imported.
    """
    if isinstance(funcs, str) or len(funcs) != 2:
        raise ConfigError(f"saved_tensors_funcs={funcs!r}: must be a pack and an unpack function")
    pack, unpack = (resolve(function) for function in funcs)
    if pack is None and unpack is None:
        return None
    return identity if pack is None else pack, checked_unpack if unpack is None else unpack


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
            raise ConfigError(f"memprofiler_cfg={memprofiler_cfg!r}: must be a MemProfilerCfg")
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
        fitting = [self._fitting(collector, trainer) for collector, _ in settings.collectors]
        # No collector is required: one that is not available is reported, and the others record.
        return replace(settings, collectors=[(collector, False) for collector in fitting if collector is not None])

    def steps_aside(self, trainer: Trainer) -> bool:
        """Whether it is disabled."""
        return not self.memprofiler_cfg.enabled

    def _fitting(self, collector: Collector, trainer: Trainer) -> Collector | None:
        """Return the collector without the parts that this run does not support, or None."""
        if isinstance(collector, FSDPMemory):
            return collector if trainer.state.fn == "fit" else None
        if not isinstance(collector, FunctionMemory):
            return collector
        module, device = trainer.lightning_module, trainer.strategy.root_device
        missing = [name for name in collector.functions if not hasattr(type(module), name) and name not in vars(module)]
        if missing:
            rank_zero_warn(
                f"memprofiler_cfg names {', '.join(missing)}, which {type(module).__name__} does not have; "
                "mark a method of another object with @memprofilable to record it"
            )
        functions = tuple(name for name in collector.functions if name not in missing)
        if device.type == "cuda":
            return replace(collector, functions=functions)
        funcs = self.memprofiler_cfg.collect_funcs
        if collector.allocator_snapshots or funcs.cuda or funcs.cuda_allocator_history:
            rank_zero_warn(
                f"memprofiler_cfg requests CUDA memory, but the model is on {device}: everything else is recorded"
            )
        return replace(collector, functions=functions, allocator_snapshots=False)


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

    Raises:
        ConfigError: the parser comes from ``pytorch_lightning``, which accepts callbacks of its own package only.
    """
    cli_parser = lightning_class(parser, "LightningArgumentParser")
    if cli_parser is not None and cli_parser.__module__.startswith("pytorch_lightning."):
        raise ConfigError(
            "add_memprofiler_arguments: the parser comes from pytorch_lightning.cli, which rejects callbacks of "
            "lightning.pytorch; import LightningCLI from lightning.pytorch.cli"
        )
    parser.add_class_arguments(MemProfilerCfg, _CONFIGURATION, sub_configs=True)
    if cli_parser is not None:
        cast("LightningArgumentParser", parser).add_lightning_class_args(_configured, _CALLBACK)
    else:
        parser.add_class_arguments(class_from_function(_configured), _CALLBACK)
    parser.link_arguments(_CONFIGURATION, f"{_CALLBACK}.memprofiler_cfg", apply_on="instantiate")


# Typed Any: with the class, the parser would show every argument twice.
def _configured(memprofiler_cfg: Any = None) -> MemProfiler:
    """Return the callback for ``memprofiler_cfg``."""
    return MemProfiler(memprofiler_cfg)
