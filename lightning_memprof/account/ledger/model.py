"""Lines of a ledger. The lines of a ledger sum to its whole."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from lightning_memprof.account.memory.activations import paths_around, patterns
from lightning_memprof.account.parts import Part
from lightning_memprof.units import format_ns, percent


class TimeLine(msgspec.Struct, frozen=True, kw_only=True):
    """One owner of time in the mean step.

    Attributes:
        part: the kind of work.
        name: callback and hook, DataLoader part, optimizer, runtime call, collective; empty where the part says it all.
        module: path of the LightningModule's submodule (``blocks.2.attention``), empty outside submodules, None where
            the recording does not tell.
        operator: the innermost operator (``aten::mul``) or kernel, None where the recording does not tell.
        ns: time per step; overlapping work counts once, for its first owner.
        count: events per step.
        called: calls per step by the program itself, of an operator; the others are by operators.
        inside: recorded events per step that lie directly inside its own.
        longest_ns: the longest call, None where unknown.
    """

    part: Part
    name: str = ""
    module: str | None = None
    operator: str | None = None
    ns: float
    count: float = 0.0
    called: float = 0.0
    inside: float = 0.0
    longest_ns: int | None = None


class OperatorWork(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one operator in one module with inputs of the same dimensions and types, per step.

    Attributes:
        part: as of a line.
        module: as of a line.
        operator: its name.
        shapes: dimensions of its operands (``64x64``), for people.
        dtype: their type.
        ns: time.
        count: calls.
        flops: floating-point operations of products of matrices, convolutions and attention, else 0.
        bytes: of its operands and its result, each once.
    """

    part: Part
    module: str | None
    operator: str
    shapes: str
    dtype: str
    ns: float
    count: float
    flops: float
    bytes: float


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a multiple of the median duration.

    ``owner`` is the part with most of the excess. ``core_wait_ns`` of the duration the training thread
    waited for a core; the excess is without it.
    """

    step: int
    duration_ns: int
    excess_ns: int
    owner: Part
    core_wait_ns: int = 0


class TimeLedger(msgspec.Struct, frozen=True, kw_only=True):
    """The owners of a step's wall time; ``lines`` are sorted, longest first, and sum to ``step_ns``.

    Attributes:
        step_ns: the mean duration of the steps.
        median_ns: their median.
        steps: number of steps.
        basis: which steps these are, for people.
        lines: the owners.
        stalls: the steps whose excess is the line ``stall``, longest first.
        work: of the operators whose inputs were recorded, most time first; beside the lines, not one of them.
        double_backward_ns: of nodes that build or run a graph of gradients; beside the lines.
        recomputed_ns: of forwards of modules that run again in backward; beside the lines.
        forwards: a module that each step of a trace calls first, two or three times, each time for other modules, and
            how often; None where there is none.
        window_factor: duration of a recorded step divided by ``median_ns``, None without a recorded step.
        communication: time in collectives that nothing hides: ``rank_wait`` until the last rank has come, where that is
            known, and ``collective``, the transfer. The lines have this time too; the rest is the rank's own work.
        exposed: of a trace, start and end (Unix ns) of the stretches of that time.
        passes: of a device, the time in kernels that forward and backward of the training step launched.
    """

    step_ns: float
    median_ns: float
    steps: int
    basis: str
    lines: tuple[TimeLine, ...]
    stalls: tuple[Stall, ...] = ()
    window_factor: float | None = None
    work: tuple[OperatorWork, ...] = ()
    double_backward_ns: float = 0.0
    recomputed_ns: float = 0.0
    forwards: tuple[str, int] | None = None
    communication: tuple[TimeLine, ...] = ()
    exposed: tuple[tuple[int, int], ...] = ()
    passes: tuple[TimeLine, ...] = ()

    def communicates(self, part: str) -> float:
        """Return the time per step in which a rank waits for others (``rank_wait``), or transfers (``collective``)."""
        return total(line for line in self.communication if line.part == part)

    @property
    def length_text(self) -> str:
        """The length of the step, for people."""
        return f"a {format_ns(self.step_ns)} step"

    def share_text(self, ns: float) -> str:
        """Return time as a share of the step, for people."""
        return f"{percent(ns / self.step_ns) if self.step_ns else percent(0)} of each step"

    def of(self, *parts: str) -> tuple[TimeLine, ...]:
        """Return the lines of some parts."""
        return tuple(line for line in self.lines if line.part in parts)

    def ns(self, *parts: str) -> float:
        """Return the time per step of some parts."""
        return total(self.of(*parts))

    def share(self, *parts: str) -> float:
        """Return the share of the step, 0 to 1, of some parts."""
        return self.ns(*parts) / self.step_ns if self.step_ns else 0.0


def total(lines: Iterable[TimeLine]) -> float:
    """Return the time per step of lines."""
    return sum(line.ns for line in lines)


def scaled(lines: Iterable[TimeLine], ns: float) -> tuple[TimeLine, ...]:
    """Return lines that sum to so much time, at most to their own."""
    found = tuple(lines)
    factor = min(max(ns, 0.0) / total(found), 1.0) if found else 0.0
    return tuple(replace(line, ns=factor * line.ns) for line in found) if factor else ()


def grouped(lines: Iterable[TimeLine]) -> list[TimeLine]:
    """Return lines with those of repeated blocks joined (``blocks.0-5.norm``), longest first; the sum stays."""
    found = list(lines)
    paths = {line.module for line in found if line.module}
    shared = patterns(paths.union(*map(paths_around, paths)), {})
    groups: dict[tuple[str, ...], list[TimeLine]] = {}
    for line in found:
        module = line.module and shared[line.module]
        named = replace(line, module=module)
        groups.setdefault((line.part, line.name, str(module), str(line.operator)), []).append(named)
    sums = [
        replace(
            alike[0],
            ns=total(alike),
            count=sum(line.count for line in alike),
            called=sum(line.called for line in alike),
            inside=sum(line.inside for line in alike),
            longest_ns=max((line.longest_ns for line in alike if line.longest_ns is not None), default=None),
        )
        for alike in groups.values()
    ]
    return sorted(sums, key=lambda line: -line.ns)
