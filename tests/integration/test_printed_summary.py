"""What a run prints at its end, and where."""

from __future__ import annotations

import io
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.collectors import Pulse
from training import Perceptron, Raises, loader, trainer

STAGES = ("fit", "validate", "test", "predict")


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    """Undo that Lightning ignores SIGINT after the first one."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def recorder(**output: Any) -> MemProfilerCallback:
    options = OutputOptions(on_error="raise", **output)
    return MemProfilerCallback(Schedule(wait=1, active=1), [Pulse()], output=options)


def ran(training: Any, stage: str) -> None:
    quiet = {} if stage in ("fit", "predict") else {"verbose": False}
    getattr(training, stage)(Perceptron(), loader(6), **quiet)


def forms(printed: str) -> list[str]:
    """Return for each run whether its page or its line was printed."""
    lines = printed.splitlines()
    found = {"page": [line for line in lines if line.startswith("verdict")]}
    found["line"] = [line for line in lines if line.startswith("memprof: ") and "lightning-memprof show" in line]
    return [name for line in lines for name, these in found.items() if line in these]


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        (None, ["page", "line", "line", "line"]),
        (True, ["page"] * 4),
        ("line", ["line"] * 4),
        (False, []),
    ],
)
def test_a_fit_prints_its_page_and_the_stages_after_it_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], summary: Any, expected: list[str]
) -> None:
    training = trainer(tmp_path, recorder(summary=summary))
    for stage in STAGES:
        ran(training, stage)
    assert forms(capsys.readouterr().out) == expected


def test_the_first_run_and_each_fit_print_their_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = trainer(tmp_path, recorder())
    for stage in ("validate", "test", "fit"):
        ran(training, stage)
    out = capsys.readouterr().out
    assert forms(out) == ["page", "line", "page"]
    (line,) = [line for line in out.splitlines() if line.startswith("memprof: ")]
    assert line.endswith(f"(lightning-memprof show {tmp_path}/log/test)")


@pytest.mark.parametrize(
    ("exception", "raised"),
    [
        (ValueError("mine"), ValueError),
        (KeyboardInterrupt(), (KeyboardInterrupt, SystemExit)),
        (SystemExit(3), SystemExit),
    ],
)
def test_an_exception_and_ctrl_c_print_the_page_to_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], exception: BaseException, raised: Any
) -> None:
    with pytest.raises(raised) as caught:
        trainer(tmp_path, recorder()).fit(Raises(exception, 2), loader(6))
    assert exception in (caught.value, caught.value.__context__)
    printed = capsys.readouterr()
    assert forms(printed.out) == []
    assert [form for form in forms(printed.err) if form == "page"] == ["page"]


def test_a_run_without_a_step_prints_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path, recorder(), max_epochs=0).fit(Perceptron(), loader(6))
    assert forms(capsys.readouterr().out) == ["line"]


def test_a_standard_error_that_takes_nothing_leaves_the_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stderr", closed)
    with pytest.raises(ValueError, match="mine"):
        trainer(tmp_path, recorder()).fit(Raises(ValueError("mine"), 2), loader(6))
