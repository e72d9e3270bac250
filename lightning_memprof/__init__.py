"""Record where a Lightning training run spends its time and memory.

Importing this package loads neither torch nor Lightning: each name is imported on first use. Collectors, anomalies and
the names of finetuning-scheduler are in :mod:`lightning_memprof.collectors`, :mod:`lightning_memprof.triggers` and
:mod:`lightning_memprof.compat.fts`.
"""

from __future__ import annotations

# For type checkers; `typing` takes longer to import than the rest of this module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from lightning_memprof.capture.base import Collector as Collector
    from lightning_memprof.capture.base import OnMark as OnMark
    from lightning_memprof.capture.base import RunContext as RunContext
    from lightning_memprof.capture.base import SkipWindow as SkipWindow
    from lightning_memprof.capture.budget import Budget as Budget
    from lightning_memprof.capture.collectors.allocator_history import start_memory_history as start_memory_history
    from lightning_memprof.capture.sources.methods import memprofilable as memprofilable
    from lightning_memprof.capture.triggers.watch import Triggers as Triggers
    from lightning_memprof.errors import ArtifactError as ArtifactError
    from lightning_memprof.errors import ConfigError as ConfigError
    from lightning_memprof.errors import MemprofError as MemprofError
    from lightning_memprof.errors import ReportError as ReportError
    from lightning_memprof.estimation.estimator import Estimate as Estimate
    from lightning_memprof.estimation.estimator import estimate as estimate
    from lightning_memprof.integration.callback import MemProfilerCallback as MemProfilerCallback
    from lightning_memprof.integration.loop import record as record
    from lightning_memprof.integration.profiler import ExtendedPyTorchProfiler as ExtendedPyTorchProfiler
    from lightning_memprof.integration.settings import OutputOptions as OutputOptions
    from lightning_memprof.judge import Finding as Finding
    from lightning_memprof.judge import Severity as Severity
    from lightning_memprof.run import Run as Run
    from lightning_memprof.run import load_run as load_run
    from lightning_memprof.schedule import Mark as Mark
    from lightning_memprof.schedule import Point as Point
    from lightning_memprof.schedule import Schedule as Schedule
    from lightning_memprof.schedule import StageSchedules as StageSchedules

__version__ = "0.1.0"

# The module of each name. A test compares it with the imports above.
_MODULES = (
    ("judge", "Finding", "Severity"),
    ("capture.base", "Collector", "SkipWindow", "OnMark", "RunContext"),
    ("capture.budget", "Budget"),
    ("capture.collectors.allocator_history", "start_memory_history"),
    ("capture.sources.methods", "memprofilable"),
    ("capture.triggers.watch", "Triggers"),
    ("errors", "ArtifactError", "ConfigError", "MemprofError", "ReportError"),
    ("estimation.estimator", "Estimate", "estimate"),
    ("integration.callback", "MemProfilerCallback"),
    ("integration.loop", "record"),
    ("integration.settings", "OutputOptions"),
    ("integration.profiler", "ExtendedPyTorchProfiler"),
    ("run", "Run", "load_run"),
    ("schedule", "Mark", "Point", "Schedule", "StageSchedules"),
)
__all__ = [name for _, *names in _MODULES for name in names]


# Hidden from type checkers: they report an unknown name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        module = next((module for module, *names in _MODULES if name in names), None)
        if module is None:
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        import importlib

        if module.startswith(("estimation.", "integration.")) and module != "integration.loop":
            import sys

            from lightning_memprof.integration.registration import check_lightning

            check_lightning(f"lightning_memprof.{name}", sys._getframe(1))  # noqa: SLF001 the importing frame has no public name
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
