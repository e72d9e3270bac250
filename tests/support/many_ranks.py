"""A run of thousands of ranks, made in seconds: one rank's files, copied with another number."""

from __future__ import annotations

import random
from pathlib import Path

from fake_runs import FakeRun, make_run
from lightning_memprof.account.ranks.summary import Arrivals, Figures, RankSummary, encode_summary
from lightning_memprof.artifacts.naming import manifest_name, pulse_name, summary_path
from lightning_memprof.units import GIB, MIB

MS = 1_000_000
PER_NODE = 8
LATE_MS = 40
START_NS = 1_800_000_000_000_000_000
KINDS: list[tuple[str, str, int | None]] = [("all_reduce", "0", 26_214_400), ("all_gather", "1", None)]
PHASES = {
    "data_wait": 2 * MS,
    "forward": 30 * MS,
    "backward": 60 * MS,
    "optimizer": 5 * MS,
    "callbacks": MS,
    "other": MS,
}


def make_many_ranks(root: Path, ranks: int, windows: int = 4, *, straggler: int) -> Path:
    """Write a run of ``ranks`` ranks on nodes of eight; one is late with its data in every step. Give its directory.

    Each node's clock is off by up to a second. The first ranks have files of every kind, the others the same rows.
    """
    directory = make_run(
        root, FakeRun(world_size=2, steps=200, windows=tuple((10 * n + 2, 10 * n + 3) for n in range(windows)))
    )
    manifest = (directory / manifest_name(1)).read_text().replace('"world_size":2', f'"world_size":{ranks}')
    (directory / manifest_name(1)).write_text(manifest)
    pulse = (directory / pulse_name(1)).read_bytes()
    for rank in range(2, ranks):
        text = manifest.replace('"rank":1,', f'"rank":{rank},').replace("rank00001", f"rank{rank:05d}")
        (directory / manifest_name(rank)).write_text(text)
        (directory / pulse_name(rank)).write_bytes(pulse)
    for window in range(windows):
        schedule = _schedule(window)
        (directory / f"window{window:03d}").mkdir(exist_ok=True)
        for rank in range(ranks):
            summary = _summary(rank, ranks, window, schedule, LATE_MS if rank == straggler else 0)
            (directory / summary_path(window, rank)).write_bytes(encode_summary(summary))
    return directory


def _schedule(window: int) -> list[tuple[int, int]]:
    """When each of 200 collectives would start without the straggler, and when it ends."""
    found, at = [], START_NS + window * 60_000 * MS
    for number in range(200):
        # 100 a step: the first of a step waits for the straggler, the others follow it.
        at += 40 * MS if number % 100 == 0 else MS
        end = at + (LATE_MS * MS if number % 100 == 0 else 0) + MS // 2
        found.append((at, end))
        at = end
    return found


def _summary(rank: int, ranks: int, window: int, schedule: list[tuple[int, int]], late_ms: int) -> RankSummary:
    noise = random.Random(rank * 7919 + window)
    clock = random.Random(rank // PER_NODE).randrange(-1000 * MS, 1000 * MS) if rank >= PER_NODE else 0
    starts, durations = [], []
    for number, (start, end) in enumerate(schedule):
        mine = start + (late_ms * MS if number % 100 == 0 else 0) + noise.randrange(100_000)
        starts.append(mine)
        durations.append(end - mine + noise.randrange(20_000))
    phases = PHASES | {"data_wait": PHASES["data_wait"] + late_ms * MS, "backward": PHASES["backward"] - late_ms * MS}
    figures = Figures(mean_ns=sum(phases.values()), phases_ns=phases)
    step = 10 * window + 2
    return RankSummary(
        rank=rank, world_size=ranks, host=f"node{rank // PER_NODE:03d}", window=window, steps=[step, step + 1],
        recorded=figures, usual=figures,
        callbacks_ns={"ModelCheckpoint": MS // 2, "LearningRateMonitor": MS // 4},
        memory={"peak_rss_bytes": 4 * GIB + rank * 1024, "allocated_bytes.all.peak": 60 * GIB + (rank % 97) * MIB},
        arrivals=Arrivals(
            count=200, base_ns=starts[0] + clock, kinds=KINDS, kind=[number % 2 for number in range(200)],
            sequence=[number // 2 for number in range(200)],
            start_ns=[start - starts[0] for start in starts], duration_ns=durations,
        ),
    )  # fmt: skip
