"""``lightning-memprof report``: a run, or traces and snapshots, as one HTML page."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path

from lightning_memprof.artifacts.naming import parse_manifest_name, parse_pulse_name
from lightning_memprof.cli.own_files import is_one_of
from lightning_memprof.errors import ConfigError, ReportError
from lightning_memprof.report.files_view import FilesView
from lightning_memprof.report.opened import opened
from lightning_memprof.report.view import View
from lightning_memprof.report.written import PAGE_NAME, own_page, write_page
from lightning_memprof.units import format_bytes

__all__ = ["report"]


def report(targets: Sequence[str], out: Path | None = None, *, open_it: bool = False) -> int:
    """Write the page of a run, or of traces and snapshots, into one file that needs no network.

    Args:
        targets: what to show, as for ``show``.
        out: the file; None is ``report.html``, in the run's own directory, or here where there is none.
        open_it: open it in a browser.

    Returns:
        The exit code.

    Raises:
        ArtifactError: there is no such thing, there are several runs, or it cannot be read.
        ConfigError: the protocol of the URL is not known here, or the page would be written over what is read.
        ReportError: the page cannot be made, or not be written there.

    """
    from lightning_memprof.cli.progress import reading
    from lightning_memprof.cli.rare_collections import rare_collections

    if out is not None and out.is_dir():
        raise ReportError(f"-o {out}: is a directory; name a file in it, as in {out / PAGE_NAME}")
    with reading() as progress, rare_collections(), opened(list(targets), progress=progress.told) as view:
        progress.end()
        file = _place(view) if out is None else out
        _spare(view, file)
        write_page(view, file)
    print(f"{file} ({format_bytes(file.stat().st_size)}) opens in any browser, without a network.")
    if open_it and not webbrowser.open(file.absolute().as_uri()):
        print("No browser could be started here; open the file yourself.")
    return 0


def _place(view: View | FilesView) -> Path:
    if isinstance(view, FilesView) or view.url is not None:
        return Path(PAGE_NAME)
    return own_page(view.directory)


def _spare(view: View | FilesView, out: Path) -> None:
    """Refuse to write over what is shown.

    Raises:
        ConfigError: the page would be a file of the target.

    """
    if isinstance(view, FilesView):
        is_read = is_one_of(out, view.sizes)
    else:
        own = parse_manifest_name(out.name) is not None or parse_pulse_name(out.name) is not None
        of_the_run = [view.directory / out.name] if own else []
        is_read = is_one_of(out, (*of_the_run, *(artifact.file for artifact in view.artifacts)))
    if is_read:
        raise ConfigError(f"-o {out}: is what is read; give the page another name")
