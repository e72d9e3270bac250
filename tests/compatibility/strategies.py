"""Strategies of two ranks on gloo: the same losses and weights on each rank, windows, no errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from distributions import judged
from kept import add_run, nothing_found
from row import Row, Verdict

from ranks import trained
from training import only_run

WORLD: Final = 2
STRATEGIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "ddp": "DDP",
        "ddp-static-checkpointed": "DDP, `static_graph=True`, gradient checkpointing",
        "ddp-unused": "DDP, `find_unused_parameters=True`",
        "fsdp1": "FSDP1 (`FSDPStrategy`; a CPU is refused by Lightning, the test's subclass is not)",
        "fsdp2": "FSDP2 (`ModelParallelStrategy`, `fully_shard`)",
    }
)


def strategy(name: str, directory: Path, recorders: tuple[str, ...] = ("defaults", "everything")) -> Row:
    """Train under a strategy bare and with each recorder."""
    what = f"{STRATEGIES[name]}, {WORLD} ranks"
    try:
        bare = trained(directory / "bare", name)
        found = nothing_found()
        for recorder in recorders:
            ours = trained(directory / recorder, name, recorder)
            found["same"] = found["same"] and ours == bare
            add_run(only_run(directory / recorder), found, range(WORLD))
    except AssertionError as error:
        return Row(what, Verdict.RED, str(error).strip().splitlines()[-1])
    return Row(what, *judged(found))
