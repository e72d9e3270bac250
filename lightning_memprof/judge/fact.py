"""What one owner has of a whole: time of the step, or bytes of the peak, in a run, a trace or a snapshot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from lightning_memprof.account.ledger.memory import ByteLedger, snapshot_bytes
from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, total
from lightning_memprof.account.parts import BUSY, Part
from lightning_memprof.account.snapshot.report import DeviceReport, SnapshotReport
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.artifacts.naming import SnapshotName
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Evidence, Recovery, Severity
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.traces import seen_in as of_trace
from lightning_memprof.judge.traces import span
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_bytes, format_count, format_ns, percent

PASSES: Final = (Part.FORWARD, Part.BACKWARD)
"""The parts in which the program alone spends time."""
LOADING: Final = (".fetch", ".collate", ".sampler")
"""Ends of the names of what a data loader calls in the training process."""
WITHOUT_TRAINER: Final = (
    *PASSES,
    *BUSY,
    *(part for part in Part if part.group == "device idle" and part != "idle_data"),
)
"""These, and those of a device whose time is not that of a hook."""


class Sourced(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank of a run has, or what a trace or the device of a snapshot shows."""

    source: Rank | TraceReport | DeviceReport

    @property
    def rank(self) -> Rank:
        """The rank of a run.

        Raises:
            TypeError: a file shows it.
        """
        if not isinstance(self.source, Rank):
            raise TypeError(f"a {type(self.source).__name__} is not a rank of a run")
        return self.source

    @property
    def why(self) -> str:
        """The measured evidence; empty where the title has it."""
        return ""

    @property
    def pressure(self) -> str:
        """How full the memory is; empty for time."""
        return ""


class Spent(Sourced, frozen=True, kw_only=True):
    """Time that lines of a ledger take: those of a part, or of one owner in it.

    Attributes:
        ledger: the whole.
        lines: the longest first; ``count`` is per step and of its owner, ``longest_ns`` that of one step.
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
    def least_ns(self) -> int:
        """The time per step below which nothing is reported: the Trainer's own hooks take a millisecond per step."""
        if all(line.part in WITHOUT_TRAINER for line in self.lines):
            return 0
        own = total(line for line in self.lines if line.part == Part.MODULE_HOOK or line.name.endswith(LOADING))
        is_short = self.ledger.step_ns < POLICY.short_step_ns and own < POLICY.most * self.ns
        return POLICY.action_short_ns if is_short else POLICY.action_ns

    @property
    def why(self) -> str:
        """The measured time and how often it is spent."""
        why = f"{format_ns(self.ns)} of {self.ledger.length_text}"
        if not self.count:
            return f"{why}."
        longest = f", the longest {format_ns(self.longest_ns)}" if self.longest_ns else ""
        noun = "pause" if self.lines[0].part == Part.GC_PAUSES else "call"
        if self.count >= POLICY.calls:
            return f"{why}: {self.count:,.0f} {noun}s per step{longest}."
        calls = format_count(round(self.count * self.ledger.steps), noun)
        return f"{why}: {calls} in {format_count(self.ledger.steps, 'step')}{longest}."


