"""Trainings of two ranks that hang, and whether their pages name the cause within ten seconds of the limit.

    python tests/programs/hangs.py [--runs N] [--faults NAME,...] [--strategies ddp,fsdp2] [--parallel N] [--healthy N]
    python tests/programs/hangs.py --runs 10 --healthy 30 --publish

Each training is two processes on gloo; its second rank has the fault in step 3 (``tests/support/faulty_ranks.py``).
While it still hangs, its page is loaded and compared with what was done: rank, step, phase, line, and the collective.
A healthy training has steps of three times the median, validations and checkpoints: its page must have no hang.
``--publish`` writes ``docs/measured/hangs.md``.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from lightning_memprof import load_run
from measured import table, write_fragment
from ports import free_port

PROGRAM: Final = Path(__file__).resolve().parents[1] / "support" / "faulty_ranks.py"
# The first report is at most a quarter of the limit late.
WITHIN: Final = 10.0 - 3.0 / 4
STARTS_WITHIN: Final = 300.0
STRATEGIES: Final = {"ddp": "DDP", "fsdp2": "FSDP2"}
# What the verdict, its reasons and its next step must contain. With gloo one of two ranks that pass different sizes is
# aborted, so that only the other one can report.
FAULTS: Final = {
    "sleep": ("rank 1", "step 3", "forward", "ranks.py:{sleep}"),
    "missed": ("rank 1", "step 3", "forward", "ranks.py:{late}", "ranks.py:{reduce}", "broadcast", "all_reduce"),
    "reordered": ("rank 1", "step 3", "forward", "ranks.py:{early}", "ranks.py:{reduce}", "broadcast", "all_reduce"),
    "shaped": ("rank 1", "step 3", "forward", "ranks.py:{reduce}", "all_reduce Float[5000]", "all_reduce Float[3]"),
    "exception": ("rank 1", "step 3", "forward", "ranks.py:{raise}", "ValueError in forward"),
    "stopped": ("rank 1 is stopped", "step 3", "{waits}"),
    "loader": ("rank 1", "step 3", "data wait", "ranks.py:{loader}"),
    "uneven": ("rank 1", "step 3", "forward", "{waits}", "same number of batches"),
}  # fmt: skip


def lines() -> dict[str, int]:
    """Return the numbers of the marked lines."""
    text = PROGRAM.read_text(encoding="utf-8").splitlines()
    return {found[1]: number for number, line in enumerate(text, 1) if (found := re.search(r"# line: (\w+)$", line))}


def waits(strategy: str) -> str:
    """Return where a rank waits for one that does not reach the step: FSDP gathers parameters in forward."""
    if strategy == "fsdp2":
        return "in forward of step 3 at training.py:"
    return f"in forward of step 3 at faulty_ranks.py:{lines()['reduce']} in collectives (all_reduce Float[3])"


def start(directory: Path, fault: str, strategy: str) -> list[subprocess.Popen[bytes]]:
    """Start both ranks; their output is in ``out0`` and ``out1``."""
    port = str(free_port())
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "NODE_RANK": "0",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parent),
    }  # fmt: skip
    ranks = []
    for rank in range(2):
        with (directory / f"out{rank}").open("wb") as out:
            command = [sys.executable, str(PROGRAM), str(directory), fault, strategy]
            environment = common | {"LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
    return ranks


def page(place: Path) -> tuple[str | None, str]:
    """Return the rule and the words of the page's verdict."""
    document = load_run(place).document()
    return document.rule, f"({document.rule}) {document.verdict} {document.why} -> {document.next}"


@dataclass(frozen=True)
class Result:
    """What the page of a training says; ``seconds`` are those from the first report to the page."""

    fault: str
    strategy: str
    right: bool
    text: str
    seconds: float | None = None


