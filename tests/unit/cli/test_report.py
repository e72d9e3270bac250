from __future__ import annotations

import os

import pytest

from fake_runs import make_run
from lightning_memprof.cli.main import main
from lightning_memprof.report.printers import html as html_module


@pytest.fixture(autouse=True)
def no_charts(monkeypatch):
    monkeypatch.setattr(html_module, "charts", lambda _view: {})
    monkeypatch.setattr(html_module, "file_charts", lambda _traces, _snapshots: {})


def test_the_page_of_a_run_goes_into_its_directory(tmp_path, capsys):
    run = make_run(tmp_path / "log")
    assert main(["report", str(tmp_path / "log")]) == 0
    assert (run / "report.html").stat().st_size > 10_000
    assert str(run / "report.html") in capsys.readouterr().out


def test_the_page_of_files_goes_where_one_is(tmp_path, monkeypatch):
    run = make_run(tmp_path / "log")
    traces = [str(path) for path in run.parent.glob("*.json.gz")]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["report", *traces]) == 0
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["report.html"]
    assert not (run / "report.html").exists()


def test_another_file_can_be_named_and_is_opened(tmp_path, monkeypatch):
    run = make_run(tmp_path / "log")
    asked: list[str] = []

    def open_(url: str) -> bool:
        asked.append(url)
        return True

    monkeypatch.setattr("webbrowser.open", open_)
    out = tmp_path / "my page.html"
    assert main(["report", str(run), "-o", str(out), "--open"]) == 0
    assert asked == [out.as_uri()]
    assert not (run / "report.html").exists()


def test_what_cannot_be_written_is_one_line(tmp_path, capsys):
    run = make_run(tmp_path / "log")
    assert main(["report", str(run), "-o", str(tmp_path)]) == 1
    assert "is a directory; name a file" in capsys.readouterr().err
    assert main(["report", str(run), "-o", str(tmp_path / "gone/page.html")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_what_is_shown_and_what_is_no_file_is_never_written_over(tmp_path, capsys):
    run = make_run(tmp_path / "log")
    trace = next(run.parent.glob("*.json.gz"))
    manifest = next(run.glob("manifest.*"))
    for target, out in ((trace, trace), (run, trace), (run, manifest)):
        before = out.read_bytes()
        assert main(["report", str(target), "-o", str(out)]) == 1
        assert "another name" in capsys.readouterr().err
        assert out.read_bytes() == before
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main(["report", str(trace), "-o", str(pipe)]) == 1
    assert "a pipe or a device" in capsys.readouterr().err
    assert pipe.is_fifo()


def test_a_file_whose_name_is_no_utf8_has_a_page(tmp_path):
    run = make_run(tmp_path / "log")
    odd = tmp_path / os.fsdecode(b"bad\xff.json.gz")
    odd.write_bytes(next(run.parent.glob("*.json.gz")).read_bytes())
    out = tmp_path / "page.html"
    assert main(["report", str(odd), "-o", str(out)]) == 0
    assert b"bad" in out.read_bytes()
