"""``python -m lightning_memprof`` is ``lightning-memprof``."""

from __future__ import annotations

import sys
from typing import Final

# 128 + the number of SIGINT, as a shell reports a program that it ended.
_INTERRUPTED: Final = 130


def main() -> int:
    """Run the command that the program's arguments name; Ctrl-C while modules are imported prints no traceback."""
    try:
        from lightning_memprof.cli.main import main as run_command

        return run_command()
    except KeyboardInterrupt:
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
