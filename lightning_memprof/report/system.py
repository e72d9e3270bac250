"""The machine during the windows: its lines on the page and its part of the document."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.report.memory_tables import DIM, Line
from lightning_memprof.report.throughput import amount
from lightning_memprof.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightning_memprof.analysis.steps.system import Figure
    from lightning_memprof.report.view import View

__all__ = ["system_document", "system_lines"]

LABEL: Final = 12
NAME: Final = 14
NARROWEST: Final = 20

_Words = tuple[str, str, "Callable[[Figure], str]"]


def _percent(figure: Figure) -> str:
    mean, most = f"{figure.mean:.0f}%", f"{figure.most:.0f}%"
    return mean if mean == most else f"{mean} (most {most})"


def _most_bytes(figure: Figure) -> str:
    return format_bytes(figure.most)


def _least_bytes(figure: Figure) -> str:
    return format_bytes(figure.least)


def _bytes_a_second(figure: Figure) -> str:
    mean, most = f"{format_bytes(figure.mean)}/s", f"{format_bytes(figure.most)}/s"
    return mean if mean == most else f"{mean} (most {most})"


def _a_second(figure: Figure) -> str:
    mean, most = f"{amount(figure.mean)}/s", f"{amount(figure.most)}/s"
    return mean if mean == most else f"{mean} (most {most})"


_LINES: Final[tuple[tuple[str, tuple[_Words, ...]], ...]] = (
    (
        "processors",
        (
            ("this process", "process_cpu_percent", _percent),
            ("all", "machine_cpu_percent", _percent),
            ("load at most", "load_1m", lambda figure: f"{figure.most:.1f}"),
        ),
    ),
    (
        "memory",
        (
            ("most used", "memory_used_bytes", _most_bytes),
            ("least available", "memory_available_bytes", _least_bytes),
            ("swap", "swap_used_bytes", _most_bytes),
            ("limit", "memory_limit_bytes", _least_bytes),
        ),
    ),
    (
        "disk",
        (
            ("read", "disk_read_bytes_per_s", _bytes_a_second),
            ("written", "disk_write_bytes_per_s", _bytes_a_second),
        ),
    ),
    (
        "network",
        (
            ("sent", "network_sent_bytes_per_s", _bytes_a_second),
            ("received", "network_received_bytes_per_s", _bytes_a_second),
        ),
    ),
    (
        "this process",
        (
            ("page faults", "page_faults_per_s", _a_second),
            ("context switches", "context_switches_per_s", _a_second),
        ),
    ),
)


def system_lines(view: View, width: int) -> list[Line]:
    """Return the lead rank's figures in lines of at most ``width`` characters; none where nothing was sampled."""
    found = next((samples for samples in view.system if samples.rank == view.lead.rank), None)
    if found is None:
        return []
    rows = [(label, _words(words, found.figures)) for label, words in _LINES]
    rows += [(f"GPU {index}", _gpu(index, found.figures)) for index in _gpus(found.figures)]
    lines: list[Line] = []
    for label, parts in rows:
        for index, words in enumerate(_wrapped(parts, max(width - LABEL - NAME, NARROWEST))):
            head = "system" if not lines else ""
            lines.append(((f"{head:<{LABEL}}", "bold"), (f"{'' if index else label:<{NAME}}", DIM), (words, "")))
    return lines


def system_document(view: View) -> list[dict[str, Any]]:
    """Return every rank's figures: mean, least and most of each, in the unit that its name ends with."""
    return [dataclasses.asdict(samples) for samples in view.system]


def _words(words: tuple[_Words, ...], figures: Mapping[str, Figure]) -> list[str]:
    return [f"{name} {write(figures[key])}" for name, key, write in words if key in figures]


def _wrapped(parts: list[str], width: int) -> list[str]:
    """Join parts to lines; none is broken."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 3 + len(part) <= width:
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    return lines


def _gpus(figures: Mapping[str, Figure]) -> list[int]:
    names = [name.partition("_")[0].removeprefix("gpu") for name in figures if name.startswith("gpu")]
    return sorted({int(name) for name in names if name.isascii() and name.isdigit() and len(name) < 6})


def _gpu(index: int, figures: Mapping[str, Figure]) -> list[str]:
    words: tuple[_Words, ...] = (
        ("busy", f"gpu{index}_utilization_percent", _percent),
        ("most used", f"gpu{index}_memory_used_bytes", _most_bytes),
        ("power", f"gpu{index}_power_w", lambda figure: f"{figure.mean:.0f} W (most {figure.most:.0f} W)"),
        ("at most", f"gpu{index}_temperature_c", lambda figure: f"{figure.most:.0f} C"),
    )
    return _words(words, figures)
