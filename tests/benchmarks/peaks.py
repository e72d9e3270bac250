"""How large a process becomes that trains and records: ``python tests/benchmarks/peaks.py CONFIGURATION``.

Each is a fresh process, because one that has recorded once keeps what it had. What it imports for its recording counts;
a process that it starts is counted apart.
"""

from __future__ import annotations

import contextlib
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
    own, largest = child.cost(__file__, name, timeout=LONGEST_S).printed.splitlines()[-1].split()
    return int(own), int(largest)


def main(name: str) -> None:
    import configurations
    import torch
    import workload

    torch.set_num_threads(1)

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
