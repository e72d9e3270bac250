from __future__ import annotations

import gzip
import io
import random
from pathlib import Path

import pytest

from fake_runs import FakeRun, make_run
from lightning_memprof.errors import ReportError
from lightning_memprof.report import summary
from lightning_memprof.report.summary import print_summary
from lightning_memprof.units import MIB


def test_the_summary_is_the_page_on_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(make_run(tmp_path))
    out, err = capsys.readouterr()
    assert out.startswith("verdict   Compute-bound")
    assert err == ""


def test_the_line_is_one_in_the_encoding_of_its_stream(tmp_path: Path) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    directory = make_run(tmp_path / "m\N{LATIN SMALL LETTER U WITH DIAERESIS}n")
    print_summary(directory, file, is_line=True)
    file.seek(0)
    (line,) = file.read().splitlines()
    assert line.startswith("memprof: Compute-bound")
    assert line.endswith(r"m\xfcn')")


def test_a_run_without_a_step_has_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(make_run(tmp_path, FakeRun(steps=0, windows=())))
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_whatever_goes_wrong_is_a_report_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ReportError, match="the data is on disk"):
        print_summary(tmp_path / "nowhere")

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("lightning_memprof.report.printers.terminal.print_document", fail)
    with pytest.raises(ReportError, match="ZeroDivisionError"):
        print_summary(make_run(tmp_path))


def test_the_summary_has_the_memory_and_survives_a_damaged_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_run(tmp_path)
    for trace in tmp_path.glob("*.pt.trace.json.gz"):
        trace.write_bytes(b"not a trace")
    print_summary(directory)
    page = capsys.readouterr().out
    assert "Peak memory by owner" in page
    assert "not a trace" not in page


@pytest.mark.parametrize(("mib", "first"), [(4, "the model takes 88%"), (12, "forward and backward take 88%")])
def test_a_trace_of_some_mebibytes_is_part_of_the_page_and_a_large_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mib: int, first: str
) -> None:
    directory = make_run(tmp_path)
    (path,) = tmp_path.glob("*.pt.trace.json.gz")
    small = path.stat().st_size
    events = gzip.decompress(path.read_bytes()).removesuffix(b"}")
    text = events + b', "padding": "' + random.Random(0).randbytes(mib * MIB * 3 // 4).hex().encode() + b'"}'
    path.write_bytes(gzip.compress(text, 1))
    manifest = directory / "manifest.rank00000.jsonl"
    manifest.write_text(manifest.read_text().replace(f'"size_bytes":{small}', f'"size_bytes":{path.stat().st_size}'))
    print_summary(directory)
    assert capsys.readouterr().out.startswith(f"verdict   Compute-bound: {first}")


def test_a_run_of_many_windows_does_not_hold_up_the_end_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "MAX_MEMORY_BYTES", 10_000)
    print_summary(make_run(tmp_path, FakeRun(windows=tuple((step, step + 1) for step in range(1, 29, 3)))))
    page = " ".join(capsys.readouterr().out.split())
    assert "windows are omitted from memory" in page


def test_a_rank_that_is_still_writing_is_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(make_run(tmp_path, FakeRun(world_size=3, endings={1: None})))
    page = " ".join(capsys.readouterr().out.split())
    assert "rank 1 was still writing when this page was made and left out" in page
    assert "running or killed" not in page


def test_where_no_rank_has_ended_the_page_has_them_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(make_run(tmp_path, FakeRun(world_size=2, endings={0: None, 1: None})))
    assert "killed" in " ".join(capsys.readouterr().out.split())
