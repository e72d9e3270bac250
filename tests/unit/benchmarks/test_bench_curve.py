"""The exponent of a cost, and what is called worse than linear."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

SIZES = [10, 100, 1_000, 10_000]


@pytest.fixture(scope="module")
def curve() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "curve.py"))


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_a_powers_exponent_is_found(curve: dict[str, Any], power: float) -> None:
    found = curve["Curve"]("show", "s", SIZES, [3 * size**power for size in SIZES])
    assert found.exponent == pytest.approx(power)
    assert found.beyond == (None if power == 0 else pytest.approx(power, abs=0.1))
    assert found.linear is (power <= 1)


def test_what_is_quadratic_behind_a_large_constant_is_worse_than_linear(curve: dict[str, Any]) -> None:
    found = curve["Curve"]("show", "s", SIZES, [2000 + size**2 / 1000 for size in SIZES])
    assert found.exponent < 1.15 < found.beyond == pytest.approx(2, abs=0.02)
    assert found.linear is False


def test_what_is_linear_behind_a_large_constant_is_found_so(curve: dict[str, Any]) -> None:
    ranks = [2, 16, 64, 256, 1024, 4096]
    found = curve["Curve"]("show", "s", ranks, [1 + size / 1000 for size in ranks])
    assert found.beyond == pytest.approx(1)
    assert found.linear is True


def test_a_jump_at_the_largest_size_alone_is_worse_than_linear(curve: dict[str, Any]) -> None:
    found = curve["Curve"]("show", "s", SIZES, [1, 1.1, 1, 50])
    assert found.linear is False


def test_what_only_scatters_does_not_grow(curve: dict[str, Any]) -> None:
    found = curve["Curve"]("show", "s", SIZES, [1, 1.2, 0.9, 1.1])
    assert found.beyond is None
    assert found.linear is True


def test_two_sizes_are_no_verdict(curve: dict[str, Any]) -> None:
    assert curve["Curve"]("show", "s", SIZES[:2], [1, 10]).linear is None


def test_no_power_goes_through_zero(curve: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="positive numbers only"):
        curve["slope"]([1, 2], [0, 1])
