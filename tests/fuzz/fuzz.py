"""Fuzz the readers of files that may come from anywhere; behind ``make fuzz``.

make fuzz                                     ten minutes each of: trace, snapshot, manifest
make fuzz ARGS="--only trace --seconds 60"    one of them, a minute
make fuzz ARGS=--quick                        twenty seconds each

The time is that of fuzzing. To start a reader's process takes some seconds more, twenty on a slow machine: every line
of the package is prepared for counting.

Where no atheris is installed (it has wheels for some versions of Python on Linux only) inputs are changed without
knowing which lines they reach, and the first line says so. What was found interesting is kept in build/fuzz/corpus and
is where the next call begins. An input that crashed a reader lies in build/fuzz/crashes: mend the reader, and put the
input into tests/fuzz/seeds, which `make test` reads.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
NAMES: Final = ("trace", "snapshot", "manifest")
QUICK_SECONDS: Final = 20
# Behind its time a target ends the input that it reads, and writes what it found.
GRACE_SECONDS: Final = 120
LAST_LINES: Final = 25


def main() -> int:
    """Fuzz each target in a process of its own: 0 where nothing crashed."""
    given = _parsed()
    names = given.only or NAMES
    seconds = QUICK_SECONDS if given.quick else given.seconds
    with_atheris = importlib.util.find_spec("atheris") is not None and not given.without_atheris
    print(
        f"{', '.join(names)}: {seconds} s of fuzzing each, beside the start of its process, "
        + ("led by coverage (atheris)" if with_atheris else "by chance: atheris is not installed for this Python"),
        flush=True,
    )
    crashes = given.out / "crashes"
    crashes.mkdir(parents=True, exist_ok=True)
    codes = [_fuzzed(name, seconds, given.out, with_atheris=with_atheris) for name in names]
    found = sorted(crashes.iterdir())
    for path in found:
        print(f"crash: {path}")
    return int(any(codes) or bool(found))


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fuzz the readers of traces, snapshots and run directories.")
    parser.add_argument("--only", choices=NAMES, action="append", help="fuzz this reader alone")
    parser.add_argument("--seconds", type=int, default=600, help="of fuzzing for each reader, beside its start")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SECONDS} s of fuzzing for each reader")
    parser.add_argument("--without-atheris", action="store_true", help="by chance, though atheris is installed")
    parser.add_argument("--out", type=Path, default=Path("build") / "fuzz", help="corpus, crashes and logs")
    given = parser.parse_args()
    if given.seconds < 1:
        parser.error(f"--seconds {given.seconds}: must be at least 1")
    return given


def _fuzzed(name: str, seconds: int, out: Path, *, with_atheris: bool) -> int:
    """Fuzz one target and tell what it does; return the exit code."""
    corpus = out / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    log = out / f"{name}.log"
    command = [sys.executable, str(HERE / "one.py"), name, str(seconds), str(corpus), str(out / "crashes")]
    start = time.monotonic()
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            command if with_atheris else [*command, "--without-atheris"],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            code = _watched(process, name, seconds, log)
        finally:
            process.kill()
            process.wait()
            # A process that crashed has left what it wrote its inputs into.
            _sweep(process.pid)
    text = log.read_text(encoding="utf-8", errors="replace")
    runs = re.findall(r"stat::number_of_executed_units: *(\d+)", text)
    fuzzed = re.findall(r"^Done \d+ runs in (\d+) second", text, re.MULTILINE)
    took = f"{time.monotonic() - start:.0f} s"
    if code == 0:
        read = f"{int(runs[-1]) if runs else 0:,} inputs in {fuzzed[-1] if fuzzed else '?'} s of fuzzing"
        print(f"\r{name}: {read} ({took} with its start), no crash; the log is {log}", flush=True)
    else:
        print(f"\r{name}: ended with {code} after {took}; the end of {log}:", flush=True)
        print("\n".join(text.splitlines()[-LAST_LINES:]), flush=True)
    return code


def _watched(process: subprocess.Popen[bytes], name: str, seconds: int, log: Path) -> int:
    start = time.monotonic()
    while (code := process.poll()) is None:
        passed = time.monotonic() - start
        if passed > seconds + GRACE_SECONDS:
            return 124
        if sys.stdout.isatty():
            inputs = re.findall(r"^#(\d+)", log.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
            done = f"{inputs[-1] if inputs else 0} inputs"
            print(f"\r{name}: {passed:.0f} s, {seconds} s of them to fuzz, {done} ", end="", flush=True)
        time.sleep(1)
    return code


def _sweep(pid: int) -> None:
    for place in Path("/dev/shm").glob(f"memprof-fuzz-{pid}-*"):
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
