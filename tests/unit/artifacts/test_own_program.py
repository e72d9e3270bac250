from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lightning_memprof.artifacts.own_program import own_program


@pytest.mark.slow
def test_no_module_of_the_directory_it_is_started_in_is_run(tmp_path: Path) -> None:
    for name in ("pickle", "dataclasses", "json", "copy"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close()")
    command = own_program("lightning_memprof.report.written", "nowhere")
    ended = subprocess.run(command, check=False, input="", text=True, capture_output=True, cwd=tmp_path)
    assert not (tmp_path / "ran").exists(), ended.stderr
