"""``lightning-memprof show``: one page, JSON or Markdown, of a run, or of traces and snapshots."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from lightning_memprof.report.files_view import FilesView
from lightning_memprof.report.opened import OpenOptions, opened

if TYPE_CHECKING:
    from lightning_memprof.report.view import View

__all__ = ["Format", "OpenOptions", "show"]

Format = Literal["terminal", "json", "markdown"]


def show(targets: str | Sequence[str], format: Format = "terminal", options: OpenOptions | None = None) -> int:  # noqa: A002 the option's name
    """Show where the time and the memory of a run, a trace or a snapshot went.

    Args:
        targets: a log directory, its memprofiler directory, or a parent directory with one run in it, also by URL; or
            traces, snapshots and directories of them.
        format: a page for the terminal, JSON with bytes and nanoseconds, or Markdown for an issue or a merge request.
        options: what of it; None is all.

    Returns:
        The exit code.

    Raises:
        ArtifactError: there is no such thing, there are several runs, or it cannot be read.
        ConfigError: the protocol of the URL is not known here.

    """
    from lightning_memprof.cli.progress import reading
    from lightning_memprof.cli.rare_collections import rare_collections

    names = [targets] if isinstance(targets, str) else list(targets)
    with reading() as progress, rare_collections(), opened(names, options or OpenOptions(), progress.told) as view:
        progress.end()
        _write(view, format)
    return 0


def _write(view: View | FilesView, form: Format) -> None:
    if form == "json":
        sys.stdout.write(json.dumps(_document(view), indent=2, allow_nan=False) + "\n")
    elif form == "markdown":
        from lightning_memprof.report.markdown import to_markdown

        sys.stdout.write(to_markdown(view))
    elif isinstance(view, FilesView):
        from lightning_memprof.report.terminal import print_files

        print_files(view)
    else:
        from lightning_memprof.report.terminal import print_view

        print_view(view)


def _document(view: View | FilesView) -> object:
    if isinstance(view, FilesView):
        from lightning_memprof.report.files_document import files_document

        return files_document(view)
    from lightning_memprof.report.machine import to_json

    return to_json(view)
