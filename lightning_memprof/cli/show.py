"""``lightning-memprof show``: the short page, all sections or some, of a run, or of traces and snapshots."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from jsonargparse import ArgumentParser, Namespace

from lightning_memprof.cli.command import (
    TARGET_HELP,
    Command,
    Format,
    add_format,
    infrequent_gc,
    named_or_newest,
    write_document,
    write_json,
)
from lightning_memprof.cli.progress import reading
from lightning_memprof.errors import ConfigError

if TYPE_CHECKING:
    from lightning_memprof.report.document import Document
    from lightning_memprof.report.opened import OpenOptions


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("TARGET", nargs="*", help=f"{TARGET_HELP} (default: the newest run in this directory)")
    add_format(parser)
    parser.add_argument("--all", action="store_true", help="all sections instead of the one-screen page")
    parser.add_argument(
        "--section", action="append", metavar="NAME", help="only this section, as in --section memory; may be repeated"
    )
    parser.add_argument("--rank", type=int, default=None, metavar="R", help="show this global rank")
    parser.add_argument("--window", type=int, default=None, metavar="N", help="only this window of a run")


def _execute(options: Namespace) -> int:
    from lightning_memprof.report.opened import OpenOptions

    chosen = OpenOptions(rank=options.rank, window=options.window)
    return show(
        named_or_newest(options.TARGET), options.format, chosen, is_full=options.all, sections=options.section or ()
    )


COMMAND: Final = Command(
    summary="show a run, traces or snapshots",
    description="Show where time and memory went: in a run, or in traces and snapshots.",
    add_options=_add_options,
    execute=_execute,
)


def show(
    targets: str | Sequence[str],
    format: Format = "terminal",  # noqa: A002 the option's name
    options: OpenOptions | None = None,
    *,
    is_full: bool = False,
    sections: Sequence[str] = (),
) -> int:
    """Show where the time and the memory of a run, a trace or a snapshot went.

    Args:
        targets: a log directory, its memprofiler directory, or a parent directory, which means its newest run, also by
            URL; or traces, snapshots, and directories of them.
        format: a page for the terminal, JSON with bytes and nanoseconds, or Markdown for an issue or a merge request.
        options: which rank and window; None shows everything.
        is_full: whether all sections are shown instead of the short page; as JSON these are the tables of the pages
            instead of the results of the analysis.
        sections: the ids of the sections to show, instead of the short page.

    Returns:
        The exit code.

    Raises:
        ArtifactError: the target is missing or unreadable, or several runs are named.
        ConfigError: the protocol of the URL is unknown, or there is no such section.
    """
    from lightning_memprof.report.opened import opened
    from lightning_memprof.report.printers.json import document_to_json, to_json
    from lightning_memprof.report.sections import document_of

    names = [targets] if isinstance(targets, str) else list(targets)
    with reading() as progress, infrequent_gc(), opened(names, options, progress.update) as view:
        progress.end()
        if format == "json" and not is_full and not sections:
            write_json(to_json(view))
            return 0
        document = _chosen(document_of(view), sections)
        as_json = partial(document_to_json, document)
        write_document(document, format, as_json, is_full=is_full, is_part=bool(sections))
    return 0


def _chosen(document: Document, sections: Sequence[str]) -> Document:
    from lightning_memprof.report.sections import EMPTY_SECTIONS

    known = [section.id for section in document.sections]
    for name in sections:
        if name in known:
            continue
        if document.kind != "run" or name not in EMPTY_SECTIONS:
            raise ConfigError(f"--section {name}: unknown section; this document has {', '.join(known)}")
        print(f"memprof: --section {name}: nothing to show: {EMPTY_SECTIONS[name]}", file=sys.stderr)
    return document.only(sections) if sections else document
