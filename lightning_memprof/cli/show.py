"""``lightning-memprof show``: a run, traces or snapshots as a page, JSON or Markdown."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

from jsonargparse import ArgumentParser, Namespace

from lightning_memprof.cli.command import TARGET_HELP, Command
from lightning_memprof.cli.terminal import infrequent_gc, reading

if TYPE_CHECKING:
    from lightning_memprof.report.files_view import FilesView
    from lightning_memprof.report.opened import OpenOptions
    from lightning_memprof.report.view import View

__all__ = ["COMMAND", "Format", "show"]

Format = Literal["terminal", "json", "markdown"]


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("TARGET", nargs="+", help=TARGET_HELP)
    parser.add_argument(
        "--format",
        choices=["terminal", "json", "markdown"],
        default="terminal",
        help="a page to read, JSON for programs, or Markdown for an issue (default: %(default)s)",
    )
    parser.add_argument("--rank", type=int, default=None, metavar="R", help="show this global rank")
    parser.add_argument("--window", type=int, default=None, metavar="N", help="only this window of a run")


def _execute(options: Namespace) -> int:
    from lightning_memprof.report.opened import OpenOptions

    return show(options.TARGET, options.format, OpenOptions(rank=options.rank, window=options.window))


COMMAND: Final = Command(
    summary="show a run, traces or snapshots",
    description="Show where time and memory went: in a run, or in traces and snapshots.",
    add_options=_add_options,
    execute=_execute,
)


def show(targets: str | Sequence[str], format: Format = "terminal", options: OpenOptions | None = None) -> int:  # noqa: A002 the option's name
    """Show where the time and the memory of a run, a trace or a snapshot went.

    Args:
        targets: a log directory, its memprofiler directory, or a parent directory with one run, also by URL; or traces,
            snapshots, and directories of them.
        format: a page for the terminal, JSON with bytes and nanoseconds, or Markdown for an issue or a merge request.
        options: which rank and window; None shows everything.

    Returns:
        The exit code.

    Raises:
        ArtifactError: the target is missing or unreadable, or there are several runs.
        ConfigError: the protocol of the URL is unknown.

    """
    from lightning_memprof.report.opened import OpenOptions, opened

    names = [targets] if isinstance(targets, str) else list(targets)
    with reading() as progress, infrequent_gc(), opened(names, options or OpenOptions(), progress.update) as view:
        progress.end()
        _write(view, format)
    return 0


def _write(view: View | FilesView, form: Format) -> None:
    from lightning_memprof.report.files_view import FilesView

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
    from lightning_memprof.report.files_view import FilesView

    if isinstance(view, FilesView):
        from lightning_memprof.report.files_document import files_document

        return files_document(view)
    from lightning_memprof.report.machine import to_json

    return to_json(view)
