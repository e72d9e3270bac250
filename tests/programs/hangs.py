"""Trainings of two ranks that hang, and whether their pages name the cause within ten seconds of the limit.

    python tests/programs/hangs.py [--runs N] [--faults NAME,...] [--strategies ddp,fsdp2] [--parallel N] [--healthy N]

Each training is two processes on gloo; its second rank has the fault in step 3 (``tests/support/faulty_ranks.py``).
While it still hangs, its page is loaded and compared with what was done: rank, step, phase, line, and the collective.
A healthy training has steps of three times the median, validations and checkpoints: its page must have no hang.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from lightning_memprof import load_run

PROGRAM: Final = Path(__file__).resolve().parents[1] / "support" / "faulty_ranks.py"
# The first report is at most a quarter of the limit late.
WITHIN: Final = 10.0 - 3.0 / 4
STARTS_WITHIN: Final = 300.0
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
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


def hung(place: Path, ranks: list[subprocess.Popen[bytes]], expected: list[str]) -> tuple[bool, str]:
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
            return False, f"ended before the run began: {text}"
        _, text = page(place)
        missing = [word for word in ("(hang)", *expected) if word.lower() not in text.lower()]
        if ended:
            break
    return not missing, f"{f'MISSING {missing} ' if missing else ''}{text}"


def run(fault: str, strategy: str) -> tuple[bool, str]:
    """Run one training; return whether its page is right, and its verdict with what is missing."""
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        place = directory / "log" / "memprofiler"
        ranks = start(directory, fault, strategy)
        try:
            if fault != "healthy":
                return hung(place, ranks, [word.format(**lines(), waits=waits(strategy)) for word in FAULTS[fault]])
            codes = [rank.wait(STARTS_WITHIN) for rank in ranks]
            rule, text = page(place)
            left = [path.name for pattern in ("hang*", "heartbeat*", "stacks*") for path in place.glob(pattern)]
            return codes == [0, 0] and rule != "hang" and not left, f"{codes} {left} {text}"
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def main() -> int:
    """Run the trainings and print a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--healthy", type=int, default=0)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--strategies", default="ddp,fsdp2")
    parser.add_argument("--parallel", type=int, default=4)
    options = parser.parse_args()
    strategies, faults = options.strategies.split(","), [name for name in options.faults.split(",") if name]
    jobs = [(fault, strategy) for _ in range(options.runs) for fault in faults for strategy in strategies]
    jobs += [("healthy", strategies[number % len(strategies)]) for number in range(options.healthy)]
    right = 0
    with ThreadPoolExecutor(options.parallel) as pool:
        results = pool.map(lambda job: run(*job), jobs)
        for (fault, strategy), (is_right, text) in zip(jobs, results, strict=True):
            right += is_right
            print(f"{'right' if is_right else 'WRONG'} {strategy} {fault}: {text}", flush=True)
    print(f"{right} of {len(jobs)} right")
    return int(right < len(jobs))


if __name__ == "__main__":
    sys.exit(main())
