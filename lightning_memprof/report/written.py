"""Writes the page, also as a separate process at the end of a training run, which does not wait for it.

python -m lightning_memprof.report.written RUN_DIRECTORY
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_memprof.errors import ReportError
from lightning_memprof.report.export.write import whole_file

if TYPE_CHECKING:
    from lightning_memprof.report.files_view import FilesView
    from lightning_memprof.report.view import View

PAGE_NAME: Final = "report.html"
LOG_NAME: Final = "report.log"
# The next training of the same program has priority.
NICENESS: Final = 10


def write_page(view: View | FilesView, out: Path) -> None:
    """Write the page to ``out``, under a temporary name first: the old page stays until the new one is complete.

    Raises:
        ReportError: the page cannot be made, or not be written there.
    """
    try:
        # Imported here: a training process imports this module and must not load bokeh and jinja2.
        from lightning_memprof.report.printers.html import to_html

        page = to_html(view)
    except Exception as error:
        msg = f"the page cannot be made ({type(error).__name__}: {error}); `lightning-memprof show` may do without it"
        raise ReportError(msg) from error
    if not out.parent.is_dir():
        raise ReportError(f"{out}: cannot be written ({out.parent} is not a directory); name another place with -o")
    with whole_file(out) as file:
        file.write(page)


def own_page(directory: Path) -> Path:
    """Return the place of a run's page in its own directory.

    Raises:
        ReportError: a link is there: the page would overwrite the file that it points to.
    """
    page = directory / PAGE_NAME
    if page.is_symlink():
        msg = f"{page}: is a link, and the page would be written where it leads; name a place with -o, or remove it"
        raise ReportError(msg)
    return page


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page of a run directory into it: 0, or 1 and a line in its ``report.log``."""
    (name,) = sys.argv[1:] if argv is None else argv
    directory = Path(name)
    log = directory / LOG_NAME
    try:
        with suppress(OSError):
            os.nice(NICENESS)
        log.unlink(missing_ok=True)
        from lightning_memprof.report.opened import opened

        with opened([str(directory)]) as view:
            write_page(view, own_page(directory))
    except Exception as error:  # noqa: BLE001 this process has no terminal: the log has the error
        if directory.is_dir():
            with suppress(ReportError), whole_file(log) as out:
                out.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
