"""DataLoader workers: their memory, their time, and the total of the node."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import Final

from lightning_memprof.account.steps.workers import (
    Call,
    Worker,
    calls,
    pinning_ns,
    private_memory,
    ready_batches,
    workers,
)
from lightning_memprof.report.document import Cell, Chart, Item, Line, Lines, Section, Table, Words, phrase
from lightning_memprof.report.sections.tables import Field, filled
from lightning_memprof.report.view import View
from lightning_memprof.units import format_count

# From this share of the limit on, the number of workers matters.
NEAR: Final = 0.5


def workers_section(view: View) -> Section | None:
    """Return the workers of all ranks; None without any."""
    found = [(rank.rank, worker) for rank in view.run.ranks for worker in workers(rank)]
    if not found:
        return None
    memory = private_memory(view.run.lead)
    held = [row.private_bytes for _, row in found if row.private_bytes is not None]
    counted = format_count(len(found), "worker")
    lead = phrase(
        "{}: {bytes} of private memory at most, {bytes} per worker.",
        counted,
        max(memory, default=sum(held)),
        max(held, default=None),
    )
    parts: list[Item] = [
        Chart("workers", "Private memory of the workers", memory, _span(memory)),
        *_memory(found),
        *_time(found),
        *_calls([(rank.rank, call) for rank in view.run.ranks for call in calls(rank)]),
        *_queue(view),
        *_node(view),
    ]
    return Section("workers", "DataLoader workers", lead, parts)


def _span(memory: list[int]) -> Words:
    return phrase("{bytes} to {bytes}", memory[0], memory[-1]) if memory else ""


def _worker(*last: Field[tuple[int, Worker]]) -> tuple[Field[tuple[int, Worker]], ...]:
    return (
        Field("data set", "code", lambda row: row[1].dataset),
        Field("worker", "index", lambda row: row[1].number),
        *last,
        Field("pid", "index", lambda row: row[1].pid, priority=1),
        Field("rank", "index", lambda row: row[0], priority=2),
    )


def _memory(found: list[tuple[int, Worker]]) -> Iterator[Table]:
    fields = _worker(
        Field("private", "bytes", lambda row: row[1].private_bytes, bar=True),
        Field("shared", "bytes", lambda row: row[1].shared_bytes),
        Field("proportional", "bytes", lambda row: row[1].pss_bytes),
        Field("growth", "bytes change", lambda row: row[1].added_bytes),
        Field("exit code", "count", lambda row: row[1].exit_code, priority=1),
    )
    notes = ["private: no other process has these bytes; proportional (PSS): shared bytes are divided among processes"]
    yield from filled(Table("worker-memory", "Memory by worker", notes=notes), found, *fields)


def _time(found: list[tuple[int, Worker]]) -> Iterator[Table]:
    timed = [row for row in found if row[1].cpu_share is not None or row[1].batches]
    fields = _worker(
        Field("batches", "count", lambda row: row[1].batches),
        Field("fetch/batch", "ns", lambda row: row[1].fetch_ns, bar=True),
        Field("collate/batch", "ns", lambda row: row[1].collate_ns),
        Field("computing", "share", lambda row: row[1].cpu_share),
        Field("blocked", "share", lambda row: row[1].blocked_share),
        Field("waiting for a core", "share", lambda row: row[1].core_wait_share, priority=1),
        Field("no work", "share", lambda row: row[1].queue_share),
        Field("waiting for disks", "share", lambda row: row[1].io_share, priority=2),
        Field("read", "bytes", lambda row: row[1].read_bytes, priority=2),
    )
    notes = [
        "blocked: in the data set without computing, as for disk, network, locks and sleep",
        "no work: the queue of indices is empty",
    ]
    yield from filled(Table("worker-time", "Time by worker", notes=notes), timed, *fields)


def _calls(found: list[tuple[int, Call]]) -> Iterator[Table]:
    fields: tuple[Field[tuple[int, Call]], ...] = (
        Field("function", "code", lambda row: row[1].function),
        Field("share", "share", lambda row: row[1].share, bar=True),
        Field("self/batch", "ns", lambda row: row[1].self_ns),
        Field("total/batch", "ns", lambda row: row[1].total_ns),
        Field("count/batch", "count", lambda row: row[1].count),
        Field("data set", "code", lambda row: row[1].dataset, priority=1),
        Field("rank", "index", lambda row: row[0], priority=2),
    )
    yield from filled(Table("worker-calls", "Time inside a fetch"), found, *fields)


def _queue(view: View) -> Iterator[Item]:
    """Yield the batches that wait for the loop, and the time of the pinning thread."""
    ready, pinning = ready_batches(view.run.lead), pinning_ns(view.run.lead)
    facts: list[Line] = []
    if ready:
        yield Chart("ready-batches", "Batches ready when the loop asks for one, in recorded windows", ready)
        words = phrase("{} on average, none in {share} of the fetches", mean(ready), ready.count(0) / len(ready))
        facts.append(Line("ready batches", words))
    if pinning is not None:
        facts.append(Line("pin_memory", phrase("{ns} per batch", pinning)))
    yield from [Lines("", facts)] if facts else []


def _node(view: View) -> Iterator[Lines]:
    """Yield the memory of all ranks of the lead rank's machine and their workers, against its limit."""
    here = [rank for rank in view.run.ranks if rank.facts.host == view.run.lead.facts.host]
    resident = sum(max((row.rss_bytes or 0 for row in rank.pulse), default=0) for rank in here)
    private = sum(max(private_memory(rank), default=0) for rank in here)
    limits = [view.run.lead.facts.environment.get(name) for name in ("memory_limit_bytes", "memory_bytes")]
    limit = next((value for value in limits if isinstance(value, int) and value > 0), None)
    each = max((row.private_bytes or 0 for rank in here for row in workers(rank)), default=0)
    counted = format_count(len(here), "rank")
    words = phrase("{} with {bytes} (RSS), private memory of their workers {bytes}", counted, resident, private)
    lines = [Line("memory of the node", phrase("at most {bytes}: {}", resident + private, words))]
    if limit is not None:
        lines.append(Line("limit of the node", Cell(limit, "bytes")))
        if each and resident + private > NEAR * limit:
            fits = max(0, limit - resident) // (each * len(here))
            lines.append(Line("num_workers that fits", phrase("{} per rank, of {bytes} each", fits, each)))
    yield Lines("", lines)
