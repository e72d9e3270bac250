"""``python -m lightning_memprof.trial SCRIPT ARGS...``: one run of a trial, with the task in the environment."""

from __future__ import annotations

import os

from lightning_memprof.trial.meter import GROUP
from lightning_memprof.trial.program import main

if __name__ == "__main__":
    # What it starts in other groups cannot be stopped with it.
    os.environ.setdefault(GROUP, str(os.getpgrp()))
    main()
