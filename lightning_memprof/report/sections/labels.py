"""The names of quantities, the colours of parts, and the peaks: one word for one thing on every page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Final, NamedTuple, TypeVar

import msgspec

from lightning_memprof.account.parts import Part
from lightning_memprof.account.snapshot.report import DeviceReport
from lightning_memprof.account.trace.model import GpuTimes
from lightning_memprof.artifacts.manifest import TrainingFacts
from lightning_memprof.judge import Severity
from lightning_memprof.read.run.locate import shown_place
from lightning_memprof.read.run.model import Run
from lightning_memprof.report.document import Badge, Bar, Cell, Style
from lightning_memprof.units import format_list, quoted

# Names that are not here are shown with blanks for underscores.
LABELS: Final[Mapping[str, str]] = {
    "workspace": "library workspaces",
    "activation": "saved activations",
    "activation_and_temporary": "saved activations and temporaries",
    "before": "before the window",
    "before_run": "before the run",
    "cached": "cached, unused",
    "data_set": "data set",
    "growth": "growth over the run",
    "outside_steps": "outside the training steps",
    "other_tensors": "other tensors held by Python",
    "pending": "pending free",
    "workers": "worker processes",
}
# The stack of a block.
BEFORE_RECORDING: Final = "(allocated before recording, or no stack)"
BADGES: Final[Mapping[Severity, Badge]] = {
    Severity.NONE: "none",
    Severity.INFO: "info",
    Severity.WARNING: "warning",
    Severity.CRITICAL: "critical",
}
STATUS_STYLES: Final[Mapping[str, Style]] = {"finished": "good", "exception": "bad"}
READABLE: Final = frozenset({".json", ".jsonl", ".txt", ".csv", ".yaml", ".log"})
MORE: Final = "--format json"


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """A maximum: its label, the bytes it counts, and the time it covers."""

    label: str
    counts: str
    span: str


class Counter(NamedTuple):
    """A system counter: its name in words, the unit of its values divided by ``scale``, and the name of its axis."""

    words: str
    unit: str
    scale: float
    axis: str


# The unit, scale and axis of a counter by the end of its name, longer ends first; charts have this order.
COUNTERS: Final[Mapping[str, tuple[str, float, str]]] = {
    "_percent": ("share", 100, "percent"),
    "_bytes": ("bytes", 1, "bytes"),
    "_bytes_per_s": ("bytes/s", 1, "bytes per second"),
    "_per_s": ("/s", 1, "per second"),
    "_ns": ("ns", 1, "nanoseconds"),
    "_c": ("°C", 1, "degrees Celsius"),
    "_w": ("W", 1, "watts"),
}
RUN: Final = "run maximum (per step: maximum so far)"
HISTORY: Final = "maximum of the recorded history"
PEAKS: Final[Mapping[str, Peak]] = {
    "rss": Peak(label="peak RSS", counts="resident memory of the process, Python and libraries included", span=RUN),
    "device": Peak(label="device peak", counts="bytes of all tensors in the device's allocator", span=RUN),
    "tensors": Peak(label="tensors peak", counts="tensors of a known category", span="maximum of the recorded steps"),
    "live": Peak(
        label="live bytes peak",
        counts="allocated since the window began and not yet freed",
        span="maximum of the recorded steps",
    ),
    "requested": Peak(label="requested peak", counts="bytes requested by the program and not freed", span=HISTORY),
    "reserved": Peak(label="reserved peak", counts="bytes that the allocator took from the device", span=HISTORY),
}


def counter(name: str) -> Counter:
    """Return the words, unit and axis of a counter's name."""
    end = next((end for end in COUNTERS if name.endswith(end)), "")
    return Counter(name.removesuffix(end).replace("_", " "), *COUNTERS.get(end, ("", 1, "")))


def called(name: str) -> str:
    """Return the name of a quantity on a page."""
    if isinstance(name, Part):
        return name.label
    return LABELS.get(name, name.replace("_", " "))


def peak_note(name: str) -> str:
    """Return the line that explains a peak: the bytes it counts, and the time it covers."""
    peak = PEAKS[name]
    return f"{peak.label}: {peak.counts}; {peak.span}"


def more(number: int, noun: str) -> str:
    """Return the note below a list that is cut."""
    return f"{number:,} {noun}: {MORE}"


N = TypeVar("N", bound=str)


def bars(parts: Mapping[N, int | None] | Mapping[N, int], whole: int, unit: str) -> list[Bar]:
    """Return the known parts of a whole that are not 0, in their order."""
    return [Bar(called(name), name, Cell(value, unit, whole=whole)) for name, value in parts.items() if value and whole]


def place(path: Path, run: Run) -> str:
    """Return a path that means the same wherever the page is read: absolute, or its URL."""
    return shown_place(path, run.root, run.url) if run.url is not None else str(path.absolute())


# Compiled modules that a note names.
MOST_COMPILED: Final = 4


def compiled_note(training: TrainingFacts | None) -> Iterator[str]:
    """Yield which modules are compiled; nothing if none is."""
    if training is not None and training.compiled:
        shown = format_list([path or "the model" for path in training.compiled], MOST_COMPILED)
        yield f"compiled by torch.compile, each with the submodules in its compiled code: {shown}"


def file_command(where: str, kind: str) -> str:
    """Return the command that opens a file, empty where none does."""
    if kind == "trace":
        return f"lightning-memprof view {quoted(where)}"
    if kind == "snapshot":
        return f"lightning-memprof show {quoted(where)}"
    return f"less {quoted(where)}" if PurePath(where).suffix in READABLE else ""


def reserved_parts(device: DeviceReport) -> dict[str, int]:
    """Return the parts of the allocator's reserved bytes; they sum to them."""
    found = device.snapshot
    return {
        "requested": found.requested_bytes,
        "rounding": found.rounding_bytes,
        "pending": found.pending_bytes,
        "inactive_split": found.inactive_split_bytes,
        "free_segments": found.free_segment_bytes,
    }


def device_parts(times: GpuTimes) -> dict[str, int]:
    """Return the parts of a device's time; they sum to its window, and overlapping time counts as compute."""
    return {
        Part.COMPUTE: times.compute_ns,
        Part.COLLECTIVE: times.communication_exposed_ns,
        Part.COPY: max(0, times.busy_ns - times.compute_ns - times.communication_exposed_ns),
        "idle": times.idle_ns,
    }