class Fact(Spent, frozen=True, kw_only=True):
    """The same, with the rank of a run that spends it, or with the trace that shows it."""

    source: Rank | TraceReport

    @property
    def is_once(self) -> bool:
        """Whether it ran so few times in the whole run that it is a start or an end of it."""
        return isinstance(self.source, Rank) and 0 < self.count * self.ledger.steps < POLICY.calls

    @property
    def share_text(self) -> str:
        """The share for a sentence: ``53% of each step``, of a trace without steps ``53% of the recorded time``."""
        if isinstance(self.source, TraceReport):
            return f"{percent(self.share)} of {span(self.source)}"
        return self.ledger.share_text(self.ns)

    def fields(self, facts: Facts, owner: str) -> dict[str, Any]:
        """Return the fields of titles and remedies."""
        return {
            "owner": owner or f"these {self.kind}s",
            "object": owner.rpartition(".")[0],
            "kind": self.kind,
            "share": self.share_text,
            "rank": facts.on_rank(self.source),
        }

    def seen(self, facts: Facts, further: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
        """Return the steps of a rank, with its trace, and further files; of a trace these, or the whole file."""
        if isinstance(self.source, TraceReport):
            return further or of_trace(self.source)
        return (*facts.pulse_and_trace(self.source), *facts.recorded(self.source, "hooks"), *further)

    def is_notable(self, share: float, least: int, *, repeats: bool) -> bool:
        """Return whether it is such a share of the step, and ``least`` ns: what runs once starts or ends the run."""
        is_enough = self.share >= share * (2 if self.is_once else 1) and self.ns >= max(least, self.least_ns)
        return is_enough and (self.repeats or not repeats)

    def at_most(self, severity: Severity) -> Severity:
        """Return how severe it can be."""
        return min(severity, Severity.INFO) if self.is_once else severity

    def of_ledger(self, worth: Recovery, of: Iterable[str]) -> Recovery | None:  # noqa: ARG002 as bytes
        """Return what is recovered, of the whole of the ledger."""
        return worth

    def worth(self, saves: tuple[float, float], of: Iterable[str]) -> Recovery:  # noqa: ARG002 as bytes
        """Return what a remedy recovers that saves these shares of it."""
        least, most = saves
        whole = span(self.source) if isinstance(self.source, TraceReport) else "each step"
        return Recovery(unit="ns", min=self.ns * least, max=self.ns * most, whole=self.ledger.step_ns, of=whole)

    def numbers(self, owner: str) -> dict[str, Any]:
        """Return the figures of a finding."""
        return {
            "rank": self.source.rank,
            "action": owner or None,
            "ns": round(self.ns),
            "share": self.share,
            "count_per_step": self.count,
            "longest_ns": max((line.longest_ns or 0 for line in self.lines), default=None),
            "duration_ns": round(self.ledger.step_ns),
        }


class ByteFact(Sourced, frozen=True, kw_only=True):
    """Bytes of a whole that an owner has, in a run or on the device of a snapshot.

    Attributes:
        source: the rank of a run, or the device.
        owner: empty where the recording does not tell.
        bytes: its bytes.
        whole: what these are a part of, usually the peak, in bytes.
        place: ``host``, or the device.
        ledger: the owners of this memory, which bound what a remedy recovers; None where they are unknown.
        evidence: files; of a snapshot, itself.
    """

    source: Rank | DeviceReport
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

    @property
    def pressure(self) -> str:
        """How full the memory is; empty where that is unknown, or for a host with room."""
        ledger = self.ledger
        if ledger is None or not ledger.limit_bytes:
            return ""
        full, place = percent(ledger.filled or 0), "the machine" if ledger.place == "host" else ledger.place
        if not ledger.is_under_pressure:
            fits = ": a larger batch fits" if ledger.has_room else ""
            return "" if ledger.place == "host" else f"{place} is {full} full at its peak{fits}."
        ranks = f" in each of {ledger.sharing} processes" if ledger.sharing > 1 else ""
        others = f" and {format_bytes(ledger.outside_bytes)} outside the allocator" if ledger.outside_bytes else ""
        peak, limit = format_bytes(ledger.peak_bytes), format_bytes(ledger.limit_bytes)
        return f"The peak of {peak}{ranks}{others} is {full} of the {limit} that {place} can hold."

    def fields(self, facts: Facts, owner: str) -> dict[str, Any]:
        """Return the fields of titles and remedies."""
        where = "" if isinstance(self.source, DeviceReport) else facts.on_rank(self.source)
        return {"owner": owner, "size": self.size, "share": percent(self.share), "place": self.place, "rank": where}

    def seen(self, facts: Facts, further: tuple[Evidence, ...]) -> tuple[Evidence, ...]:  # noqa: ARG002 as time
        """Return the files that show them, ``further`` ones in place of the usual."""
        return further or self.evidence

    def is_notable(self, share: float, least: int, *, repeats: bool) -> bool:  # noqa: ARG002 as time
        """Return whether they are such a share of the whole, and ``least`` bytes; they stay until they are freed."""
        return self.share >= share and self.bytes >= least

    def at_most(self, severity: Severity) -> Severity:
        """Return how severe they can be: without a limit where the memory is nearly full."""
        return Severity.CRITICAL if self.ledger is not None and self.ledger.is_under_pressure else severity

    def of_ledger(self, worth: Recovery, of: Iterable[str]) -> Recovery | None:
        """Return what is recovered, of the whole of the ledger; None where that has nothing of it."""
        if self.ledger is None or not any(map(self.ledger.bytes, of)):
            return None
        return replace(worth, whole=self.ledger.peak_bytes)

    def worth(self, saves: tuple[float, float], of: Iterable[str]) -> Recovery:
        """Return what a remedy recovers that saves these shares of them, at most what the ledger has of ``of``."""
        held = sum(map(self.ledger.bytes, of)) if self.ledger is not None else 0
        least, most = (min(self.bytes * share, held or self.bytes * share) for share in saves)
        of_whole = "the reserved memory" if isinstance(self.source, DeviceReport) else "the peak"
        return Recovery(unit="bytes", min=least, max=most, whole=self.whole, of=of_whole)

    def numbers(self, owner: str) -> dict[str, Any]:
        """Return the figures of a finding."""
        of_rank = {"rank": self.source.rank} if isinstance(self.source, Rank) else {"device": self.source.device}
        return {
            **of_rank, "bytes": self.bytes, "peak_bytes": self.whole, "share": self.share, "owner": owner or None,
        }  # fmt: skip


def time_of(facts: Facts, parts: Iterable[str], *, each: bool) -> list[Fact]:
    """Return the time that parts take on the rank that spends most in them, or that ``each`` of its owners takes."""
    worst = facts.heaviest(lambda ledger: ledger.ns(*parts))
    if worst is None:
        return []
    rank, ledger = worst
    lines = ledger.of(*parts)
    names = list(dict.fromkeys(line.name for line in lines)) if each else []
    groups = [tuple(line for line in lines if line.name == name) for name in names] or [lines]
    return [Fact(source=rank, ledger=ledger, lines=group) for group in groups[: POLICY.owners]]


def bytes_of(facts: Facts, *categories: str) -> list[ByteFact]:
    """Return the bytes of categories at the peak of each rank of a run, the most first, with their largest owner."""
    found = [
        ByteFact(
            source=rank,
            owner=next(line.name for line in ledger.lines if line.category == category),
            bytes=ledger.bytes(category),
            whole=ledger.peak_bytes,
            place=ledger.place,
            ledger=ledger,
            evidence=(facts.pulse(rank),),
        )
        for category in categories
        for rank in facts.run.ranks
        for ledger in (facts.byte_ledgers.get(rank.rank), facts.resident_ledgers.get(rank.rank))
        if ledger is not None and ledger.bytes(category)
    ]
    return sorted(found, key=lambda fact: -fact.bytes)


def on_device(snapshot: SnapshotReport, device: DeviceReport, size: int, whole: int, *, owner: str = "") -> ByteFact:
    """Return bytes of a whole on a device, with its history as evidence."""
    ledger = snapshot_bytes(device)
    return ByteFact(
        source=device,
        owner=owner,
        bytes=size,
        whole=whole,
        place=ledger.place,
        ledger=ledger,
        evidence=(seen_in(snapshot, device),),
    )


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
