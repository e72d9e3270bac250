"""How large a process becomes that trains and records: ``python tests/benchmarks/peaks.py CONFIGURATION``.

Each is a fresh process, because one that has recorded once keeps what it had. What it imports for its recording counts;
a process that it starts is counted apart.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import child
import psutil

STEPS = 32
LONGEST_S = 300
EVERY_S = 0.02


class Children(threading.Thread):
    """Looks at the processes that this one has started: what ``getrusage`` says of them begins with this one's size."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.largest = 0
        self._over = threading.Event()

    def run(self) -> None:
        own = psutil.Process()
        while not self._over.wait(EVERY_S):
            for process in own.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    # Until it has become another program it is a copy of this one.
                    if process.cmdline() != own.cmdline():
                        self.largest = max(self.largest, process.memory_info().rss)

    def end(self) -> int:
        """Stop looking; give the bytes of the largest."""
        self._over.set()
        self.join()
        return self.largest


def measure(name: str) -> tuple[int, int]:
    """Fit in a fresh process; give bytes of its largest resident size and of that of its largest child.

    Raises:
        RuntimeError: it failed; the message holds the end of what it said.

    """
    done = subprocess.run(
        [sys.executable, __file__, name],
        capture_output=True,
        text=True,
        check=False,
        cwd=tempfile.gettempdir(),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=LONGEST_S,
    )
    if done.returncode:
        msg = f"{name} ended with {done.returncode}: {done.stderr.strip()[-2000:]}"
        raise RuntimeError(msg)
    own, largest = done.stdout.splitlines()[-1].split()
    return int(own), int(largest)


def main(name: str) -> None:
    import configurations
    import workload

    job = workload.Job(name, "network", STEPS)
    with tempfile.TemporaryDirectory(prefix="memprof-bench-") as directory:
        children = Children()
        children.start()
        workload.fit(job, configurations.configurations()[name].arguments, lambda: None, Path(directory))
        largest = children.end()
        print()
        print(child.resident_peak(), largest)


if __name__ == "__main__":
    main(sys.argv[1])
