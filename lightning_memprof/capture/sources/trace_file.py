"""One window's trace as a file: JSON as Kineto writes it, then gzip."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from isal import igzip

from lightning_memprof.artifacts.trace_rewriting import FAST_LEVEL, write_trace
from lightning_memprof.units import format_bytes

if TYPE_CHECKING:
    from torch.profiler import profile

__all__ = ["TraceFile"]

_TAIL_BYTES: Final = 16


@dataclass(frozen=True)
class TraceFile:
    """A trace that Kineto has written: as JSON until it is compressed, then only as ``trace``."""

    raw: Path
    trace: Path

    def take(self, profiler: profile) -> int:
        """Have Kineto write the JSON; return its size. Kineto holds the GIL meanwhile.

        Args:
            profiler: torch's, stopped.

        Raises:
            RuntimeError: it has no trace.
            OSError: the file has no end: where the disk is full, torch says nothing.

        """
        results = profiler.profiler.kineto_results if profiler.profiler is not None else None
        if results is None or results.trace_start_ns() == 0:
            msg = "Kineto gave no trace of this window; another profiler may have stopped it"
            raise RuntimeError(msg)
        self.raw.parent.mkdir(parents=True, exist_ok=True)
        try:
            results.save(str(self.raw))
            return self._whole_bytes()
        except BaseException:
            for half in (self.raw, self._unfinished):
                with suppress(OSError):
                    half.unlink()
            raise

    @property
    def _unfinished(self) -> Path:
        # Kineto's own temporary name, which stays where it could not write to the end.
        return self.raw.with_name(f"{self.raw.name}.tmp")

    def _whole_bytes(self) -> int:
        found = self.raw if self.raw.exists() else self._unfinished
        with found.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            whole = file.read().rstrip().endswith(b"}")
        if found is not self.raw or not whole:
            msg = f"torch could write {format_bytes(size)} of the trace; is the disk full?"
            raise OSError(errno.ENOSPC, msg, str(self.raw))
        return size

    def compress(self, target: Path) -> None:
        """Write the trace that stays: as gzip, with the categories that TensorBoard's profiler tab reads."""
        write_trace(self.raw, target)

    def _copy_compressed(self, target: Path) -> None:
        """Write what Kineto wrote as gzip; isal releases the GIL."""
        with self.raw.open("rb") as source, igzip.open(target, "wb", compresslevel=FAST_LEVEL) as gz:  # type: ignore[no-untyped-call]
            shutil.copyfileobj(source, gz, 1 << 20)

    def export(self, path: str, use_python_export: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 torch's
        """Stand in for ``torch.profiler.profile.export_chrome_trace``."""
        if self.raw.exists():
            if str(path).endswith(".gz"):
                self._copy_compressed(Path(path))
            else:
                shutil.copyfile(self.raw, path)
        elif str(path).endswith(".gz"):
            shutil.copyfile(self.trace, path)
        else:
            with gzip.open(self.trace, "rb") as source, Path(path).open("wb") as target:
                shutil.copyfileobj(source, target)
