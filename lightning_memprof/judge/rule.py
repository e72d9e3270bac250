"""A rule as a row: time that one owner takes of each step, what to say about it, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, total
from lightning_memprof.account.parts import Part
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Evidence, Finding, Recovery, Severity, titled
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_ns


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """Time that lines of a ledger take: those of a part, or of one owner in it.

    ``count`` is per step and of the first owner; ``longest_ns`` is that of one step.
    """

    rank: Rank
    ledger: TimeLedger
    lines: tuple[TimeLine, ...]

    @property
    def ns(self) -> float:
        """Time per step."""
        return total(self.lines)

    @property
    def share(self) -> float:
        """Share of the step, 0 to 1."""
        return self.ns / self.ledger.step_ns if self.ledger.step_ns else 0.0

    @property
    def owner(self) -> str:
        """The name of the longest line, empty where the recording does not tell."""
        return self.lines[0].name

    @property
    def kind(self) -> str:
        """The part, for people, as one of its kind."""
        return self.lines[0].part.label.removesuffix("s")

    @property
    def count(self) -> float:
        """Calls of the owner per step, 0 where unknown."""
        return sum(line.count for line in self.lines if line.name == self.owner and not line.operator)

    @property
    def longest_ns(self) -> int:
        """The longest call, 0 where unknown; operators are of recorded steps and left out where others are known."""
        return max((line.longest_ns or 0 for line in self.lines if line.operator is None), default=0)

    @property
    def is_once(self) -> bool:
        """Whether it ran so few times in the whole run that it is a start or an end of it."""
        return 0 < self.count * self.ledger.steps < POLICY.calls

    @property
    def repeats(self) -> bool:
        """Whether it is spread over several steps."""
        longest = max((line.longest_ns or 0 for line in self.lines), default=0)
        return self.ns * self.ledger.steps >= POLICY.repeated * longest

    @property
    def why(self) -> str:
        """The measured time and how often it is spent."""
        why = f"{format_ns(self.ns)} of {self.ledger.length_text}"
        if not self.count:
            return why
        if self.count * self.ledger.steps < 1.5:
            return f"{why}: it runs once, for {format_ns(self.ns / self.count)}"
        if self.count < POLICY.always:
            often = f"every {1 / self.count:,.0f} steps, for {format_ns(self.ns / self.count)}"
        else:
            often = f"{self.count:,.3g} times per step" if self.count >= 1.05 else "in each step"
        most = f", up to {format_ns(self.longest_ns)} in a step" if self.longest_ns else ""
        return f"{why}: it runs {often}{most}"


class Detail(msgspec.Struct, frozen=True, kw_only=True):
    """What else the recording shows of a fact: a sentence of the evidence, remedies that come first, and figures."""

    why: str = ""
    remedies: tuple[Remedy | str, ...] = ()
    numbers: Mapping[str, Any] = msgspec.field(default_factory=dict)
    evidence: tuple[Evidence, ...] = ()


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """A finding about time that parts of the step take.

    Attributes:
        id: stable.
        about: what it is and why it matters, for the documentation.
        trade_off: what the remedy loses, for the documentation.
        of: the parts of the ledger.
        says: the title, with the fields ``owner``, ``kind`` (the part), ``share`` and ``rank`` (``" on rank 3"``).
        unnamed: the title where the recording does not tell the owner; default: ``says``.
        remedies: with the fields ``owner`` and ``object`` (the owner without its method).
        saves: least and most share of this time that the first of them recovers.
        each: whether each owner is a finding of its own.
        repeats: whether only time that returns in several steps is a fault.
        note: share of the step below which nothing is reported; another one than the policy's has its reason beside it.
        applies: whether a fact is this rule's, apart from its time.
        detail: what else the recording shows.
        least_ns: time per step below which nothing is reported: the Trainer itself takes some.
    """

    id: str
    about: str = ""
    trade_off: str = ""
    of: tuple[Part, ...]
    says: str
    unnamed: str = ""
    remedies: tuple[Remedy, ...]
    saves: tuple[float, float]
    each: bool = False
    repeats: bool = False
    note: float = POLICY.note
    applies: Callable[[Facts, Fact], bool] | None = None
    detail: Callable[[Facts, Fact], Detail] | None = None

    def findings(self, facts: Facts) -> Iterator[Finding]:
        """Yield the findings about the rank that spends most in these parts."""
        worst = facts.heaviest(lambda ledger: ledger.ns(*self.of))
        if worst is None:
            return
        for fact in self._facts(*worst):
            # What runs once starts or ends the run.
            least = self.note * (2 if fact.is_once else 1)
            if fact.share < least or fact.ns < least_ns(fact) or (self.repeats and not fact.repeats):
                continue
            if self.applies is None or self.applies(facts, fact):
                yield self._finding(facts, fact)

    def _facts(self, rank: Rank, ledger: TimeLedger) -> Sequence[Fact]:
        lines = ledger.of(*self.of)
        names = list(dict.fromkeys(line.name for line in lines)) if self.each else []
        groups = [tuple(line for line in lines if line.name == name) for name in names] or [lines]
        return [Fact(rank=rank, ledger=ledger, lines=group) for group in groups[: POLICY.owners]]

    def _finding(self, facts: Facts, fact: Fact) -> Finding:
        detail = self.detail(facts, fact) if self.detail is not None else Detail()
        least, most = self.saves
        worth = Recovery(unit="ns", min=fact.ns * least, max=fact.ns * most, whole=fact.ledger.step_ns)
        names = {"owner": fact.owner or f"these {fact.kind}s", "object": fact.owner.rpartition(".")[0]}
        says = self.says if fact.owner else self.unnamed or self.says
        return Finding(
            rule=self.id,
            severity=Severity.INFO if fact.is_once else worth.severity,
            title=titled(
                says, kind=fact.kind, share=fact.ledger.share_text(fact.ns), rank=facts.on_rank(fact.rank), **names
            ),
            why=f"{fact.why}.{f' {detail.why}' if detail.why else ''}",
            remedies=(*detail.remedies, *(remedy.filled(**names) for remedy in self.remedies)),
            evidence=(facts.pulse(fact.rank), *facts.recorded(fact.rank, "hooks"), *detail.evidence),
            numbers={
                "rank": fact.rank.rank,
                "action": fact.owner or None,
                "ns": round(fact.ns),
                "share": fact.share,
                "count_per_step": fact.count,
                "longest_ns": max((line.longest_ns or 0 for line in fact.lines), default=None),
                "duration_ns": round(fact.ledger.step_ns),
                **detail.numbers,
            },
            weight=worth.share,
            recovers=worth,
        )


def least_ns(fact: Fact) -> int:
    """Return the time per step below which nothing is reported: the Trainer's own hooks take a millisecond per step."""
    is_short = fact.ledger.step_ns < POLICY.short_step_ns and any(line.part != "module_hook" for line in fact.lines)
    return POLICY.action_short_ns if is_short else POLICY.action_ns
