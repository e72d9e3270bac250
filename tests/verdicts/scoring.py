"""How a page is scored against the fault that a training has. Reads neither the training nor the rules."""

from __future__ import annotations

import csv
import importlib.util
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
# Of trainings for a CPU; those of the folder `gpu` need an accelerator.
SETS: Final = ("faults", "holdout")
ON_GPU: Final = "gpu"
CAUSE_AIM: Final = 0.90
NEXT_AIM: Final = 0.85
TRAINING: Final = re.compile(r"^def (\w+)\(fault: bool\)", re.MULTILINE)
FULL: Final = 2
PARTIAL: Final = 1
# Instead of points: the fix of a row has no id yet.
UNSCORED: Final = -1
ANY_RULE: Final = "*"
NOTHING_FOUND: Final = "nothing_found"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A finding as it is scored.

    Attributes:
        rule: its id.
        sentence: its first line.
        why: the evidence, with the owners that the first line leaves out.
        next_step: the first one.
        remedies: their ids, that of the first next step first.
        severity: ``none`` if it reports no problem.
        share: of the step, or of the peak, that the next step recovers at most; 0 where nobody can tell.

    """

    rule: str
    sentence: str
    why: str = ""
    next_step: str = ""
    remedies: tuple[str, ...] = ()
    severity: str = "info"
    share: float = 0.0


@dataclass(frozen=True)
class Page:
    """The findings of a page; the first one is the verdict."""

    findings: tuple[Found, ...]

    @property
    def verdict(self) -> Found:
        return self.findings[0]

    @property
    def problems(self) -> tuple[Found, ...]:
        return tuple(found for found in self.findings if found.severity != "none")

    def without(self, rules: Collection[str], expected: Expected | Known) -> Page:
        """Give the page without the findings of some rules, but for those that name the fault."""
        kept = [row for row in self.findings if row.rule not in rules or expected.cause_points(row) == FULL]
        return Page(tuple(kept or self.findings))


@dataclass(frozen=True)
class Score:
    """0 to 2 points for the cause and for the next step, -1 if it is not scored."""

    cause: int
    fix: int


@dataclass(frozen=True)
class Claim:
    """A finding that names a fault, in a table: ``rule``, ``rule:owner|owner`` or ``*:owner``, and ``>20`` in percent.

    An owner is a word of the first line or of the evidence: a module, hook, callback, data set, loader or function.
    """

    rule: str
    owners: tuple[str, ...] = ()
    above: float = 0.0

    @classmethod
    def parsed(cls, text: str) -> Claim:
        text, _, above = text.partition(">")
        rule, _, owners = text.partition(":")
        return cls(rule, tuple(owners.split("|")) if owners else (), float(above or 0) / 100)

    def is_made(self, found: Found) -> bool:
        return self.has_rule(found) and found.share >= self.above and self.has_owner(found)

    def has_rule(self, found: Found) -> bool:
        return self.rule in {ANY_RULE, found.rule}

    def has_owner(self, found: Found) -> bool:
        text = f"{found.sentence} {found.why}"
        return not self.owners or matches(text, (rf"(?<![^\W_]){re.escape(owner)}" for owner in self.owners))


@dataclass(frozen=True, kw_only=True)
class Known:
    """What a fair page says about a training with one fault, in ids.

    Attributes:
        name: the training in its script.
        cause: claims of which one must be the verdict: 2 points; the same rule with another owner: 1 point.
        near: claims of the cause's surroundings: 1 point.
        fix: ids of remedies of which one must be the first next step: 2 points; not scored while it is empty.
        near_fix: ids of remedies that lead to the fix or remove part of the cost: 1 point.
        accuse: claims that no finding of the healthy twin may make; default: ``cause``; ``-`` is no rule.
        is_note: whether the page names it among its findings, not in the first line: memory that fits costs nothing.
        script: the file name of the script that has a function of this name; its stem is the domain.

    """

    name: str
    cause: tuple[Claim, ...]
    near: tuple[Claim, ...] = ()
    fix: tuple[str, ...] = ()
    near_fix: tuple[str, ...] = ()
    accuse: tuple[Claim, ...] = ()
    is_note: bool = False
    script: str = ""

    @property
    def domain(self) -> str:
        return self.script.removesuffix(".py")

    @classmethod
    def parsed(cls, row: Mapping[str, str]) -> Known:
        """Read a row of a table; lists are separated by spaces."""
        cause, near, accuse = (tuple(map(Claim.parsed, row[key].split())) for key in ("cause", "near", "accuse"))
        return cls(
            name=row["training"],
            cause=cause,
            near=near,
            accuse=accuse,
            fix=tuple(row["fix"].split()),
            near_fix=tuple(row["near_fix"].split()),
            is_note=bool(row["is_note"]),
        )

    def cause_points(self, found: Found) -> int:
        if any(claim.is_made(found) for claim in self.cause):
            return FULL
        is_near = any(claim.rule == found.rule for claim in self.cause) or any(
            claim.is_made(found) for claim in self.near
        )
        return PARTIAL if is_near else 0

    def fix_points(self, found: Found) -> int:
        if not self.fix:
            return UNSCORED
        first = found.remedies[:1]
        return FULL if set(first) & set(self.fix) else PARTIAL if set(first) & set(self.near_fix) else 0

    def accuses(self, found: Found) -> bool:
        return any(claim.is_made(found) for claim in self.accuse or self.cause)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a fair page says about a training that nobody has seen, in patterns. All of them ignore case.

    Attributes:
        name: the training in its script.
        cause: patterns of which one must be in the first line: the cause, 2 points.
        fix: patterns of which one must be in the first next step: 2 points.
        script: the file name of the script that has a function of this name; its stem is the domain.
        near: patterns that name only the cause's surroundings: 1 point.
        near_fix: patterns of a step that leads to the fix or removes part of the cost: 1 point.
        accuse: patterns that no finding of the healthy twin may match; default: ``cause`` and ``near``.
        is_note: whether the page names it among its findings, not in the first line: memory that fits costs nothing.

    """

    name: str
    cause: tuple[str, ...]
    fix: tuple[str, ...]
    script: str = ""
    near: tuple[str, ...] = ()
    near_fix: tuple[str, ...] = ()
    accuse: tuple[str, ...] = ()
    is_note: bool = False

    @property
    def domain(self) -> str:
        return self.script.removesuffix(".py")

    def cause_points(self, found: Found) -> int:
        return points(found.sentence, self.cause, self.near)

    def fix_points(self, found: Found) -> int:
        return points(found.next_step, self.fix, self.near_fix)

    def accuses(self, found: Found) -> bool:
        return matches(found.sentence, self.accuse or self.cause + self.near)


