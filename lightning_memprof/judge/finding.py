"""The finding that a rule returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.units import percent

# The rule of the finding that no other rule fired.
NOTHING_FOUND: Final = "nothing_found"
# A person opens a few of thousands of traces.
MAX_EVIDENCE: Final = 16
_CUT: Final = "…"
# A smaller share of the whole is not worth a figure.
LEAST_SAVED: Final = 0.01
_FIGURES: Final = frozenset({"share", "rank", "kind"})
# A shorter name tells nothing.
_LEAST_NAME: Final = 12


class Severity(IntEnum):
    """How much a finding matters; the most severe finding is the verdict."""

    NONE = 0
    INFO = 1
    WARNING = 2
    CRITICAL = 3


def severity_of(share: float) -> Severity:
    """Return the severity of a share of the step, or of the peak, 0 to 1, that a remedy would recover."""
    if share < POLICY.note:
        return Severity.NONE
    if share < POLICY.verdict:
        return Severity.INFO
    return Severity.CRITICAL if share >= POLICY.severe else Severity.WARNING


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the run or of the user, and the part of it that shows a finding.

    ``artifact`` is the path in the manifest, or the path that the user gave. ``steps`` are the first and the last step;
    ``start_ns`` and ``end_ns`` are Unix epoch times in ns. None does not narrow the file.
    """

    artifact: str
    rank: int | None = None
    window: int | None = None
    steps: tuple[int, int] | None = None
    start_ns: int | None = None
    end_ns: int | None = None


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """What a remedy would recover: nanoseconds per step or bytes of the peak, and its share of the whole, 0 to 1.

    ``min`` and ``max`` are equal where the formula gives one figure. ``of`` names the whole for people.
    """

    unit: Literal["ns", "bytes"]
    min: float
    max: float
    whole: float
    of: str = "each step"

    @property
    def text(self) -> str:
        """The range for people: ``18% to 36% of each step``, ``up to 36% of each step``; empty for less than 1%."""
        if not self.whole or self.max < LEAST_SAVED * self.whole:
            return ""
        least, most = percent(self.min / self.whole), percent(self.max / self.whole)
        if self.min < LEAST_SAVED * self.whole:
            return f"up to {most} of {self.of}"
        return f"{most} of {self.of}" if least == most else f"{least} to {most} of {self.of}"

    @property
    def share(self) -> float:
        """The middle of the range, as a share of the whole."""
        return (self.min + self.max) / 2 / self.whole if self.whole else 0.0

    @property
    def severity(self) -> Severity:
        """The severity of a fault that costs this much: by the middle of the range, a warning also by its end."""
        may_decide = bool(self.whole) and self.max >= POLICY.verdict * self.whole
        return max(severity_of(self.share), Severity.WARNING if may_decide else Severity.NONE)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The conclusion of a rule.

    ``title`` has cause, size and place, ``why`` the measured evidence, ``remedies`` what to do, the best first.
    ``numbers`` are in base units: bytes, nanoseconds, shares of 1. ``recovers`` is what the first remedy would
    recover, at most what the ledger's line holds; None where nobody can tell. ``weight`` orders findings of one
    severity: the share of the step, or of the memory, that is at stake. ``owner`` is the function whose time it is,
    empty where that is not a single one: a function's time is reported once.

    Raises:
        ValueError: the title is longer than a title may be; :func:`titled` cuts names.
    """

    rule: str
    severity: Severity
    title: str
    why: str
    remedies: tuple[Remedy, ...]
    numbers: Mapping[str, Any] = msgspec.field(default_factory=dict)
    weight: float = 0.0
    evidence: tuple[Evidence, ...] = ()
    recovers: Recovery | None = None
    owner: str = ""

    def __post_init__(self) -> None:
        if len(self.title) > POLICY.title:
            raise ValueError(f"a title has at most {POLICY.title} characters, not {len(self.title)}: {self.title!r}")

    @property
    def saves(self) -> str:
        """What the first remedy would save, for people; empty where nobody can tell."""
        return self.recovers.text if self.recovers is not None else ""

    @property
    def next_steps(self) -> tuple[str, ...]:
        """The texts of the remedies."""
        return tuple(remedy.text for remedy in self.remedies)

    @property
    def steps(self) -> tuple[dict[str, str], ...]:
        """The id and the text of each remedy, for programs."""
        return tuple(remedy.fields for remedy in self.remedies)

    @property
    def next(self) -> str:
        """The first next step."""
        return self.next_steps[0]

    def __repr__(self) -> str:
        return f"Finding({self.rule}, {self.severity.name.lower()}: {self.title!r})"


def titled(template: str, **names: object) -> str:
    """Return a title: the names in it are cut where it would be longer than a title may be; figures are not."""
    texts = {field: str(name) for field, name in names.items()}
    while (excess := len(template.format(**texts)) - POLICY.title) > 0:
        longest = max(texts.keys() - _FIGURES, key=lambda field: (len(texts[field]), field), default=None)
        if longest is None or len(texts[longest]) <= _LEAST_NAME:
            break
        texts[longest] = shortened(texts[longest], max(len(texts[longest]) - excess, _LEAST_NAME))
    text = template.format(**texts)
    return text if len(text) <= POLICY.title else f"{text[: POLICY.title - len(_CUT)]}{_CUT}"


def shortened(name: str, characters: int) -> str:
    """Return the end of a dotted name, or of a name, in so many characters; its place in parentheses goes first."""
    if len(name) <= characters:
        return name
    if len(plain := name.partition(" (")[0]) <= characters:
        return plain
    end = name[len(name) - characters + len(_CUT) :]
    _, dot, whole = end.partition(".")
    return f"{_CUT}{whole if dot and len(whole) >= characters / 2 else end}"


def ordered(found: Iterable[Finding]) -> list[Finding]:
    """Return findings, the most severe first, of one severity the one with most at stake."""
    return sorted(found, key=lambda finding: (finding.severity, finding.weight), reverse=True)


def merged(alike: Iterable[Finding]) -> Iterator[Finding]:
    """Yield one finding of a rule for all traces: the worst, with the evidence of all."""
    worst, *others = ordered(alike) or (None,)
    if worst is None:
        return
    if not others:
        yield worst
        return
    more = "1 other trace" if len(others) == 1 else f"{len(others):,} other traces"
    seen = (*worst.evidence, *(finding.evidence[0] for finding in others if finding.evidence))
    if any(evidence.rank is None for evidence in seen):
        # Of another program, perhaps, that has the same fault for another reason.
        why = f"In {Path(seen[0].artifact).name}: {worst.why} {worst.rule} is found in {more}, too."
    else:
        why = f"{worst.why} {more} {'shows' if len(others) == 1 else 'show'} it too."
    yield replace(worst, why=why, evidence=seen[:MAX_EVIDENCE])
