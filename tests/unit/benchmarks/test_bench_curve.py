"""The exponent of a cost, and what is called worse than linear."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

SIZES = [10, 100, 1_000, 10_000]
RANKS = [2, 16, 64, 256, 1024, 4096]


@pytest.fixture(scope="module")
def curve() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "curve.py"))


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_a_powers_exponent_is_found(curve: dict[str, Any], power: float) -> None:
    found = curve["Curve"]("show", "s", SIZES, [3 * size**power for size in SIZES])
    assert found.exponent == pytest.approx(power)
    assert found.beyond == (None if power == 0 else pytest.approx(power, abs=0.1))
    assert found.linear is (power <= 1)


@pytest.mark.parametrize(
    ("sizes", "values", "beyond", "linear"),
    [
        pytest.param(SIZES, [2000 + size**2 / 1000 for size in SIZES], 2, False, id="quadratic behind a constant"),
        pytest.param(RANKS, [1 + size / 1000 for size in RANKS], 1, True, id="linear behind a constant"),
        pytest.param(SIZES, [1, 1.1, 1, 50], 2.28, False, id="a jump at the largest size"),
        pytest.param(SIZES, [1, 1.2, 0.9, 1.1], None, True, id="scatter"),
        pytest.param(SIZES[:2], [1, 10], None, None, id="two sizes"),
    ],
)
def test_what_comes_on_top_of_the_smallest_size_decides(
    curve: dict[str, Any], sizes: list[int], values: list[float], beyond: float | None, linear: bool | None
) -> None:
    found = curve["Curve"]("show", "s", sizes, values)
    assert found.beyond == (beyond and pytest.approx(beyond, abs=0.03))
    assert found.linear is linear


def test_no_power_goes_through_zero(curve: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="positive numbers only"):
        curve["slope"]([1, 2], [0, 1])
