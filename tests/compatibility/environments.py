"""Environments that differ from this one in a few packages; torch, which is large, is never fetched."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

# They would change what a helper process imports, records, or may install.
_OURS = ("PYTHONPATH", "LIGHTNING_MEMPROF", "PL_TRAINER_PROFILER", "PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")


def clean(**more: str) -> dict[str, str]:
    """Give the variables for a helper process."""
    kept = {name: value for name, value in os.environ.items() if name not in _OURS}
    return kept | {"OMP_NUM_THREADS": "1"} | more


def environment(directory: Path, python: str = sys.executable) -> Path:
    """Make an empty virtual environment; give its interpreter."""
    subprocess.run([python, "-m", "venv", "--clear", str(directory)], check=True, env=clean(), capture_output=True)
    return python_of(directory)


def python_of(directory: Path) -> Path:
    """Give the interpreter of an environment."""
    return directory / "bin" / "python"


def differing(directory: Path, *, without: Collection[str], added: Path | None = None) -> Path:
    """Make an environment that has this one's packages by links, less some, and those of a directory.

    Args:
        directory: where it is made.
        without: names of packages as they are imported; their metadata is left out with them.
        added: packages that :func:`fetch` has put there; they come first.

    """
    python = environment(directory)
    (site,) = directory.glob("lib/python*/site-packages")
    sources = [added] if added is not None else []
    sources += [Path(entry) for entry in sys.path if Path(entry).name == "site-packages"]
    for source in sources:
        left_out = () if source == added else without
        for path in sorted(source.iterdir()):
            link = site / path.name
            # A further directory of packages would bring back what is left out; an editable install is one directory.
            foreign = path.suffix == ".pth" and not path.name.startswith("_editable")
            if not foreign and not link.exists() and _package(path) not in left_out and _package(path) != "pip":
                link.symlink_to(path)
    return python


def fetch(requirement: str, directory: Path) -> None:
    """Install one distribution into a directory, without what it depends on.

    Raises:
        RuntimeError: pip could not; the text is its last line.

    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(directory), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean(), timeout=300)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"pip exited with {done.returncode}")


def _package(path: Path) -> str:
    name = path.name.partition("-")[0] if path.suffix in {".dist-info", ".egg-info"} else path.stem
    return name.lower()
