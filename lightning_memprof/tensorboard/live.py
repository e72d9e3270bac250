"""A live run, as JSON for its page."""

from __future__ import annotations

import statistics
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.analysis.run.confined import refuse_links
from lightning_memprof.analysis.run.following import Follower, total_steps
from lightning_memprof.artifacts.series import PHASES
from lightning_memprof.report.sections.labels import COLOURS, called
from lightning_memprof.units import format_bytes, format_ns, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.run.following import RankProgress
    from lightning_memprof.tensorboard.runs import FoundRun

__all__ = ["Live"]

# A follower keeps a few hundred numbers a rank; what nobody looks at any more is forgotten.
MOST_FOLLOWED: Final = 16
MOST_POINTS: Final = 120
MOST_RANKS: Final = 16


class Live:
    """Runs that are looked at again and again; each look reads what is new. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._followed: OrderedDict[str, tuple[threading.Lock, Follower]] = OrderedDict()

    def document(self, found: FoundRun) -> dict[str, Any]:
        """Return how far a run is, how fast, and how much memory it takes; ``lead`` is None before its first rank.

        Raises:
            ArtifactError: a file of the run is a link that leads out of the log directory.

        """
        with self._lock:
            if found.id not in self._followed:
                refuse_links(found.directory, found.top)
                self._followed[found.id] = threading.Lock(), Follower(found.directory)
            lock, follower = self._followed[found.id]
            self._followed.move_to_end(found.id)
            while len(self._followed) > MOST_FOLLOWED:
                self._followed.popitem(last=False)
        # The first look at a long pulse takes a second: another run's page does not wait for it.
        with lock:
            follower.look()
            if not follower.ranks:
                return {"lead": None, "ranks": []}
            ranks = sorted(follower.ranks.values(), key=lambda rank: rank.rank)
            return {
                "lead": _rank(follower.lead),
                "world_size": follower.world_size,
                "found": follower.found,
                "ranks": [_short(rank) for rank in ranks[:MOST_RANKS]] if len(ranks) > 1 else [],
            }


def _rank(rank: RankProgress) -> dict[str, Any]:
    phases = rank.phases_ns()
    whole = sum(phases.values())
    last = rank.recent[-1] if rank.recent else None
    return {
        **_short(rank),
        "total": total_steps(rank) or None,
        "epoch": last["epoch"] if last else None,
        "phases": [
            {
                "name": called(phase),
                "class": f"c-{phase}" if phase in COLOURS else "c-other",
                "text": format_ns(phases[phase]),
                "percent": percent(phases[phase] / whole),
                "share": phases[phase] / whole,
            }
            for phase in PHASES
            if whole
        ],
        "device_peak": None if rank.device_peak_bytes is None else format_bytes(rank.device_peak_bytes),
        "durations_ns": _thinned(rank.durations_ns.values),
        "rss_bytes": _thinned(rank.rss_bytes.values),
        "errors": rank.errors,
    }


def _short(rank: RankProgress) -> dict[str, Any]:
    durations = [ns for row in rank.usual() if (ns := row["duration_ns"]) is not None]
    phases = rank.phases_ns()
    whole = sum(phases.values())
    last = rank.recent[-1] if rank.recent else None
    step = last["step"] if last else None
    rss = last["rss_bytes"] if last else None
    return {
        "rank": rank.rank,
        "steps": rank.steps if step is None else step + 1,
        "step": format_ns(statistics.median(durations)) if durations else None,
        "data_wait": percent(phases["data_wait"] / whole) if whole else None,
        "rss": None if rss is None else format_bytes(rss),
        "has_ended": rank.end is not None,
    }


def _thinned(values: list[int]) -> list[int]:
    """Return so many maxima at most, for a curve that is a few hundred pixels wide."""
    stretch = -(-len(values) // MOST_POINTS) or 1
    return [max(values[place : place + stretch]) for place in range(0, len(values), stretch)]
