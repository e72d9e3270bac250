"""A rule as a row: time that one owner takes of each step, its title, and the remedies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, total
from lightning_memprof.account.parts import BUSY, Part
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Evidence, Finding, Recovery, Severity, merged, titled
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.judge.traces import span
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_count, format_ns, percent

PASSES: Final = (Part.FORWARD, Part.BACKWARD)
"""The parts in which the program alone spends time."""
WITHOUT_TRAINER: Final = (
    *PASSES,
    *BUSY,
    *(part for part in Part if part.group == "device idle" and part != "idle_data"),
)
"""These, and those of a device whose time is not that of a hook."""


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """Time that lines of a ledger take: those of a part, or of one owner in it.

    ``count`` is per step and of the first owner; ``longest_ns`` is that of one step.
    """

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
        """Calls of the owner per step, 0 where unknown, and for forward and backward, which run in each."""
        if any(line.part in PASSES for line in self.lines):
            return 0.0
        return sum(line.count for line in self.lines if line.name == self.owner and not line.operator)

    @property
    def longest_ns(self) -> int:
        """The longest call, 0 where unknown; operators are of recorded steps and left out where others are known."""
        return max((line.longest_ns or 0 for line in self.lines if line.operator is None), default=0)

    @property
    def repeats(self) -> bool:
        """Whether it is spread over several steps; the longest call, unlike the time, includes waits for a core."""
        longest = max((line.longest_ns or 0 for line in self.lines), default=0)
        runs = 1 - self.ledger.share(Part.CORE_WAIT)
        return self.ns * self.ledger.steps >= POLICY.repeated * longest * runs

    @property
    def why(self) -> str:
        """The measured time and how often it is spent."""
        why = f"{format_ns(self.ns)} of {self.ledger.length_text}"
        if not self.count:
            return why
        longest = f", the longest {format_ns(self.longest_ns)}" if self.longest_ns else ""
        noun = "pause" if self.lines[0].part == Part.GC_PAUSES else "call"
        if self.count >= POLICY.calls:
            return f"{why}: {self.count:,.0f} {noun}s per step{longest}"
        calls = format_count(round(self.count * self.ledger.steps), noun)
        return f"{why}: {calls} in {format_count(self.ledger.steps, 'step')}{longest}"


class Fact(Spent, frozen=True, kw_only=True):
    """The same, with the rank of a run that spends it, or with the trace that shows it."""

    source: Rank | TraceReport

    @property
    def is_once(self) -> bool:
        """Whether it ran so few times in the whole run that it is a start or an end of it."""
        return not isinstance(self.source, TraceReport) and 0 < self.count * self.ledger.steps < POLICY.calls

    @property
    def share_text(self) -> str:
        """The share for a sentence: ``53% of each step``, of a trace without steps ``53% of the recorded time``."""
        if isinstance(self.source, TraceReport):
            return f"{percent(self.share)} of {span(self.source)}"
        return self.ledger.share_text(self.ns)

    @property
    def rank(self) -> Rank:
        """The rank of a run.

        Raises:
            TypeError: a trace shows the time.
        """
        if isinstance(self.source, TraceReport):
            raise TypeError(f"{self.source.file} is not a rank of a run")
        return self.source


class Detail(msgspec.Struct, frozen=True, kw_only=True):
    """What else the recording shows of a fact.

    Attributes:
        says: another title than the rule's.
        fields: further ones of the title and of the rule's remedies.
        measured: another first sentence of the evidence than the time and the count, without its period.
        why: the second one, with it.
        remedies: those that come first.
        saves: other shares of the fact's time than the rule's.
        is_note: whether programs do this on purpose, or chance does: then it is a note, whatever it takes.
        numbers: figures.
        evidence: files.
    """

    says: str = ""
    fields: Mapping[str, object] = msgspec.field(default_factory=dict)
    measured: str = ""
    why: str = ""
    remedies: tuple[Remedy, ...] = ()
    saves: tuple[float, float] | None = None
    is_note: bool = False
    numbers: Mapping[str, Any] = msgspec.field(default_factory=dict)
    evidence: tuple[Evidence, ...] = ()


Found = tuple[Fact, Detail]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What a rule about time and one about bytes say alike.

    Attributes:
        id: stable.
        about: what it is and why it matters, for the documentation.
        when: what else has to hold, for the documentation.
        trade_off: what the remedy loses, for the documentation.
        says: the title, with the fields ``owner``, ``share``, ``rank`` (``" on rank 3"``), those of the detail and,
            of time, ``kind`` (the part) and ``object`` (the owner without its method), of bytes ``size``, ``place``.
        unnamed: the title where the recording does not tell the owner; default: ``says``.
        remedies: with the same fields.
    """

    id: str
    about: str = ""
    when: str = ""
    trade_off: str = ""
    says: str
    unnamed: str = ""
    remedies: tuple[Remedy, ...] = ()

    def title_of(self, owner: str, detail: Detail) -> str:
        """Return the title, its fields not filled in."""
        return detail.says or (self.says if owner else self.unnamed or self.says)


