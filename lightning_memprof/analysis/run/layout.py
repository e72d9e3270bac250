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
        """Return where a manifest's path lies, or None where it points out of the run's root or cannot be looked at."""
        pure = PurePosixPath(path)
        if not pure.parts or (".." in pure.parts and not pure.is_absolute()):
            return None
        in_root = self.root.joinpath(*pure.parts)
        try:
            lies_there = in_root.exists()
        except OSError:  # a name is too long for any file, or a directory may not be read
            return None
        if not lies_there and parse_numbered(pure.parts[0])[0] == RUN_DIRECTORY:
            return self.directory.joinpath(*pure.parts[1:])
        return in_root
