"""How fast operator traces are analysed, and in how much memory; HolisticTraceAnalysis and torch-tb-profiler beside it.

    python tests/benchmarks/traces.py                                       a made-up trace of 50 MB
    python tests/benchmarks/traces.py --megabytes 2600 --only decode ours   a large one
    python tests/benchmarks/traces.py --peers /path/to/python               peers that are installed elsewhere

Each program is a process of its own on the same file. Given are the CPU time of the analysis without imports, and how
much the resident memory grew over an interpreter that has loaded nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import made_trace
import part

from measured import progress, table

PEERS: Final = {"hta": "HolisticTraceAnalysis", "tensorboard": "torch-tb-profiler"}
SAYS: Final = {"decode": "decoding to columns", "ours": "the whole analysis", **PEERS}
# `make bench` installs the peers beside the tests' environment, whose torch they use.
PEERS_PYTHON: Final = Path(sys.prefix) / "peers" / "bin" / "python"
MIB: Final = 1 << 20
LEAST_RATE: Final = {"decode": 200, "ours": 100}
# Of a small file the first calls are most of the time.
LEAST_BYTES: Final = 49 * part.MB
# Prints seconds of CPU without imports, and how many events it saw.
TIMED: Final = """
import os, sys, time
path = sys.argv[1]
{setup}
begun = time.process_time()
{work}
print(time.process_time() - begun, {events}, end=" ")
"""
# Prints MiB of the largest resident size; that of `getrusage` would begin with the size of the process above this one.
RESIDENT: Final = """
for line in open("/proc/self/status"):
    if line.startswith("VmHWM"):
        print(int(line.split()[1]) / 1024)
"""
TELL: Final = """
def tell(done, of):
    print(f"\\r{100 * done / of:5.1f}%", end="", file=sys.stderr)
