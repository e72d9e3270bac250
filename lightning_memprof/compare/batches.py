"""The largest batch that fits: the search for it, and what a search by real runs found."""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class TriedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch size that ran.

    Attributes:
        samples: in a batch.
        fits: whether it ran within the limit.
        peak_bytes: peak memory; None where it did not run to its end.
        step_ns: mean step time of its one run; None as well.
        problem: why it did not run to its end.
    """

    samples: int
    fits: bool
    peak_bytes: int | None = None
    step_ns: float | None = None
    problem: str = ""

    @property
    def samples_per_s(self) -> float | None:
        """Samples trained per second; None where unknown."""
        return None if not self.step_ns else self.samples / self.step_ns * 1e9


class Batches(msgspec.Struct, frozen=True, kw_only=True):
    """The batch sizes that were tried for a program.

    Attributes:
        program: its command line.
        remedies: what else was changed in all runs.
        samples: of the program's batch.
        limit_bytes: memory that a run may use; None for all of the device.
        is_device: whether that is the device's memory, not the host's.
        tried: by batch size.
        is_stopped: whether Ctrl-C ended the search.
    """

    program: str
    remedies: tuple[str, ...] = ()
    samples: int
    limit_bytes: int | None
    is_device: bool = False
    tried: tuple[TriedBatch, ...] = ()
    is_stopped: bool = False

    @property
    def best(self) -> TriedBatch | None:
        """The largest batch that fits; None where none does."""
        return max((found for found in self.tried if found.fits), key=lambda found: found.samples, default=None)

    @property
    def refused(self) -> TriedBatch | None:
        """The smallest batch that does not fit; None where all do."""
        return min((found for found in self.tried if not found.fits), key=lambda found: found.samples, default=None)


def largest_fitting(fits: Callable[[int], bool], first: int, most: int, tolerance: float = 0.0) -> int:
    """Return the largest number that fits, where all smaller ones do; 0 where not even 1 fits.

    The size is doubled while it fits; then the interval up to the first size that does not fit is halved.

    Args:
        fits: is called once for each number that is tried.
        first: the number to begin with.
        most: the largest that is tried.
        tolerance: by what share the result may be less than the largest size.
    """
    fitting, failing = 0, most + 1
    number = min(max(first, 1), most)
    while failing - fitting > max(1, tolerance * fitting):
        if fits(number):
            fitting = number
        else:
            failing = number
        number = min(2 * fitting, most) if failing > most else (fitting + failing) // 2
        number = max(number, 1)
    return fitting
