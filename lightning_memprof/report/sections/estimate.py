"""The document of an estimate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.report.document import (
    Badge,
    Bar,
    Cell,
    Chart,
    Column,
    Command,
    Document,
    Facts,
    Paragraph,
    Part,
    Phrase,
    Section,
    Stack,
    Style,
    Table,
    Words,
    code,
    count,
    duration,
    phrase,
    rate,
    size,
    text,
)
from lightning_memprof.units import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_memprof.analysis.estimate import Alternative, Estimate

__all__ = ["estimate_document"]

_BADGES: Final[dict[str, Badge]] = {
    "fits": "none", "does not fit": "critical", "too close to call": "warning", "no limit": "none",
}  # fmt: skip
_STYLES: Final[dict[str, Style]] = {
    "fits": "good", "does not fit": "bad", "too close to call": "warn", "no limit": "",
}  # fmt: skip
_CATEGORIES: Final = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients",
    "optimizer_state": "optimizer state",
    "activation": "activations",
    "input": "batch",
    "temporary": "temporaries",
    "workspace": "library workspaces",
}


def estimate_document(estimate: Estimate) -> Document:
    """Return the document of an estimate."""
    return Document(
        title=f"{estimate.program} on {estimate.device.name}",
        kind="estimate",
        about=_about(estimate),
        status=estimate.fit if estimate.device.usable_bytes is not None else "estimated",
        status_style=_STYLES[estimate.fit],
        badge=_BADGES[estimate.fit],
        verdict=_verdict(estimate),
        sections=[_memory(estimate), _modules(estimate), *_alternatives(estimate), _basis(estimate)],
        commands=[Command("lightning-memprof", f"run {estimate.program}")],
    )


def _about(estimate: Estimate) -> Words:
    parts: list[str | Cell] = [rate(estimate.parameters, "parameters"), " · batch of "]
    parts.append("unknown size" if estimate.batch_size is None else format_count(estimate.batch_size, "sample"))
    parts.append(f" ({', '.join(estimate.batch)})" if estimate.batch else "")
    return Phrase((*parts, f" · {format_count(estimate.steps, 'step')} simulated"))


def _verdict(estimate: Estimate) -> Words:
    limit, reserved = estimate.device.usable_bytes, estimate.reserved
    if limit is None:
        return phrase("The tensors of a step need {} at their peak.", size(estimate.allocated_bytes))
    if estimate.fit == "fits":
        return phrase("Fits: the peak is {} of {} usable.", size(reserved.likely_bytes), size(limit))
    if estimate.fit == "does not fit":
        return phrase(
            "Does not fit: the peak is {}, {} more than is usable.",
            size(reserved.likely_bytes), size(reserved.likely_bytes - limit),
        )  # fmt: skip
    return phrase(
        "Too close to call: the peak is between {} and {}, and {} are usable.",
        size(reserved.low_bytes), size(reserved.high_bytes), size(limit),
    )  # fmt: skip


def _memory(estimate: Estimate) -> Section:
    whole = estimate.allocated_bytes
    bars = [Bar(_named(name), name, size(value, whole)) for name, value in estimate.categories.items()]
    rows: list[tuple[str, Cell | Words]] = [("peak of the tensors", size(whole))]
    device = estimate.device
    if device.workspace_bytes:
        reserved = estimate.reserved
        rows += [
            ("peak reserved by the allocator", size(reserved.likely_bytes)),
            ("between", phrase("{} and {}", size(reserved.low_bytes), size(reserved.high_bytes))),
        ]
    rows.append(("reached in", phrase(f"{estimate.part} of step {estimate.step}, by {{}}", code(estimate.operator))))
    if device.usable_bytes is not None and device.total_bytes is not None:
        rows += [
            ("usable on the device", size(device.usable_bytes)),
            ("kept for CUDA and the driver", size(device.total_bytes - device.usable_bytes)),
        ]
    parts: list[Part] = [
        Stack("Peak memory by category", size(whole), bars),
        Facts("Peak", rows),
        Chart("live", "Memory of tensors during a step", list(estimate.live)),
        Table(
            id="dtypes",
            title="Peak memory by dtype",
            columns=(Column("dtype", "code"), Column("bytes", "bytes", has_share=True)),
            rows=[(code(name), size(value, whole)) for name, value in estimate.dtypes.items()],
        ),
    ]
    return Section("memory", "Memory", parts=parts, summary=True)


def _modules(estimate: Estimate) -> Section:
    whole = estimate.allocated_bytes
    table = Table(
        id="modules",
        title="Peak memory by module",
        columns=(Column("module", "code"), Column("category"), Column("bytes", "bytes", has_share=True)),
        rows=[
            (code(module or "(the LightningModule)"), text(_named(category)), size(value, whole))
            for module, category, value in estimate.modules
        ],
        notes=["Activations belong to the module in whose forward they are made."],
    )
    return Section("modules", "Modules", parts=[table])


def _alternatives(estimate: Estimate) -> Iterator[Section]:
    if not estimate.alternatives:
        return
    table = Table(
        id="alternatives",
        title="The same training, changed",
        columns=(
            Column("change"),
            Column("peak of tensors", "bytes", priority=1),
            Column("peak reserved", "bytes"),
            Column("difference", "bytes change"),
            Column("cost", priority=2),
        ),
        rows=[tuple(_alternative(changed, estimate)) for changed in estimate.alternatives],
        is_sortable=False,
        top=None,
    )
    yield Section("alternatives", "Alternatives", parts=[table], summary=True)


def _alternative(changed: Alternative, estimate: Estimate) -> Iterator[Cell]:
    likely = None if changed.reserved is None else changed.reserved.likely_bytes
    yield text(changed.change)
    yield size(changed.allocated_bytes)
    yield size(likely)
    yield Cell(None if likely is None else likely - estimate.reserved.likely_bytes, "bytes change")
    yield text(changed.problem or changed.costs)


def _basis(estimate: Estimate) -> Section:
    facts = Facts(
        "Basis",
        [
            ("device", text(f"{estimate.device.name} ({estimate.device.source})")),
            ("time of the simulation", duration(estimate.seconds * 1e9)),
            ("values assumed", count(len(estimate.assumptions))),
        ],
    )
    return Section("basis", "Basis", parts=[facts, *(Paragraph(words) for words in estimate.assumptions)])


def _named(category: str) -> str:
    return _CATEGORIES.get(category, category)
