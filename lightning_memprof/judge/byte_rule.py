"""A rule about memory as a row: bytes of a whole that an owner has, what to say about them, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from lightning_memprof.account.ledger.memory import ByteLedger, snapshot_bytes
from lightning_memprof.account.snapshot.report import DeviceReport, SnapshotReport
from lightning_memprof.artifacts.naming import SnapshotName
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Evidence, Finding, Recovery, Severity, titled
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.rule import Detail, Row
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_bytes, percent


class ByteFact(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a whole that an owner has, in a run or on the device of a snapshot.

    Attributes:
        owner: empty where the recording does not tell.
        bytes: its bytes.
        whole: what these are a part of, usually the peak, in bytes.
        place: ``host``, or the device.
        ledger: the owners of this memory, which bound what a remedy recovers; None where they are unknown.
        evidence: files; of a snapshot, itself.
    """

    owner: str = ""
    bytes: int
    whole: int
    place: str = "host"
    ledger: ByteLedger | None = None
    evidence: tuple[Evidence, ...] = ()

    @property
    def size(self) -> str:
        """The bytes, for people."""
        return format_bytes(self.bytes)

    @property
    def share(self) -> float:
        """Share of the whole, 0 to 1."""
        return self.bytes / self.whole if self.whole else 0.0


class RankBytes(ByteFact, frozen=True, kw_only=True):
    """The same, of a rank of a run."""

    rank: Rank


class ByteDetail(Detail, frozen=True, kw_only=True):
    """What else the recording shows of bytes.

    Attributes:
        owner: another one than the fact's.
        saves_bytes: least and most bytes that the first remedy recovers, in place of the rule's shares.
        at_most: another severity than the rule's where the memory suffices.
        at_least: the severity of bytes that will be more.
    """

    owner: str = ""
    saves_bytes: tuple[float, float] | None = None
    at_most: Severity | None = None
    at_least: Severity = Severity.NONE


FoundBytes = tuple[RankBytes, ByteDetail]
# A detail may take long to compute: only where the fact is notable.
FoundInSnapshot = tuple[ByteFact, Callable[[], ByteDetail]]


