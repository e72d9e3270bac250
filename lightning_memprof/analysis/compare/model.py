"""What two runs, traces or snapshots are compared by, and what the comparison says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

__all__ = [
    "GROUPS",
    "QUANTITIES",
    "Change",
    "Comparison",
    "Difference",
    "Measure",
    "NamedChange",
    "Side",
    "SideKind",
    "Unit",
]

Unit = Literal["ns", "bytes", "count", "per_s"]
SideKind = Literal["run", "traces", "snapshots"]
Change = Literal["appeared", "disappeared", "changed"]

# What ``--fail-on`` can name, with its unit, in the order in which it is shown.
QUANTITIES: Final[Mapping[str, Unit]] = {
    "step_ns": "ns",
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
# What appears and disappears by name, with the unit of its figures and what one is called.
GROUPS: Final[Mapping[str, tuple[Unit, str]]] = {
    "modules": ("bytes", "bytes for backward, in a step"),
    "parameters": ("bytes", "bytes of a module's parameters"),
    "stacks": ("bytes", "bytes held at the peak"),
    "operators": ("ns", "time of its own on the host, in a step"),
    "kernels": ("ns", "time on the device, in a step"),
    "collectives": ("ns", "time in communication, in a step"),
    "findings": ("count", "severity: 2 warning, 3 critical"),
}


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One quantity of one side.

    ``noise`` is its spread over the ``samples`` (steps mostly): the standard deviation that their median deviation
    means; of a single sample it is what such a quantity differs by between two runs of one program. ``source`` says
    what it was taken from: only what has the same source is compared.
    """

    name: str
    unit: Unit
    value: float
    noise: float
    samples: int
    source: str


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two that are compared.

    ``named`` holds figures by group (a key of ``GROUPS``) and name; a group that was not recorded is not in it.
    ``spreads`` has by how much those differ between windows, ``sentences`` what each finding says, by rule.
    ``notes`` say what could not be read.
    """

    label: str
    kind: SideKind
    measures: Mapping[str, Measure]
    named: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    spreads: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    sentences: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One quantity of both sides; None where a side does not have it.

    ``needed`` is how large a change must be to be more than noise. ``problem`` says why the two cannot be compared.
    """

    name: str
    unit: Unit
    a: Measure | None
    b: Measure | None
    needed: float
    problem: str | None = None

    @property
    def change(self) -> float | None:
        """Return how much more B has, in the unit; None where they cannot be compared."""
        if self.a is None or self.b is None or self.problem is not None:
            return None
        return self.b.value - self.a.value

    @property
    def relative(self) -> float | None:
        """Return the change as a part of A; None where they cannot be compared, or A is 0."""
        change = self.change
        return None if change is None or self.a is None or not self.a.value else change / self.a.value

    @property
    def is_above_noise(self) -> bool:
        """Whether the change is more than noise."""
        change = self.change
        return change is not None and abs(change) > self.needed


@dataclass(frozen=True, kw_only=True)
class NamedChange:
    """Something with a name that only one side has, or whose figure changed by more than noise."""

    group: str
    name: str
    kind: Change
    unit: Unit
    a: float | None
    b: float | None
    sentence: str | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two sides beside each other. ``changes`` are by group, the largest first; ``left_out`` groups were not compared.

    ``left_out`` maps a group to the reason.
    """

    a: Side
    b: Side
    differences: tuple[Difference, ...]
    changes: tuple[NamedChange, ...]
    left_out: Mapping[str, str]

    @property
    def is_same(self) -> bool:
        """Whether nothing differs by more than noise, and nothing appeared or disappeared."""
        return not self.changes and not any(difference.is_above_noise for difference in self.differences)

    def difference(self, name: str) -> Difference | None:
        """Return one quantity, None where neither side has it."""
        return next((difference for difference in self.differences if difference.name == name), None)
