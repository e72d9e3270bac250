"""Separate process that renders one page, so that TensorBoard stays responsive and its memory does not grow.

Standard input: the page request as JSON. Standard output: the page. Standard error: one JSON object per line, either
progress (``file``, ``done``, ``total`` in bytes) or a failure (``error``).
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.errors import MemprofError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["main"]

# Training on this machine has priority.
NICENESS: Final = 10
# Progress interval within a file.
PROGRESS_BYTES: Final = 4 << 20


def main() -> int:
    """Render the requested page; return 0, or 1 after reporting the error."""
    with suppress(OSError):
        os.nice(NICENESS)
    try:
        page = _render(json.loads(sys.stdin.read()))
    except MemprofError as error:
        return _report_error(str(error))
    except Exception as error:  # noqa: BLE001 the tab shows it
        return _report_error(f"{type(error).__name__}: {error}")
    # A file name that is not UTF-8 contains surrogates, which no encoding accepts.
    sys.stdout.buffer.write(page.encode("utf-8", "backslashreplace"))
    sys.stdout.buffer.flush()
    return 0


def _render(request: Mapping[str, Any]) -> str:
    from lightning_memprof.report.opened import OpenOptions, opened
    from lightning_memprof.report.printers.html import render_document, to_html

    runs = [(Path(run["directory"]), Path(run["top"]), str(run["label"])) for run in request["runs"]]
    if len(runs) == 2:
        from lightning_memprof.analysis.compare.comparison import compare
        from lightning_memprof.analysis.compare.sides import run_side
        from lightning_memprof.analysis.run.confined import load_confined
        from lightning_memprof.report.sections.comparison import comparison_document

        a, b = (run_side(load_confined(directory, top), label) for directory, top, label in runs)
        return render_document(comparison_document(compare(a, b)), {})
    directory, top, _ = runs[0]
    options = OpenOptions(rank=request.get("rank"), window=request.get("window"), below=top)
    with opened([str(directory)], options, _progress_writer()) as view:
        return to_html(view)


def _progress_writer() -> Callable[[Path, int, int], None]:
    reported: dict[Path, int] = {}

    def write(file: Path, done: int, total: int) -> None:
        if file not in reported or done - reported[file] >= PROGRESS_BYTES:
            reported[file] = done
            _send(file=file.name, done=done, total=total)

    return write


def _report_error(message: str) -> int:
    _send(error=message)
    return 1


def _send(**fields: object) -> None:
    sys.stderr.write(json.dumps(fields) + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
