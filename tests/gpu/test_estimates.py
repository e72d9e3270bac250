"""Estimates against trainings on the GPU with torch's own allocator, kernels and autocast."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).parents[1] / "support" / "estimated_on_cuda.py"


def test_the_estimated_reserved_memory_is_that_of_torchs_own_allocator() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_allocator_backend() != "native":
        pytest.skip("the accelerator's allocator is not CUDA's native one")
    ran = subprocess.run([sys.executable, PROGRAM], check=True, capture_output=True, text=True, timeout=280)
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[")]
    assert len(found) == 8
    # A real device's libraries choose kernels.
    allowed = 0 if "FAKE" in torch.cuda.get_device_name(0) else 0.05
    ratios = {case: expected / reserved - 1 for case, expected, reserved in found}
    assert {case: ratio for case, ratio in ratios.items() if abs(ratio) > allowed} == {}
