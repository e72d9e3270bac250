"""The page of two runs, traces or snapshots beside each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.compare.model import QUANTITIES
from lightning_memprof.report.compare import (
    by_group,
    comparison_notes,
    conclusion,
    heading,
    shown_change,
    shown_figure,
    shown_value,
)
from lightning_memprof.report.page import made_now
from lightning_memprof.report.page.cells import NONE, name_of
from lightning_memprof.report.page.model import Cell, Head, Page, Section, Table, Words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_memprof.analysis.compare.model import Comparison, Difference, NamedChange

__all__ = ["comparison_page"]

KINDS: Final = {"appeared": "only in B", "disappeared": "only in A", "changed": "changed"}
STYLES: Final = {"appeared": "warn", "disappeared": "dim", "changed": ""}
WHY: Final = "A change counts where it is more than the spread over the steps, or between two runs of one program."
NEXT: Final = "Look first at the quantities that changed, then at the names that appeared."


def comparison_page(comparison: Comparison) -> Page:
    """Return the page of a comparison: all its quantities, and by group what appeared, disappeared and changed."""
    a, b = comparison.a.label, comparison.b.label
    worse = [difference for difference in comparison.differences if _is_worse(difference)]
    groups = [_group(name, changes) for name, changes in by_group(comparison).items()]
    return Page(
        title=f"{a} · {b}",
        kind="comparison",
        about=f"A: {a} · B: {b}",
        status="",
        status_style="",
        exception=None,
        badge="warning" if worse else "none" if comparison.is_same else "info",
        verdict=(
            _in_words(conclusion(comparison)),
            WHY,
            NEXT if not comparison.is_same else "There is nothing to look at.",
        ),
        sections=[
            Section("quantities", "Quantities", parts=[_quantities(comparison)]),
            *groups,
            Section("notes", "Notes", parts=[Words(_in_words("\n".join(comparison_notes(comparison))))]),
        ],
        made=made_now(),
    )


def _name(quantity: str) -> str:
    """Write a quantity's name without its unit, which its figures have."""
    return name_of(quantity.removesuffix("_ns").removesuffix("_bytes"))


def _in_words(sentence: str) -> str:
    for name in sorted(QUANTITIES, key=len, reverse=True):
        sentence = sentence.replace(name, _name(name))
    return sentence


def _is_worse(difference: Difference) -> bool:
    rises = (difference.change or 0) > 0
    return difference.is_above_noise and rises != (difference.unit == "per_s")


def _quantities(comparison: Comparison) -> Table:
    heads = (Head("quantity"), Head("A", "number"), Head("B", "number"), Head("change", "number"), Head("from"))
    return Table("quantity-table", "", heads, [_quantity(difference) for difference in comparison.differences])


def _quantity(difference: Difference) -> Sequence[Cell]:
    if difference.problem is not None:
        change = Cell("n/a", style="dim")
    elif not difference.is_above_noise:
        change = Cell("~" if difference.change is not None else NONE, sort=0, style="dim")
    else:
        change = Cell(
            shown_change(difference), sort=_size(difference), style="bad" if _is_worse(difference) else "good"
        )
    source = next((side.source for side in (difference.b, difference.a) if side is not None), NONE)
    return (
        Cell(_name(difference.name), id=f"quantity-{difference.name}"),
        Cell(shown_value(difference.a), sort=difference.a.value if difference.a else None),
        Cell(shown_value(difference.b), sort=difference.b.value if difference.b else None),
        change,
        Cell(source, style="dim"),
    )


def _size(difference: Difference) -> float | None:
    return difference.relative if difference.relative is not None else difference.change


def _group(name: str, changes: Sequence[NamedChange]) -> Section:
    heads = (Head("name", "code"), Head("what"), Head("A", "number"), Head("B", "number"), Head("says"))
    rows = [
        (
            Cell(change.name),
            Cell(KINDS[change.kind], style=STYLES[change.kind]),
            Cell(shown_figure(change.a, change), sort=change.a),
            Cell(shown_figure(change.b, change), sort=change.b),
            Cell(change.sentence or NONE, style="" if change.sentence else "dim"),
        )
        for change in changes
    ]
    table = Table(f"{name}-table", "", heads, rows)
    return Section(name, name[:1].upper() + name[1:], heading(name), [table])
