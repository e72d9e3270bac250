"""The events of saved traces as torch's ``EventList``: what ``PyTorchProfiler.function_events`` is."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from torch.autograd import DeviceType  # type: ignore[attr-defined] # torch's stubs do not re-export it
from torch.autograd.profiler_util import EventList, FunctionEvent

from lightning_memprof.account.trace.key_averages import CPU, CPU_MEMORY, DEVICE, DEVICE_MEMORY, HIDDEN, MEMORY
from lightning_memprof.read.trace.events import OperatorEvent, read_trace

_PARAMETERS: Final = frozenset(inspect.signature(FunctionEvent).parameters)


def function_events(traces: Iterable[Path]) -> EventList:
    """Read all events of the traces, some kilobytes of memory each; times in µs from the start of the first trace.

    As in ``torch.profiler.profile.events()``, without what a trace does not contain: floating point operations, and
    the stack of an operator (Python functions are events of their own).

    Raises:
        ArtifactError: a trace is missing, damaged or truncated.
    """
    events: list[FunctionEvent] = []
    device: str | None = None
    has_memory = False
    origin_ns: int | None = None
    for path in traces:
        window = _Window()
        trace = read_trace(path)
        for row in trace.events():
            window.add(row)
        began_ns = trace.time_origin_ns + (window.began_ns or 0)
        origin_ns = began_ns if origin_ns is None else origin_ns
        device = device or window.device
        has_memory |= bool(window.memory or trace.metadata.get("profile_memory"))
        events += window.finish((began_ns - origin_ns) / 1000)
    for event in events:
        event.use_device = device
    events.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
    found = EventList(events, use_device=device, profile_memory=has_memory)  # type: ignore[no-untyped-call]
    found._build_tree()  # type: ignore[no-untyped-call]
    return found


@dataclass
class _Window:
    """The events of one trace, and their links: operators by number, device work by the number of its operator."""

    events: list[FunctionEvent] = field(default_factory=list)
    memory: list[OperatorEvent] = field(default_factory=list)
    operators: dict[int, FunctionEvent] = field(default_factory=dict)
    launched: dict[int, list[FunctionEvent]] = field(default_factory=lambda: defaultdict(list))
    threads: dict[tuple[int | str, int | str], int] = field(default_factory=dict)
    device: str | None = None
    # Of the first event in the file: microseconds since the origin of a trace have few digits for nanoseconds.
    began_ns: int | None = None

    def add(self, event: OperatorEvent) -> None:
        category, args = event.cat, event.args
        self.began_ns = event.start_ns if self.began_ns is None and event.ph == "X" else self.began_ns
        if event.name == MEMORY:
            self.memory.append(event)
        if event.ph != "X" or event.name in HIDDEN or not (category in CPU or category in DEVICE):
            return
        if "cuda" in category or category in DEVICE or category == "xpu_runtime":
            self.device = "xpu" if category == "xpu_runtime" else self.device or "cuda"
        made = self._event(event)
        self.events.append(made)
        if category in {"cpu_op", "user_annotation", "Operator"}:
            self.operators[args.link] = made
        elif args.link and category in DEVICE and category != "gpu_user_annotation":
            self.launched[args.link].append(made)

    def finish(self, shift_us: float) -> list[FunctionEvent]:
        """Return all events, with kernels at their operators, and allocations at every event that contains them."""
        for link, kernels in self.launched.items():
            if (operator := self.operators.get(link)) is not None:
                for kernel in kernels:
                    interval = kernel.time_range
                    operator.append_kernel(kernel.name, kernel.device_index, interval.end - interval.start)  # type: ignore[no-untyped-call]
        self._add_memory()
        for event in self.events:
            event.time_range.start += shift_us
            event.time_range.end += shift_us
        return self.events

    def _event(self, event: OperatorEvent, memory: tuple[int, int] = (0, 0)) -> FunctionEvent:
        args = event.args
        # Torch counts the profiler's own work on the main thread.
        lane = (event.pid, event.pid if event.cat == "overhead" else event.tid)
        on_device = event.cat in DEVICE
        shapes = msgspec.json.decode(args.input_dims) if bytes(args.input_dims) else []
        values: dict[str, Any] = {
            "id": args.link,
            "name": "ProfilerStep*" if event.name.startswith("ProfilerStep#") else event.name,
            "trace_name": event.name,
            "overload_name": "",
            "thread": self.threads.setdefault(lane, len(self.threads) + 1),
            "start_us": self._us(event.start_ns),
            "end_us": self._us(event.start_ns + event.duration_ns),
            "fwd_thread": args.forward_thread,
            "sequence_nr": args.sequence_number,
            # As torch: a list of tensors is one empty entry.
            "input_shapes": [[] if any(isinstance(n, list) for n in shape) else shape for shape in shapes],
            "structured_input_shapes": shapes,
            "stack": [],
            "cpu_memory_usage": memory[0],
            "device_memory_usage": memory[1],
            "device_type": DeviceType.CUDA if on_device else DeviceType.CPU,
            "device_index": max(args.device_id, 0),
            "is_user_annotation": event.cat in {"user_annotation", "gpu_user_annotation"},
            "is_python_function": event.cat == "python_function",
            "activity_type": event.cat,
        }
        return FunctionEvent(**{name: value for name, value in values.items() if name in _PARAMETERS})  # type: ignore[no-untyped-call]

    def _us(self, ns: int) -> float:
        return (ns - (self.began_ns or 0)) / 1000

    def _add_memory(self) -> None:
        rows = sorted(self.memory, key=lambda event: event.start_ns)
        times = np.array([self._us(row.start_ns) for row in rows])
        host = [row.args.bytes if row.args.device_type in CPU_MEMORY else 0 for row in rows]
        device = [row.args.bytes if row.args.device_type in DEVICE_MEMORY else 0 for row in rows]
        sums = [np.append(0, np.cumsum(np.array(column, np.int64))) for column in (host, device)]
        covered = np.zeros(len(rows) + 1, np.int64)
        for event in self.events:
            if event.device_type is DeviceType.CPU:
                interval = event.time_range
                first = int(np.searchsorted(times, interval.start))
                last = int(np.searchsorted(times, interval.end, side="right"))
                event.cpu_memory_usage, event.device_memory_usage = (
                    int(column[last] - column[first]) for column in sums
                )
                covered[first] += 1
                covered[last] -= 1
        for index in np.flatnonzero(np.cumsum(covered[:-1]) == 0):
            self.events.append(self._event(rows[index], (host[index], device[index])))
