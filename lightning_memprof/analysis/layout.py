"""From a path of the manifest to the file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lightning_memprof.artifacts.naming import RUN_DIRECTORY, parse_numbered

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """Where a run's files lie now, wherever they were written; ``directory`` is the run directory."""

    directory: Path

    @property
    def root(self) -> Path:
        """The log directory that the manifest's paths begin in."""
        return self.directory.parent

    def resolve(self, path: str) -> Path | None:
        """Return where a manifest's path lies, or None where it points out of the run's root."""
        pure = PurePosixPath(path)
        if pure.is_absolute():
            return Path(path)
        if ".." in pure.parts or not pure.parts:
            return None
        in_root = self.root.joinpath(*pure.parts)
        if parse_numbered(pure.parts[0])[0] == RUN_DIRECTORY and not in_root.exists():
            return self.directory.joinpath(*pure.parts[1:])
        return in_root
