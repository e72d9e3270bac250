"""A run in progress: the rows that its files gained since the last look."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from lightning_memprof.artifacts.files import open_plain
from lightning_memprof.artifacts.manifest import EndRow, ErrorRow, RunFacts, TrainingFacts, WindowRow, decode_fact
from lightning_memprof.artifacts.naming import (
    hangs_name,
    heartbeat_name,
    manifest_name,
    pulse_name,
)
from lightning_memprof.artifacts.pulse import parse_pulse_row
from lightning_memprof.artifacts.rows import Row, decode_rows
from lightning_memprof.artifacts.series import HangRow, PulseRow
from lightning_memprof.read.run.load import in_full
from lightning_memprof.read.run.locate import ranks_in

T = TypeVar("T")

# The current step time; more steps would include old ones.
RECENT_STEPS: Final = 100
# Limit of the values in a curve of the whole run.
MOST_POINTS: Final = 512
# Limit of one look at a file; the next look reads the rest.
MOST_BYTES: Final = 32 << 20
SHOWN_ERRORS: Final = 3


class Tail:
    """The lines that were appended to a file since the last look; a partial last line waits for its end.

    Args:
        path: the file; it may not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._partial = b""

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
        *lines, self._partial = (self._partial + data).split(b"\n")
        return lines


class Curve(msgspec.Struct):
    """The largest value of each stretch of a run; the stretches are equal and grow with the run."""

    values: list[int] = msgspec.field(default_factory=list)
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


class RankProgress(msgspec.Struct):
    """One rank so far. ``facts``, ``training`` and ``end`` are rows of its manifest, None before they are written.

    ``recent`` are the last of its ``counted`` steps; ``durations_ns`` and ``rss_bytes`` cover the whole run, and
    ``device_peak_bytes`` is the peak of the device's memory. ``windows`` has the last row of each window. ``beat`` is
    its place some seconds ago, ``reports`` the number of its rows about steps that do not end.
    """

    rank: int
    facts: RunFacts | None = None
    training: TrainingFacts | None = None
    end: EndRow | None = None
    counted: int = 0
    recent: deque[PulseRow] = msgspec.field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    durations_ns: Curve = msgspec.field(default_factory=Curve)
    rss_bytes: Curve = msgspec.field(default_factory=Curve)
    device_peak_bytes: int | None = None
    windows: dict[int, WindowRow] = msgspec.field(default_factory=dict)
    errors: list[str] = msgspec.field(default_factory=list)
    beat: HangRow | None = None
    reports: int = 0

    @property
    def steps(self) -> int:
        """The number of steps: those of the pulse, or of the ``end`` row where the pulse is off."""
        return max(self.counted, (self.end.steps if self.end else None) or 0)

    @property
    def last_ns(self) -> int | None:
        """Unix time of the end of the last step that was written."""
        if not self.recent:
            return None
        start, duration = self.recent[-1]["start_ns"], self.recent[-1]["duration_ns"]
        return None if start is None else start + (duration or 0)

    def usual(self) -> list[PulseRow]:
        """Return the recent steps outside windows, or all of them where there are no others."""
        return [row for row in self.recent if row["window"] is None] or list(self.recent)

    def take_step(self, row: PulseRow) -> None:
        """Add a row of the pulse."""
        self.counted += 1
        self.recent.append(row)
        # The cost of a window would hide the steps themselves.
        if row["duration_ns"] is not None and row["window"] is None:
            self.durations_ns.add(row["duration_ns"])
        if row["rss_bytes"] is not None:
            self.rss_bytes.add(row["rss_bytes"])
        if row["device_peak_bytes"] is not None:
            self.device_peak_bytes = max(row["device_peak_bytes"], self.device_peak_bytes or 0)

    def take_fact(self, row: Row) -> None:
        """Add a row of the manifest."""
        match row:
            case RunFacts():
                self.facts = row
            case TrainingFacts():
                self.training = row
            case EndRow():
                self.end = row
            case ErrorRow() if len(self.errors) < SHOWN_ERRORS:
                self.errors.append(f"{row.collector}: {row.message}")
            case WindowRow(window=int() as index):
                self.windows[index] = row


class Follower:
    """A run directory that is read repeatedly; each look reads only new rows.

    Args:
        directory: the run directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ranks: dict[int, RankProgress] = {}
        self.found = 0
        """The number of ranks with a manifest; of thousands only the first are followed."""
        self._tails: dict[int, tuple[Tail, Tail, Tail]] = {}

    def look(self) -> None:
        """Read the rows that were appended since the last look."""
        self._find_ranks()
        for rank, (manifest, pulse, hangs) in self._tails.items():
            so_far = self.ranks[rank]
            for row in _readable(manifest.lines(), decode_fact):
                if row is not None:
                    so_far.take_fact(row)
            for step in _readable(pulse.lines(), lambda line: parse_pulse_row(line.decode("ascii"))):
                so_far.take_step(step)
            so_far.reports += len(hangs.lines())
            with suppress(OSError):
                beats, _ = decode_rows((self.directory / heartbeat_name(rank)).read_bytes(), HangRow)
                so_far.beat = beats[0] if beats else None

    @property
    def lead(self) -> RankProgress:
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
        """Whether every followed rank has written its end."""
        return bool(self.ranks) and all(rank.end is not None for rank in self.ranks.values())

    @property
    def world_size(self) -> int:
        """The number of ranks according to the run."""
        return max((rank.facts.world_size or 1 for rank in self.ranks.values() if rank.facts), default=1)

    def _find_ranks(self) -> None:
        # A rank on another node may start late; with all ranks found, no listing is needed.
        if self.found and self.found >= self.world_size:
            return
        ranks = ranks_in(self.directory)
        self.found = len(ranks)
        for rank in in_full(ranks):
            if rank not in self.ranks:
                self.ranks[rank] = RankProgress(rank)
                manifest, pulse, hangs = (
                    Tail(self.directory / name(rank)) for name in (manifest_name, pulse_name, hangs_name)
                )
                self._tails[rank] = (manifest, pulse, hangs)


def total_steps(rank: RankProgress) -> int | None:
    """Return the total number of steps (batches) of the training; None where its settings do not limit it."""
    training = rank.training
    if training is None:
        return None
    known = []
    if training.num_batches is not None and training.max_epochs is not None and training.max_epochs > 0:
        known.append(training.num_batches * training.max_epochs)
    if training.max_steps is not None and training.max_steps > 0:
        known.append(training.max_steps * (training.accumulate_grad_batches or 1))
    return min(known, default=None)


def _readable(lines: list[bytes], parse: Callable[[bytes], T]) -> Iterator[T]:
    for line in lines:
        with suppress(ValueError):  # damage, or the header of a pulse
            yield parse(line)
