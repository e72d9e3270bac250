"""Strategies of two ranks on gloo: the same losses and weights on each rank, windows, no errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from distributions import judged
from row import HERE, Row, Verdict

from ranks import launch
from training import only_run, rows_of

WORLD: Final = 2
STRATEGIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "ddp": "DDP",
        "ddp_static_graph": "DDP, `static_graph=True`, gradient checkpointing",
        "ddp_find_unused": "DDP, `find_unused_parameters=True`",
        "fsdp1": "FSDP1 (`FSDPStrategy`; a CPU is refused by Lightning, the test's subclass is not)",
        "fsdp2": "FSDP2 (`ModelParallelStrategy`, `fully_shard`)",
    }
)


def strategy(name: str, directory: Path, recorders: tuple[str, ...] = ("defaults", "everything")) -> Row:
    """Train under a strategy bare and with each recorder."""
    what = f"{STRATEGIES[name]}, {WORLD} ranks"
    try:
        bare = _digests(name, "bare", directory)
        found: dict[str, Any] = {"same": True, "errors": [], "unavailable": [], "windows": 0, "pages": 0}
        for recorder in recorders:
            found["same"] = found["same"] and _digests(name, recorder, directory) == bare
            _add(only_run(directory / recorder), found)
    except RuntimeError as error:
        return Row(what, Verdict.RED, str(error))
    return Row(what, *judged(found))


def _digests(name: str, recorder: str, directory: Path) -> list[str]:
    place = directory / recorder
    codes = launch(str(HERE / "strategy_ranks.py"), place, name, recorder, world=WORLD)
    if any(codes):
        failed = next(rank for rank, code in enumerate(codes) if code)
        said = (place / f"out{failed}").read_text().strip().splitlines()
        msg = f"with {recorder} rank {failed} exited with {codes[failed]}: {said[-1] if said else ''}"
        raise RuntimeError(msg)
    return [json.loads((place / f"rank{rank}.json").read_text())["digest"] for rank in range(WORLD)]


def _add(run: Path, found: dict[str, Any]) -> None:
    for rank in range(WORLD):
        found["errors"] += [f"{row['collector']}: {row['exception']}" for row in rows_of(run, "error", rank)]
        left_out = {f"{row['collector']}: {row['reason']}" for row in rows_of(run, "unavailable", rank)}
        found["unavailable"] = sorted({*found["unavailable"], *left_out})
        found["windows"] += sum(row["event"] == "close" for row in rows_of(run, "window", rank))
    shown = subprocess.run(
        [sys.executable, "-m", "lightning_memprof", "show", str(run)], capture_output=True, check=False, timeout=120
    )
    found["pages"] += shown.returncode == 0
