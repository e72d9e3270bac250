from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_memprof.artifacts.manifest import ManifestWriter
from lightning_memprof.cli.main import main
from lightning_memprof.cli.own_files import is_one_of
from lightning_memprof.testing import make_run


@pytest.mark.parametrize(
    "path",
    ["zero\x00byte", "loop", "a" * 300, "memprofiler/window000/" + "a" * 300],
    ids=["zero", "loop", "long", "file"],
)
@pytest.mark.parametrize("command", ["merge", "report", "export"])
def test_a_listed_path_that_cannot_be_a_file_does_not_stop_a_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, path: str
) -> None:
    run = make_run(tmp_path / "log")
    (run.parent / "loop").symlink_to("loop")
    manifest = ManifestWriter(run / "manifest.rank00000.jsonl")
    manifest.append("artifact", collector="x", type="blob", path=path, size_bytes=1)
    manifest.close()
    out = tmp_path / {"merge": "m.json", "report": "r.html", "export": "e"}[command]
    options = ["--to", "csv"] if command == "export" else []
    assert main([command, str(run), "-o", str(out), *options]) == 0, capsys.readouterr().err
    assert out.exists()


def test_a_result_is_one_of_the_files_also_under_a_link_to_it(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({}))
    (tmp_path / "link").symlink_to(file)
    assert is_one_of(tmp_path / "link", [tmp_path / "zero\x00", file])
    assert not is_one_of(tmp_path / "b.json", [tmp_path / "zero\x00", file])
