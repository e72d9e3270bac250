"""The document of an estimate."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Final

from lightning_memprof.account.estimate import KNOWN, Alternative, Estimate
from lightning_memprof.report.document import (
    Badge,
    Cell,
    Chart,
    Command,
    Document,
    Facts,
    Figure,
    Figures,
    Item,
    Line,
    Lines,
    Phrase,
    Section,
    Stack,
    Style,
    Table,
    Words,
    phrase,
)
from lightning_memprof.report.sections.labels import bars, called
from lightning_memprof.report.sections.tables import Field, filled
from lightning_memprof.units import MIB, format_bytes, format_count, percent

_LOOKS: Final[dict[str, tuple[Badge, Style]]] = {
    "fits": ("none", "good"),
    "does not fit": ("critical", "bad"),
    "too close to call": ("warning", "warn"),
    "no limit": ("none", ""),
}
_NAMED: Final = 3
_FEW: Final = 1_000
_STEPS: Final = ("first", "second", "third")
_OUTSIDE: Final = "(no module)"
_BARE_CLI: Final = 'python -c "from lightning.pytorch.cli import LightningCLI; LightningCLI()"'


def estimate_document(estimate: Estimate) -> Document:
    """Return the document of an estimate."""
    badge, style = _LOOKS["too close to call" if estimate.retries else estimate.fit]
    return Document(
        title=estimate.program,
        kind="estimate",
        about=_about(estimate),
        status="estimated" if estimate.fit == "no limit" else estimate.fit,
        status_style=style,
        badge=badge,
        verdict=_verdict(estimate),
        why=_why(estimate),
        next=_next(estimate),
        sections=[_overview(estimate), _memory(estimate), _modules(estimate), _basis(estimate)],
        commands=list(_commands(estimate)),
    )


def _commands(estimate: Estimate) -> Iterator[Command]:
    if estimate.fit == "does not fit" and estimate.device.source == KNOWN and estimate.is_program:
        device = shlex.quote(estimate.device.name.removeprefix("NVIDIA "))
        yield Command(f"lightning-memprof estimate --device {device} --batch-size max", estimate.program)
    if estimate.program.startswith("fit "):
        callback = "--trainer.callbacks+=lightning_memprof.MemProfilerCallback"
        yield Command(_BARE_CLI, f"{estimate.program} {callback}")
    elif estimate.is_program:
        yield Command("lightning-memprof", f"run {estimate.program}")


def _about(estimate: Estimate) -> Words:
    ranks = f" · {estimate.strategy} on {format_count(estimate.ranks, 'device')}" if estimate.strategy else ""
    samples = "batch" if estimate.batch_size is None else f"batch of {format_count(estimate.batch_size, 'sample')}"
    shapes = f" ({', '.join(estimate.batch)})" if estimate.batch else ""
    few = estimate.parameters < _FEW
    count = format_count(estimate.parameters, "parameter") if few else Cell(estimate.parameters, "parameters")
    first = f" · first fit at {estimate.called_at}" if estimate.called_at else ""
    return Phrase((f"{estimate.device.name} · ", count, f" · {samples}{shapes}{ranks}{first}"))


def _verdict(estimate: Estimate) -> Words:
    limit, reserved = estimate.device.usable_bytes, estimate.reserved
    if limit is None:
        return phrase("Needs {bytes} of memory at its peak.", reserved.likely_bytes)
    if estimate.fit == "fits":
        if estimate.is_largest:
            samples = format_count(estimate.batch_size or 0, "sample")
            return phrase(
                "The largest batch that fits has {}: {bytes} of {bytes} usable.", samples, reserved.likely_bytes, limit
            )
        if estimate.retries:
            return phrase(
                "Fits, barely: the peak is {bytes} of {bytes}, and the allocator empties its cache, which is slow.",
                reserved.likely_bytes,
                limit,
            )
        return phrase("Fits: the peak is {bytes}, and {bytes} is usable.", reserved.likely_bytes, limit)
    if estimate.fit == "does not fit":
        over = reserved.likely_bytes - limit
        return phrase("Does not fit: the peak is {bytes}, {bytes} more than is usable.", reserved.likely_bytes, over)
    between = (reserved.low_bytes, reserved.high_bytes)
    return phrase("Too close to call: the peak is between {bytes} and {bytes}; {bytes} are usable.", *between, limit)


def _why(estimate: Estimate) -> str:
    """Name the categories that are most of the peak."""
    whole = estimate.allocated_bytes
    largest = sorted(estimate.categories.items(), key=lambda entry: -entry[1])[:_NAMED]
    parts = [f"{called(name)} {format_bytes(count)} ({percent(count / whole)})" for name, count in largest if whole]
    when = estimate.part if estimate.part == "setup" else f"the {estimate.part} of the {_STEPS[estimate.step]} step"
    return f"At the peak, in {when}: {', '.join(parts)}."


def _next(estimate: Estimate) -> str:
    """Name the changes that make a training run fit, or else the one that saves most."""
    limit = estimate.device.usable_bytes
    if limit is None or estimate.fit == "fits":
        return ""
    changes = [changed for changed in estimate.alternatives if not changed.is_rank]
    fitting = [changed.change for changed in changes if changed.fit == "fits"]
    if fitting:
        return f"It fits with {' or '.join(fitting)}."
    if estimate.batchless_bytes > limit:
        alone = format_bytes(estimate.batchless_bytes)
        return f"Parameters, gradients and optimizer state alone need {alone}: no batch size makes it fit."
    return "None of the changes below makes it fit; try --batch-size max." if changes else ""


def _overview(estimate: Estimate) -> Section:
    reserved, device = estimate.reserved, estimate.device
    between = phrase("between {bytes} and {bytes}", reserved.low_bytes, reserved.high_bytes)
    figures = [
        Figure("reserved", Cell(reserved.likely_bytes, "bytes"), between),
        Figure("tensors", Cell(estimate.allocated_bytes, "bytes"), phrase("reached by {}", estimate.operator)),
    ]
    if device.usable_bytes is not None and device.total_bytes is not None:
        kept: Words = phrase("of {bytes}; CUDA and the driver use the rest", device.total_bytes)
        if estimate.retries:
            kept = f"the allocator empties its cache {format_count(estimate.retries, 'time')} to fit: this is slow"
        figures.append(
            Figure("usable", Cell(device.usable_bytes, "bytes"), kept if device.name != "CPU" else device.source)
        )
    if estimate.host.total_bytes >= MIB:
        moved = (estimate.host.to_device_bytes, estimate.host.to_host_bytes)
        copied = phrase("per device; {bytes} to it and {bytes} back per step", *moved)
        figures.append(Figure("host", Cell(estimate.host.total_bytes, "bytes"), copied))
    parts: list[Item] = [Figures(figures)]
    if estimate.alternatives:
        parts.append(Lines("Alternatives", [_line(changed, estimate) for changed in estimate.alternatives]))
    if estimate.assumptions:
        lines = [Line("assumed", words, "warn") for words in estimate.assumptions[:_NAMED]]
        parts.append(Lines("Assumptions", lines))
    whole = estimate.allocated_bytes
    parts.append(Stack("Peak memory by category", Cell(whole, "bytes"), bars(estimate.categories, whole, "bytes")))
    return Section("overview", "Overview", parts=parts, summary=True)


def _line(changed: Alternative, estimate: Estimate) -> Line:
    if changed.reserved is None:
        return Line(changed.change, changed.problem, "dim")
    likely = changed.reserved.likely_bytes
    saved = estimate.reserved.likely_bytes - likely
    costs = f"; {changed.costs}" if changed.costs and saved > 0 else ""
    fit = f", {changed.fit}" if changed.fit != "no limit" else ""
    return Line(changed.change, phrase("{bytes} ({bytes change}){}{}", likely, -saved, fit, costs))


def _memory(estimate: Estimate) -> Section:
    whole = estimate.allocated_bytes
    totals = [sum(values) for values in zip(*estimate.live.values(), strict=True)]
    dtypes = filled(
        Table("dtypes", "Peak memory by dtype"),
        list(estimate.dtypes.items()),
        Field("dtype", "code", lambda row: row[0]),
        Field("bytes", "bytes", lambda row: Cell(row[1], "bytes", whole), has_share=True),
    )
    return Section("memory", "Memory", parts=[Chart("live", "Memory of tensors during a step", totals), *dtypes])


def _modules(estimate: Estimate) -> Section:
    whole = estimate.allocated_bytes
    note = f"Activations belong to the module whose forward makes them; {_OUTSIDE} is all else, such as the loss."
    table = filled(
        Table("modules", "Peak memory by module", notes=[note]),
        estimate.modules,
        Field("module", "code", lambda row: row[0] or _OUTSIDE),
        Field("category", "text", lambda row: called(row[1])),
        Field("bytes", "bytes", lambda row: Cell(row[2], "bytes", whole), has_share=True),
        most=None,
    )
    return Section("modules", "Modules", parts=list(table))


def _basis(estimate: Estimate) -> Section:
    facts = Facts(
        "Simulation",
        [
            ("device", Cell(f"{estimate.device.name} ({estimate.device.source})")),
            ("steps simulated", Cell(str(estimate.steps))),
            ("time of the simulation", Cell(estimate.seconds * 1e9, "ns")),
        ],
    )
    others = Lines("Further assumptions", [Line("assumed", words) for words in estimate.assumptions[_NAMED:]])
    return Section("basis", "Basis", parts=[facts, others] if others.rows else [facts])
