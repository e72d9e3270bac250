"""Saved activations, parameters, gradients and forward time by module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.memory.activations import patterns
from lightning_memprof.report.document import Cell, Paragraph, Part, Section, Table, phrase, share, size, text
from lightning_memprof.report.sections.memory import MAX_ROWS
from lightning_memprof.report.sections.tables import Field, filled, grid

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lightning_memprof.analysis.memory.activations import Activations, ModuleBytes
    from lightning_memprof.report.view import View

__all__ = ["modules_section"]

MAX_MODULES: Final = 1000
ROOT: Final = "(the model)"


def modules_section(view: View) -> Section:
    """Return the saved activations, parameters, gradients and forward time of each module."""
    saved = view.memory.lead.activations
    if saved is None:
        reason = view.memory.lead.reasons.get("modules", "not recorded")
        return Section("modules", "Modules", f"Saved activations by module are not available: {reason}.")
    parts: list[Part] = [_module_patterns(saved), _every_module(saved)]
    types = sorted(saved.dtypes.items(), key=lambda item: -item[1])
    if types and saved.total_bytes:
        words = ", ".join(f"{name} {{}} ({{}})" for name, _ in types)
        values = [cell for _, total in types for cell in (size(total), share(total / saved.total_bytes))]
        parts.append(Paragraph(phrase(f"By data type: {words}.", *values)))
    if saved.attribution:
        parts.append(Paragraph(phrase(f"{{}} are unattributed: {saved.attribution}.", size(saved.unattributed_bytes))))
    if saved.uncounted:
        words = "more values have an unknown size: a scripted module or hooks of the program saved them."
        parts.append(Paragraph(f"{saved.uncounted} {words}"))
    lead = phrase(f"Saved activations in step {saved.step}: {{}}.", size(saved.total_bytes))
    return Section("modules", "Modules", lead, parts)


def _alike(saved: Activations) -> list[tuple[str, list[ModuleBytes]]]:
    """Return the modules by name, repeated blocks together, the largest total first."""
    shared = patterns((module.name for module in saved.modules), saved.parameters)
    groups: dict[str, list[ModuleBytes]] = {}
    for module in saved.modules:
        groups.setdefault(shared[module.name] or ROOT, []).append(module)
    return sorted(groups.items(), key=lambda row: (-_total(row[1]), -_self(row[1]), row[0]))


def _self(alike: Sequence[ModuleBytes]) -> int:
    return sum(module.own_activation_bytes for module in alike)


def _total(alike: Sequence[ModuleBytes]) -> int:
    return sum(module.inclusive_activation_bytes for module in alike)


def _sum(sizes: Iterable[int | None]) -> int | None:
    """Return a sum, None where a part is not known."""
    found = list(sizes)
    known = [part for part in found if part is not None]
    return sum(known) if len(known) == len(found) else None


def _module_patterns(saved: Activations) -> Table:
    columns, rows = grid(
        _alike(saved)[:MAX_ROWS],
        Field("module", "code", lambda row: row[0]),
        Field("self", "bytes", lambda row: _self(row[1])),
        Field("total", "bytes", lambda row: _total(row[1]), bar=True),
        Field("parameters", "bytes", lambda row: _sum(module.parameter_bytes for module in row[1]), priority=1),
        Field("gradients", "bytes", lambda row: _sum(module.gradient_bytes for module in row[1]), priority=2),
        Field("count", "count", lambda row: sum(module.calls for module in row[1]) or None, priority=3),
    )
    footer = [filled(columns, text("unattributed"), size(saved.unattributed_bytes))]
    return Table("modules-alike", "Saved activations by module, repeated blocks together", columns, rows, footer)


def _every_module(saved: Activations) -> Table:
    others = saved.modules[MAX_MODULES:]
    columns, rows = grid(
        saved.modules[:MAX_MODULES],
        Field("module", "code", lambda module: Cell(module.name or ROOT, "code", sort=module.name)),
        Field(
            "self",
            "bytes",
            lambda module: module.own_activation_bytes,
            "saved while it was the innermost module",
            bar=True,
        ),
        Field("total", "bytes", lambda module: module.inclusive_activation_bytes, "with its submodules", bar=True),
        Field("parameters", "bytes", lambda module: module.parameter_bytes),
        Field("gradients", "bytes", lambda module: module.gradient_bytes),
        Field(
            "forward",
            "ns",
            lambda module: module.forward_ns if module.calls else None,
            "in the recorded step",
            bar=True,
        ),
        Field("count", "count", lambda module: module.calls or None),
    )
    footer = [filled(columns, text("unattributed"), size(saved.unattributed_bytes))]
    if others:
        sums = sum(module.own_activation_bytes for module in others)
        footer.insert(0, filled(columns, text(f"{len(others)} more"), size(sums)))
    return Table("modules-each", "By module", columns, rows, footer, is_detail=True)
