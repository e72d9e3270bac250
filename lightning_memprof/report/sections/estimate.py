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
    Column,
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
    change,
    code,
    duration,
    phrase,
    rate,
    size,
    text,
)
from lightning_memprof.report.sections.labels import bars, called
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
        sections=list(_sections(estimate)),
        commands=list(_commands(estimate)),
    )


def _sections(estimate: Estimate) -> Iterator[Section]:
    yield _overview(estimate)
    yield _memory(estimate)
    yield _modules(estimate)
    if estimate.alternatives:
        yield _alternatives(estimate)
    yield _basis(estimate)


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
    count = format_count(estimate.parameters, "parameter") if few else rate(estimate.parameters, "parameters")
    first = f" · first fit at {estimate.called_at}" if estimate.called_at else ""
    return Phrase((f"{estimate.device.name} · ", count, f" · {samples}{shapes}{ranks}{first}"))


def _verdict(estimate: Estimate) -> Words:
    limit, reserved = estimate.device.usable_bytes, estimate.reserved
    if limit is None:
        return phrase("Needs {} of memory at its peak.", size(reserved.likely_bytes))
    if estimate.fit == "fits":
        if estimate.is_largest:
            samples = format_count(estimate.batch_size or 0, "sample")
            fits = size(reserved.likely_bytes)
            return phrase("The largest batch that fits has {}: {} of {} usable.", samples, fits, size(limit))
        if estimate.retries:
            return phrase(
                "Fits, barely: the peak is {} of {} usable, and the allocator empties its cache, which is slow.",
                size(reserved.likely_bytes),
                size(limit),
            )
        return phrase("Fits: the peak is {}, and {} is usable.", size(reserved.likely_bytes), size(limit))
    if estimate.fit == "does not fit":
        over = size(reserved.likely_bytes - limit)
        return phrase("Does not fit: the peak is {}, {} more than is usable.", size(reserved.likely_bytes), over)
    low, high = size(reserved.low_bytes), size(reserved.high_bytes)
    return phrase("Too close to call: the peak is between {} and {}; {} are usable.", low, high, size(limit))


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
    between = phrase("between {} and {}", size(reserved.low_bytes), size(reserved.high_bytes))
    figures = [
        Figure("reserved", size(reserved.likely_bytes), between),
        Figure("tensors", size(estimate.allocated_bytes), phrase("reached by {}", code(estimate.operator))),
    ]
    if device.usable_bytes is not None and device.total_bytes is not None:
        kept: Words = phrase("of {}; CUDA and the driver use the rest", size(device.total_bytes))
        if estimate.retries:
            kept = f"the allocator empties its cache {format_count(estimate.retries, 'time')} to fit: this is slow"
        figures.append(Figure("usable", size(device.usable_bytes), kept if device.name != "CPU" else device.source))
    if estimate.host.total_bytes >= MIB:
        moved = (size(estimate.host.to_device_bytes), size(estimate.host.to_host_bytes))
        copied = phrase("per device; {} to it and {} back per step", *moved)
        figures.append(Figure("host", size(estimate.host.total_bytes), copied))
    parts: list[Item] = [Figures(figures)]
    if estimate.alternatives:
        parts.append(Lines("Alternatives", [_line(changed, estimate) for changed in estimate.alternatives]))
    if estimate.assumptions:
        lines = [Line("assumed", words, "warn") for words in estimate.assumptions[:_NAMED]]
        parts.append(Lines("Assumptions", lines))
    whole = estimate.allocated_bytes
    parts.append(Stack("Peak memory by category", size(whole), bars(estimate.categories, whole, "bytes")))
    return Section("overview", "Overview", parts=parts, summary=True)


def _line(changed: Alternative, estimate: Estimate) -> Line:
    if changed.reserved is None:
        return Line(changed.change, changed.problem, "dim")
    likely = changed.reserved.likely_bytes
    saved = estimate.reserved.likely_bytes - likely
    costs = f"; {changed.costs}" if changed.costs and saved > 0 else ""
    fit = f", {changed.fit}" if changed.fit != "no limit" else ""
    return Line(changed.change, phrase("{} ({}){}{}", size(likely), change(-saved), fit, costs))


def _memory(estimate: Estimate) -> Section:
    whole = estimate.allocated_bytes
    totals = [sum(values) for values in zip(*estimate.live.values(), strict=True)]
    dtypes = Table(
        id="dtypes",
        title="Peak memory by dtype",
        columns=(Column("dtype", "code"), Column("bytes", "bytes", has_share=True)),
        rows=[(code(name), size(value, whole)) for name, value in estimate.dtypes.items()],
    )
    return Section("memory", "Memory", parts=[Chart("live", "Memory of tensors during a step", totals), dtypes])


def _modules(estimate: Estimate) -> Section:
    whole = estimate.allocated_bytes
    table = Table(
        id="modules",
        title="Peak memory by module",
        columns=(Column("module", "code"), Column("category"), Column("bytes", "bytes", has_share=True)),
        rows=[
            (code(module or _OUTSIDE), text(called(name)), size(value, whole))
            for module, name, value in estimate.modules
        ],
        notes=[f"Activations belong to the module whose forward makes them; {_OUTSIDE} is all else, such as the loss."],
    )
    return Section("modules", "Modules", parts=[table])


def _alternatives(estimate: Estimate) -> Section:
    table = Table(
        id="alternatives",
        title="The same training, changed",
        columns=(
            Column("change"),
            Column("tensors", "bytes", priority=1),
            Column("reserved", "bytes"),
            Column("difference", "bytes change"),
            Column("fits"),
            Column("cost", priority=2),
        ),
        rows=[tuple(_alternative(changed, estimate)) for changed in estimate.alternatives],
        is_sortable=False,
        top=None,
    )
    return Section("alternatives", "Alternatives", parts=[table])


def _alternative(changed: Alternative, estimate: Estimate) -> Iterator[Cell]:
    likely = None if changed.reserved is None else changed.reserved.likely_bytes
    yield text(changed.change)
    yield size(changed.allocated_bytes)
    yield size(likely)
    yield change(None if likely is None else likely - estimate.reserved.likely_bytes)
    yield text("" if changed.fit in {None, "no limit"} else str(changed.fit))
    yield text(changed.problem or changed.costs)


def _basis(estimate: Estimate) -> Section:
    facts = Facts(
        "Simulation",
        [
            ("device", text(f"{estimate.device.name} ({estimate.device.source})")),
            ("steps simulated", text(str(estimate.steps))),
            ("time of the simulation", duration(estimate.seconds * 1e9)),
        ],
    )
    others = Lines("Further assumptions", [Line("assumed", words) for words in estimate.assumptions[_NAMED:]])
    return Section("basis", "Basis", parts=[facts, others] if others.rows else [facts])
