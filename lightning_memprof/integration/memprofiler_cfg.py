"""finetuning-scheduler's ``memprofiler_cfg``: its fields under its names, and what they are here.

Names, defaults and meaning of the fields are those of ``fts_examples.profiling.config`` in finetuning-scheduler 2.x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_memprof.artifacts.naming import RUN_DIRECTORY
from lightning_memprof.capture.collectors.functions import CallRange, FunctionMemory, UserHooks
from lightning_memprof.capture.collectors.host import HostMemory
from lightning_memprof.capture.collectors.oom import OutOfMemory
from lightning_memprof.capture.collectors.pulse import Pulse
from lightning_memprof.capture.tracker.fsdp import FSDPMemory
from lightning_memprof.errors import ConfigError
from lightning_memprof.integration.memprofiler_hooks import (
    HOOK_ATTRIBUTES,
    NPP_HOOK,
    POST_FORWARD,
    PRE_FORWARD,
    RESET_STATE,
    BuiltIn,
    reset_attributes,
    resolve,
    saved_tensors_pair,
)
from lightning_memprof.schedule import Schedule

if TYPE_CHECKING:
    from lightning_memprof.capture.base import Collector

__all__ = [
    "MemProfilerCfg",
    "MemProfilerFuncs",
    "MemProfilerHooks",
    "MemProfilerSchedule",
    "collectors_for",
    "dirpath_for",
    "schedule_for",
]

_STEP: Final = "training_step"


@dataclass(frozen=True, kw_only=True)
class MemProfilerHooks:
    """Hooks around the forwards of all modules, as dotted names or callables.

    Args:
        pre_forward_hooks: called as ``hook(module, args)`` before each forward.
        post_forward_hooks: called as ``hook(module, args, output)`` after each forward.
        reset_state_hooks: called as ``hook(model, save_hook_attrs)`` at the beginning and after each recorded call.

    """

    pre_forward_hooks: list[str | Callable[..., Any]] = field(default_factory=lambda: [PRE_FORWARD])
    post_forward_hooks: list[str | Callable[..., Any]] = field(default_factory=lambda: [POST_FORWARD])
    reset_state_hooks: list[str | Callable[..., Any]] = field(default_factory=lambda: [RESET_STATE])


@dataclass(frozen=True, kw_only=True)
class MemProfilerFuncs:
    """Names of methods, by what is collected at them.

    Args:
        default: added to each of the others.
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
        """Take lists for sets; refuse a single name, whose letters would be taken for names."""
        for option in self.__dataclass_fields__:
            value = getattr(self, option)
            if isinstance(value, str) or not all(isinstance(name, str) and name.isidentifier() for name in value):
                msg = f"collect_funcs.{option}={value!r}: must be a set of methods' names, as in {{'training_step'}}"
                raise ConfigError(msg)
            object.__setattr__(self, option, set(value))


@dataclass(frozen=True, kw_only=True)
class MemProfilerSchedule:
    """Which calls of each function are recorded, by the function's own count from 1.

    Args:
        warmup_iters: calls that are left out at first.
        max_iter: the last call that is recorded; None is ``warmup_iters + 1``.

    """

    warmup_iters: int = 1
    max_iter: int | None = None

    def __post_init__(self) -> None:
        """Refuse what could never record."""
        if isinstance(self.warmup_iters, bool) or self.warmup_iters < 0:
            msg = f"schedule.warmup_iters={self.warmup_iters!r}: must be an integer of at least 0"
            raise ConfigError(msg)
        if self.last <= self.warmup_iters:
            msg = (
                f"schedule.max_iter={self.max_iter!r}: the last call to record must be greater than "
                f"warmup_iters={self.warmup_iters}; leave it out to record one call"
            )
            raise ConfigError(msg)

    @property
    def last(self) -> int:
        """Number of the last call that is recorded."""
        return self.warmup_iters + 1 if self.max_iter is None else self.max_iter


