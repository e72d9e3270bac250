"""What is to be checked on a GPU has its test in tests/gpu, which are skipped with the reason where there is none."""

from __future__ import annotations

from pathlib import Path

GPU = Path(__file__).resolve().parents[1] / "gpu"


def test_each_module_is_marked_so_that_it_is_skipped_without_an_accelerator() -> None:
    for path in GPU.glob("test_*.py"):
        assert "pytestmark = pytest.mark.gpu" in path.read_text(encoding="utf-8"), path.name