class Rule(Row, frozen=True, kw_only=True):
    """A finding about time that parts of the step take.

    Attributes:
        of: the parts of the ledger.
        find: yields facts with their details where the lines are not all those of ``of``; those of traces count where
            no rank of a run has one.
        bound: the words before the title from half of the step on: ``Optimizer-bound``.
        saves: least and most share of this time that the first remedy recovers; None where it promises nothing.
        each: whether each owner is a finding of its own.
        repeats: whether only time that returns in several steps is a fault.
        note: share of the step below which nothing is reported; another one than the policy's has its reason beside it.
        applies: whether a fact is this rule's, apart from its time.
        detail: what else the recording shows.
    """

    of: tuple[Part, ...]
    find: Callable[[Facts], Iterable[Found]] | None = None
    bound: str = ""
    saves: tuple[float, float] | None
    each: bool = False
    repeats: bool = False
    note: float = POLICY.note
    applies: Callable[[Facts, Fact], bool] | None = None
    detail: Callable[[Facts, Fact], Detail] | None = None

    def findings(self, facts: Facts) -> Iterator[Finding]:
        """Yield the findings about the rank that spends most in these parts, without a rank the worst of all traces."""
        found = [(fact, detail) for fact, detail in self._found(facts) if self._counts(fact)]
        in_run = [pair for pair in found if not isinstance(pair[0].source, TraceReport)]
        findings = [self._finding(facts, *pair) for pair in in_run or found]
        yield from findings if in_run else merged(findings)

    def _found(self, facts: Facts) -> Iterable[Found]:
        if self.find is not None:
            yield from self.find(facts)
            return
        worst = facts.heaviest(lambda ledger: ledger.ns(*self.of))
        for fact in self._facts(*worst) if worst is not None else ():
            if self.applies is None or self.applies(facts, fact):
                yield fact, self.detail(facts, fact) if self.detail is not None else Detail()

    def _counts(self, fact: Fact) -> bool:
        # What runs once starts or ends the run.
        least = self.note * (2 if fact.is_once else 1)
        return fact.share >= least and fact.ns >= least_ns(fact) and (fact.repeats or not self.repeats)

    def _facts(self, rank: Rank, ledger: TimeLedger) -> Sequence[Fact]:
        lines = ledger.of(*self.of)
        names = list(dict.fromkeys(line.name for line in lines)) if self.each else []
        groups = [tuple(line for line in lines if line.name == name) for name in names] or [lines]
        return [Fact(source=rank, ledger=ledger, lines=group) for group in groups[: POLICY.owners]]

    def _finding(self, facts: Facts, fact: Fact, detail: Detail) -> Finding:
        least, most = detail.saves or self.saves or (1.0, 1.0)
        worth = Recovery(unit="ns", min=fact.ns * least, max=fact.ns * most, whole=fact.ledger.step_ns)
        names = {
            "owner": fact.owner or f"these {fact.kind}s",
            "object": fact.owner.rpartition(".")[0],
            "share": fact.share_text,
            "rank": facts.on_rank(fact.source),
            **detail.fields,
        }
        says = self.title_of(fact.owner, detail)
        if self.bound:
            says = f"{self.bound}: {says}" if fact.share >= POLICY.bound else f"{says[0].upper()}{says[1:]}"
        return Finding(
            rule=self.id,
            owner=fact.owner.partition(" (")[0] if self.each else "",
            severity=min(worth.severity, Severity.INFO) if fact.is_once or detail.is_note else worth.severity,
            title=titled(says, kind=fact.kind, **names),
            why=f"{detail.measured or fact.why}.{f' {detail.why}' if detail.why else ''}",
            remedies=(*detail.remedies, *(remedy.filled(**names) for remedy in self.remedies)),
            evidence=(*_seen(facts, fact.source), *detail.evidence),
            numbers={
                "rank": fact.source.rank,
                "action": fact.owner or None,
                "ns": round(fact.ns),
                "share": fact.share,
                "count_per_step": fact.count,
                "longest_ns": max((line.longest_ns or 0 for line in fact.lines), default=None),
                "duration_ns": round(fact.ledger.step_ns),
                **detail.numbers,
            },
            weight=0.0 if detail.is_note else worth.share,
            recovers=worth if self.saves else None,
        )


def _seen(facts: Facts, source: Rank | TraceReport) -> tuple[Evidence, ...]:
    """Return the steps of a rank, with its trace; what a trace alone shows is in the detail."""
    if isinstance(source, TraceReport):
        return ()
    return (*facts.pulse_and_trace(source), *facts.recorded(source, "hooks"))


def least_ns(fact: Spent) -> int:
    """Return the time per step below which nothing is reported: the Trainer's own hooks take a millisecond per step."""
    if all(line.part in WITHOUT_TRAINER for line in fact.lines):
        return 0
    is_short = fact.ledger.step_ns < POLICY.short_step_ns and any(line.part != "module_hook" for line in fact.lines)
    return POLICY.action_short_ns if is_short else POLICY.action_ns