@dataclass(frozen=True, kw_only=True)
class MemProfilerCfg:
    """Configuration of :class:`~lightning_memprof.MemProfiler`, field for field finetuning-scheduler's.

    Args:
        enabled: False records nothing and resolves no name.
        collect_funcs: names of methods, by what is collected at them.
        cuda_allocator_history: keep the CUDA allocator's history and write snapshots.
        track_fsdp_mem: track FSDP2 memory by category.
        fsdp_mem_track_module_depth: levels of modules in the FSDP report.
        fsdp_mem_tracker_tabulate: write the FSDP report as tables.
        fsdp_mem_tracker_units: unit of the FSDP report.
        fsdp_mem_tracker_root_module: path of the module that ``fully_shard`` was applied to; "" is the LightningModule.
        dump_memorystats_pickle: write the statistics as pickle.
        dump_memorystats_yaml: write the statistics as YAML.
        schedule: which calls are recorded.
        save_dir: directory of all files; None is ``memprofiler`` in the Trainer's ``log_dir``.
        enable_memory_hooks: measure around the forwards of modules.
        enable_saved_tensors_hooks: count what autograd saves for backward.
        memory_hooks: what measures around forwards.
        saved_tensors_funcs: pack and unpack function of ``torch.autograd.graph.saved_tensors_hooks``, as dotted names
            or callables; ``identity_lambda`` as unpack function gives back what was packed.
        save_hook_attrs: attributes that the hooks write on modules.
        retain_hooks_for_funcs: functions that must be done before the hooks around forwards go; the default is all.

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
    saved_tensors_funcs: list[str | Callable[..., Any]] = field(default_factory=lambda: [NPP_HOOK, "identity_lambda"])
    save_hook_attrs: list[str] = field(default_factory=lambda: list(HOOK_ATTRIBUTES))
    retain_hooks_for_funcs: set[str] = field(default_factory=lambda: {_STEP})


def schedule_for(cfg: MemProfilerCfg) -> Schedule:
    """Return the schedule of what is recorded by whole steps."""
    warmup, calls = cfg.schedule.warmup_iters, cfg.schedule.last - cfg.schedule.warmup_iters
    if calls > 1 and _tracks_fsdp(cfg):
        # FSDP memory is tracked in one step of each window, and every call has its report.
        return Schedule(skip_first=warmup, wait=0, warmup=0, active=1, repeat=calls)
    return Schedule(wait=0, warmup=warmup, active=calls, repeat=1)


def dirpath_for(cfg: MemProfilerCfg) -> str | None:
    """Return the directory that gets the run directory, or None for the Trainer's ``log_dir``.

    The run directory has its own name: it is ``save_dir`` where that ends with it, else it lies in ``save_dir``.
    """
    if cfg.save_dir is None:
        return None
    path = Path(cfg.save_dir)
    return str(path.parent if path.name == RUN_DIRECTORY else path)


def collectors_for(cfg: MemProfilerCfg) -> list[Collector]:
    """Return what records what an enabled ``cfg`` asks for, as far as this machine can.

    Raises:
        ConfigError: a dotted name does not resolve, or a value is not usable.

    """
    cuda = _usable_cuda(cfg)
    collectors: list[Collector] = [Pulse(), HostMemory(), OutOfMemory()]
    if (functions := _function_memory(cfg, cuda=cuda)) is not None:
        collectors.append(functions)
    if (sharded := _fsdp_memory(cfg)) is not None:
        collectors.append(sharded)
    return collectors


def _usable_cuda(cfg: MemProfilerCfg) -> bool:
    available = torch.cuda.is_available()
    funcs = cfg.collect_funcs
    if not available and (cfg.cuda_allocator_history or funcs.cuda or funcs.cuda_allocator_history):
        rank_zero_warn("memprofiler_cfg asks for CUDA memory, and there is no CUDA device: the rest is recorded")
    return available


def _function_memory(cfg: MemProfilerCfg, *, cuda: bool) -> FunctionMemory | None:
    funcs = cfg.collect_funcs
    snapshots = funcs.default | funcs.cuda_allocator_history if cuda else set()
    names = {*funcs.default, *funcs.cpu, *snapshots, *(funcs.cuda if cuda else ())}
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
        # Its default waits for all functions there: the set is overwritten when the model is connected.
        retain_hooks_for=() if cfg.retain_hooks_for_funcs == {_STEP} else tuple(sorted(cfg.retain_hooks_for_funcs)),
    )


def _user_hooks(cfg: MemProfilerCfg) -> tuple[bool, UserHooks | None]:
    """Return whether ours measure around forwards, and what of the user's does besides."""
    pair = saved_tensors_pair(cfg.saved_tensors_funcs) if cfg.enable_saved_tensors_hooks else None
    if not cfg.enable_memory_hooks:
        return False, None if pair is None else UserHooks(saved_tensors_funcs=pair)
    around = [_resolved(hooks) for hooks in (cfg.memory_hooks.pre_forward_hooks, cfg.memory_hooks.post_forward_hooks)]
    resets = _resolved(cfg.memory_hooks.reset_state_hooks)
    measured = any(isinstance(hook, BuiltIn) for hooks in around for hook in hooks)
    before, after = (tuple(hook for hook in hooks if not isinstance(hook, BuiltIn)) for hooks in around)
    if not any((before, after, pair)) and all(isinstance(hook, BuiltIn) for hook in resets):
        return measured, None
    # What ours measure is in the files under these names already.
    own = tuple(name for name in cfg.save_hook_attrs if not (measured and name in HOOK_ATTRIBUTES))
    reset = tuple(reset_attributes if isinstance(hook, BuiltIn) else hook for hook in resets)
    return measured, UserHooks(
        pre_forward=before, post_forward=after, reset_state=reset, saved_tensors_funcs=pair, save_attributes=own
    )


def _resolved(hooks: Iterable[str | Callable[..., Any]]) -> list[Callable[..., Any] | BuiltIn]:
    return [resolve(hook) for hook in hooks]


def _tracks_fsdp(cfg: MemProfilerCfg) -> bool:
    return cfg.track_fsdp_mem and _STEP in cfg.collect_funcs.default | cfg.collect_funcs.fsdp


def _fsdp_memory(cfg: MemProfilerCfg) -> FSDPMemory | None:
    others = sorted((cfg.collect_funcs.default | cfg.collect_funcs.fsdp) - {_STEP})
    if cfg.track_fsdp_mem and others:
        rank_zero_warn(
            f"memprofiler_cfg: FSDP memory is tracked in whole training steps, not in {', '.join(others)}; "
            "whatever of it runs inside a training step is in that step's report"
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
        msg = f"memprofiler_cfg, fsdp_mem_track_module_depth or fsdp_mem_tracker_units: {error}"
        raise ConfigError(msg) from error
