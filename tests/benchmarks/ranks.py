"""What `show` costs for thousands of ranks: ``python tests/benchmarks/ranks.py [RANKS] [WINDOWS]``."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from many_ranks import make_many_ranks

MIB = 1 << 20


def main(ranks: int = 4096, windows: int = 4) -> None:
    """Make the run, show it, and print the seconds and the memory that showing it took."""
    with tempfile.TemporaryDirectory() as directory:
        run = make_many_ranks(Path(directory), ranks, windows, straggler=ranks // 3)
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "lightning_memprof", "show", os.fspath(run)],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        seconds = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(done.stdout.split("\n", 1)[0])
    print(
        f"{ranks} ranks x {windows} windows: {seconds:.1f} s, {used.ru_utime + used.ru_stime:.1f} s of cpu, "
        f"{used.ru_maxrss * 1024 // MIB} MiB"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
