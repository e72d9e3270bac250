"""One rank of two that call collectives until one differs: ``recorded_collectives.py DIRECTORY RANK FAULT``.

It writes what torch's flight recorder has, twice: as rows of ours, and as torch's own dump.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

from lightning_memprof.artifacts.series import columns_of, encode_rows
from lightning_memprof.capture.collectors.hangs import _collectives

DIRECTORY, RANK, FAULT = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
STEPS, STEP = 5, 3


def write() -> None:
    """Write both dumps while the ranks wait for each other, and end when both ranks have."""
    time.sleep(3)
    (DIRECTORY / f"rows{RANK}").write_text(encode_rows(map(columns_of, _collectives())))
    (DIRECTORY / f"part{RANK}").write_bytes(_dump_fr_trace())
    (DIRECTORY / f"part{RANK}").rename(DIRECTORY / f"trace_{RANK}")
    until = time.monotonic() + 60
    while time.monotonic() < until and not all((DIRECTORY / f"trace_{rank}").exists() for rank in range(2)):
        time.sleep(0.05)
    time.sleep(1)
    os._exit(0)


if __name__ == "__main__":
    dist.init_process_group("gloo", rank=RANK, world_size=2, init_method=f"file://{DIRECTORY}/store")
    threading.Thread(target=write, daemon=True).start()
    # The rank that ends first closes the connection.
    with suppress(RuntimeError):
        for step in range(STEPS):
            fault = FAULT if RANK == 1 and step == STEP else ""
            if fault == "reordered":
                dist.broadcast(torch.ones(2), 0)
            if fault != "missed":
                dist.all_reduce(torch.ones(3))
            if fault != "reordered":
                dist.broadcast(torch.ones(2), 0)
    time.sleep(90)
