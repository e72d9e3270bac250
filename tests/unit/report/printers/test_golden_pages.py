from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from lightning_memprof.report.opened import opened
from pages import full, short

RECORDED = Path(__file__).parents[3] / "golden" / "recorded"
RUNS = sorted(path.name.removesuffix(".tar.gz") for path in RECORDED.glob("*.tar.gz"))


@pytest.mark.parametrize("name", [name for name in RUNS if name not in {"device_traces", "snapshots", "stages"}])
def test_the_short_page_of_a_recorded_run_fits_one_screen(name: str, tmp_path: Path) -> None:
    with tarfile.open(RECORDED / f"{name}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    with opened([str(tmp_path / name / "log")]) as view:
        for width in (80, 100):
            page = short(view, width)
            assert len(page.splitlines()) <= 40
            assert page.startswith("verdict   ")
            body = page.rpartition("\nfiles ")[0]
            assert max(map(len, body.splitlines())) <= width
        everything = full(view, 100)
    assert all(f"\n{title} " in everything for title in ("Steps", "Memory", "Modules", "Files", "Profiler overhead"))
