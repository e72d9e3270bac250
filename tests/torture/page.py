"""The matrix as a page: a table with a row for each fault, what was counted, and what the rows mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import fault
import moments

import measured
from lightning_memprof.units import format_count

Results = Mapping[tuple[str, str, int], Mapping[str, Any]]


def body(rows: Sequence[fault.Fault], results: Results, seconds: float) -> str:
    """Give the fragment's text."""
    counted = _counted(results, seconds)
    return "\n\n".join([counted, _matrix(rows, results), _reds(results), _rows(rows), _absent(rows)])


def _counted(results: Results, seconds: float) -> str:
    found = list(results.values())
    green = sum(not result["red"] for result in found)
    windows, lost, files = (sum(result.get(name, 0) for result in found) for name in ("windows", "lost", "files"))
    cells = f"{format_count(len(found), 'cell')}, {green} green, {len(found) - green} red"
    torn = sum(bool(result.get("named")) for result in found)
    lines = [
        f"**{cells}; {windows} closed windows were read, {lost} lost.**",
        f"{files} files of closed windows were read and compared with their digests.",
        f"In {torn} cells something is unfinished or has failed, and is named by `show`.",
        f"The run took {seconds / 60:.1f} min.",
    ]
    return "\n".join(lines)


def _matrix(rows: Sequence[fault.Fault], results: Results) -> str:
    headings = ["fault", *(f"{moment.name}" for moment in moments.MOMENTS)]
    lines = []
    for row in rows:
        cells = []
        for moment in moments.MOMENTS:
            told = [_cell(row, moment.name, world, results) for world in (1, 2)]
            cells.append(" ".join(told) if told[0] != told[1] else told[0])
        lines.append([row.name, *cells])
    legend = "In each cell one process and two ranks; `ok` where both are green, `·` where there is no such cell."
    return f"{measured.table(headings, lines)}\n\n{legend}"


def _cell(row: fault.Fault, moment: str, world: int, results: Results) -> str:
    result = results.get((row.name, moment, world))
    if result is None:
        return "·"
    return "**red**" if result["red"] else "ok"


def _reds(results: Results) -> str:
    lines = []
    for (name, moment, world), told in results.items():
        if told["red"]:
            why = "; ".join(" ".join(reason.split())[:300] for reason in told["red"])
            lines.append(f"- {name}, {moment}, {'one process' if world == 1 else 'two ranks'}: {why}")
    return "\n".join(["What is red:", "", *lines]) if lines else "Nothing is red."


def _rows(rows: Sequence[fault.Fault]) -> str:
    return measured.table(["fault", "what happens"], [[row.name, row.says] for row in rows])


def _absent(rows: Sequence[fault.Fault]) -> str:
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for moment, reason in row.absent.items():
            reasons.setdefault(f"{reason} ({row.name})", []).append(moment)
        if row.worlds == (2,):
            reasons.setdefault(f"one process is all of them ({row.name})", []).append("one process")
    lines = [f"- {', '.join(moments_)}: {reason}" for reason, moments_ in reasons.items()]
    return "\n".join(["Cells that cannot exist:", "", *lines])
