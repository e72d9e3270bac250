"""Estimates of a training on the CPU have the bytes, by category, that ModuleMemory counts in the real one."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest

from estimated_models import MODELS, MODES, OPTIMIZERS, PRECISIONS, Case, estimated, tracked

_SETTINGS: Final = list(product(OPTIMIZERS, PRECISIONS, MODES))
# Lightning rejects accumulation for manual optimization.
_REJECTED: Final = {("Gan", "accumulated")}


def _cases() -> list[Any]:
    """Return a training of each model; the settings take turns. `make test` has every third one."""
    found = []
    for index, model in enumerate(MODELS):
        allowed = [
            Case(model=model, optimizer=optimizer, precision=precision, mode=mode)
            for optimizer, precision, mode in _SETTINGS
            if (model, mode) not in _REJECTED
        ]
        case = allowed[5 * index % len(allowed)]
        found.append(pytest.param(case, id=str(case), marks=pytest.mark.extended if index % 3 else ()))
    return found


@pytest.mark.parametrize("case", _cases())
def test_the_estimated_peak_of_a_step_is_the_tracked_one_byte_for_byte(tmp_path: Path, case: Case) -> None:
    assert estimated(case, tmp_path / "estimated") == tracked(case, tmp_path / "tracked")
