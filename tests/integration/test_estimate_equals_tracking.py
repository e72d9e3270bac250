"""Estimates of a training on the CPU have the bytes, by category, that ModuleMemory counts in the real one."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Final

import pytest

from estimated_models import MODELS, MODES, OPTIMIZERS, PRECISIONS, Case, estimated, tracked

_SETTINGS: Final = list(product(OPTIMIZERS, PRECISIONS, MODES))
# Lightning rejects accumulation for manual optimization.
_REJECTED: Final = {("Gan", "accumulated")}


def _cases() -> list[Case]:
    """Return a training of each model; the settings take turns."""
    found = []
    for index, model in enumerate(MODELS):
        allowed = [
            Case(model=model, optimizer=optimizer, precision=precision, mode=mode)
            for optimizer, precision, mode in _SETTINGS
            if (model, mode) not in _REJECTED
        ]
        found.append(allowed[5 * index % len(allowed)])
    return found


@pytest.mark.parametrize("case", _cases(), ids=str)
def test_the_estimated_peak_of_a_step_is_the_tracked_one_byte_for_byte(tmp_path: Path, case: Case) -> None:
    assert estimated(case, tmp_path / "estimated") == tracked(case, tmp_path / "tracked")
