"""How fast operator traces are analysed, and in how much memory; HolisticTraceAnalysis and torch-tb-profiler beside it.

    python tests/benchmarks/traces.py                                       a made-up trace of 50 MB
    python tests/benchmarks/traces.py --trace worker0.pt.trace.json.gz      a recorded one, repeated to 50 MB
    python tests/benchmarks/traces.py --megabytes 2600 --only decode ours   a large one
    python tests/benchmarks/traces.py --peers /path/to/python               peers that are installed elsewhere

Each program is a process of its own on the same file. Given are the CPU time of the analysis without imports, and how
much the resident memory grew over an interpreter that has loaded nothing. The figures go into
``docs/measured/traces.md``, those of a recorded trace into ``traces-recorded.md``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import merge
import part
from analyses import PROGRAMS, RESIDENT

from measured import table

PEERS: Final = {"hta": "HolisticTraceAnalysis", "tensorboard": "torch-tb-profiler"}
SAYS: Final = {"decode": "decoding to columns", "ours": "the whole analysis", **PEERS}
# `make bench` installs the peers beside the tests' environment, whose torch they use.
PEERS_PYTHON: Final = Path(sys.prefix) / "peers" / "bin" / "python"
MIB: Final = 1 << 20
LEAST_RATE: Final = {"decode": 200, "ours": 100}
# Of a small file the first calls are most of the time.
LEAST_BYTES: Final = 49 * part.MB
PROFILED_FUNCTIONS: Final = 8
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


class Run(NamedTuple):
    """One analysis: seconds of CPU, resident bytes beyond an empty interpreter, and events where they are told."""

    seconds: float
    resident: float
    events: int


def measure(python: str, name: str, trace: Path) -> Run | None:
    """Run one program; return None where it cannot run, and say why."""
    begun = subprocess.run([python, "-c", RESIDENT], check=True, capture_output=True, text=True)
    program = [python, "-c", PROGRAMS[name].timed, str(trace)]
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
    with part.progress() as bar:
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


def slow(found: Mapping[str, Sequence[Run]], size: int) -> list[str]:
    """Name our programs that miss their rate."""
    rates = {name: size / min(run.seconds for run in found[name]) / part.MB for name in LEAST_RATE if name in found}
    return [name for name, rate in rates.items() if size >= LEAST_BYTES and rate < LEAST_RATE[name]]


def profile(name: str, trace: Path) -> str:
    """Run one of our programs once more under a profile; the functions that took longest themselves, as Markdown."""
    program = [sys.executable, "-c", PROGRAMS[name].profiled, str(trace)]
    beside = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(program, capture_output=True, text=True, check=True, env=beside)
    functions = sorted(json.loads(done.stdout.splitlines()[-1]), key=lambda row: row[2], reverse=True)
    whole = sum(own for _, _, own, _ in functions)
    rows = [
        [f"`{function}`", f"{calls:,}", f"{1000 * own:.0f}", f"{own / whole:.0%}"]
        for function, calls, own, _ in functions[:PROFILED_FUNCTIONS]
    ]
    headings = ["function", "calls", "ms, own", "of the whole"]
    return f"Missed: {SAYS[name]}, once more with a profile.\n\n{table(headings, rows)}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="a recorded trace, plain or gzip (default: a made-up one)")
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
        size = options.megabytes * part.MB
        if options.trace:
            repeat(options.trace, trace, size)
        else:
            make(trace, size)
        size = trace.stat().st_size
        found = measured(trace, options)
        if not found:
            sys.exit("none of the programs ran")
        profiles = [profile(name, trace) for name in slow(found, size) if not options.quick]
    body = "\n\n".join([fragment(found, size, trial=options.quick), *profiles])
    name = "traces-recorded" if options.trace else "traces"
    part.publish({name: body}, trial=options.quick, packages=versions(options.peers))
    if {"decode", "ours"} & set(options.only) - set(found):
        sys.exit("our own analysis did not run")


if __name__ == "__main__":
    main()
