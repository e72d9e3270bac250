"""Compare what findings promise with what their remedies gain: recordings of faults, and of twins that have the remedy.

    python tests/verdicts/promises.py DIR [--only TEXT ...] [--write]

DIR has the recordings that ``run.py --recordings DIR`` keeps. The first finding that names the fault promises shares of
the mean step, or of the peak; the gain is the difference between both recordings, their waits for a core left out. A
promise is kept if the gain is within 30 % of its range. ``--write`` writes ``docs/measured/promises.md``. The exit code
is 1 if fewer than three of four promises of a remedy are kept.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from page_commands import shown
from scoring import FULL, PARTIAL, SETS, Expected, Known, expected_of, found_of
from trainings import Case, is_recorded, path_of

from measured import table, write_fragment

TOLERANCE: Final = 0.3
LEAST_KEPT: Final = 0.75
NOT_COMPARED: Final = frozenset({"core_wait", "worker_memory"})
# Its threads wait for cores because they are too many.
OWN_WAITS: Final = "thread_oversubscription"


@dataclass(frozen=True)
class Promise:
    """The nanoseconds of a step, or the bytes of the peak, that a finding says its first remedy recovers."""

    rule: str
    remedy: str
    unit: str
    least: float
    most: float


@dataclass(frozen=True)
class Comparison:
    """A promise, and the mean step in ns, or the peak in bytes, before and after the remedy; all shares are of it."""

    name: str
    promise: Promise
    before: float
    after: float

    @property
    def least(self) -> float:
        return self.promise.least / self.before

    @property
    def most(self) -> float:
        return self.promise.most / self.before

    @property
    def gain(self) -> float:
        return 1 - self.after / self.before

    @property
    def is_kept(self) -> bool:
        return is_within(self.gain, self.least, self.most)


def is_within(gain: float, least: float, most: float) -> bool:
    """Tell whether a gain is within 30 % of a range.

    >>> is_within(0.95, 0.7, 0.8), is_within(1.1, 0.7, 0.8), is_within(0.5, 0.7, 0.8), is_within(0.48, 0.7, 0.8)
    (True, False, True, False)
    """
    return least * (1 - TOLERANCE) <= gain <= most * (1 + TOLERANCE)


def main() -> int:
    options = parse()
    cases = [
        row
        for row in expected_of(SETS[0])
        if not options.only or any(text in row.name for text in options.only)
        if all(is_recorded(Case(row, SETS[0], healthy, 0), options.recordings) for healthy in (False, True))
    ]
    with ProcessPoolExecutor(os.cpu_count() or 1) as pool:
        found = [row for row in pool.map(partial(compared, options.recordings), cases) if row is not None]
    text = page(found, len(cases))
    print(text)
    if options.write:
        print(f"Wrote {write_fragment('promises', 'python tests/verdicts/promises.py DIR', text)}")
    return 0 if all(are_kept(rows) for rows in by_remedy(found).values()) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path, metavar="DIR")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="trainings whose name contains a text")
    parser.add_argument("--write", action="store_true", help="write docs/measured/promises.md")
    return parser.parse_args()


def compared(recordings: Path, fault: Expected | Known) -> Comparison | None:
    """Give the promise of a recorded fault and the gain of its twin, None without a promise."""
    before, after = (
        shown(next(path_of(Case(fault, SETS[0], healthy, 0), recordings).rglob("memprofiler")))
        for healthy in (False, True)
    )
    promise = promised(before, fault)
    if promise is None:
        return None
    if promise.unit == "ns":
        # A larger batch makes a step longer.
        sizes = [step_ns(before, promise.rule), step_ns(after, promise.rule) * samples_of(before) / samples_of(after)]
    else:
        sizes = [peak_bytes(before), peak_bytes(after)]
    return Comparison(fault.name, promise, *sizes) if all(sizes) else None


def step_ns(page: Mapping[str, Any], rule: str) -> float:
    """Give the mean step without the wait for a core, where the load of the machine decides it."""
    ledger = page["ledger"] or {}
    waits = 0 if rule == OWN_WAITS else ledger.get("parts_ns", {}).get("core_wait", 0)
    return float(ledger.get("step_ns", 0) - waits)


def samples_of(page: Mapping[str, Any]) -> float:
    """Give the samples of a step, 1 where they are unknown."""
    return next((float(rate["samples"]) for rate in page["throughput"] or () if rate["samples"]), 1.0)


def peak_bytes(page: Mapping[str, Any]) -> float:
    """Give the peak of the device, without one that of the process, of the rank with the highest."""
    places = [rank["device"] or rank["host"] or {} for rank in page["ranks"]]
    return float(max((place.get("peak_bytes") or place.get("peak_rss_bytes") or 0 for place in places), default=0))


def promised(page: Mapping[str, Any], fault: Expected | Known) -> Promise | None:
    """Give what the first finding that names the fault, or its surroundings, says that it recovers.

    What other processes take of the machine, no remedy of the training recovers, and the memory of workers is no part
    of a peak.
    """
    for points in (FULL, PARTIAL):
        for row in page["findings"]:
            worth = row["recovers"]
            if worth is not None and row["rule"] not in NOT_COMPARED and fault.cause_points(found_of(row)) == points:
                return Promise(row["rule"], row["remedies"][0]["id"], worth["unit"], worth["min"], worth["max"])
    return None


def by_remedy(found: Iterable[Comparison]) -> dict[tuple[str, str], list[Comparison]]:
    """Give the comparisons by rule and remedy, those with most programs first."""
    groups: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for row in found:
        groups[row.promise.rule, row.promise.remedy].append(row)
    return dict(sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])))


def are_kept(rows: Sequence[Comparison]) -> bool:
    """Tell whether three of four promises of a remedy are kept; of fewer programs, nobody can tell."""
    return len(rows) < 4 or sum(row.is_kept for row in rows) >= LEAST_KEPT * len(rows)


def page(found: Sequence[Comparison], programs: int) -> str:
    """Give the promises and gains in Markdown: a row per remedy, and a row per training."""
    kept = sum(row.is_kept for row in found)
    heading = f"{kept} of {len(found)} promises kept, of {programs} trainings; the others promise nothing."
    remedies = [
        (f"`{rule}`", f"`{remedy}`", len(rows), sum(row.is_kept for row in rows), *medians(rows))
        for (rule, remedy), rows in by_remedy(found).items()
    ]
    trainings = [
        (row.name, f"`{row.promise.rule}`", f"`{row.promise.remedy}`", *medians([row]), "" if row.is_kept else "broken")
        for row in found
    ]
    of_remedy = ("rule", "remedy", "trainings", "kept", "promised", "gained")
    of_training = ("training", "rule", "remedy", "promised", "gained", "")
    return f"{heading}\n\n{table(of_remedy, remedies)}\n\n{table(of_training, trainings)}"


def medians(rows: Sequence[Comparison]) -> tuple[str, str]:
    """Give the shares that remedies promise and gain."""
    least, most, gain = (statistics.median(getattr(row, key) for row in rows) for key in ("least", "most", "gain"))
    return f"{least:.0%} to {most:.0%} of the {'step' if rows[0].promise.unit == 'ns' else 'peak'}", f"{gain:.0%}"


if __name__ == "__main__":
    raise SystemExit(main())
