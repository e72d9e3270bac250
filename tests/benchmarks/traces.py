"""How fast operator traces are analysed, and in how much memory; HolisticTraceAnalysis and torch-tb-profiler beside it.

    python tests/benchmarks/traces.py                                       a made-up trace of 50 MB
    python tests/benchmarks/traces.py --trace worker0.pt.trace.json.gz      a recorded one, repeated to 50 MB
    python tests/benchmarks/traces.py --megabytes 2600 --only decode ours   a large one
    python tests/benchmarks/traces.py --peers /path/to/python               peers that are installed elsewhere

Each program is a process of its own on the same file. Given are the CPU time of the analysis without imports, and how
much the resident memory grew over an interpreter that has loaded nothing.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.benchmarks import merge
else:
    # This script's directory is on the path and the repository's root is not: the installed package is measured.
    import merge

# Each prints seconds of CPU, how many events it saw, and MiB of the largest resident size.
FRAME = """
import os, sys, time
path = sys.argv[1]
{setup}
begun = time.process_time()
{work}
print(time.process_time() - begun, {events}, end=" ")
"""
# The resident size of `getrusage` begins with that of the process that started this one.
RESIDENT = """
for line in open("/proc/self/status"):
    if line.startswith("VmHWM"):
        print(int(line.split()[1]) / 1024)
"""
TELL = """
def tell(done, of):
    print(f"\\r{100 * done / of:5.1f} %", end="", file=sys.stderr)
"""
PROGRAMS = {
    "decode": FRAME.format(
        setup="from pathlib import Path\nfrom lightning_memprof.analysis.trace_columns import read_columns" + TELL,
        work="found = read_columns(Path(path), tell)",
        events="found.events",
    ),
    "ours": FRAME.format(
        setup="from pathlib import Path\nfrom lightning_memprof.analysis.trace_report import trace_report" + TELL,
        work="found = trace_report(Path(path), tell)",
        events="found.events",
    ),
    "hta": FRAME.format(
        setup="import logging; logging.disable()\nfrom hta.trace_analysis import TraceAnalysis",
        work="found = TraceAnalysis(trace_files={0: path}, trace_dir=os.path.dirname(path))\n"
        "found.get_temporal_breakdown(visualize=False)\n"
        "found.get_comm_comp_overlap(visualize=False)\n"
        "found.get_idle_time_breakdown(ranks=[0], visualize=False)",
        events="0",
    ),
    "tensorboard": FRAME.format(
        setup="import logging; logging.disable()\nfrom torch_tb_profiler.profiler.data import RunProfileData",
        work="RunProfileData.parse('worker0', None, path, os.path.dirname(path))",
        events="0",
    ),
}
PEERS = ("hta", "tensorboard")
NUMBERS = re.compile(rb'("ts": *|"correlation": *)(\d+)')


def repeat(trace: Path, out: Path, size: int) -> None:
    """Write a recorded trace again and again, each time behind the last one, until the file has `size` bytes."""
    data = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    opens = data.index(b"[", data.index(b'"traceEvents"')) + 1
    closes = data.rindex(b"}", opens, data.rindex(b"]", opens)) + 1
    times = [int(number) for key, number in NUMBERS.findall(data) if key.startswith(b'"ts"') and int(number)]
    length = max(times) - min(times) + 1_000_000

    def later(found: re.Match[bytes]) -> bytes:
        shift = length if found[1].startswith(b'"ts"') else 10_000_000
        return b"%b%d" % (found[1], int(found[2]) + again * shift)

    with out.open("wb") as stream:
        stream.write(data[:opens])
        again = 0
        while not again or stream.tell() < size:
            events = NUMBERS.sub(later, data[opens:closes]) if again else data[opens:closes]
            stream.write(b"," * bool(again) + events)
            again += 1
        stream.write(data[closes:])


def make(out: Path, size: int) -> None:
    """Write a made-up trace of a training, with steps."""
    merge.write(out, 0, size)
    data = out.read_text(encoding="utf-8")
    steps = [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 4000, "tid": 4000,
         "ts": event["ts"], "dur": 9_000.5, "args": {}}
        for step, event in enumerate(islice(merge.events(0), 0, 7 * 1000, 7 * 100))
    ]  # fmt: skip
    head, between, tail = data.partition('"traceEvents": [\n')
    out.write_text(head + between + "".join(json.dumps(step) + ",\n" for step in steps) + tail, encoding="utf-8")


def measure(python: str, name: str, trace: Path) -> tuple[float, float, int] | None:
    """Run one program; return seconds, MiB and events, or None where it cannot run."""
    begun = subprocess.run([python, "-c", RESIDENT], check=True, capture_output=True, text=True)
    program = [python, "-c", PROGRAMS[name] + RESIDENT, str(trace)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{name:12} does not run: {done.stderr.strip().splitlines()[-1]}")
        return None
    seconds, events, mebibytes = done.stdout.strip().splitlines()[-1].split()
    return float(seconds), float(mebibytes) - float(begun.stdout), int(events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="a recorded trace, plain or gzip (default: a made-up one)")
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3, help="the fastest of so many counts (default %(default)s)")
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--peers", default=sys.executable, help="the Python that has the peers (default: this one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "worker0.1700000000000.pt.trace.json"
        size = options.megabytes * 1_000_000
        if options.trace:
            repeat(options.trace, trace, size)
        else:
            make(trace, size)
        size = trace.stat().st_size
        print(f"{size / 1e6:.0f} MB of JSON")
        fastest: dict[str, float] = {}
        for name in options.only:
            python = options.peers if name in PEERS else sys.executable
            runs = [measure(python, name, trace) for _ in range(options.repeats)]
            known = [run for run in runs if run is not None]
            if not known:
                continue
            seconds, mebibytes, events = min(known)
            fastest[name] = seconds
            each = f", {(mebibytes - 64) * 1024**2 / events:.0f} bytes an event beyond 64 MiB" if events else ""
            ratio = f", {seconds / fastest['ours']:.1f} x the time" if name in PEERS and "ours" in fastest else ""
            print(
                f"{name:12} {seconds:7.2f} s {size / seconds / 1e6:6.0f} MB/s {mebibytes:6.0f} MiB{each}{ratio}",
                flush=True,
            )


if __name__ == "__main__":
    main()
