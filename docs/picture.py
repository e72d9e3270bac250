"""Draw the summary of a recorded run in the README as a picture: ``python docs/picture.py RUN``.

Run it in the directory where the run was recorded: the commands show paths relative to it. With a name and a
title, RUN is a file with the output of a command and its colours: ``python docs/picture.py OUTPUT budgets
"pytest test_training.py"``.
"""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from lightning_memprof.report.opened import opened
from lightning_memprof.report.printers.terminal import print_document
from lightning_memprof.report.sections import document_of

TARGET = Path(__file__).parent / "images"
WIDTH = 100


def main(run: str, name: str = "summary", title: str = "") -> None:
    """Write the picture."""
    file = io.StringIO()
    os.environ.update(COLUMNS=str(WIDTH), FORCE_COLOR="1")
    if title:
        file.write(Path(run).read_text(encoding="utf-8"))
    else:
        title = "trainer.fit(model)"
        with opened([run]) as view:
            print_document(document_of(view), file)
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    # An empty line at the end: the picture's edge cuts the descenders of the last line.
    console.print(Text.from_ansi(file.getvalue() + "\n"))
    svg = console.export_svg(title=title, theme=MONOKAI, unique_id="memprof")
    # Rich links fonts from the network; a picture in a repository must not.
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    (TARGET / f"{name}.svg").write_text(svg.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas"), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
