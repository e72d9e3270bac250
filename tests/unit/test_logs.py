from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_memprof import MemProfilerCallback, OutputOptions
from lightning_memprof.logs import logger_of
from training import Perceptron, loader, only_run, rows_of, trainer


class Raising(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # Lightning's own lines would end the training.
        if record.name.startswith(("lightning_memprof", "root")):
            raise ConnectionError(record.getMessage())


def raising(_: logging.LogRecord) -> bool:
    raise ConnectionError


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, which has a handler that raises."""
    found, handler = logging.getLogger(), Raising(logging.INFO)
    found.addHandler(handler)
    try:
        yield found
    finally:
        found.removeHandler(handler)


def test_a_logger_is_that_of_logging_and_made_once(root: logging.Logger) -> None:
    log = logger_of("lightning_memprof.made")
    assert log is logger_of("lightning_memprof.made") is logging.getLogger("lightning_memprof.made")
    log.warning("lost")
    log.addFilter(raising)
    log.warning("lost")
    log.removeFilter(raising)
    with pytest.raises(ConnectionError):
        root.warning("of the program")


class Closing(Callback):
    def on_train_start(self, *_: Any) -> None:
        sys.stderr.close()


def weights(directory: Path, *callbacks: Callback, **options: Any) -> list[torch.Tensor]:
    model = Perceptron()
    trainer(directory, *callbacks, **options).fit(model, loader(6))
    return list(model.state_dict().values())


def assert_trains_as_bare(directory: Path, *callbacks: Callback) -> None:
    bare = weights(directory / "bare")
    ours = MemProfilerCallback(output=OutputOptions(summary=False))
    recorded = weights(directory / "ours", *callbacks, ours, profiler="fts_extended")
    assert all(map(torch.equal, bare, recorded))
    run = only_run(directory / "ours")
    assert (rows_of(run, "error"), rows_of(run, "end")[0]["steps"]) == ([], 6)


@pytest.mark.slow
def test_a_handler_that_raises_costs_its_lines_only(tmp_path: Path, root: logging.Logger) -> None:
    assert_trains_as_bare(tmp_path)


@pytest.mark.slow
def test_a_closed_standard_error_costs_its_lines_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The package shows its lines where the program has no handler.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert_trains_as_bare(tmp_path, Closing())
