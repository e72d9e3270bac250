"""``lightning-memprof show``: the short page, all sections or some, of a run, or of traces and snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from jsonargparse import ArgumentParser, Namespace

from lightning_memprof.cli.command import (
    TARGET_HELP,
    Command,
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


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("TARGET", nargs="*", help=f"{TARGET_HELP} (default: the newest run in this directory)")
    add_format(parser)
    parser.add_argument("--all", action="store_true", help="all sections instead of the one-screen page")
    parser.add_argument(
        "--section", action="append", metavar="NAME", help="only this section, as in --section memory; may be repeated"
    )
    parser.add_argument("--watch", action="store_true", help="draw the page of a live run again until it ends")
    parser.add_argument("--rank", type=int, metavar="R", help="show this global rank")
    parser.add_argument("--window", type=int, metavar="N", help="only this window of a run")


def _execute(options: Namespace) -> int:
    """Show where the time and the memory of a run, a trace or a snapshot went; as JSON the results of the analysis."""
    if options.watch:
        return _watch(options)
    from lightning_memprof.report.opened import OpenOptions, opened
    from lightning_memprof.report.printers.json import encode, to_json
    from lightning_memprof.report.sections import document_of

    chosen = OpenOptions(rank=options.rank, window=options.window)
    sections: Sequence[str] = options.section or ()
    with (
        reading() as progress,
        infrequent_gc(),
        opened(named_or_newest(options.TARGET), chosen, progress.read) as view,
    ):
        progress.clear()
        if options.format == "json" and not options.all and not sections:
            write_json(to_json(view))
            return 0
        document = _chosen(document_of(view), sections)
        as_json = partial(encode, document)
        write_document(document, options.format, as_json, is_full=options.all, is_part=bool(sections))
    return 0


def _watch(options: Namespace) -> int:
    from lightning_memprof.cli.watch import watch
    from lightning_memprof.report.printers.text import full_page, short_page

    target, *more = named_or_newest(options.TARGET)
    parts = (options.section, options.rank, options.window)
    if more or any(part is not None for part in parts) or options.format != "terminal":
        raise ConfigError("--watch: shows one whole run; omit other targets, --section, --rank, --window and --format")
    return watch(target, full_page if options.all else short_page)


def _chosen(document: Document, sections: Sequence[str]) -> Document:
    known = [section.id for section in document.sections]
    if unknown := next((name for name in sections if name not in known), None):
        raise ConfigError(f"--section {unknown}: unknown, or nothing to show; this page has {', '.join(known)}")
    return document.only(sections) if sections else document


COMMAND: Final = Command(
    summary="show a run, traces or snapshots",
    description="Show where time and memory went: in a run, or in traces and snapshots.",
    add_options=_add_options,
    execute=_execute,
)
