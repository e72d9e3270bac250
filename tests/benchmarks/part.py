"""What the parts of ``make bench`` share: their command as it is typed, verdicts, and figures with units."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from measured import table

if TYPE_CHECKING:
    from collections.abc import Sequence

MB: Final = 1_000_000
WORDS: Final = {True: "met", False: "**missed**", None: "not judged"}


@dataclass(frozen=True)
class Target:
    """A target, what was measured, and whether it is met; None where that is not what the target speaks of."""

    target: str
    measured: str
    met: bool | None


def targets(found: Sequence[Target]) -> str:
    """Give targets as a table."""
    return table(["target", "measured", ""], [[each.target, each.measured, WORDS[each.met]] for each in found])


def typed() -> str:
    """Give this process's command as it is typed in the repository's root; of a path, its last part."""
    program = f"python tests/benchmarks/{Path(sys.argv[0]).name}"
    return " ".join([program, *(Path(word).name if "/" in word else word for word in sys.argv[1:])])


def progress() -> Progress:
    """Give a bar that is drawn when something was done: drawing by a thread would take time from what is measured."""
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), auto_refresh=False)


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Give the median and half of the range."""
    if len(values) < 2:
        return format(median(values), form)
    return f"{median(values):{form}} ± {(max(values) - min(values)) / 2:{form}}"
