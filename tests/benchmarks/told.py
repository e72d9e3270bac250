"""The figures of fits as Markdown: a table for each workload, the targets, and what could not be measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from aims import Apart
from configurations import Configuration
from figures import Row, is_lost, noise
from part import Target, spread, targets

from measured import table

MIB = 2**20
SHOWN = "default"
HEADINGS = (
    "", "waiting", "active", "after", "whole fit", "window start, ms", "window end, ms", "of it `stop_trace`",
    "fit end, ms", "on disk, MiB",
)  # fmt: skip
SHORT = (
    "", "waiting", "after", "active", "window end, ms", "fit end, ms", "resident size beyond bare, MiB", "on disk, MiB",
)  # fmt: skip


@dataclass
class Told:
    """Everything of one run of the benchmark.

    Attributes:
        rows: figures by workload and configuration.
        bare_ms: CPU time of a bare step by workload, one a fit.
        rounds: by workload, how many.
        steps: of a fit.
        first_window_ms: what the first window of a process took to open.
        apart: what was measured apart.
        aims: targets.
        left_out: why something was not measured, or what a collector complained of.
        is_trial: it is too small for the targets.

    """

    steps: int
    rows: dict[str, dict[str, Row]] = field(default_factory=dict)
    bare_ms: dict[str, list[float]] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)
    first_window_ms: float = 0.0
    apart: Apart | None = None
    aims: Sequence[Target] = ()
    left_out: list[str] = field(default_factory=list)
    is_trial: bool = False


def markdown(told: Told, says: Mapping[str, str], known: Mapping[str, Configuration]) -> str:
    """Give the page's part; ``says`` tells of each workload what it is."""
    return "\n\n".join(part for part in _parts(told, says, known) if part)


def _parts(told: Told, says: Mapping[str, str], known: Mapping[str, Configuration]) -> Iterator[str]:
    yield from _in_short(told, says)
    yield "### Targets of fits"
    yield targets(told.aims)
    for workload, rows in told.rows.items():
        bare = told.bare_ms[workload]
        count = told.rounds[workload]
        null = noise(rows)
        yield f"### {says[workload][0].upper()}{says[workload][1:]} (`{workload}`)"
        yield (
            f"{told.steps} steps, {count} round{'s' * (count != 1)}; a bare step took {median(bare):.1f} ms of CPU time"
            f" (medians of fits: {min(bare):.1f} to {max(bare):.1f}); the null pair was off by up to {null:.3f}."
        )
        yield table(HEADINGS, [_cells(name, row, known) for name, row in rows.items()])
    if told.apart is not None and told.apart.rss_bytes:
        yield "### Largest resident size (`network`)"
        yield _peaks(told.apart, known)
    if told.first_window_ms:
        yield f"The first window of a process took {told.first_window_ms:.0f} ms more to open than a later one's wait."
    yield "\n".join(f"- {line}" for line in told.left_out)


def _in_short(told: Told, says: Mapping[str, str]) -> Iterator[str]:
    """Give what most want to know: of the default configuration, a line each workload."""
    growth = None if told.apart is None else told.apart.growth(SHOWN)
    lines = [
        [
            says[workload],
            *(spread(values) if values else "" for values in (row.waiting, row.after, row.active)),
            _stall(row.closing_ms),
            spread(row.end_ms, ".0f"),
            # Measured on one workload.
            f"{growth / MIB:.0f}" if growth is not None and workload == "network" else "",
            f"{median(row.size_bytes) / MIB:.2f}",
        ]
        for workload, rows in told.rows.items()
        if (row := rows.get(SHOWN)) is not None
    ]
    if lines:
        yield f"### The defaults (`{SHOWN}`) in short"
        yield table(SHORT, lines)


def _cells(name: str, row: Row, known: Mapping[str, Configuration]) -> list[str]:
    return [
        f"`{name}`: {known[name].says}",
        *(
            _both(cpu, wall)
            for cpu, wall in (
                (row.waiting, row.waiting_wall), (row.active, row.active_wall), (row.after, row.after_wall),
                (row.fit_cpu, row.fit_wall),
            )
        ),
        spread(row.opening_ms, ".0f") if row.opening_ms else "",
        _stall(row.closing_ms),
        spread(row.stop_ms, ".0f") if row.stop_ms else "",
        spread(row.end_ms, ".0f"),
        f"{median(row.size_bytes) / MIB:.2f}",
    ]  # fmt: skip


def _stall(values: Sequence[float]) -> str:
    """Give the stall at the end of a window; a dash where it was lost in its spread."""
    if not values:
        return ""
    return "-" if is_lost(values) else spread(values, ".0f")


def _both(cpu: Sequence[float], wall: Sequence[float]) -> str:
    return f"{spread(cpu)} (wall {median(wall):.2f})" if cpu else ""


def _peaks(apart: Apart, known: Mapping[str, Configuration]) -> str:
    rows = []
    for name, sizes in apart.rss_bytes.items():
        growth = apart.growth(name)
        children = apart.children_bytes.get(name, ())
        rows.append(
            [
                f"`{name}`: {known[name].says}",
                spread([size / MIB for size in sizes], ".0f"),
                "" if growth is None else f"{growth / MIB:.0f}",
                f"{median(children) / MIB:.0f}" if children and max(children) else "",
            ]
        )
    headings = ["", "MiB", "beyond bare, MiB", "largest child process, MiB"]
    return table(headings, rows)
