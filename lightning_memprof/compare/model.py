"""The compared quantities of runs, traces and snapshots, and the results of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from lightning_memprof.compare.significance import RankTest

Unit = Literal["ns", "bytes", "count", "per_s"]
SideKind = Literal["run", "traces", "snapshots"]
Change = Literal["appeared", "disappeared", "changed"]

# The quantities that ``--fail-on`` accepts, with their units, in display order.
QUANTITIES: Final[Mapping[str, Unit]] = {
    "step_ns": "ns",
    "mean_step_ns": "ns",
    "data_wait_ns": "ns",
    "forward_ns": "ns",
    "backward_ns": "ns",
    "optimizer_ns": "ns",
    "callbacks_ns": "ns",
    "other_ns": "ns",
    "samples_per_s": "per_s",
    "duration_ns": "ns",
    "gpu_window_ns": "ns",
    "gpu_busy_ns": "ns",
    "gpu_idle_ns": "ns",
    "gpu_compute_ns": "ns",
    "gpu_communication_ns": "ns",
    "gpu_communication_exposed_ns": "ns",
    "gpu_memory_copy_ns": "ns",
    "data_loading_ns": "ns",
    "peak_allocated_bytes": "bytes",
    "peak_requested_bytes": "bytes",
    "peak_reserved_bytes": "bytes",
    "allocated_bytes": "bytes",
    "requested_bytes": "bytes",
    "reserved_bytes": "bytes",
    "inactive_bytes": "bytes",
    "peak_rss_bytes": "bytes",
    "parameter_bytes": "bytes",
    "gradient_bytes": "bytes",
    "optimizer_state_bytes": "bytes",
    "activation_bytes": "bytes",
    "warnings": "count",
}
# Groups of named entries that appear and disappear, with unit and heading.
GROUPS: Final[Mapping[str, tuple[Unit, str]]] = {
    "modules": ("bytes", "saved activations per step"),
    "parameters": ("bytes", "parameters by module"),
    "stacks": ("bytes", "live bytes at the peak"),
    "operators": ("ns", "self time on the host per step"),
    "kernels": ("ns", "device time per step"),
    "collectives": ("ns", "communication time per step"),
    "findings": ("count", "severity: 2 warning, 3 critical"),
}


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity of one side.

    ``noise`` is its spread over the ``samples`` (usually steps) as a standard deviation; for a single sample, the usual
    difference between two runs of the same program. Only measures with the same ``source`` are compared. ``steps``
    are the samples in time order if each is one step, otherwise None.
    """

    name: str
    unit: Unit
    value: float
    noise: float
    samples: int
    source: str
    steps: tuple[float, ...] | None = None


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a comparison.

    ``named`` has figures by group (a key of ``GROUPS``) and name; groups that were not recorded are missing.
    ``spreads`` has their ranges over the windows, ``sentences`` the sentence of each finding by rule, ``notes`` the
    files that could not be read.
    """

    label: str
    kind: SideKind
    measures: dict[str, Measure] = msgspec.field(default_factory=dict)
    named: dict[str, Mapping[str, float]] = msgspec.field(default_factory=dict)
    spreads: dict[str, Mapping[str, float]] = msgspec.field(default_factory=dict)
    sentences: dict[str, str] = msgspec.field(default_factory=dict)
    notes: list[str] = msgspec.field(default_factory=list)

    def add(self, *measures: Measure | None) -> None:
        """Add known measures; the first one of a name is used."""
        for measure in measures:
            if measure is not None:
                self.measures.setdefault(measure.name, measure)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity of both sides; None where a side lacks it.

    ``needed`` is the smallest change above noise. If both sides have steps it is the resolution, or the drift within a
    side, and ``rank_test`` has to confirm the change. ``problem`` is the reason why the two cannot be compared.
    """

    name: str
    unit: Unit
    a: Measure | None
    b: Measure | None
    needed: float
    rank_test: RankTest | None = None
    problem: str | None = None

    @property
    def change(self) -> float | None:
        """B minus A, in the unit; None where they cannot be compared."""
        if self.a is None or self.b is None or self.problem is not None:
            return None
        return self.b.value - self.a.value

    @property
    def relative(self) -> float | None:
        """The change as a fraction of A; None where they cannot be compared or A is 0."""
        change = self.change
        return None if change is None or self.a is None or not self.a.value else change / self.a.value

    @property
    def is_above_noise(self) -> bool:
        """Whether the change is above noise."""
        change = self.change
        if change is None or abs(change) <= self.needed:
            return False
        return self.rank_test is None or self.rank_test.confirms(change)

    @property
    def has_too_few_steps(self) -> bool:
        """Whether the change exceeds ``needed``, but the steps are too few for any confidence."""
        return self.rank_test is not None and self.rank_test.confidence is None and abs(self.change or 0) > self.needed


class NamedChange(msgspec.Struct, frozen=True, kw_only=True):
    """A named entry that only one side has, or whose figure changed above noise."""

    group: str
    name: str
    kind: Change
    unit: Unit
    a: float | None
    b: float | None
    title: str | None = None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of two sides. ``changes`` are by group, largest first.

    ``left_out`` maps each group that was not compared to the reason.
    """

    a: Side
    b: Side
    differences: tuple[Difference, ...]
    changes: tuple[NamedChange, ...]
    left_out: Mapping[str, str]

    @property
    def is_same(self) -> bool:
        """Whether nothing differs above noise, and nothing appeared or disappeared."""
        return not self.changes and not any(difference.is_above_noise for difference in self.differences)

    def difference(self, name: str) -> Difference | None:
        """Return one quantity, or None."""
        return next((difference for difference in self.differences if difference.name == name), None)