def hung(place: Path, ranks: list[subprocess.Popen[bytes]], expected: list[str]) -> tuple[bool, str, float | None]:
    """Wait until the page is right, or ten seconds after the first report."""
    until, has_report = time.monotonic() + STARTS_WITHIN, False
    text, missing = "no page", expected
    while time.monotonic() < until and missing:
        time.sleep(0.5)
        ended = all(rank.poll() is not None for rank in ranks)
        if not (list(place.glob("hangs.rank*.jsonl")) or ended):
            continue
        if not has_report:
            has_report, until = True, time.monotonic() + WITHIN
        if not place.exists():
            text = "\n".join(path.read_text(errors="replace")[-2000:] for path in place.parents[1].glob("out*"))
            return False, f"ended before the run began: {text}", None
        _, text = page(place)
        missing = [word for word in ("(hang)", *expected) if word.lower() not in text.lower()]
        if ended:
            break
    seconds = time.monotonic() - (until - WITHIN) if has_report else None
    return not missing, f"{f'MISSING {missing} ' if missing else ''}{text}", seconds


def run(fault: str, strategy: str) -> Result:
    """Run one training; the text of the result is its verdict with what is missing."""
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        place = directory / "log" / "memprofiler"
        ranks = start(directory, fault, strategy)
        try:
            if fault != "healthy":
                expected = [word.format(**lines(), waits=waits(strategy)) for word in FAULTS[fault]]
                return Result(fault, strategy, *hung(place, ranks, expected))
            codes = [rank.wait(STARTS_WITHIN) for rank in ranks]
            rule, text = page(place)
            left = [path.name for pattern in ("hang*", "heartbeat*", "stacks*") for path in place.glob(pattern)]
            is_right = codes == [0, 0] and rule != "hang" and not left
            return Result(fault, strategy, is_right, f"{codes} {left} {text}")
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def fragment(results: Sequence[Result]) -> str:
    """Return the counts by fault and strategy, and the pages that are wrong."""

    def count(found: Sequence[Result]) -> str:
        return f"{sum(result.right for result in found)} of {len(found)}" if found else "-"

    rows = []
    for fault in [*FAULTS, "healthy"]:
        found = [result for result in results if result.fault == fault]
        taken = [result.seconds for result in found if result.right and result.seconds is not None]
        by_strategy = [count([result for result in found if result.strategy == name]) for name in STRATEGIES]
        times = [f"{statistics.median(taken):.1f}", f"{max(taken):.1f}"] if taken else ["-", "-"]
        rows.append([fault, *by_strategy, *times])
    healthy = [result for result in results if result.fault == "healthy"]
    faulty = [result for result in results if result.fault != "healthy"]
    words = f"Right: {count(faulty)} trainings with a fault, {count(healthy)} healthy ones."
    wrong = [f"- {result.strategy}, {result.fault}: {result.text}" for result in results if not result.right]
    heading = ["fault", *STRATEGIES.values(), "median s", "max s"]
    return "\n\n".join([words, table(heading, rows), *(["Wrong:", "\n".join(wrong)] if wrong else [])])


def main() -> int:
    """Run the trainings and print a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--healthy", type=int, default=0)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--publish", action="store_true")
    options = parser.parse_args()
    strategies, faults = options.strategies.split(","), [name for name in options.faults.split(",") if name]
    jobs = [("healthy", strategies[number % len(strategies)]) for number in range(options.healthy)]
    jobs += [(fault, strategy) for _ in range(options.runs) for fault in faults for strategy in strategies]
    results = []
    with ThreadPoolExecutor(options.parallel) as pool:
        for found in pool.map(lambda job: run(*job), jobs):
            results.append(found)
            print(f"{'right' if found.right else 'WRONG'} {found.strategy} {found.fault}: {found.text}", flush=True)
    right = sum(result.right for result in results)
    print(f"{right} of {len(results)} right")
    if options.publish:
        write_fragment("hangs", f"python {os.path.relpath(__file__)} {' '.join(sys.argv[1:])}", fragment(results))
    return int(right < len(results))


if __name__ == "__main__":
    sys.exit(main())
