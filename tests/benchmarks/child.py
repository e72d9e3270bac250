"""A program in a process of its own, and what it cost: wall, CPU with its children, and largest resident size.

Run as a script it is that process: ``child.py FILE.py [ARGUMENT ...]`` or ``child.py -m MODULE [ARGUMENT ...]``; the
last line that it prints holds the figures.
"""

from __future__ import annotations

import json
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cost:
    """What one run of a program took.

    Attributes:
        wall_s: seconds from the first line of the program to its end, without the start of the interpreter.
        cpu_s: seconds of CPU time in the same stretch, its child processes included.
        rss_bytes: the largest resident size of the process, beyond that of the interpreter.
        printed: what it printed.

    """

    wall_s: float
    cpu_s: float
    rss_bytes: int
    printed: str


def cost(*arguments: str, timeout: float = 900) -> Cost:
    """Run Python with arguments: ``FILE.py ...`` or ``-m MODULE ...``.

    Raises:
        RuntimeError: it failed; the message holds the end of what it said.

    """
    # Not in the repository's root: the installed package is measured.
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=tempfile.gettempdir(),
        timeout=timeout,
    )
    if done.returncode:
        msg = f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()[-2000:]}"
        raise RuntimeError(msg)
    printed, _, figures = done.stdout.rstrip("\n").rpartition("\n")
    wall, cpu, rss = json.loads(figures)
    return Cost(wall, cpu, rss, printed)


def cpu_seconds() -> float:
    """CPU time of this process and of the children that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def resident_peak() -> int:
    """Bytes of the largest resident size of this process so far.

    That of ``getrusage`` begins with the size of the process that started this one.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def main(arguments: list[str]) -> None:
    before, wall, cpu = resident_peak(), time.perf_counter(), cpu_seconds()
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path[0] = str(Path(arguments[0]).parent)
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ending:
        if ending.code not in {None, 0}:
            raise
    print()
    print(json.dumps([time.perf_counter() - wall, cpu_seconds() - cpu, resident_peak() - before]))


if __name__ == "__main__":
    main(sys.argv[1:])
