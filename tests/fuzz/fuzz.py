"""Fuzz the readers of files that may come from anywhere; behind ``make fuzz``.

make fuzz                                     ten minutes each of: trace, snapshot, manifest
make fuzz ARGS="--only trace --seconds 60"    one of them, a minute
make fuzz ARGS=--quick                        twenty seconds each

The time is that of fuzzing. To start a reader's process takes some seconds more, twenty on a slow machine: every line
of the package is prepared for counting.

It needs atheris, which has wheels for some versions of Python on Linux; `make test-slow` changes inputs without it.
What was found interesting is kept in build/fuzz/corpus and is where the next call begins. An input that crashed a
reader lies in build/fuzz/crashes: mend the reader, and put the input into tests/fuzz/seeds, which `make test` reads.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
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
    if importlib.util.find_spec("atheris") is None:
        sys.exit("atheris is not installed for this Python: pytest -m extended tests/property/test_fuzz.py needs none")
    print(f"{', '.join(names)}: {seconds} s of fuzzing each, beside the start of its process", flush=True)
    crashes = given.out / "crashes"
    crashes.mkdir(parents=True, exist_ok=True)
    codes = [_fuzzed(name, seconds, given.out) for name in names]
    found = sorted(crashes.iterdir())
    for path in found:
        print(f"crash: {path}")
    return int(any(codes) or bool(found))


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fuzz the readers of traces, snapshots and run directories.")
    parser.add_argument("--only", choices=NAMES, action="append", help="fuzz this reader alone")
    parser.add_argument("--seconds", type=int, default=600, help="of fuzzing for each reader, beside its start")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SECONDS} s of fuzzing for each reader")
    parser.add_argument("--out", type=Path, default=Path("build") / "fuzz", help="corpus, crashes and logs")
    given = parser.parse_args()
    if given.seconds < 1:
        parser.error(f"--seconds {given.seconds}: must be at least 1")
    return given


def _fuzzed(name: str, seconds: int, out: Path) -> int:
    """Fuzz one target; return the exit code."""
    corpus = out / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    log = out / f"{name}.log"
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "one.py"), name, str(seconds), str(corpus), str(out / "crashes")],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            code = process.wait(seconds + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            process.kill()
            process.wait()
            # A process that crashed has left what it wrote its inputs into.
            for place in Path("/dev/shm").glob(f"memprof-fuzz-{process.pid}-*"):
                shutil.rmtree(place, ignore_errors=True)
    text = log.read_text(encoding="utf-8", errors="replace")
    runs = re.findall(r"stat::number_of_executed_units: *(\d+)", text)
    if code == 0:
        print(f"{name}: {int(runs[-1]) if runs else 0:,} inputs, no crash; the log is {log}", flush=True)
    else:
        print(f"{name}: ended with {code}; the end of {log}:", flush=True)
        print("\n".join(text.splitlines()[-LAST_LINES:]), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
