"""Hands cells to processes that run them, one after another, and takes what they tell."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from warm_python import without_ours

HERE: Final = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Asked:
    """One cell of the matrix."""

    fault: str
    moment: str
    world: int
    number: int


def results(asked: Sequence[Asked], directory: Path, jobs: int) -> Iterator[dict[str, Any]]:
    """Run the cells in ``jobs`` processes; give each result as it comes."""
    waiting: queue.Queue[Asked] = queue.Queue()
    told: queue.Queue[dict[str, Any] | None] = queue.Queue()
    for request in asked:
        waiting.put(request)
    threads = [
        threading.Thread(target=_work, args=(waiting, told, directory / f"job{job}"), daemon=True)
        for job in range(min(jobs, len(asked)))
    ]
    for thread in threads:
        thread.start()
    ended = 0
    while ended < len(threads):
        result = told.get()
        if result is None:
            ended += 1
        else:
            yield result
    for thread in threads:
        thread.join()


def _work(waiting: queue.Queue[Asked], told: queue.Queue[dict[str, Any] | None], directory: Path) -> None:
    try:
        # A process that died with its cell is followed by another one.
        while not waiting.empty():
            _one_process(waiting, told, directory)
    finally:
        told.put(None)


def _one_process(waiting: queue.Queue[Asked], told: queue.Queue[dict[str, Any] | None], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    environment = without_ours() | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(HERE.parent / "support"),
        # torch's own lines about each window; its errors stay.
        "KINETO_LOG_LEVEL": "3",
    }
    with (directory / "zygote.err").open("a") as err:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py"), str(directory)],
            env=environment, cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True,
        )  # fmt: skip
    try:
        while (request := _next(waiting)) is not None:
            line = _ask(process, request)
            if not line.startswith("{"):
                told.put(asdict(request) | {"red": [f"the process of the cells ended: {directory}/zygote.err"]})
                return
            told.put(json.loads(line))
    finally:
        process.communicate()


def _ask(process: subprocess.Popen[str], request: Asked) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(asdict(request)) + "\n")
        process.stdin.flush()
        return process.stdout.readline()
    except OSError:
        return ""


def _next(waiting: queue.Queue[Asked]) -> Asked | None:
    try:
        return waiting.get_nowait()
    except queue.Empty:
        return None
