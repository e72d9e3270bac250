"""A rule about memory as a row: bytes of the peak that one category has, what to say about them, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from lightning_memprof.account.ledger.memory import ByteLedger, ByteLine
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Finding, Recovery, Severity, titled
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.judge.rule import Detail
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_bytes, percent


class ByteFact(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the peak of a rank that a category has."""

    rank: Rank
    ledger: ByteLedger
    lines: tuple[ByteLine, ...]

    @property
    def bytes(self) -> int:
        """The bytes."""
        return sum(line.bytes for line in self.lines)

    @property
    def share(self) -> float:
        """Share of the peak, 0 to 1."""
        return self.bytes / self.ledger.peak_bytes

    @property
    def owner(self) -> str:
        """The name of the largest line, empty where the recording does not tell."""
        return self.lines[0].name


class ByteDetail(Detail, frozen=True, kw_only=True):
    """What else the recording shows of bytes: also who has them, and the least and most that the first remedy saves."""

    owner: str = ""
    saves_bytes: tuple[float, float] | None = None


class ByteRule(msgspec.Struct, frozen=True, kw_only=True):
    """A finding about bytes of the peak.

    Attributes:
        id: stable.
        about: what it is and why it matters, for the documentation.
        trade_off: what the remedy loses, for the documentation.
        of: the category of the ledger.
        says: the title, with the fields ``owner``, ``size``, ``share`` (of the peak) and ``rank``.
        unnamed: the title where the recording does not tell the owner; default: ``says``.
        remedies: with the fields ``owner`` and ``size``.
        saves: least and most share of these bytes that the first of them recovers.
        note: share of the peak below which nothing is reported: a smaller part cannot be a verdict.
        is_fault: whether a fact is a fault where the memory suffices, too.
        detail: what else the recording shows.
        offers: remedies of ``detail``, for the documentation.
    """

    id: str
    about: str
    trade_off: str
    of: str
    says: str
    unnamed: str = ""
    remedies: tuple[Remedy, ...]
    saves: tuple[float, float]
    note: float = POLICY.verdict
    is_fault: Callable[[ByteFact], bool] = lambda _: False
    detail: Callable[[Facts, ByteFact], ByteDetail] | None = None
    offers: tuple[Remedy, ...] = ()

    def findings(self, facts: Facts) -> Iterator[Finding]:
        """Yield the finding about the rank with the most bytes of the category."""
        found = [
            ByteFact(rank=rank, ledger=ledger, lines=lines)
            for rank in facts.run.ranks
            for ledger in (facts.byte_ledgers.get(rank.rank), facts.resident_ledgers.get(rank.rank))
            if ledger is not None and (lines := tuple(line for line in ledger.lines if line.category == self.of))
        ]
        worst = max(found, key=lambda fact: fact.bytes, default=None)
        if worst is not None and worst.share >= self.note:
            yield self._finding(facts, worst)

    def _finding(self, facts: Facts, fact: ByteFact) -> Finding:
        detail = self.detail(facts, fact) if self.detail is not None else ByteDetail()
        least, most = detail.saves_bytes or (fact.bytes * share for share in self.saves)
        worth = Recovery(
            unit="bytes", min=min(least, fact.bytes), max=min(most, fact.bytes), whole=fact.ledger.peak_bytes
        )
        owner = detail.owner or fact.owner
        shown: dict[str, Any] = {"owner": owner, "size": format_bytes(fact.bytes), "share": percent(fact.share)}
        return Finding(
            rule=self.id,
            severity=self._severity(fact, worth),
            title=titled(self.says if owner else self.unnamed or self.says, rank=facts.on_rank(fact.rank), **shown),
            why=" ".join(filter(None, (detail.why, pressure(fact.ledger)))),
            remedies=(*detail.remedies, *(remedy.filled(**shown) for remedy in self.remedies)),
            evidence=detail.evidence or (facts.pulse(fact.rank),),
            numbers={
                "rank": fact.rank.rank,
                "bytes": fact.bytes,
                "peak_bytes": fact.ledger.peak_bytes,
                "share": fact.share,
                "owner": owner or None,
                **detail.numbers,
            },
            weight=worth.share,
            recovers=worth,
        )

    def _severity(self, fact: ByteFact, worth: Recovery) -> Severity:
        if fact.ledger.is_under_pressure:
            return worth.severity
        return min(worth.severity, Severity.WARNING if self.is_fault(fact) else Severity.INFO)


def pressure(ledger: ByteLedger) -> str:
    """Return a sentence about how full the memory is; empty where that is unknown, or for a host with room."""
    if not ledger.limit_bytes:
        return ""
    full, place = percent(ledger.filled or 0), "the machine" if ledger.place == "host" else ledger.place
    if not ledger.is_under_pressure:
        fits = ": a larger batch fits" if ledger.has_room else ""
        return "" if ledger.place == "host" else f"{place} is {full} full at its peak{fits}."
    ranks = f" in each of {ledger.sharing} processes" if ledger.sharing > 1 else ""
    others = f" and {format_bytes(ledger.outside_bytes)} outside the allocator" if ledger.outside_bytes else ""
    peak, limit = format_bytes(ledger.peak_bytes), format_bytes(ledger.limit_bytes)
    return f"The peak of {peak}{ranks}{others} is {full} of the {limit} that {place} can hold."
