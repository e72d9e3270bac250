"""Mean step time, CPU time per step of the main process, and peak memory of a training script without the profiler.

``python tests/verdicts/bare.py faults/loading.py slow_decode [--healthy]`` prints one JSON object.
"""

from __future__ import annotations

import json
import resource
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning
from clock import Clock

SKIPPED = 5  # the first steps warm up caches and workers


def main() -> None:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="bare-") as directory:
        ends, times = timed(Path(directory) / "ends.json")
    peaks = [resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    wall, cpu = (round(1e3 * (clock[-1] - clock[SKIPPED]) / (len(clock) - 1 - SKIPPED), 1) for clock in (ends, times))
    figures = {
        "steps": len(ends),
        "mean_ms": wall,
        "cpu_ms": cpu,
        "peak_mib": round(peaks[0]),
        "workers_peak_mib": round(peaks[1]),
        "wall_s": round(time.perf_counter() - began, 1),
        "ends_s": [round(end, 5) for end in ends],
    }
    print(json.dumps(figures))


def timed(path: Path) -> list[list[float]]:
    """Run the script; return when its batches ended, on the clock and in CPU time, by way of a file."""
    clock = Clock(path)
    trainer_init = lightning.Trainer.__init__

    def with_clock(trainer: Any, **options: Any) -> None:
        options["callbacks"] = [*(options.get("callbacks") or ()), clock]
        trainer_init(trainer, **options)

    # The script makes its Trainer itself.
    lightning.Trainer.__init__ = with_clock  # type: ignore[method-assign, assignment]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    ends: list[list[float]] = json.loads(path.read_text())
    return ends


if __name__ == "__main__":
    main()
