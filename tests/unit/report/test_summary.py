from __future__ import annotations

from pathlib import Path

import pytest

from lightning_memprof.errors import ReportError
from lightning_memprof.report.summary import print_summary
from lightning_memprof.testing import make_run


def test_the_summary_is_the_page_on_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(make_run(tmp_path))
    out, err = capsys.readouterr()
    assert out.startswith("verdict   No bottleneck found")
    assert err == ""


def test_whatever_goes_wrong_is_a_report_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ReportError, match="the data is on disk"):
        print_summary(tmp_path / "nowhere")

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("lightning_memprof.report.terminal.print_view", fail)
    with pytest.raises(ReportError, match="ZeroDivisionError"):
        print_summary(make_run(tmp_path))
