"""Runs cells: ``python zygote.py DIRECTORY``; a line of JSON comes in for each cell, and one goes out."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Not above: a spawned worker of a data loader loads this file again, and need not load Lightning for it.
    sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
    import forks

    forks.serve(Path(sys.argv[1]))
