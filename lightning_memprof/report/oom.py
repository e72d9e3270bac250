"""An out-of-memory event in words, for the page and for standard error."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from lightning_memprof.analysis.oom.autopsy import Autopsy, autopsy
from lightning_memprof.analysis.oom.events import oom_events
from lightning_memprof.analysis.run.rows import first_row, last_row, manifest_rows
from lightning_memprof.artifacts.naming import manifest_name, oom_name
from lightning_memprof.report.words import clean
from lightning_memprof.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lightning_memprof.analysis.oom.autopsy import Holder
    from lightning_memprof.report.view import View

__all__ = ["autopsy_lines", "print_autopsy", "view_lines"]

WIDTH: Final = 80
LABEL_WIDTH: Final = 10
SHOWN_TENSORS: Final = 5
SHOWN_EVENTS: Final = 2
LONGEST_NAME: Final = 52
ASCII: Final = str.maketrans({"·": ",", "…": "~"})


def print_autopsy(directory: Path, rank: int, file: TextIO) -> None:
    """Print the last out-of-memory event of a rank.

    Args:
        directory: the run directory.
        rank: the rank.
        file: where to.

    Raises:
        ArtifactError: nothing of it can be read.

    """
    rows, _ = manifest_rows(directory / manifest_name(rank))
    events = oom_events(directory, rank, rows)
    if not events:
        return
    world_size = (first_row(rows, "run") or {}).get("world_size")
    lines = autopsy_lines(autopsy(events[-1], {**(last_row(rows, "training") or {}), "world_size": world_size}))
    lines.append(("file", str(directory / oom_name(rank))))
    if events[-1].snapshot is not None:
        lines.append(("", f"{events[-1].snapshot} (drop it on pytorch.org/memory_viz)"))
    print_lines(lines, file)


def view_lines(view: View) -> Iterator[list[tuple[str, str]]]:
    """Yield the lines of each event that the page shows: those that ended a rank first, then the latest."""
    events = sorted(view.ooms, key=lambda oom: (not oom.ended_run, oom.rank if oom.ended_run else -oom.number))
    for event in events[:SHOWN_EVENTS]:
        yield autopsy_lines(event)
    if len(events) > SHOWN_EVENTS:
        yield [("memory", f"ran out {len(events) - SHOWN_EVENTS} times more: --format json")]


def print_lines(lines: Sequence[tuple[str, str]], file: TextIO) -> None:
    """Print labelled lines at most 80 columns wide, in what the file's encoding can write; paths are not broken."""
    blank = " " * LABEL_WIDTH
    printed = [""]
    for label, line in lines:
        start = f"{label:<{LABEL_WIDTH}}"
        wrapped = textwrap.wrap(
            clean(line), WIDTH, initial_indent=start, subsequent_indent=blank + "  " * bool(not label),
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        printed += wrapped or [start]
    encoding = getattr(file, "encoding", None) or "utf-8"
    text = "\n".join([*printed, ""]) + "\n"
    if encoding.lower().replace("-", "") != "utf8":
        text = text.translate(ASCII)
    file.write(text.encode(encoding, "backslashreplace").decode(encoding))
    file.flush()


def autopsy_lines(oom: Autopsy) -> list[tuple[str, str]]:
    """Return an event as ``(label, text)``; a line that goes on has no label."""
    lines = [("memory", f"out of memory on {_where(oom)}")]
    lines.append(("asked", _asked(oom)))
    lines.append(("why", f"{oom.cause}: {oom.why}"))
    lines.append(("had", _had(oom)))
    lines += _listed("held by", [(held.bytes, held.name, "") for held in oom.held])
    lines += _holders("lines", oom.by_stack, oom.by_stack_note)
    lines += _holders("modules", oom.by_module, oom.by_module_note if oom.by_stack else None)
    tensors = oom.tensors[:SHOWN_TENSORS] if not oom.by_stack else ()
    lines += _listed("tensors", [(held.bytes, held.name, _detail(held)) for held in tensors])
    lines += [("next" if not index else "", f"{index + 1}. {step}") for index, step in enumerate(oom.next_steps)]
    return lines


def _where(oom: Autopsy) -> str:
    place = oom.place
    words = [f"{'the host' if oom.is_host else oom.device} (rank {oom.rank})"]
    words.append("before the first step" if place["step"] is None else f"step {place['step']}")
    if place["phase"]:
        function = place["function"]
        inside = f" of {function}" if function and function != "training_step" else ""
        words.append(f"{str(place['phase']).replace('_', ' ')}{inside}")
    path, named = place["module"], place["module_class"]
    if path:
        words.append(f"in {path}" + (f" ({named})" if named else ""))
    elif named:
        words.append(f"in {named}")
    words.append(f"window {place['window']} open" if place["window"] is not None else "no window open")
    if not oom.ended_run:
        words.append("caught: the run went on")
    return ", ".join(words)


def _asked(oom: Autopsy) -> str:
    by = f" by {_short(oom.line)}" if oom.line else ""
    if oom.asked_bytes is None:
        return f"how much is not known{by}: Python's MemoryError does not say"
    about = "about " if oom.asked_source == "message, rounded" else ""
    return f"{about}{format_bytes(oom.asked_bytes)}{by}"


def _had(oom: Autopsy) -> str:
    memory = oom.memory
    named: tuple[tuple[str, int | None], ...]
    if oom.is_host:
        named = (
            ("rss", memory.allocated_bytes), ("vms", memory.reserved_bytes), ("available", memory.free_bytes),
            ("limit", memory.limit_bytes), ("machine", memory.total_bytes),
        )  # fmt: skip
    else:
        named = (
            ("allocated", memory.allocated_bytes), ("reserved", memory.reserved_bytes),
            ("unused", memory.unused_bytes), ("largest unused piece", memory.largest_free_bytes),
            ("free", memory.free_bytes), ("outside of torch", memory.other_bytes), ("device", memory.total_bytes),
        )  # fmt: skip
    known = [f"{name} {format_bytes(value)}" for name, value in named if value is not None]
    return " · ".join(known) or "no figures"


def _holders(label: str, holders: Sequence[Holder], note: str | None) -> Iterator[tuple[str, str]]:
    if note is not None:
        yield label, f"not known: {note}"
        return
    yield from _listed(label, [(holder.bytes, _short(holder.name), _detail(holder)) for holder in holders])


def _listed(label: str, rows: Sequence[tuple[int, str, str]]) -> Iterator[tuple[str, str]]:
    for index, (size, name, detail) in enumerate(rows):
        yield "" if index else label, f"{format_bytes(size):>9}  {name}{detail}"


def _detail(holder: Holder) -> str:
    words = [] if holder.detail is None else [holder.detail]
    if holder.blocks > 1:
        words.append(f"{holder.blocks} blocks")
    return f" ({', '.join(words)})" if words else ""


def _short(name: str) -> str:
    """Write a path below the working directory relative to it, and the last parts of one that is long."""
    here = os.getcwd() + os.sep  # noqa: PTH109 compared as text
    short = name.removeprefix(here)
    parts = short.rsplit("/", 3)
    return short if len(short) <= LONGEST_NAME or len(parts) < 4 else "/".join(["…", *parts[1:]])
