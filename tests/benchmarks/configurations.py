"""The ways of recording that are compared: each gives a Trainer's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import peers

EVERYWHERE = ("network", "gpt", "cnn", "ddp")


@dataclass(frozen=True)
class Configuration:
    """One way of recording.

    Attributes:
        says: what it is, in a few words.
        arguments: given a directory to write to, returns arguments of the Trainer.
        has_window: whether it records steps ``WAIT + WARMUP`` to ``WAIT + WARMUP + ACTIVE - 1``.
        workloads: what is trained with it.
        page: whether a process of its own makes a page when the fit is over.
        needs: what has to be installed.

    """

    says: str
    arguments: Callable[[Path], dict[str, Any]]
    has_window: bool = True
    workloads: tuple[str, ...] = ("network",)
    page: bool = False
    needs: str = "lightning"

    @property
    def is_there(self) -> bool:
        """Whether what it needs is installed."""
        return find_spec(self.needs) is not None


def configurations() -> Mapping[str, Configuration]:
    """Give all configurations by name; ``bare`` is what the others are compared with."""
    return {
        "bare": Configuration("null pair: no profiler", lambda _: {}, has_window=False, workloads=EVERYWHERE),
        "callback": Configuration(
            "a callback without methods: what Lightning takes for any", _empty_callback, False, workloads=("small",)
        ),
        **_of_ours(),
        **_of_torch(),
        **_of_others(),
    }


def _of_ours() -> dict[str, Configuration]:
    return {
        "pulse": Configuration("the pulse alone", lambda d: _ours().pulse(d), has_window=False),
        "default-idle": Configuration(
            "callback and profiler, no window reached", lambda d: _ours().default(d, idle=True),
            has_window=False, workloads=EVERYWHERE,
        ),
        "default": Configuration(
            "callback and profiler, one window", lambda d: _ours().default(d), workloads=EVERYWHERE, page=True
        ),
        "everything-idle": Configuration(
            "every collector and option, no window reached", lambda d: _ours().everything(d, idle=True),
            has_window=False, workloads=EVERYWHERE,
        ),
        "everything": Configuration(
            "every collector and option, one window", lambda d: _ours().everything(d),
            workloads=EVERYWHERE,
        ),
        "memory": Configuration(
            "function memory, saved tensors by module, rss at every mark", lambda d: _ours().memory(d),
            workloads=("network", "gpt"),
        ),
        "memory-idle": Configuration(
            "the same, no window reached", lambda d: _ours().memory(d, idle=True), has_window=False
        ),
        "trace": Configuration(
            "operator trace alone, no module names", lambda d: _ours().trace(d, names=False),
            workloads=("network", "gpt"),
        ),
        "trace-names": Configuration(
            "operator trace alone, module names", lambda d: _ours().trace(d, names=True)
        ),
    }  # fmt: skip


def _of_torch() -> dict[str, Configuration]:
    return {
        "hand-json": Configuration(
            "`torch.profiler` by hand, `.json`", lambda d: peers.by_hand(d / "trace.json"), workloads=("network", "gpt")
        ),
        "hand-gz": Configuration(
            "`torch.profiler` by hand, `.json.gz`", lambda d: peers.by_hand(d / "trace.json.gz"), workloads=EVERYWHERE
        ),
    }


def _of_others() -> dict[str, Configuration]:
    return {
        "lightning": Configuration("Lightning's PyTorchProfiler", peers.lightning, workloads=EVERYWHERE),
        "device-stats": Configuration("Lightning's DeviceStatsMonitor", peers.device_stats, workloads=EVERYWHERE),
        "fts-profiler": Configuration(
            "finetuning-scheduler's ExtendedPyTorchProfiler", peers.finetuning_profiler, needs="fts_examples"
        ),
        "fts-memory": Configuration(
            "finetuning-scheduler's MemProfiler", peers.finetuning_memory,
            workloads=("network", "gpt"), needs="fts_examples",
        ),
    }  # fmt: skip


def _ours() -> Any:
    # A process that records nothing, or with a peer, should not hold this package's modules.
    import ours

    return ours


def _empty_callback(_: Path) -> dict[str, Any]:
    from lightning.pytorch import Callback

    return {"callbacks": [Callback()]}
