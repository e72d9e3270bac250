"""Draw the summary of a recorded run as the picture in the README: ``python docs/picture.py RUN``."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from lightning_memprof import load_run
from lightning_memprof.report.terminal import render
from lightning_memprof.report.view import run_view

TARGET = Path(__file__).parent / "images" / "summary.svg"
# A picture as long as the page would hide the README behind it.
LAST_SECTION = "kept"


def main(run: str) -> None:
    """Write the picture."""
    page = Console(width=80, force_terminal=True, color_system="truecolor", file=io.StringIO())
    render(run_view(load_run(run)), page)
    console = Console(record=True, width=80, file=io.StringIO())
    # One empty line more: the picture's edge cuts what hangs below the last one.
    console.print(Text.from_ansi(_beginning(page.file.getvalue()) + "\n"))  # type: ignore[attr-defined]
    svg = console.export_svg(title="trainer.fit(model)", theme=MONOKAI, unique_id="memprof")
    # Rich names fonts of another host; a picture in a repository asks nobody.
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    TARGET.write_text(svg.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas"), encoding="utf-8")


def _beginning(page: str) -> str:
    """Return the page up to the section from which on the picture leaves it out."""
    lines = page.splitlines()
    end = next(at for at, line in enumerate(lines) if Text.from_ansi(line).plain.startswith(LAST_SECTION))
    return "\n".join([*lines[:end], "... functions, what if, events, throughput, system, files, profiler overhead"])


if __name__ == "__main__":
    main(sys.argv[1])
