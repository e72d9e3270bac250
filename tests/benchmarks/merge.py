"""Merging against its plain peer: `json.load` of every file and one `json.dump`.

    python -m tests.benchmarks.merge --traces 8 --megabytes 50            both, on the same files
    python -m tests.benchmarks.merge --traces 8 --megabytes 500 --no-peer the merge alone

Prints wall time, CPU time and the largest resident memory, of all processes together.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

PEER = """
import json, sys
events = []
for path in sys.argv[2:]:
    with open(path, encoding="utf-8") as stream:
        events += json.load(stream)["traceEvents"]
with open(sys.argv[1], "w", encoding="utf-8") as stream:
    json.dump({"traceEvents": events}, stream)
"""
OURS = """
import sys
from pathlib import Path
from lightning_memprof.analysis.timeline.merge import merge_traces
from lightning_memprof.analysis.timeline.model import Source
sources = [Source(label=f"rank {at} · host", sort=at, trace=Path(path)) for at, path in enumerate(sys.argv[2:])]
merge_traces(sources, Path(sys.argv[1]))
"""
BASE_NS = 1_750_000_000_000_000_000


class Cost(NamedTuple):
    wall_s: float
    cpu_s: float
    rss_mib: float


def events(rank: int) -> Iterator[dict[str, object]]:
    """A GPU training as torch writes it, without an end: frames, operators with shapes, launches, kernels, arrows."""
    at = float(rank)
    number = 0
    while True:
        number += 1
        base = {"ph": "X", "pid": 4000 + rank, "tid": 4000 + rank}
        shapes = {"External id": number, "Record function id": 0, "Ev Idx": number, "Concrete Inputs": ["", "", ""]}
        shapes |= {"Input Dims": [[64, 512], [512, 2048], []], "Input type": ["float", "float", "Scalar"]}
        frame = {"Python parent id": number - 1, "Python id": number, "Ev Idx": number}
        yield {**base, "cat": "python_function", "name": "torch/nn/modules/linear.py(124): forward", "ts": at,
               "dur": 91.127, "args": frame}  # fmt: skip
        yield {**base, "cat": "cpu_op", "name": "aten::linear", "ts": at + 2.25, "dur": 80.5, "args": shapes}
        yield {**base, "cat": "cpu_op", "name": "aten::addmm", "ts": at + 9.125, "dur": 70.031, "args": shapes}
        launch = {"External id": number, "cbid": 211, "correlation": number}
        yield {**base, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at + 40, "dur": 6.2, "args": launch}
        arrow = {"id": number, "cat": "ac2g", "name": "ac2g"}
        yield {"ph": "s", **arrow, "pid": 4000 + rank, "tid": 4000 + rank, "ts": at + 40}
        kernel = {"External id": number, "correlation": number, "stream": 7, "grid": [16, 32, 1], "block": [128, 1, 1],
                  "registers per thread": 128, "shared memory": 49152, "est. achieved occupancy %": 37}  # fmt: skip
        yield {"ph": "X", "cat": "kernel", "name": "ampere_sgemm_128x64_tn", "pid": 0, "tid": 7, "ts": at + 60,
               "dur": 95.008, "args": kernel}  # fmt: skip
        yield {"ph": "f", **arrow, "bp": "e", "pid": 0, "tid": 7, "ts": at + 60}
        at = round(at + 100.137, 3)


def write(path: Path, rank: int, size: int) -> None:
    written = 0
    with path.open("w", encoding="utf-8") as stream:
        stream.write(f'{{\n  "schemaVersion": 1,\n  "baseTimeNanoseconds": {BASE_NS},\n  "traceEvents": [\n')
        for at, event in enumerate(events(rank)):
            written += stream.write((",\n" if at else "") + json.dumps(event, indent=2))
            if written > size:
                break
        stream.write('\n  ],\n  "traceName": "bench"\n}\n')


def measure(code: str, out: Path, traces: list[Path]) -> Cost:
    """Run a program and watch it and its children."""
    begun = time.perf_counter()
    process = psutil.Popen([sys.executable, "-c", code, str(out), *map(str, traces)], stdout=subprocess.DEVNULL)
    peak, cpu = 0, {}
    while process.poll() is None:
        total = 0
        try:
            for one in (process, *process.children(recursive=True)):
                total += one.memory_info().rss
                times = one.cpu_times()
                cpu[one.pid] = times.user + times.system
        except psutil.Error:
            continue
        peak = max(peak, total)
        time.sleep(0.02)
    wall = time.perf_counter() - begun
    if process.returncode:
        raise SystemExit(f"the program failed with {process.returncode}")
    return Cost(wall, sum(cpu.values()), peak / 1024**2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--no-peer", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        traces = [Path(folder) / f"rank{rank}.json" for rank in range(options.traces)]
        write(traces[0], 0, options.megabytes * 1_000_000)
        for trace in traces[1:]:
            # To read, a copy is as much work as another rank's trace; to make, it is none.
            shutil.copyfile(traces[0], trace)
        ours = measure(OURS, Path(folder) / "merged.json.gz", traces)
        print(f"merge: {ours.wall_s:.1f} s, {ours.cpu_s:.1f} s of CPU, {ours.rss_mib:.0f} MiB", flush=True)
        if not options.no_peer:
            peer = measure(PEER, Path(folder) / "peer.json", traces)
            print(f"peer:  {peer.wall_s:.1f} s, {peer.cpu_s:.1f} s of CPU, {peer.rss_mib:.0f} MiB")
            print(f"{peer.wall_s / ours.wall_s:.1f} x faster, 1/{peer.rss_mib / ours.rss_mib:.1f} of the memory")


if __name__ == "__main__":
    main()
