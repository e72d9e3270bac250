"""Out-of-memory events: place, cause, memory at that moment, sites and remedies; holders of growing memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from lightning_memprof.account.ledger.holders import who_holds
from lightning_memprof.account.oom.autopsy import Autopsy, Holder, autopsies
from lightning_memprof.account.oom.causes import Memory
from lightning_memprof.account.parts import phase_label
from lightning_memprof.artifacts.naming import oom_name
from lightning_memprof.artifacts.series import HolderRow
from lightning_memprof.judge.out_of_memory import remedies_for
from lightning_memprof.read.run.load import load_rank
from lightning_memprof.report.document import Cell, Item, Line, Lines, Section, Table, Words, joined, phrase
from lightning_memprof.report.sections.labels import more
from lightning_memprof.report.sections.tables import Field, filled
from lightning_memprof.report.view import View

MAX_EVENTS: Final = 2
MAX_TENSORS: Final = 5
LONGEST_NAME: Final = 52
GROWTH: Final = frozenset({"memory_growth"})
NAMELESS: Final = {
    "remainder": "(no Python object: native code)",
    "free memory": "(freed memory that the C allocator keeps)",
    "first touch": "(first touch of memory allocated before)",
}
AUTOGRAD: Final = "(no Python object: autograd or C++)"


def oom_section(events: Sequence[Autopsy]) -> Section | None:
    """Return the events that ended a rank first, then the latest; None where memory did not run out."""
    if not events:
        return None
    ordered = sorted(events, key=lambda event: (not event.ended_run, event.rank if event.ended_run else -event.number))
    parts = [part for number, event in enumerate(ordered[:MAX_EVENTS]) for part in _event(number, event)]
    lead = more(len(events) - MAX_EVENTS, "more events") if len(events) > MAX_EVENTS else ""
    return Section("oom", "Out of memory", lead, parts, summary=True)


def holders_section(view: View) -> Section | None:
    """Return the holders of growing memory; None where memory does not grow and no request asked for them."""
    grows = any(finding.rule in GROWTH for finding in view.findings)
    found = [
        (rank.rank, row) for rank in view.run.ranks if rank.in_full for row in who_holds(rank.read(HolderRow).rows)
    ]
    if not found or not (grows or any(row.asked for _, row in found)):
        return None
    first = found[0][1]
    steps = f"{first.since_step} and {first.step}"
    lead = phrase("Memory grew by {bytes} between steps {}.", first.grown_bytes or 0, steps)
    parts = filled(
        Table("growing-holders", "Growing memory by holder", is_sortable=False),
        found,
        Field("holder", "code", _holder_name),
        Field("growth", "bytes", lambda row: row[1].added_bytes, bar=True),
        Field("new entries", "count", lambda row: row[1].added),
        Field("content", "code", lambda row: row[1].content),
        Field("assigned in", "code", lambda row: row[1].line),
        Field("source", "code", lambda row: row[1].source, priority=2),
        Field("kind", "text", lambda row: row[1].kind, priority=1),
        Field("entries", "count", lambda row: row[1].count, priority=2),
        Field("limit", "count", lambda row: row[1].bound, priority=2),
        Field("rank", "index", lambda row: row[0], priority=2),
    )
    return Section("holders", "Who keeps the memory", lead, list(parts))


def _holder_name(row: tuple[int, HolderRow]) -> Cell:
    if row[1].place:
        return Cell(row[1].place, "code")
    return Cell(NAMELESS.get(row[1].kind or "", AUTOGRAD))


def autopsy_section(directory: Path, rank: int) -> Section | None:
    """Return the last out-of-memory event of a rank, with the files that have more; None where there is none.

    Raises:
        ArtifactError: its files cannot be read.
    """
    run = load_rank(directory, rank)
    if not run.ooms:
        return None
    (event,) = autopsies(replace(run, ooms=run.ooms[-1:]))
    files = [Line("file", Cell(str(directory / oom_name(rank)), "path"))]
    if (snapshot := run.ooms[-1].snapshot) is not None:
        files.append(Line("snapshot", Cell(str(snapshot), "path")))
        files.append(Line("", "the snapshot opens at pytorch.org/memory_viz"))
    return Section("oom", "Out of memory", parts=[*_event(0, event), Lines("", files)], summary=True)


def _event(number: int, event: Autopsy) -> Iterator[Item]:
    steps = remedies_for(event)
    yield Lines(
        "",
        [
            Line("memory", f"out of memory on {_where(event)}", "bad"),
            Line("failed", _failed(event)),
            Line("state", _state(event)),
        ],
    )
    yield Lines(
        "",
        [
            Line("why", f"{event.cause}: {event.why}"),
            *(Line("" if place else "next", f"{place + 1}. {step.text}") for place, step in enumerate(steps)),
        ],
        is_short=False,
    )
    if event.held:
        yield from _sites(f"oom-categories-{number}", "Allocated bytes by category", "category", event.held)
    if event.by_stack:
        yield from _sites(f"oom-lines-{number}", "Allocation sites by line", "line", event.by_stack)
        if event.by_module:
            yield from _sites(f"oom-modules-{number}", "Allocation sites by module", "module", event.by_module)
    elif event.tensors:
        yield from _sites(f"oom-tensors-{number}", "Largest tensors", "tensor", event.tensors[:MAX_TENSORS])
    if event.by_stack_note is not None:
        yield Lines("", [Line("lines", f"not available: {event.by_stack_note}", "dim")])


def _sites(table_id: str, title: str, heading: str, sites: Sequence[Holder]) -> Iterator[Table]:
    return filled(
        Table(table_id, title),
        sites,
        Field(heading, "code", _named),
        Field("bytes", "bytes", lambda site: site.bytes, bar=True),
        Field("blocks", "count", lambda site: site.blocks if site.blocks > 1 else None),
        Field("detail", "text", lambda site: site.detail),
        most=None,
    )


def _named(site: Holder) -> Cell:
    """Return the name of a line or a module, or the sentence in its place."""
    return Cell(site.name) if site.name.count(" ") > 3 else Cell(_short(site.name), "code")


def _where(event: Autopsy) -> str:
    place = event.place
    words = [f"{'the host' if event.is_host else event.device} (rank {event.rank})"]
    words.append("before the first step" if place["step"] is None else f"step {place['step']}")
    if place["phase"]:
        function = place["function"]
        inside = f" of {function}" if function and function != "training_step" else ""
        words.append(f"{phase_label(str(place['phase']))}{inside}")
    path, named = place["module"], place["module_class"]
    if path:
        words.append(f"in {path}" + (f" ({named})" if named else ""))
    elif named:
        words.append(f"in {named}")
    words.append(f"window {place['window']} open" if place["window"] is not None else "no window open")
    if not event.ended_run:
        words.append("caught: the run continued")
    return ", ".join(words)


def _failed(event: Autopsy) -> Words:
    by = f" by {_short(event.line)}" if event.line else ""
    if event.asked_bytes is None:
        return f"allocation of unknown size{by}: Python's MemoryError has no size"
    about = "about " if event.asked_source == "message, rounded" else ""
    return phrase("allocation of {}{bytes}{}", about, event.asked_bytes, by)


def _state(event: Autopsy) -> Words:
    memory = event.memory
    names = (
        {
            "RSS": memory.allocated_bytes,
            "VMS": memory.reserved_bytes,
            "available": memory.free_bytes,
            "limit": memory.limit_bytes,
            "machine": memory.total_bytes,
        }
        if event.is_host
        else {
            "allocated": memory.allocated_bytes,
            "reserved": memory.reserved_bytes,
            "unused": memory.unused_bytes,
            "largest unused block": memory.largest_free_bytes,
            "free": memory.free_bytes,
            **_outside(memory),
            "device": memory.total_bytes,
        }
    )
    known = [phrase("{} {bytes}", name, value) for name, value in names.items() if value is not None]
    return joined(" · ", known) if known else "not available"


def _outside(memory: Memory) -> Mapping[str, int | None]:
    if memory.process_bytes is None or memory.other_bytes is None:
        return {"outside of torch": memory.other_bytes}
    return {"other processes": memory.process_bytes, "CUDA context": max(0, memory.other_bytes - memory.process_bytes)}


def _short(name: str) -> str:
    """Return a path below the working directory relative to it, and the last parts of a long path."""
    here = os.getcwd() + os.sep  # noqa: PTH109 compared as text
    short = name.removeprefix(here)
    parts = short.rsplit("/", 3)
    return short if len(short) <= LONGEST_NAME or len(parts) < 4 else "/".join(["…", *parts[1:]])
