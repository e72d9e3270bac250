"""How a cost grows: the exponent of a power that is fitted to it, and whether that is worse than linear."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import linear_regression
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

# Times scatter: of a cost that grows linearly the slope is found within so much.
LINEAR: Final = 1.15
# Of the first value: less than that may be scatter and no growth.
GROWN: Final = 0.25


@dataclass(frozen=True)
class Curve:
    """One cost over one size.

    Attributes:
        name: what is counted, as a table and a legend name it.
        unit: of ``values``.
        sizes: rising.
        values: one a size, positive.

    """

    name: str
    unit: str
    sizes: Sequence[float]
    values: Sequence[float]

    @property
    def exponent(self) -> float:
        """The slope of the logarithms over all sizes."""
        return slope(self.sizes, self.values)

    @property
    def beyond(self) -> float | None:
        """The slope of what comes on top of the cost at the smallest size; None where next to nothing does.

        A fixed part hides for long how the rest grows: 2 s + n² looks like nothing at first.
        """
        size, value = self.sizes[0], self.values[0]
        least = GROWN * value
        on_top = [(x - size, y - value) for x, y in zip(self.sizes, self.values, strict=True)][1:]
        grown = [each for each in on_top if each[1] > least]
        if not grown:
            return None
        if len(grown) == 1 and (before := [each for each in on_top if each[0] < grown[0][0]]):
            # It had grown by no more than that: the slope is at least this one.
            grown = [(before[-1][0], least), *grown]
        return slope(*zip(*grown, strict=True)) if len(grown) > 1 else None

    @property
    def linear(self) -> bool | None:
        """Whether neither slope is worse than linear; None with fewer than three sizes."""
        return max(self.exponent, self.beyond or 0.0) <= LINEAR if len(self.sizes) > 2 else None


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Give the slope of the least squares through the logarithms of both.

    Raises:
        ValueError: a size or a value is not positive, or there are fewer than two.

    """
    if any(number <= 0 for number in (*sizes, *values)):
        msg = f"a power can be fitted to positive numbers only: {list(sizes)}, {list(values)}"
        raise ValueError(msg)
    return linear_regression([math.log(size) for size in sizes], [math.log(value) for value in values]).slope
