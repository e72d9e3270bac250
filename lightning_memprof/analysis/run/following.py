"""A run while it goes on: what its files have more of since the last look."""

from __future__ import annotations

import json
import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.analysis.run.many_ranks import in_full
from lightning_memprof.analysis.run.rows import text, whole, whole_numbers
from lightning_memprof.artifacts.naming import manifest_name, parse_manifest_name, pulse_name
from lightning_memprof.artifacts.plain_file import open_plain
from lightning_memprof.artifacts.series import PHASES, parse_pulse_row

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

from lightning_memprof.artifacts.series import PulseRow

__all__ = ["RECENT_STEPS", "Follower", "RankSoFar", "RecordedWindow", "Tail", "progress_of"]

# What a step takes now; more would say what it took long ago.
RECENT_STEPS: Final = 100
# The pages show curves of the whole run with so many values at most.
MOST_POINTS: Final = 512
# Of a file that has grown by more since the last look, the rest is read at the next one.
MOST_BYTES: Final = 32 << 20
SHOWN_ERRORS: Final = 3


class Tail:
    """The lines that were appended to a file since the last look; a torn last line waits for its end.

    Args:
        path: the file; it may not be there yet.

    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._torn = b""

    def lines(self) -> list[bytes]:
        """Return the new lines, without their ends; none where the file cannot be read now."""
        try:
            if self._path.stat().st_size <= self._offset:
                return []
            with open_plain(self._path) as stream:
                stream.seek(self._offset)
                data = stream.read(MOST_BYTES)
        except OSError:
            return []
        self._offset += len(data)
        *lines, self._torn = (self._torn + data).split(b"\n")
        return lines


@dataclass
class RecordedWindow:
    """One window as far as it went; ``steps`` are those planned until it is closed."""

    index: int
    steps: tuple[int, ...]
    closed: bool = False


@dataclass
class Curve:
    """Values over a whole run at equal distances, the largest of each stretch; the stretches grow with the run."""

    values: list[int] = field(default_factory=list)
    every: int = 1
    count: int = 0

    def add(self, value: int) -> None:
        """Add the next value."""
        if self.count % self.every == 0:
            if len(self.values) == MOST_POINTS:
                self.values = list(map(max, self.values[::2], self.values[1::2]))
                self.every *= 2
            self.values.append(value)
        else:
            self.values[-1] = max(self.values[-1], value)
        self.count += 1


@dataclass
class RankSoFar:
    """One rank until now. ``facts``, ``training`` and ``end`` are rows of its manifest, None before they are written.

    ``recent`` are its last steps, of ``counted`` ones; ``durations_ns`` and ``rss_bytes`` are over all of it,
    and ``device_peak_bytes`` is the most of the device's memory.
    """

    rank: int
    facts: Mapping[str, Any] | None = None
    training: Mapping[str, Any] | None = None
    end: Mapping[str, Any] | None = None
    counted: int = 0
    recent: deque[PulseRow] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    durations_ns: Curve = field(default_factory=Curve)
    rss_bytes: Curve = field(default_factory=Curve)
    device_peak_bytes: int | None = None
    windows: dict[int, RecordedWindow] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """How many steps there were: those of the pulse, or what the end says where the pulse is off."""
        return max(self.counted, whole(self.end, "steps") or 0)

    @property
    def last_ns(self) -> int | None:
        """Unix time of the end of the last step that was written."""
        if not self.recent:
            return None
        start, duration = self.recent[-1]["start_ns"], self.recent[-1]["duration_ns"]
        return None if start is None else start + (duration or 0)

    def usual(self) -> list[PulseRow]:
        """Return the recent steps that no window has recorded, or all of them where there are no others."""
        return [row for row in self.recent if row["window"] is None] or list(self.recent)

    def phases_ns(self) -> dict[str, int]:
        """Return the mean recent step by phase."""
        rows = self.usual()
        return {phase: sum(row[f"{phase}_ns"] or 0 for row in rows) // max(len(rows), 1) for phase in PHASES}

    def take_step(self, row: PulseRow) -> None:
        """Add a row of the pulse."""
        self.counted += 1
        self.recent.append(row)
        # What a window costs would hide what the steps do.
        if row["duration_ns"] is not None and row["window"] is None:
            self.durations_ns.add(row["duration_ns"])
        if row["rss_bytes"] is not None:
            self.rss_bytes.add(row["rss_bytes"])
        if row["device_peak_bytes"] is not None:
            self.device_peak_bytes = max(row["device_peak_bytes"], self.device_peak_bytes or 0)

    def take_fact(self, row: Mapping[str, Any]) -> None:
        """Add a row of the manifest."""
        kind = row.get("kind")
        if kind == "run":
            self.facts = row
        elif kind == "training":
            self.training = row
        elif kind == "end":
            self.end = row
        elif kind == "error" and len(self.errors) < SHOWN_ERRORS:
            self.errors.append(f"{text(row, 'collector') or '?'}: {text(row, 'message') or 'no message'}")
        elif kind == "window" and (index := whole(row, "window")) is not None:
            closed = row.get("event") == "close"
            steps = whole_numbers(row, "steps" if closed else "active_steps")
            self.windows[index] = RecordedWindow(index, steps, closed)


class Follower:
    """A run directory that is looked at again and again; each look reads what is new.

    Args:
        directory: the run directory.

    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ranks: dict[int, RankSoFar] = {}
        self.found = 0
        """How many ranks have a manifest; of thousands only the first are followed."""
        self._tails: dict[int, tuple[Tail, Tail]] = {}

    def look(self) -> None:
        """Read what was appended since the last look."""
        self._find_ranks()
        for rank, (manifest, pulse) in self._tails.items():
            so_far = self.ranks[rank]
            for row in _rows(manifest.lines()):
                so_far.take_fact(row)
            for step in _steps(pulse.lines()):
                so_far.take_step(step)

    @property
    def lead(self) -> RankSoFar:
        """The lowest rank that has made a step.

        Raises:
            ValueError: there is no rank.

        """
        ranks = sorted(self.ranks.values(), key=lambda rank: (not rank.steps, rank.rank))
        if not ranks:
            raise ValueError(f"{self.directory}: no rank")
        return ranks[0]

    @property
    def has_ended(self) -> bool:
        """Whether every rank that is followed has written its end."""
        return bool(self.ranks) and all(rank.end is not None for rank in self.ranks.values())

    @property
    def world_size(self) -> int:
        """How many ranks the run says that it has."""
        return max((whole(rank.facts, "world_size") or 1 for rank in self.ranks.values()), default=1)

    def _find_ranks(self) -> None:
        # A rank may come late, on another node; once they are all there, the listing is spared.
        if self.found and self.found >= self.world_size:
            return
        try:
            names = [entry.name for entry in os.scandir(self.directory)]
        except OSError:
            return
        ranks = sorted(rank for name in names if (rank := parse_manifest_name(name)) is not None)
        self.found = len(ranks)
        for rank in in_full(ranks):
            if rank not in self.ranks:
                self.ranks[rank] = RankSoFar(rank)
                places = (self.directory / manifest_name(rank), self.directory / pulse_name(rank))
                self._tails[rank] = (Tail(places[0]), Tail(places[1]))


def progress_of(rank: RankSoFar) -> int | None:
    """Return how many steps (batches) the training will have in all; None where it does not say."""
    batches, epochs = whole(rank.training, "num_batches"), whole(rank.training, "max_epochs")
    most, accumulated = whole(rank.training, "max_steps"), whole(rank.training, "accumulate_grad_batches") or 1
    known = []
    if batches is not None and epochs is not None and epochs > 0:
        known.append(batches * epochs)
    if most is not None and most > 0:
        known.append(most * accumulated)
    return min(known, default=None)


def _rows(lines: list[bytes]) -> Iterator[Mapping[str, Any]]:
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def _steps(lines: list[bytes]) -> Iterator[PulseRow]:
    for line in lines:
        try:
            yield parse_pulse_row(line.decode("ascii"))
        except ValueError:  # the header, or damage
            continue
