"""Memory at points that the program names."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil
import torch

from lightning_memprof.artifacts.naming import regions_name
from lightning_memprof.artifacts.series import RegionRow, columns_of, encode_rows
from lightning_memprof.capture.sources.memory import memory_stats, peak_rss_bytes
from lightning_memprof.logs import logger_of

if TYPE_CHECKING:
    from lightning_memprof.capture.base import Position

log = logger_of(__name__)


def encodable(name: object) -> str:
    """Return any name as text that files and traces can encode."""
    return str(name).encode("utf-8", "replace").decode()


class NamedSnapshots:
    """Rows of host and device memory by name, buffered until the run directory is known, then appended to its file."""

    def __init__(self) -> None:
        self._waiting: list[dict[str, Any]] = []
        self._path: Path | None = None

    def place(self, directory: Path, rank: int) -> None:
        """Write to this run directory from now on."""
        self._path = directory / regions_name(rank)
        self._flush()

    def take(self, name: str, point: Literal["snapshot", "start", "end"], position: Position | None) -> None:
        """Record one row now."""
        rss = int(psutil.Process().memory_info().rss)
        row = columns_of(
            RegionRow(
                name=name,
                point=point,
                step=None if position is None else position.step,
                global_step=None if position is None else position.global_step,
                time_ns=time.time_ns(),
                rss_bytes=rss,
                peak_rss_bytes=peak_rss_bytes(rss),
            )
        )
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            row |= memory_stats(torch.device("cuda", torch.cuda.current_device()))
        self._waiting.append(row)
        self._flush()

    def _flush(self) -> None:
        if self._path is None or not self._waiting:
            return
        rows, self._waiting = self._waiting, []
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(encode_rows(rows))
        except OSError as error:
            log.warning("named snapshots cannot be written: %s", error)