def found_of(row: Mapping[str, Any]) -> Found:
    """Read a finding of the JSON object of ``lightning-memprof show``."""
    recovers = row["recovers"]
    return Found(
        rule=row["rule"],
        sentence=row["title"],
        why=row["why"],
        next_step=next((remedy["text"] for remedy in row["remedies"]), ""),
        remedies=tuple(remedy["id"] for remedy in row["remedies"]),
        severity=row["severity"],
        share=recovers["max"] / recovers["whole"] if recovers and recovers["whole"] else 0.0,
    )


def page_of(shown: Mapping[str, Any]) -> Page:
    """Read the JSON object of ``lightning-memprof show RUN --format json``."""
    return Page(tuple(map(found_of, shown["findings"])))


def score(expected: Expected | Known, page: Page) -> Score:
    """Give the points of the verdict; those of the best finding where a note is enough."""
    rows = (expected.is_note and page.problems) or (page.verdict,)
    scores = [Score(expected.cause_points(found), expected.fix_points(found)) for found in rows]
    return max(scores, key=lambda found: (found.cause, found.fix))


def points(text: str, full: Iterable[str], partial: Iterable[str]) -> int:
    if matches(text, full):
        return FULL
    return PARTIAL if matches(text, partial) else 0


def accusations(expected: Expected | Known, page: Page) -> list[str]:
    """Give the findings of a healthy twin that claim the fault it does not have."""
    return [found.sentence for found in page.problems if expected.accuses(found)]


def matches(text: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns)


def share(scores: Iterable[int]) -> float:
    """Give the share of the reachable points, 0 without any score."""
    found = [value for value in scores if value != UNSCORED]
    return sum(found) / (FULL * len(found)) if found else 0.0


def squeezed(text: str) -> str:
    """Give the text without white space: a page wraps its lines."""
    return "".join(text.split())


def expected_of(folder: str) -> Sequence[Expected | Known]:
    """Give the table of a folder, ``expected.csv`` or patterns in ``expected.py``, each training with its script."""
    scripts = {
        name: path.name
        for path in (HERE / folder).glob("*.py")
        for name in TRAINING.findall(path.read_text(encoding="utf-8"))
    }
    table = HERE / folder / "expected.csv"
    rows = known_in(table) if table.is_file() else patterns_in(table.with_suffix(".py"))
    return [replace(expected, script=scripts[expected.name]) for expected in rows]


def known_in(table: Path) -> list[Known]:
    with table.open(encoding="utf-8", newline="") as file:
        return [Known.parsed(row) for row in csv.DictReader(file)]


def patterns_in(file: Path) -> list[Expected]:
    spec = importlib.util.spec_from_file_location(f"expected_{file.parent.name}", file)
    if spec is None or spec.loader is None:
        raise ImportError(file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.EXPECTED)
