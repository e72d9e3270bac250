"""``estimate()`` in a program that has trained already, such as a notebook."""

from __future__ import annotations

from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PROGRAM = dedent("""
    import sys
    import torch
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
    from lightning_memprof import estimate

    if "trained" in sys.argv:
        torch.ones(2, requires_grad=True).sum().backward()
    print(estimate(BoringModel(), BoringDataModule(), trainer=Trainer(logger=False), device="A100-40GB").categories)
""")


@pytest.mark.slow
def test_an_estimate_after_a_backward_is_that_of_a_new_process(tmp_path: Path, run_program: Callable[..., Any]) -> None:
    (tmp_path / "new.py").write_text(PROGRAM)
    (tmp_path / "trained.py").write_text('import sys\nsys.argv.append("trained")\n' + PROGRAM)
    new, trained = run_program("new.py"), run_program("trained.py")
    assert (new.returncode, trained.returncode) == (0, 0), trained.stderr[-2000:]
    assert new.stdout == trained.stdout != ""
