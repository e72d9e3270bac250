"""Bytes by category of one rank of a model under ``fully_shard`` (FSDP2)."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import yaml

from lightning_memprof.artifacts.naming import fsdp_log_name, fsdp_stats_name
from lightning_memprof.artifacts.sink import Artifact
from lightning_memprof.capture.base import Collector, OnMark, SkipWindow, no_training_step
from lightning_memprof.capture.sources.module_calls import COMPILED, is_compiled
from lightning_memprof.capture.tracker.report import Layout
from lightning_memprof.capture.tracker.tracked_step import TrackedStep, missing_tracker, track_step, write_log
from lightning_memprof.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch import nn

    from lightning_memprof.capture.base import OnStep, RunContext
    from lightning_memprof.capture.tracker.report import TrackerReport
    from lightning_memprof.capture.tracker.tracker import CategoryTracker
    from lightning_memprof.schedule import Mark, Window

__all__ = ["FSDPMemory"]

_NAMED: Final = 8


@dataclass(frozen=True, kw_only=True)
class FSDPMemory(Collector):
    """This rank's sharded and unsharded parameters and gradients, and the other categories, by torch's FSDPMemTracker.

    The first recorded step of each window is tracked, forward and backward, from the start to the end of its batch;
    that step is several times slower. A shard's padding to the size of the other ranks' shards does not count as
    parameter: the parameters of all ranks add up to the model's.

    Args:
        depth: levels of modules in the log; the root is the first.
        tabulate: tables in the log.
        units: ``B``, ``KiB``, ``MiB`` or ``GiB`` in the log.
        root_module: path of the module to track, which ``fully_shard`` was called on. Empty is the LightningModule, or
            otherwise the only outermost sharded module.
        function: part of the file names; None is the function that a step runs, ``training_step``.

    Raises:
        ConfigError: ``depth`` or ``units`` is invalid. When the training starts: ``root_module`` does not exist, or
            ``fully_shard`` was not called on it.

    """

    name: ClassVar[str] = "fsdp_memory"

    depth: int = 2
    tabulate: bool = False
    units: str = "MiB"
    root_module: str = ""
    function: str | None = None

    def __post_init__(self) -> None:
        """Validate the values."""
        Layout(depth=self.depth, units=self.units)

    def unavailable(self, run: RunContext) -> str | None:
        """Return a reason if the model will not be sharded; ``fully_shard`` is called later, before the first step."""
        if reason := no_training_step(run):
            return reason
        if reason := missing_tracker():
            return reason
        from lightning_memprof.capture.tracker.sharded_tracker import sharded_modules

        if run.strategy != "ModelParallelStrategy" and not sharded_modules(run.model):
            return f"{run.strategy} does not use fully_shard (FSDP2); ModelParallelStrategy does"
        return None

    def follow(self, run: RunContext) -> AbstractContextManager[OnStep | None]:
        """Find the root before the first step.

        Raises:
            ConfigError: it does not exist, or ``fully_shard`` was not called on it.

        """
        self._root(run.model)
        return nullcontext(None)

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Track the first recorded step; write the series, the log and this rank's mapping."""
        if is_compiled(run.model):
            raise SkipWindow(COMPILED)
        from lightning_memprof.capture.tracker.sharded_tracker import ShardedTracker

        path, root = self._root(run.model)
        layout = Layout(depth=self.depth, units=self.units, tabulate=self.tabulate)
        function = self.function or run.function

        def begin() -> tuple[CategoryTracker, str]:
            return ShardedTracker(root), path

        def save(mark: Mark, report: TrackerReport) -> None:
            log = run.sink.place.directory / fsdp_log_name(run.rank, function, mark.step + 1)
            write_log(
                run, Artifact(path=log, type="blob", collector=self.name, window=window.index), report.text(layout)
            )
            stats = run.sink.place.directory / fsdp_stats_name(run.rank)
            known: dict[str, Any] = yaml.safe_load(stats.read_text(encoding="utf-8")) if stats.exists() else {}
            known[f"{run.rank}.{function}.{mark.step + 1}"] = {"root_module": path, **report.mapping(layout)}
            write_log(
                run,
                Artifact(path=stats, type="blob", collector=self.name, window=window.index),
                yaml.safe_dump(known, sort_keys=False),
            )

        wanted = TrackedStep(collector=self.name, number=0, begin=begin, save=save)
        with track_step(run, window, wanted) as on_mark:
            yield on_mark

    def _root(self, model: nn.Module) -> tuple[str, nn.Module]:
        from lightning_memprof.capture.tracker.sharded_tracker import sharded_modules

        sharded = sharded_modules(model)
        path = self.root_module
        outermost = [name for name in sharded if not any(_is_below(name, other) for other in sharded)]
        if not path and len(outermost) == 1:
            return outermost[0], sharded[outermost[0]]
        if path in sharded:
            return path, sharded[path]
        named = ", ".join(repr(name) for name in list(sharded)[:_NAMED]) + (", ..." if len(sharded) > _NAMED else "")
        known = f"sharded modules: {named}" if sharded else "the model has none: call fully_shard in configure_model"
        if path and path not in dict(model.named_modules()):
            msg = f"FSDPMemory(root_module={path!r}): the model has no such module; {known}"
        else:
            msg = f"FSDPMemory(root_module={path!r}): fully_shard was not called on it; {known}"
        raise ConfigError(msg)


def _is_below(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))
