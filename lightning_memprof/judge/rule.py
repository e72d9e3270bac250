"""A rule as a row: the time or the bytes of one owner, what to say about them, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from lightning_memprof.account.ledger.model import TimeLedger, TimeLine
from lightning_memprof.account.parts import Part
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.judge.fact import ByteFact, Fact, bytes_of, time_of
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Evidence, Finding, Severity, merged, titled
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.judge.traces import device_traces
from lightning_memprof.read.run.model import Rank


class Detail(msgspec.Struct, frozen=True, kw_only=True):
    """What else the recording shows of a fact.

    Attributes:
        lines: the part of the fact's time that the rule is about; None is the whole.
        owner: another one than the fact's.
        says: another title than the rule's.
        fields: further ones of the title and of the rule's remedies.
        measured: another first sentence of the evidence than the fact's, without its period.
        why: the second one, with it.
        remedies: those that come first.
        saves: other shares of the fact than the rule's.
        is_note: whether programs do this on purpose, or chance does: then it is a note, whatever it takes.
        at_least: the severity of what will be more.
        at_most: another one than the rule's.
        numbers: figures.
        evidence: files.
    """

    lines: tuple[TimeLine, ...] | None = None
    owner: str = ""
    says: str = ""
    fields: Mapping[str, object] = msgspec.field(default_factory=dict)
    measured: str = ""
    why: str = ""
    remedies: tuple[Remedy, ...] = ()
    saves: tuple[float, float] | None = None
    is_note: bool = False
    at_least: Severity = Severity.NONE
    at_most: Severity | None = None
    numbers: Mapping[str, Any] = msgspec.field(default_factory=dict)
    evidence: tuple[Evidence, ...] = ()


# A detail may take long to compute: only where the fact is notable.
Found = tuple[Fact | ByteFact, Detail | Callable[[], Detail]]
InTrace = tuple[tuple[TimeLine, ...], Detail]


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """What takes at least a share of its whole is reported, as severe as what the first remedy recovers.

    Attributes:
        id: stable.
        about: what it is and why it matters, for the documentation.
        when: what else has to hold, for the documentation.
        trade_off: what the remedy loses, for the documentation.
        of: the parts of the step, or the categories of memory, which a remedy cannot exceed.
        find: yields facts with their details that are not those of ``of`` on the worst rank of a run; those of files
            count where no rank has one.
        in_trace: returns the lines of the ledger of a device with their detail, for each trace that has enough of it.
        says: the title, with the fields ``owner``, ``share``, ``rank`` (``" on rank 3"``), those of the detail and,
            of time, ``kind`` (the part) and ``object`` (the owner without its method), of bytes ``size``, ``place``.
        unnamed: the title where the recording does not tell the owner; default: ``says``.
        bound: the words before the title from half of the step on: ``Optimizer-bound``.
        remedies: with the fields of the title.
        saves: least and most share of the fact that the first remedy recovers; None where it promises nothing.
        each: whether each owner is a finding of its own.
        repeats: whether only time that returns in several steps is a fault.
        note: share of the whole below which nothing is reported; another one than the policy's has its reason beside
            it.
        least: nanoseconds per step, or bytes, below which nothing is reported.
        at_most: the severity where the memory suffices: ``INFO`` for what the program needs, ``WARNING`` for waste.
        detail: what else the recording shows of the time of ``of``, or of the memory; None where it is not this rule's.
    """

    id: str
    about: str = ""
    when: str = ""
    trade_off: str = ""
    of: tuple[str, ...] = ()
    find: Callable[[Facts], Iterable[Found]] | None = None
    in_trace: Callable[[TraceReport, TimeLedger], InTrace | None] | None = None
    says: str
    unnamed: str = ""
    bound: str = ""
    remedies: tuple[Remedy, ...] = ()
    saves: tuple[float, float] | None
    each: bool = False
    repeats: bool = False
    note: float = POLICY.note
    least: int = 0
    at_most: Severity = Severity.CRITICAL
    detail: Callable[[Facts, Any], Detail | None] | None = None

    @property
    def is_of_time(self) -> bool:
        """Whether it is about the parts of a step, not about memory."""
        return any(isinstance(part, Part) for part in self.of)

    def findings(self, facts: Facts) -> Iterator[Finding]:
        """Yield the findings about a run; where there are none, those about its files, of traces the worst."""
        found = [
            (fact, detail)
            for fact, detail in self._found(facts)
            if fact.is_notable(self.note, self.least, repeats=self.repeats)
        ]
        of_run = [pair for pair in found if isinstance(pair[0].source, Rank)]
        findings = [self.finding(facts, *pair) for pair in of_run or found]
        yield from findings if of_run or not self.is_of_time else merged(findings)

    def finding(self, facts: Facts, fact: Fact | ByteFact, detail: Detail | Callable[[], Detail]) -> Finding:
        """Return the finding about a fact, whatever it takes."""
        detail = detail() if callable(detail) else detail
        owner = detail.owner or fact.owner
        fields = {**fact.fields(facts, owner), **detail.fields}
        worth = fact.worth(detail.saves or self.saves or (1.0, 1.0), self.of)
        most = fact.at_most(self.at_most if detail.at_most is None else detail.at_most)
        remedies = (*detail.remedies, *(remedy.filled(**fields) for remedy in self.remedies))
        recovers = (
            fact.of_ledger(worth, self.of) if self.saves and not any(first.is_look for first in remedies[:1]) else None
        )
        measured = (f"{detail.measured}.", detail.why) if detail.measured else (fact.why, detail.why, fact.pressure)
        return Finding(
            rule=self.id,
            owner=owner.partition(" (")[0] if self.each else "",
            severity=min(max(worth.severity, detail.at_least), Severity.INFO if detail.is_note else most),
            title=titled(self._title(fact, owner, detail), **fields),
            why=" ".join(filter(None, measured)),
            remedies=remedies,
            evidence=fact.seen(facts, detail.evidence),
            numbers={**fact.numbers(owner), **detail.numbers},
            weight=0.0 if detail.is_note else (recovers or worth).share,
            recovers=recovers,
        )

    def _found(self, facts: Facts) -> Iterator[Found]:
        if self.find is not None:
            yield from self.find(facts)
        if self.in_trace is not None:
            for trace, ledger in device_traces(facts):
                if (found := self.in_trace(trace, ledger)) is not None and found[0]:
                    yield Fact(source=trace, ledger=ledger, lines=found[0]), found[1]
        if self.detail is not None or (self.find is None and self.in_trace is None):
            yield from self._of_run(facts)

    def _of_run(self, facts: Facts) -> Iterator[Found]:
        for fact in time_of(facts, self.of, each=self.each) if self.is_of_time else bytes_of(facts, *self.of)[:1]:
            # A part of it is not notable where it is not.
            if not fact.is_notable(self.note, self.least, repeats=False):
                continue
            if (detail := self.detail(facts, fact) if self.detail is not None else Detail()) is None:
                continue
            is_part = isinstance(fact, Fact) and detail.lines is not None
            yield replace(fact, lines=detail.lines) if is_part else fact, detail

    def _title(self, fact: Fact | ByteFact, owner: str, detail: Detail) -> str:
        says = detail.says or (self.says if owner else self.unnamed or self.says)
        if not self.bound:
            return says
        return f"{self.bound}: {says}" if fact.share >= POLICY.bound else f"{says[0].upper()}{says[1:]}"