"""


def program(setup: str, work: str, events: str = "0") -> str:
    """Give a program that measures an analysis: what it loads, what counts, and how it tells the events that it saw."""
    return TIMED.format(setup=setup, work=work, events=events) + RESIDENT


PROGRAMS: Final = {
    "decode": program(
        "from pathlib import Path\nfrom lightning_memprof.read.trace.columns import read_columns" + TELL,
        "found = read_columns(Path(path), tell)",
        "found.events",
    ),
    "ours": program(
        "from pathlib import Path\nfrom lightning_memprof.account.trace.report import trace_report" + TELL,
        "found = trace_report(Path(path), tell)",
        "found.events",
    ),
    "hta": program(
        "import logging; logging.disable()\nfrom hta.trace_analysis import TraceAnalysis",
        "found = TraceAnalysis(trace_files={0: path}, trace_dir=os.path.dirname(path))\n"
        "found.get_temporal_breakdown(visualize=False)\n"
        "found.get_comm_comp_overlap(visualize=False)\n"
        "found.get_idle_time_breakdown(ranks=[0], visualize=False)",
    ),
    "tensorboard": program(
        "import logging; logging.disable()\nfrom torch_tb_profiler.profiler.data import RunProfileData",
        "RunProfileData.parse('worker0', None, path, os.path.dirname(path))",
    ),
}


class Run(NamedTuple):
    """One analysis: seconds of CPU, resident bytes beyond an empty interpreter, and events where they are told."""

    seconds: float
    resident: float
    events: int


def measure(python: str, name: str, trace: Path) -> Run | None:
    """Run one program; return None where it cannot run, and say why."""
    begun = subprocess.run([python, "-c", RESIDENT], check=True, capture_output=True, text=True)
    program = [python, "-c", PROGRAMS[name], str(trace)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{name:12} does not run: {done.stderr.strip().splitlines()[-1]}")
        return None
    seconds, events, mebibytes = done.stdout.strip().splitlines()[-1].split()
    return Run(float(seconds), (float(mebibytes) - float(begun.stdout)) * MIB, int(events))


def versions(python: str) -> list[str]:
    """Give the peers that another Python has, with their versions."""
    program = "import sys; from importlib.metadata import version; print(sys.argv[1], version(sys.argv[1]))"
    runs = [
        subprocess.run([python, "-c", program, name], capture_output=True, text=True, check=False)
        for name in PEERS.values()
    ]
    return [run.stdout.strip() for run in runs if not run.returncode]


def measured(trace: Path, options: argparse.Namespace) -> dict[str, list[Run]]:
    """Run the programs in turn, repeat after repeat; by name, the runs that were made."""
    found: dict[str, list[Run]] = {}
    names = list(options.only)
    with progress() as bar:
        task = bar.add_task("analyses", total=options.repeats * len(names))
        for _ in range(options.repeats):
            for name in list(names):
                run = measure(options.peers if name in PEERS else sys.executable, name, trace)
                if run is None:
                    names.remove(name)
                else:
                    found.setdefault(name, []).append(run)
                bar.update(task, advance=1, description=SAYS[name])
                bar.refresh()
    return found


def fragment(found: Mapping[str, Sequence[Run]], size: int, *, trial: bool = False) -> str:
    ours = min(run.seconds for run in found["ours"]) if "ours" in found else None
    rows = []
    for name, runs in found.items():
        seconds = min(run.seconds for run in runs)
        spread = max(run.seconds for run in runs) - seconds
        resident = max(run.resident for run in runs)
        ratio = f"{seconds / ours:.1f}" if name in PEERS and ours else ""
        events = runs[0].events
        beyond = f"{max(0, resident - 64 * MIB) / events:.0f}" if events else ""
        rows.append([SAYS[name], f"{seconds:.2f} s (+{spread:.2f})", f"{size / seconds / part.MB:.0f} MB", ratio,
                     f"{resident / MIB:.0f} MiB", beyond])  # fmt: skip
    headings = ["", "CPU time", "JSON a second", "times ours", "resident", "bytes an event beyond 64 MiB"]
    verdicts = part.targets(part.judged(targets(found, size), trial=trial))
    return f"{size / part.MB:.0f} MB of JSON.\n\n{table(headings, rows)}\n\n{verdicts}"


def targets(found: Mapping[str, Sequence[Run]], size: int) -> list[part.Target]:
    best = {name: min(run.seconds for run in runs) for name, runs in found.items()}
    judged = size >= LEAST_BYTES
    verdicts = []
    for name, least in LEAST_RATE.items():
        rate = size / best[name] / part.MB if name in best else None
        shown = f"{rate:.0f} MB/s" if rate else "not measured"
        met = rate >= least if rate and judged else None
        verdicts.append(part.Target(f"{SAYS[name]}: {least} MB/s of JSON", shown, met))
    for name, says in PEERS.items():
        ratio = best[name] / best["ours"] if {name, "ours"} <= best.keys() else None
        shown = f"{ratio:.1f} x" if ratio else "not measured"
        met = ratio >= 3 if ratio and judged else None
        verdicts.append(part.Target(f"the analysis: at least 3 x as fast as {says}", shown, met))
    if "ours" in found:
        beyond = max((run.resident - 64 * MIB) / run.events for run in found["ours"])
        shown = f"{max(run.resident for run in found['ours']) / MIB:.0f} MiB"
        verdicts.append(part.Target("resident: at most 64 MiB + 64 bytes an event", shown, beyond <= 64))
    return verdicts


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, help="default 50; with --quick 5")
    parser.add_argument("--repeats", type=int, help="the fastest of so many counts (default 3; with --quick 1)")
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    peers = PEERS_PYTHON if PEERS_PYTHON.exists() else Path(sys.executable)
    parser.add_argument("--peers", default=str(peers), help="the Python that has the peers (default: of `make bench`)")
    parser.add_argument("--quick", action="store_true", help="small and once; nothing is judged, nothing written")
    options = parser.parse_args()
    options.megabytes = options.megabytes or (5 if options.quick else 50)
    options.repeats = options.repeats or (1 if options.quick else 3)
    return options


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "worker0.1700000000000.pt.trace.json"
        size, _ = made_trace.write(trace, options.megabytes * part.MB)
        found = measured(trace, options)
        if not found:
            sys.exit("none of the programs ran")
    body = fragment(found, size, trial=options.quick)
    part.publish({"traces": body}, trial=options.quick, packages=versions(options.peers))
    if {"decode", "ours"} & set(options.only) - set(found):
        sys.exit("our own analysis did not run")


if __name__ == "__main__":
    main()
