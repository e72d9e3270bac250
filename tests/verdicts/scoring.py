"""How a page is scored against the fault that a training has. Reads neither the training nor the rules."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
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


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a fair page says about a training with one fault. All patterns ignore case.

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


@dataclass(frozen=True)
class Page:
    """The first line, the first next step, and the sentences of all findings that report a problem, with theirs."""

    sentence: str
    next_step: str
    findings: tuple[str, ...]
    next_steps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Score:
    """0 to 2 points for the cause and for the next step."""

    cause: int
    fix: int


def page_of(shown: Mapping[str, Any]) -> Page:
    """Read the JSON object of ``lightning-memprof show RUN --format json``."""
    verdict = shown["verdict"]
    rows = [row for row in shown["findings"] if row["severity"] != "none"]
    return Page(
        verdict["sentence"],
        verdict["next"] or "",
        tuple(row["sentence"] for row in rows),
        tuple(row["next_steps"][0] for row in rows),
    )


def score(expected: Expected, page: Page) -> Score:
    lines = [(page.sentence, page.next_step)]
    if expected.is_note:
        lines = [*zip(page.findings, page.next_steps, strict=True)] or lines
    scores = [
        Score(points(line, expected.cause, expected.near), points(step, expected.fix, expected.near_fix))
        for line, step in lines
    ]
    return max(scores, key=lambda found: (found.cause, found.fix))


def points(text: str, full: Iterable[str], partial: Iterable[str]) -> int:
    if matches(text, full):
        return FULL
    return PARTIAL if matches(text, partial) else 0


def accusations(expected: Expected, page: Page) -> list[str]:
    """Give the findings of a healthy twin that claim the fault it does not have."""
    patterns = expected.accuse or expected.cause + expected.near
    return [sentence for sentence in page.findings if matches(sentence, patterns)]


def is_healthy(sentence: str) -> bool:
    """Tell whether a first line finds no fault: the time is spent in the model's computation."""
    return matches(sentence, (r"^compute-bound", r"^no bottleneck"))


def matches(text: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns)


def share(scores: Iterable[int]) -> float:
    """Give the share of the reachable points, 0 without any score."""
    found = list(scores)
    return sum(found) / (FULL * len(found)) if found else 0.0


def squeezed(text: str) -> str:
    """Give the text without white space: a page wraps its lines."""
    return "".join(text.split())


def expected_of(folder: str) -> Sequence[Expected]:
    """Give the table of a folder, from its ``expected.py``, each training with its script."""
    spec = importlib.util.spec_from_file_location(f"expected_{folder}", HERE / folder / "expected.py")
    if spec is None or spec.loader is None:
        raise ImportError(folder)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    scripts = {
        name: path.name
        for path in (HERE / folder).glob("*.py")
        for name in TRAINING.findall(path.read_text(encoding="utf-8"))
    }
    return [replace(expected, script=scripts[expected.name]) for expected in module.EXPECTED]
