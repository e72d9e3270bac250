"""``python -m lightning_memprof`` is ``lightning-memprof``."""

from __future__ import annotations

import sys

from lightning_memprof.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
