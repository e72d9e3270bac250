"""The interface of a command, and what several commands share: options, targets, output, progress and signals."""

from __future__ import annotations

import gc
import json
import logging
import signal
import sys
import warnings
import webbrowser
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TextIO

from jsonargparse import ArgumentParser, Namespace

from lightning_memprof.artifacts.naming import parse_manifest_name, parse_pulse_name
from lightning_memprof.errors import ConfigError
from lightning_memprof.units import printable

if TYPE_CHECKING:
    from lightning_memprof.read.run.model import Run
    from lightning_memprof.read.run.targets import Targets
    from lightning_memprof.report.document import Document

Format = Literal["terminal", "json", "markdown"]

RUN_HELP: Final = "a log_dir, its memprofiler directory, or a folder of runs (the newest)"
TARGET_HELP: Final = f"{RUN_HELP}; or traces, snapshots, and folders of them"
_MOST_NUMBERS: Final = 1_000_000
# Thousands of ranks make millions of containers, and none of them is in a cycle.
_GC_THRESHOLD: Final = 200_000
_IRRELEVANT: Final = (
    # Lightning uses a function of torch's pytree that torch has since renamed; no reader can act on it.
    r".*isinstance\(treespec, LeafSpec\).*",
    # The demo slices a tensor in memory: that is cheaper than receiving the slices from a worker.
    r".*does not have many workers.*",
    # `doctor` makes a Trainer on the CPU, which every machine has.
    r"GPU available but not used.*",
)


def _no_options(parser: ArgumentParser) -> None:
    """Add nothing."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of ``lightning-memprof``; its module defines it as ``COMMAND``.

    The list of commands imports every command module: a module imports numpy, torch and the packages ``analysis`` and
    ``report`` inside functions.

    Attributes:
        summary: one line in the list of commands.
        description: first paragraph of the command's own help.
        execute: runs the command with the parsed options; returns the exit code.
        add_options: adds the command's options to its parser.
        usage: replaces the generated usage line.
    """

    summary: str
    description: str
    execute: Callable[[Namespace], int]
    add_options: Callable[[ArgumentParser], None] = _no_options
    usage: str | None = None


def add_format(parser: ArgumentParser) -> None:
    """Add ``--format``."""
    parser.add_argument(
        "--format",
        choices=["terminal", "json", "markdown"],
        default="terminal",
        help="a page to read, JSON for programs, or Markdown for an issue (default: %(default)s)",
    )


def say(line: str, stream: TextIO | None = None) -> None:
    """Print a line with control characters escaped, and flush; to standard output by default."""
    print(printable(line), file=stream, flush=True)


def named_or_newest(targets: Sequence[str]) -> Sequence[str]:
    """Return the targets; if none, the newest run below the working directory, or that directory."""
    from lightning_memprof.read.run.locate import newest_run

    return targets or [str(newest_run(Path()))]


def write_json(found: object) -> None:
    """Write JSON to standard output."""
    sys.stdout.write(json.dumps(found, indent=2, allow_nan=False) + "\n")


def write_document(
    document: Document, form: Format, as_json: Callable[[], object], *, is_full: bool, is_part: bool = False
) -> None:
    """Write a document to standard output.

    Args:
        document: what Markdown and the terminal show.
        form: the format.
        as_json: returns what JSON shows.
        is_full: whether all sections are shown instead of the short page.
        is_part: whether the document consists of single sections, without a page around them.
    """
    if form == "json":
        write_json(as_json())
    elif form == "markdown":
        from lightning_memprof.report.printers.markdown import sections_to_markdown, to_markdown

        sys.stdout.write(sections_to_markdown(document) if is_part else to_markdown(document, is_full=is_full))
    else:
        from lightning_memprof.report.printers.terminal import print_page
        from lightning_memprof.report.printers.text import full_page, sections_page, short_page

        print_page(sections_page if is_part else full_page if is_full else short_page, document)


def open_in_browser(address: str, noun: str = "address") -> None:
    """Open an address in a browser, or tell the user to do it."""
    if not webbrowser.open(address):
        print(f"No browser could be started; open the {noun} yourself.", flush=True)


@contextmanager
def opened_target(*names: str) -> Iterator[Run | Targets]:
    """Read a run, or find the traces and snapshots of targets without one; a run at a URL is local in the context.

    Raises:
        ArtifactError: there is none of these, or it is unreadable.
    """
    from msgspec.structs import replace

    from lightning_memprof.read.run.fetch import LocalRun
    from lightning_memprof.read.run.load import load_run
    from lightning_memprof.report.opened import located

    with located(names) as found:
        yield replace(load_run(found.path), url=found.url) if isinstance(found, LocalRun) else found


def parse_numbers(option: str, text: str) -> list[int]:
    """Return the numbers in a text such as ``0,3-5``, in ascending order.

    Raises:
        ConfigError: the text is malformed, a range is reversed, or it has more than a million numbers.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = (number.strip() for number in part.partition("-"))
        if not (first.isdecimal() and first.isascii()) or (dash and not (last.isdecimal() and last.isascii())):
            raise ConfigError(f"{option} {text!r}: {part.strip()!r} is not a number or a range, as in 0,3-5")
        low, high = int(first), int(last) if dash else int(first)
        if high < low:
            raise ConfigError(f"{option} {text!r}: the range {part.strip()!r} is reversed; write {high}-{low}")
        if high - low + len(found) > _MOST_NUMBERS:
            raise ConfigError(f"{option} {text!r}: has more than {_MOST_NUMBERS} numbers")
        found.update(range(low, high + 1))
    return sorted(found)


def check_output(out: Path, inputs: Iterable[Path], run_directory: Path | None = None) -> None:
    """Refuse an output path that would overwrite an input; links are followed.

    Args:
        out: the file to write.
        inputs: files that the command reads.
        run_directory: also protect the manifests and pulses in this directory.

    Raises:
        ConfigError: the output is one of the inputs.
    """
    protected = list(inputs)
    if run_directory is not None and any(
        parse(out.name) is not None for parse in (parse_manifest_name, parse_pulse_name)
    ):
        protected.append(run_directory / out.name)
    place = _resolved(out)
    if place is not None and any(_resolved(path) == place for path in protected):
        raise ConfigError(f"-o {out}: this is an input file; choose another name")


def _resolved(path: Path) -> Path | None:
    # A loop of links or a zero byte makes a path that cannot be a file.
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):
        return None


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP as Ctrl-C, so that a command removes its partial files and ends its processes.

    A signal that is ignored stays ignored, as SIGHUP under ``nohup``.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handled = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Run Python's cyclic garbage collector rarely while a command reads a run."""
    before = gc.get_threshold()
    gc.set_threshold(_GC_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Hide Lightning's INFO lines about hardware and limits; warnings and errors stay. Lightning must be imported."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "pytorch_lightning")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in _IRRELEVANT:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
