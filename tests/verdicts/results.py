"""What the pages of trainings say, their scores, and the page of all scores."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from scoring import CAUSE_AIM, NEXT_AIM, SETS, share

from measured import table


@dataclass(kw_only=True)
class Result:
    """What one training's page says. Points are -1 where they do not apply; ``rule`` and ``remedies`` are ids.

    ``loaded``: a busy process was run beside it; ``load``: runnable processes of the machine at the training's end, the
    mean over a minute; ``read_s``: CPU time of the page.
    """

    name: str
    domain: str
    healthy: bool
    repeat: int
    seconds: float = 0.0
    sentence: str = ""
    next_step: str = ""
    rule: str = ""
    remedies: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    cause: int = -1
    fix: int = -1
    accused: list[str] = field(default_factory=list)
    error: str = ""
    set: str = SETS[0]
    loaded: bool = False
    load: float | None = None
    read_s: float = 0.0


@dataclass(frozen=True)
class Totals:
    """The score of results: shares of the points, and counts."""

    faults: int
    cause: float
    fix: float
    twins: int
    accused: int
    errors: int

    @property
    def are_met(self) -> bool:
        are_named = not self.faults or (self.cause >= CAUSE_AIM and self.fix >= NEXT_AIM)
        return are_named and not self.accused and not self.errors


def totals(results: Sequence[Result]) -> Totals:
    done = [result for result in results if not result.error]
    faults = [result for result in done if not result.healthy]
    return Totals(
        faults=len(faults),
        cause=share(result.cause for result in faults),
        fix=share(result.fix for result in faults),
        twins=len(done) - len(faults),
        accused=sum(bool(result.accused) for result in results),
        errors=len(results) - len(done),
    )


def page(results: Sequence[Result]) -> str:
    """Return the scores in Markdown: a row per set of trainings and load, and a row per training.

    Trainings of the holdout have no rows: who writes rules reads this page.
    """
    groups: dict[tuple[str, str], list[Result]] = {}
    trainings: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        load = "another busy process" if result.loaded else "whatever else runs"
        groups.setdefault((result.set, load), []).append(result)
        if result.set == SETS[0]:
            trainings.setdefault((result.domain, result.name), []).append(result)
    scores = [(*group, *score_cells(alike)) for group, alike in groups.items()]
    rows = [training_cells(domain, name, alike) for (domain, name), alike in trainings.items()]
    aims = f"Aims: cause {CAUSE_AIM:.0%}, next step {NEXT_AIM:.0%}, no accused twin."
    headings = ("set", "beside it", "load average", "faults", "cause", "next step", "twins", "accused", "failed")
    columns = ("domain", "training", "runs", "cause", "next step", "accused", "first line with the fault")
    return f"{aims}\n\n{table(headings, scores)}\n\n{table(columns, rows)}"


def score_cells(results: Sequence[Result]) -> tuple[object, ...]:
    found, loads = totals(results), [result.load for result in results if result.load is not None]
    load = f"{statistics.median(loads):.1f} (max {max(loads):.1f})" if loads else "unknown"
    return (load, found.faults, f"{found.cause:.0%}", f"{found.fix:.0%}", found.twins, found.accused, found.errors)


def training_cells(domain: str, name: str, results: Sequence[Result]) -> tuple[object, ...]:
    found = totals(results)
    sentence = next((result.sentence for result in results if not result.healthy and result.sentence), "")
    return (domain, name, found.faults, f"{found.cause:.0%}", f"{found.fix:.0%}", found.accused, sentence)
