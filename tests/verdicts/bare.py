"""Mean step time, CPU time per step of the main process, and peak memory of a training script without the profiler.

``python tests/verdicts/bare.py faults/data.py slow_decode [--healthy]`` prints one JSON object.
"""

from __future__ import annotations

import json
import resource
import runpy
import sys
import time
from typing import Any

import lightning

SKIPPED = 5  # the first steps warm up caches and workers


class Clock(lightning.Callback):
    """Notes when each batch ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.cpu: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.perf_counter())
        self.cpu.append(time.process_time())


def main() -> None:
    began = time.perf_counter()
    clock = Clock()
    trainer_init = lightning.Trainer.__init__

    def with_clock(trainer: Any, **options: Any) -> None:
        options["callbacks"] = [*(options.get("callbacks") or ()), clock]
        trainer_init(trainer, **options)

    # The script makes its Trainer itself.
    lightning.Trainer.__init__ = with_clock  # type: ignore[method-assign, assignment]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    ends = clock.ends
    peaks = [resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    wall, cpu = (
        round(1e3 * (times[-1] - times[SKIPPED]) / (len(times) - 1 - SKIPPED), 1) for times in (ends, clock.cpu)
    )
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


if __name__ == "__main__":
    main()
