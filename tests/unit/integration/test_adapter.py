from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lightning_memprof.integration.adapter import LogLines, _Handler


@contextmanager
def bare_root() -> Iterator[None]:
    """A program that has not set up logging: no handler of anybody's, pytest's included."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        yield
    finally:
        root.handlers = handlers


@pytest.mark.parametrize("level", [logging.NOTSET, logging.ERROR])
def test_lines_are_shown_and_the_logger_is_left_as_it_was(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    logger = logging.getLogger("lightning_memprof")
    logger.setLevel(level)
    lines = LogLines()
    with bare_root():
        lines.show()
        logger.info("window 0")
        lines.hide()
    assert logger.handlers == []
    assert logger.level == level
    assert shown.getvalue() == ("memprof: window 0\n" if level == logging.NOTSET else "")
    logger.setLevel(logging.NOTSET)


def test_a_name_stays_on_its_line_and_a_traceback_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    lines = LogLines()
    with bare_root():
        lines.show()
        logging.getLogger("lightning_memprof").info("recorded in %s", "/a\nb\x1b[31m", exc_info=ValueError("why"))
        lines.hide()
    assert shown.getvalue().splitlines() == [r"memprof: recorded in /a\nb\x1b[31m", "ValueError: why"]


def test_two_runs_at_a_time_show_each_line_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    first, second = LogLines(), LogLines()
    with bare_root():
        first.show()
        second.show()
        logging.getLogger("lightning_memprof").info("once")
        second.hide()
        first.hide()
    assert shown.getvalue().count("once") == 1


def test_a_program_with_its_own_logging_is_left_alone() -> None:
    handler = logging.NullHandler()
    logging.getLogger().addHandler(handler)
    lines = LogLines()
    lines.show()
    assert logging.getLogger("lightning_memprof").handlers == []
    lines.hide()
    logging.getLogger().removeHandler(handler)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_line_on_a_terminal_appears_above_the_progress_bar_and_in_a_file_nothing_is_redrawn(
    stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = stream()
    monkeypatch.setattr("sys.stdout", shown)
    monkeypatch.setattr("sys.stderr", shown)
    bar = Tqdm(total=2, file=shown, bar_format="{n_fmt}/{total_fmt}")
    _Handler().emit(logging.makeLogRecord({"msg": "found"}))
    written = shown.getvalue()
    bar.close()
    above, below = "0/2\r   \rfound\n", "\r0/2"
    assert written.lstrip("\r") == (above + below if stream is Terminal else "0/2found\n")


@pytest.mark.parametrize("output", [None, object()])
def test_a_line_is_written_whatever_the_program_made_of_its_output(
    output: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Terminal()
    monkeypatch.setattr("sys.stdout", output)
    monkeypatch.setattr("sys.stderr", shown)
    _Handler().emit(logging.makeLogRecord({"msg": "found"}))
    assert shown.getvalue() == "found\n"
