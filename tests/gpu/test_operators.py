"""Operators without data against the GPU with torch's own kernels and allocator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).parents[1] / "support" / "operators_on_cuda.py"
# The partial results of a few reductions.
SMALL = 10 * 2**10


def test_the_peak_of_operators_is_that_of_torchs_own_kernels() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_allocator_backend() != "native":
        pytest.skip("the accelerator's allocator is not CUDA's native one")
    ran = subprocess.run([sys.executable, PROGRAM], check=True, capture_output=True, text=True, timeout=280)
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[")]
    assert len(found) == 22 * 4 * 5
    differences = {case: expected - measured for case, expected, measured in found}
    assert {case: difference for case, difference in differences.items() if abs(difference) > SMALL} == {}
