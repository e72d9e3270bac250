"""A run that has not ended, as the pages show it."""

from __future__ import annotations

import time
from typing import Final

import msgspec

from lightning_memprof.read.run.following import Follower
from lightning_memprof.read.run.model import Run

# A process writes its place every few seconds, also in a step that does not end.
SILENT_NS: Final = 30_000_000_000
# Without a sign of life for this long a run is not live.
GONE_NS: Final = 20 * SILENT_NS


class Live(msgspec.Struct, frozen=True):
    """A run that has not ended, as its files were at ``now_ns`` (Unix time)."""

    follower: Follower
    now_ns: int


def live_run(run: Run) -> Live | None:
    """Return the state of a run, as :func:`live_now` does."""
    if all(rank.status != "running or killed" for rank in run.ranks):
        return None
    follower = Follower(run.directory)
    follower.look()
    return live_now(follower)


def live_now(follower: Follower) -> Live | None:
    """Return the state of a run with a sign of life in the last minutes; None of one that has ended, or is silent."""
    now_ns = time.time_ns()
    signs = [
        (rank.last_ns, rank.beat and rank.beat.time_ns, rank.facts and rank.facts.time_ns)
        for rank in follower.ranks.values()
        if rank.end is None
    ]
    last_ns = max((sign or 0 for known in signs for sign in known), default=0)
    return Live(follower, now_ns) if now_ns - last_ns < GONE_NS else None
