"""``lightning-memprof report``: a run, traces or snapshots as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from jsonargparse import ArgumentParser, Namespace

from lightning_memprof.cli.command import TARGET_HELP, Command, check_output, infrequent_gc, open_in_browser, say
from lightning_memprof.cli.progress import reading
from lightning_memprof.errors import ReportError
from lightning_memprof.units import format_bytes


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("TARGET", nargs="+", help=TARGET_HELP)
    parser.add_argument("-o", "--output", metavar="FILE", help="the page (default: report.html in the run directory)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def _execute(options: Namespace) -> int:
    from lightning_memprof.report.files_view import FilesView
    from lightning_memprof.report.opened import opened
    from lightning_memprof.report.written import PAGE_NAME, own_page, write_page

    out = None if options.output is None else Path(options.output)
    if out is not None and out.is_dir():
        raise ReportError(f"-o {out}: is a directory; name a file, as in {out / PAGE_NAME}")
    with reading() as progress, infrequent_gc(), opened(options.TARGET, progress=progress.read) as view:
        progress.clear()
        if isinstance(view, FilesView):
            file = out or Path(PAGE_NAME)
            check_output(file, view.sizes)
        else:
            file = out or (Path(PAGE_NAME) if view.run.url else own_page(view.run.directory))
            check_output(file, (artifact.file for artifact in view.run.artifacts), view.run.directory)
        write_page(view, file)
    say(f"{file} ({format_bytes(file.stat().st_size)}) opens in any browser, offline.")
    if options.open:
        open_in_browser(file.absolute().as_uri(), "file")
    return 0


COMMAND: Final = Command(
    summary="write a run, traces or snapshots as one HTML page",
    description="Write one HTML page for a run, or for traces and snapshots; it opens offline.",
    add_options=_add_options,
    execute=_execute,
)
