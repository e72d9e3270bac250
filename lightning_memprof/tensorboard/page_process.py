"""Makes one page; a process of its own, so that TensorBoard keeps answering and its memory stays what it was.

It reads what to make as JSON on its standard input, writes the page on its standard output, and on its standard error
one JSON object a line: how far it has read (``file``, ``done``, ``total``), or what is wrong (``error``).
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

# Whoever trains on this machine goes first.
NICENESS: Final = 10
# So often, in bytes of one file, its reader says how far it is.
EVERY_BYTES: Final = 4 << 20


def main() -> int:
    """Make the page that standard input asks for: 0, or 1 and the reason."""
    with suppress(OSError):
        os.nice(NICENESS)
    try:
        page = _made(json.loads(sys.stdin.read()))
    except MemprofError as error:
        return _failed(str(error))
    except Exception as error:  # noqa: BLE001 the tab shows it; this process has no other reader
        return _failed(f"{type(error).__name__}: {error}")
    # A file's name may be no UTF-8; Python then holds it with halves of characters that no encoding has.
    sys.stdout.buffer.write(page.encode("utf-8", "backslashreplace"))
    sys.stdout.buffer.flush()
    return 0


def _made(asked: Mapping[str, Any]) -> str:
    from lightning_memprof.report.opened import OpenOptions, opened
    from lightning_memprof.report.printers.html import render_document, to_html

    runs = [(Path(run["directory"]), Path(run["top"]), str(run["label"])) for run in asked["runs"]]
    if len(runs) == 2:
        from lightning_memprof.analysis.compare.comparison import compare
        from lightning_memprof.analysis.compare.sides import run_side
        from lightning_memprof.analysis.run.confined import load_confined
        from lightning_memprof.report.sections.comparison import comparison_document

        a, b = (run_side(load_confined(directory, top), label) for directory, top, label in runs)
        return render_document(comparison_document(compare(a, b)), {})
    directory, top, _ = runs[0]
    options = OpenOptions(rank=asked.get("rank"), window=asked.get("window"), below=top)
    with opened([str(directory)], options, _teller()) as view:
        return to_html(view)


def _teller() -> Callable[[Path, int, int], None]:
    said: dict[Path, int] = {}

    def tell(file: Path, done: int, total: int) -> None:
        if file not in said or done - said[file] >= EVERY_BYTES:
            said[file] = done
            _say(file=file.name, done=done, total=total)

    return tell


def _failed(message: str) -> int:
    _say(error=message)
    return 1


def _say(**words: object) -> None:
    sys.stderr.write(json.dumps(words) + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
