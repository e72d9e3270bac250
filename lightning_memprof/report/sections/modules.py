"""Saved activations, parameters, gradients and forward time by module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.memory.activations import patterns
from lightning_memprof.report.document import (
    Cell,
    Column,
    Paragraph,
    Part,
    Section,
    Table,
    code,
    count,
    duration,
    phrase,
    share,
    size,
    text,
)
from lightning_memprof.report.sections.memory import MAX_ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_memprof.analysis.memory.report import Activations, ModuleBytes
    from lightning_memprof.report.view import View

__all__ = ["ModuleSums", "module_sums", "modules_section"]

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


@dataclass(frozen=True, kw_only=True)
class ModuleSums:
    """The sums of modules that are alike; None where one of them is not known."""

    name: str
    self_bytes: int
    total_bytes: int
    parameter_bytes: int | None
    gradient_bytes: int | None
    calls: int


def module_sums(saved: Activations) -> list[ModuleSums]:
    """Return the modules, repeated blocks as one, the largest total first."""
    shared = patterns((module.name for module in saved.modules), saved.parameters)
    groups: dict[str, list[ModuleBytes]] = {}
    for module in saved.modules:
        groups.setdefault(shared[module.name], []).append(module)
    sums = [
        ModuleSums(
            name=name or ROOT,
            self_bytes=sum(module.own_activation_bytes for module in alike),
            total_bytes=sum(module.inclusive_activation_bytes for module in alike),
            parameter_bytes=_sum([module.parameter_bytes for module in alike]),
            gradient_bytes=_sum([module.gradient_bytes for module in alike]),
            calls=sum(module.calls for module in alike),
        )
        for name, alike in groups.items()
    ]
    return sorted(sums, key=lambda found: (-found.total_bytes, -found.self_bytes, found.name))


def _sum(sizes: Sequence[int | None]) -> int | None:
    known = [known for known in sizes if known is not None]
    return sum(known) if len(known) == len(sizes) else None


def _module_patterns(saved: Activations) -> Table:
    sums = module_sums(saved)[:MAX_ROWS]
    most = max((found.total_bytes for found in sums), default=None)
    rows = [
        (
            code(found.name),
            size(found.self_bytes),
            size(found.total_bytes, most),
            size(found.parameter_bytes),
            size(found.gradient_bytes),
            count(found.calls or None),
        )
        for found in sums
    ]
    columns = (
        Column("module", "code"),
        Column("self", "bytes"),
        Column("total", "bytes"),
        Column("parameters", "bytes", priority=1),
        Column("gradients", "bytes", priority=2),
        Column("count", "count", priority=3),
    )
    footer = [(text("unattributed"), size(saved.unattributed_bytes), *[text("")] * 4)]
    title = "Saved activations by module, repeated blocks together"
    return Table(id="modules-alike", title=title, columns=columns, rows=rows, footer=footer)


def _every_module(saved: Activations) -> Table:
    shown, rest = saved.modules[:MAX_MODULES], saved.modules[MAX_MODULES:]
    self_most = max((module.own_activation_bytes for module in shown), default=None)
    total_most = max((module.inclusive_activation_bytes for module in shown), default=None)
    longest = max((module.forward_ns or 0 for module in shown), default=None)
    rows = [
        (
            Cell(module.name or ROOT, "code", sort=module.name),
            size(module.own_activation_bytes, self_most),
            size(module.inclusive_activation_bytes, total_most),
            size(module.parameter_bytes),
            size(module.gradient_bytes),
            duration(module.forward_ns if module.calls else None, longest),
            count(module.calls or None),
        )
        for module in shown
    ]
    columns = (
        Column("module", "code"),
        Column("self", "bytes", "saved while it was the innermost module"),
        Column("total", "bytes", "with its submodules"),
        Column("parameters", "bytes"),
        Column("gradients", "bytes"),
        Column("forward", "ns", "in the recorded step"),
        Column("count", "count"),
    )
    empty = [text("")] * 5
    footer = [(text("unattributed"), size(saved.unattributed_bytes), *empty)]
    if rest:
        sums = sum(module.own_activation_bytes for module in rest)
        footer.insert(0, (text(f"{len(rest)} more"), size(sums), *empty))
    return Table(id="modules-each", title="By module", columns=columns, rows=rows, footer=footer, is_detail=True)
