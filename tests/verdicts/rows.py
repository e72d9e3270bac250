"""Write the rows of known faults, in ids, from what patterns say of their recordings.

    python tests/verdicts/rows.py --recordings DIR --patterns FILE [--write]

``FILE`` is an ``expected.py`` with patterns, as blind sets have it. Where the patterns give a recording full points,
the row gets the rule of the finding as its cause and the id of its first remedy as its fix; half points fill the
columns of half points. What a row has already stays. Prints the rows that score otherwise than the patterns, those
without a fix, and both totals; ``--write`` changes ``faults/expected.csv``. Which owner a page must name, and what
accuses a twin, is added by hand.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

sys.path.append(str(Path(__file__).resolve().parent))

from page_commands import shown
from scoring import FULL, HERE, PARTIAL, UNSCORED, Expected, Found, Known, Page, page_of, patterns_in, score, share
from trainings import RAN

TABLE: Final = HERE / "faults" / "expected.csv"
COLUMNS: Final = ("training", "cause", "near", "fix", "near_fix", "accuse", "is_note")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=Path, required=True, metavar="DIR")
    parser.add_argument("--patterns", type=Path, required=True, metavar="FILE")
    parser.add_argument("--table", type=Path, default=TABLE, metavar="FILE", help=f"default: {TABLE}")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(argv)
    patterns = {expected.name: expected for expected in patterns_in(options.patterns)}
    places = {name: options.recordings / f"{name}-fault-0" for name in patterns}
    runs = {name: next(place.rglob("memprofiler")) for name, place in places.items() if (place / RAN).is_file()}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        pages = dict(zip(runs, map(page_of, pool.map(shown, runs.values())), strict=True))
    rows = {row["training"]: row for row in read(options.table)}
    for name, page in pages.items():
        row = rows.setdefault(name, {**dict.fromkeys(COLUMNS, ""), "training": name})
        rows[name] = filled(row, patterns[name], page)
    report([(patterns[name], Known.parsed(rows[name]), page) for name, page in pages.items()])
    if options.write:
        with options.table.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows.values())
    return 0


def read(table: Path) -> list[dict[str, str]]:
    if not table.is_file():
        return []
    with table.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def filled(row: dict[str, str], expected: Expected, page: Page) -> dict[str, str]:
    """Return a row with the ids of the finding that the patterns score best, in the columns that are empty."""
    found = best(expected, page)
    by_points = {FULL: ("cause", "fix"), PARTIAL: ("near", "near_fix")}
    new = {"is_note": "yes" if expected.is_note else ""}
    for points, (cause, fix) in by_points.items():
        if expected.cause_points(found) == points:
            new[cause] = found.rule
        if expected.fix_points(found) == points and found.remedies:
            new[fix] = found.remedies[0]
    kept = {column for column, value in row.items() if value} | ({"near"} if row["cause"] else set())
    return {**row, **{column: value for column, value in new.items() if column not in kept}}


def best(expected: Expected, page: Page) -> Found:
    """Return the finding that the patterns score best, whether or not it is the first line."""
    rows = page.problems or (page.verdict,)
    return max(rows, key=lambda found: (expected.cause_points(found), expected.fix_points(found)))


def report(scored: Sequence[tuple[Expected, Known, Page]]) -> None:
    """Print the rows whose points differ from those of the patterns, or which have no fix, and the totals."""
    points = [(known, score(expected, page), score(known, page), page) for expected, known, page in scored]
    for known, old, new, page in points:
        if old.cause != new.cause or new.fix not in {old.fix, UNSCORED}:
            print(f"{known.name}: {old} by patterns, {new} by ids: {page.verdict.rule}: {page.verdict.sentence}")
    print("no fix: " + " ".join(known.name for known, *_ in points if not known.fix))
    for name, index in (("patterns", 1), ("ids", 2)):
        cause, fix = (share(getattr(row[index], part) for row in points) for part in ("cause", "fix"))
        print(f"{len(points)} faults by {name}: cause {cause:.1%}, next step {fix:.1%}")


if __name__ == "__main__":
    raise SystemExit(main())
