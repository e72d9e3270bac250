"""Merging against its plain peer: `json.load` of every file and one `json.dump`.

    python tests/benchmarks/merge.py                              both, on the same 8 files of 50 MB
    python tests/benchmarks/merge.py --megabytes 500 --no-peer    the merge alone, of 8 files of 500 MB

Given are wall time, CPU time and the largest resident memory, of all processes together; in ``docs/measured/merge.md``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import part
import psutil

from measured import table

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
from lightning_memprof.timeline.merge import merge_traces
from lightning_memprof.timeline.events import Source
sources = [Source(label=f"rank {at} · host", sort=at, trace=Path(path)) for at, path in enumerate(sys.argv[2:])]
merge_traces(sources, Path(sys.argv[1]))
"""
OURS_NAME = "`merge`, to .json.gz"
PEER_NAME = "`json.load` of each file and one `json.dump`"
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
            for child in (process, *process.children(recursive=True)):
                total += child.memory_info().rss
                times = child.cpu_times()
                cpu[child.pid] = times.user + times.system
        except psutil.Error:
            continue
        peak = max(peak, total)
        time.sleep(0.02)
    wall = time.perf_counter() - begun
    if process.returncode:
        raise SystemExit(f"the program failed with {process.returncode}")
    return Cost(wall, sum(cpu.values()), peak / 1024**2)


def fragment(found: Mapping[str, Sequence[Cost]], files: str, *, judged: bool) -> str:
    """Give the table, and the targets where both were measured; the fastest of the repeats counts."""
    best = {name: min(costs) for name, costs in found.items()}
    rows = [
        [name, part.spread([each.wall_s for each in costs], ".1f") + " s", f"{best[name].wall_s:.1f} s",
         f"{best[name].cpu_s:.1f} s", f"{max(each.rss_mib for each in costs):.0f} MiB"]
        for name, costs in found.items()
    ]  # fmt: skip
    verdicts = []
    if PEER_NAME in best:
        ours, peer = best[OURS_NAME], best[PEER_NAME]
        faster, smaller = peer.wall_s / ours.wall_s, peer.rss_mib / ours.rss_mib
        verdicts = [
            part.Target("at least 5 x faster than json by hand", f"{faster:.1f} x", faster >= 5 if judged else None),
            part.Target("at most a sixth of its memory", f"1/{smaller:.1f}", smaller >= 6 if judged else None),
        ]
    shown = table(["", "wall, median ± half of the range", "wall, fastest", "CPU", "resident, all processes"], rows)
    return "\n\n".join([files, shown, *([part.targets(verdicts)] if verdicts else [])])


def compare(traces: list[Path], *, peer: bool, repeats: int) -> dict[str, list[Cost]]:
    """Merge, and have the peer merge, in turn."""
    programs = {OURS_NAME: (OURS, "merged.json.gz")} | ({PEER_NAME: (PEER, "peer.json")} if peer else {})
    found: dict[str, list[Cost]] = {name: [] for name in programs}
    with part.progress() as bar:
        task = bar.add_task("merges", total=repeats * len(programs))
        for _ in range(repeats):
            for name, (code, out) in programs.items():
                found[name].append(measure(code, traces[0].parent / out, traces))
                bar.update(task, advance=1)
                bar.refresh()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, help="default 8; with --quick 4")
    parser.add_argument("--megabytes", type=int, help="of each file; default 50, with --quick 3")
    parser.add_argument("--repeats", type=int, help="default 3; with --quick 1")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--quick", action="store_true", help="small and once; nothing is judged, nothing written")
    options = parser.parse_args()
    count, megabytes = options.traces or (4 if options.quick else 8), options.megabytes or (3 if options.quick else 50)
    with tempfile.TemporaryDirectory() as folder:
        traces = [Path(folder) / f"rank{rank}.json" for rank in range(count)]
        write(traces[0], 0, megabytes * part.MB)
        for trace in traces[1:]:
            # To read, a copy is as much work as another rank's trace; to make, it is none.
            shutil.copyfile(traces[0], trace)
        repeats = options.repeats or (1 if options.quick else 3)
        found = compare(traces, peer=not options.no_peer, repeats=repeats)
    files = f"{count} files of {megabytes} MB, {repeats} time{'s' * (repeats != 1)} in turn."
    # The targets speak of 8 files of 50 MB; with less, the start of the processes is most of it.
    body = fragment(found, files, judged=count >= 8 and megabytes >= 50 and not options.quick)
    part.publish({"merge": body}, trial=options.quick)


if __name__ == "__main__":
    main()
