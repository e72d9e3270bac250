"""The columns of the step table: the whole run, then recorded steps or, where those are many, windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.steps.statistics import DeviceMemory, HostMemory, StepReport
from lightning_memprof.artifacts.series import PHASES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lightning_memprof.report.view import View, WindowView

__all__ = ["Column", "span", "step_columns"]

# Two rows of three: more recorded steps than these are read as means, one a window.
MAX_STEPS: Final = 5
MAX_WINDOWS: Final = 8


@dataclass(frozen=True)
class Column:
    """One column: a time by phase that sums to ``duration_ns``, and memory in bytes. None is unavailable.

    ``rss_moment`` and ``device_moment`` say when in the column's steps the sizes that are no peaks were read; empty
    where the column is one step.
    """

    title: str
    subtitle: str
    duration_ns: int | None
    breakdown_ns: Mapping[str, int | None] | None
    clock: str | None
    host: HostMemory
    device: DeviceMemory | None
    rss_moment: str = ""
    device_moment: str = ""


def step_columns(view: View) -> tuple[list[Column], str | None]:
    """Return the columns of the lead rank, and a line that says what was left out, if anything was."""
    columns = []
    lead = view.lead
    if (pulse := lead.statistics) is not None:
        basis = f"mean of {pulse.used} step{'s' * (pulse.used != 1)}"
        memory = (lead.host, lead.device, "at the end", "last seen")
        columns.append(Column("whole run", basis, pulse.mean_ns, pulse.breakdown_ns, pulse.clock, *memory))
    windows = [window for window in lead.windows if window.steps]
    if sum(len(window.steps) for window in windows) <= MAX_STEPS:
        columns += [_of_step(window, step) for window in windows for step in window.steps]
        return columns, None
    columns += [_of_window(window) for window in windows[:MAX_WINDOWS]]
    left_out = len(windows) - MAX_WINDOWS
    return columns, f"{left_out} more windows and each step of them: --format json" if left_out > 0 else None


def span(steps: tuple[int, ...]) -> str:
    """Write steps for people: ``step 2``, ``steps 2-5``, ``no steps``."""
    if not steps:
        return "no steps"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"


def _of_step(window: WindowView, step: StepReport) -> Column:
    cut = ", cut short" if window.truncated else ""
    return Column(
        f"step {step.step}", f"window {window.index}{cut}", step.duration_ns, step.breakdown_ns, step.clock, step.host,
        step.device,
    )  # fmt: skip


def _of_window(window: WindowView) -> Column:
    """Average the times of a window's steps; memory is the last step's, or the largest where it is a maximum."""
    timed = [step.breakdown_ns for step in window.steps if step.breakdown_ns is not None]
    breakdown = {phase: _mean(step[phase] for step in timed) for phase in PHASES} if timed else None
    hosts = [step.host for step in window.steps]
    devices = [step.device for step in window.steps if step.device is not None]
    device = None
    if devices:
        device = DeviceMemory(
            devices[-1].device,
            devices[-1].allocated_bytes,
            devices[-1].reserved_bytes,
            _most(device.max_allocated_bytes for device in devices),
            _most(device.peak_allocated_bytes for device in devices),
        )
    clocks = {step.clock for step in window.steps if step.clock}
    return Column(
        f"window {window.index}",
        span(tuple(step.step for step in window.steps)) + (", cut" if window.truncated else ""),
        sum(ns or 0 for ns in breakdown.values()) if breakdown else None,
        breakdown,
        clocks.pop() if len(clocks) == 1 else None,
        HostMemory(
            hosts[-1].rss_bytes,
            _most(host.max_rss_bytes for host in hosts),
            _most(host.peak_rss_bytes for host in hosts),
            hosts[-1].uss_bytes,
            hosts[-1].vms_bytes,
        ),
        device,
        "at the end",
        "at the end",
    )


def _mean(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known)) if known else None


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