class ByteRule(Row, frozen=True, kw_only=True):
    """A finding about bytes of a run, and of a snapshot's device.

    Attributes:
        of: the categories of the ledgers, which a remedy cannot exceed.
        find: returns the fact of a run and its detail where the bytes are not all those of ``of``.
        in_snapshot: returns the same bytes on a device of a snapshot, whichever program it is from.
        saves: least and most share of these bytes that the first remedy recovers.
        note: share of the whole below which nothing is reported: a smaller part cannot be a verdict.
        least: bytes below which nothing is reported.
        at_most: the severity where the memory suffices: ``INFO`` for what the program needs, ``WARNING`` for waste,
            ``CRITICAL`` for what will not suffice for long.
        detail: what else a run shows of the bytes of ``of``.
    """

    of: tuple[str, ...] = ()
    find: Callable[[Facts], FoundBytes | None] | None = None
    in_snapshot: Callable[[SnapshotReport, DeviceReport], FoundInSnapshot | None] | None = None
    saves: tuple[float, float]
    note: float = POLICY.verdict
    least: int = 0
    at_most: Severity = Severity.INFO
    detail: Callable[[Facts, RankBytes], ByteDetail] | None = None

    def findings(self, facts: Facts) -> Iterator[Finding]:
        """Yield the finding about the rank of a run with the most bytes, without it those about snapshots' devices."""
        found = self.find(facts) if self.find is not None else self._most(facts)
        if found is not None and self._is_notable(found[0]):
            rank = found[0].rank
            yield self._finding(*found, {"rank": rank.rank}, facts.on_rank(rank))
            return
        for snapshot in facts.snapshots:
            for device in snapshot.devices:
                yield from self.on_device(snapshot, device)

    def on_device(self, snapshot: SnapshotReport, device: DeviceReport) -> Iterator[Finding]:
        """Yield the finding about a device of a snapshot."""
        found = self.in_snapshot(snapshot, device) if self.in_snapshot is not None else None
        if found is not None and self._is_notable(found[0]):
            ledger, evidence = snapshot_bytes(device), (seen_in(snapshot, device),)
            fact = replace(found[0], ledger=ledger, place=ledger.place, evidence=evidence)
            yield self._finding(fact, found[1](), {"device": device.device}, "")

    def _most(self, facts: Facts) -> FoundBytes | None:
        found = (fact for category in self.of for fact in facts_of(facts, category))
        fact = max(found, key=lambda fact: fact.bytes, default=None)
        if fact is None or not self._is_notable(fact):
            return None
        return fact, self.detail(facts, fact) if self.detail is not None else ByteDetail()

    def _is_notable(self, fact: ByteFact) -> bool:
        return fact.share >= self.note and fact.bytes >= self.least

    def _finding(self, fact: ByteFact, detail: ByteDetail, source: Mapping[str, int], where: str) -> Finding:
        held = sum(map(fact.ledger.bytes, self.of)) if fact.ledger is not None else 0
        least, most = (min(size, held or size) for size in detail.saves_bytes or (fact.bytes * s for s in self.saves))
        worth = Recovery(unit="bytes", min=least, max=most, whole=fact.whole)
        recovers = replace(worth, whole=fact.ledger.peak_bytes) if held and fact.ledger is not None else None
        owner = detail.owner or fact.owner
        usual: dict[str, Any] = {"owner": owner, "size": fact.size, "share": percent(fact.share), "place": fact.place}
        fields = {**usual, "rank": where, **detail.fields}
        measured = f"{detail.measured}." if detail.measured else ""
        full = "" if measured or fact.ledger is None else pressure(fact.ledger)
        return Finding(
            rule=self.id,
            severity=self._severity(fact, detail, worth),
            title=titled(self.title_of(owner, detail), **fields),
            why=" ".join(filter(None, (measured, detail.why, full))),
            remedies=(*detail.remedies, *(remedy.filled(**fields) for remedy in self.remedies)),
            evidence=detail.evidence or fact.evidence,
            numbers={
                **source,
                "bytes": fact.bytes,
                "peak_bytes": fact.whole,
                "share": fact.share,
                "owner": owner or None,
                **detail.numbers,
            },
            weight=(recovers or worth).share,
            recovers=recovers,
        )

    def _severity(self, fact: ByteFact, detail: ByteDetail, worth: Recovery) -> Severity:
        severity = max(worth.severity, detail.at_least)
        if detail.is_note:
            return min(severity, Severity.INFO)
        if fact.ledger is not None and fact.ledger.is_under_pressure:
            return severity
        return min(severity, self.at_most if detail.at_most is None else detail.at_most)


def facts_of(facts: Facts, category: str) -> list[RankBytes]:
    """Return the bytes of a category at the peak of each rank of a run; the owner is that of the largest line."""
    return [
        RankBytes(
            owner=next(line.name for line in ledger.lines if line.category == category),
            bytes=ledger.bytes(category),
            whole=ledger.peak_bytes,
            place=ledger.place,
            ledger=ledger,
            rank=rank,
            evidence=(facts.pulse(rank),),
        )
        for rank in facts.run.ranks
        for ledger in (facts.byte_ledgers.get(rank.rank), facts.resident_ledgers.get(rank.rank))
        if ledger is not None and ledger.bytes(category)
    ]


def seen_in(snapshot: SnapshotReport, device: DeviceReport, moment_us: int | None = None) -> Evidence:
    """Return a snapshot as evidence, narrowed to the recorded history of a device, or to one moment of it."""
    name = SnapshotName.parse(snapshot.file.name)
    start, end = (device.start_us, device.end_us) if moment_us is None else (moment_us, moment_us)
    return Evidence(
        artifact=str(snapshot.file),
        rank=name.rank if name is not None else None,
        start_ns=None if start is None else start * 1000,
        end_ns=None if end is None else end * 1000,
    )


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
