"""Result of a memory tracker for one step, as text in torch's layout and as rows.

The text has the layout of torch's ``MemTracker.display_snapshot("peak")`` and ``display_modulewise_snapshots``, and
tables that of the format ``rst`` of the package ``tabulate``. Unlike torch's it includes devices whose bytes round to
0.0 in the given unit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Final

from lightning_memprof.artifacts.series import PeakRow
from lightning_memprof.errors import ConfigError
from lightning_memprof.units import GIB, KIB, MIB

_UNITS: Final = MappingProxyType({"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB})
# torch's words to this package's; sharded bytes of a sharded model are its parameters and gradients.
_CATEGORIES: Final = MappingProxyType(
    {
        "Parameter": "parameter", "Sharded Param": "parameter", "Gradient": "gradient", "Sharded Grad": "gradient",
        "Optstate": "optimizer_state", "OptState": "optimizer_state", "Activation": "activation", "Inputs": "input",
        "Temp": "temporary", "Buffer": "buffer", "Other": "other", "Padding": "other",
        "Unsharded Param": "unsharded_parameter", "Unsharded Grad": "unsharded_gradient",
        "All Gather": "all_gather", "Reduce Scatter": "reduce_scatter",
    }
)  # fmt: skip
_ALWAYS: Final = ("parameter", "gradient", "optimizer_state", "activation", "input", "temporary", "buffer", "other")


@dataclass(frozen=True)
class Figures:
    """Bytes on one device at one moment, by torch's word for the category, and their sum."""

    device: str
    by_kind: Mapping[str, int]
    total_bytes: int

    def categories(self) -> dict[str, int]:
        """Return the bytes by this package's words; the categories of sharded models come last."""
        named = dict.fromkeys(_ALWAYS, 0)
        for kind, count in self.by_kind.items():
            category = _CATEGORIES[kind]
            named[category] = named.get(category, 0) + count
        return named

    def labelled(self) -> dict[str, int]:
        """Return the bytes in torch's order, the sum last."""
        return {**self.by_kind, "Total": self.total_bytes}


@dataclass(frozen=True)
class ModuleFigures:
    """One moment of one module.

    Attributes:
        name: torch's name, from the root's class: ``Net.layers.0``.
        path: in the LightningModule, whose own path is ``""``.
        state: torch's word for the moment, ``Pre-Forward`` for instance.
        call: number of the call, from 1.
        figures: by device.
    """

    name: str
    path: str
    state: str
    call: int
    figures: tuple[Figures, ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of a report.

    Args:
        depth: levels of modules; the root is the first.
        units: ``B``, ``KiB``, ``MiB`` or ``GiB``.
        tabulate: as tables.

    Raises:
        ConfigError: ``depth`` or ``units`` is invalid.
    """

    depth: int = 2
    units: str = "MiB"
    tabulate: bool = False

    def __post_init__(self) -> None:
        """Validate the values."""
        if type(self.depth) is not int or self.depth < 1:
            raise ConfigError(f"depth={self.depth!r}: must be an integer of at least 1; 1 is the root alone")
        if self.units not in _UNITS:
            raise ConfigError(f"units={self.units!r}: must be one of {', '.join(_UNITS)}")

    def amount(self, count: int) -> str:
        """Return a number of bytes as text."""
        return f"{count if self.units == 'B' else round(count / _UNITS[self.units], 2)} {self.units}"


@dataclass(frozen=True)
class TrackerReport:
    """One tracked step.

    Attributes:
        peak: the step's peak by device, each device when it has its own peak.
        end: bytes at the end of the step.
        modules: every moment of every sharded module, in the order of their first calls.
    """

    peak: tuple[Figures, ...]
    end: tuple[Figures, ...]
    modules: tuple[ModuleFigures, ...] = ()

    def text(self, layout: Layout) -> str:
        """Return peak and modules as text."""
        lines = list(_peak(self.peak, layout))
        for name, moments in self._by_module(layout.depth).items():
            lines.append(f"Module:  {name}")
            lines += (_state_table if layout.tabulate else _state_list)(moments, layout)
        return "\n".join(lines) + "\n"

    def rows(self) -> Iterator[PeakRow]:
        """Yield a row for each device at the peak, at the end, and at every moment of every module."""
        for kind, several in (("peak", self.peak), ("end", self.end)):
            for figures in several:
                yield _row(kind, figures)
        for moment in self.modules:
            for figures in moment.figures:
                row = _row("module", figures)
                row.module, row.call = moment.path, moment.call
                row.state = moment.state.lower().replace("-", "_").replace(" ", "_")
                yield row

    def _by_module(self, depth: int) -> dict[str, list[ModuleFigures]]:
        found: dict[str, list[ModuleFigures]] = {}
        for moment in self.modules:
            if moment.name.count(".") < depth:
                found.setdefault(moment.name, []).append(moment)
        return dict(sorted(found.items(), key=lambda entry: _natural(entry[0])))


def _row(kind: str, figures: Figures) -> PeakRow:
    return PeakRow(kind=kind, device=figures.device, total_bytes=figures.total_bytes, categories=figures.categories())


def _natural(name: str) -> list[tuple[int, int, str]]:
    parts = re.split("([0-9]+)", name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part.lower()) for part in parts]


def _peak(peak: Sequence[Figures], layout: Layout) -> Iterator[str]:
    if not peak:
        yield "No memory tracked."
    elif layout.tabulate:
        yield from _rst([((), figures) for figures in peak], (), layout)
    else:
        yield from _list(peak, layout)


def _list(several: Sequence[Figures], layout: Layout) -> Iterator[str]:
    for figures in several:
        if figures.total_bytes > 0:
            yield f"Device: {figures.device}"
            yield from (f"\t{kind}: {layout.amount(count)}" for kind, count in figures.labelled().items())


def _state_list(moments: Sequence[ModuleFigures], layout: Layout) -> Iterator[str]:
    for state, calls in groupby(moments, lambda moment: moment.state):
        yield state
        for moment in calls:
            yield f"# {moment.call}:"
            yield from _list(moment.figures, layout)
    yield ""


def _state_table(moments: Sequence[ModuleFigures], layout: Layout) -> Iterator[str]:
    rows = [((f"{moment.state} # {moment.call}",), figures) for moment in moments for figures in moment.figures]
    yield from _rst(rows, ("State & Call",), layout)


def _rst(rows: Sequence[tuple[tuple[str, ...], Figures]], names: Sequence[str], layout: Layout) -> Iterator[str]:
    shown = [(first, figures) for first, figures in rows if figures.total_bytes > 0]
    if not shown:
        return
    headers = [*names, "Device", *shown[0][1].labelled()]
    cells = [[*first, figures.device, *map(layout.amount, figures.labelled().values())] for first, figures in shown]
    # tabulate makes columns two wider than a header.
    widths = [max(len(header) + 2, *map(len, column)) for header, *column in zip(headers, *cells, strict=True)]
    rule = "  ".join("=" * width for width in widths)
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    head = "  ".join(header.ljust(width) for header, width in zip(headers, widths, strict=True)).rstrip()
    yield from (rule, head, rule, *lines, rule)
