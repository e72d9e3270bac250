"""Traces for tests: written from a list of events, and what torch itself makes of the same list."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")


@dataclass(frozen=True)
class Made:
    """An event of a made-up profile; times in us."""

    name: str
    start: int
    end: int
    cat: str = "cpu_op"
    thread: int = 7
    id: int = 0  # of an operator
    link: int = 0  # of a device event or a runtime call: the operator's id
    bytes: int = 0  # of a [memory] event
    device_type: int = 0
    shapes: list[Any] = field(default_factory=list)


ACCELERATED = [
    Made("ProfilerStep#4", 0, 1000, "user_annotation", id=1),
    Made("aten::linear", 10, 300, id=2, shapes=[[8, 4], [4]]),
    Made("aten::addmm", 20, 280, id=3, shapes=[[8, 4], [4]]),
    Made("cudaLaunchKernel", 100, 150, "cuda_runtime", link=3),
    Made("cudaDeviceSynchronize", 900, 990, "cuda_runtime"),
    Made("aten::copy_", 400, 500, id=4),
    Made("aten::add", 400, 480, thread=8, id=5),
    Made("gemm<float>", 160, 1160, "kernel", 1, link=3),
    Made("gemm<float>", 1200, 1450, "kernel", 1, link=5),
    Made("Memcpy HtoD", 1500, 1600, "gpu_memcpy", 1, link=4),
    Made("ProfilerStep#4", 160, 1600, "gpu_user_annotation", 1, id=1),
    Made("[memory]", 30, 30, "cpu_instant_event", bytes=4096, device_type=1),
    Made("[memory]", 450, 450, "cpu_instant_event", bytes=-1024, device_type=0),
    Made("[memory]", 5000, 5000, "cpu_instant_event", bytes=-2048, device_type=1),
]


def write_trace(path: Path, events: Sequence[dict[str, Any]], *, gap: str = ",\n  ", **metadata: Any) -> Path:
    """Write events as Kineto lays them out: metadata before and behind the event array."""
    head = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in metadata.items())
    text = f'{{\n{head}  "traceEvents": [\n  {gap.join(json.dumps(event, indent=1) for event in events)}\n  ],'
    text += f'\n  "traceName": "{path.name}"\n}}\n'
    data = text.encode()
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)
    return path


def event_fields(made: Made) -> dict[str, Any]:
    """The event as it stands in a trace."""
    base = {"cat": made.cat, "name": made.name, "pid": 7, "tid": made.thread, "ts": made.start}
    if made.cat == "cpu_instant_event":
        return {"ph": "i", **base, "s": "t", "args": {"Bytes": made.bytes, "Device Type": made.device_type}}
    args: dict[str, Any] = {}
    if made.id or made.link:
        args["External id"] = made.id or made.link
    if made.shapes:
        args["Input Dims"] = made.shapes
    return {"ph": "X", **base, "dur": made.end - made.start, "args": args}


class _KinetoEvent:
    """What torch's profiler asks an event for; everything else is empty."""

    def __init__(self, made: Made) -> None:
        self._made = made

    def __getattr__(self, asked: str) -> Any:
        from torch._C._autograd import DeviceType

        made = self._made
        if made.cat == "cpu_instant_event":
            device = DeviceType(made.device_type)
        else:
            device = DeviceType.CUDA if made.cat in DEVICE_CATEGORIES else DeviceType.CPU
        linked = 0 if made.cat == "gpu_user_annotation" else made.link
        values = {
            "name": made.name,
            "overload_name": "",
            "start_ns": made.start * 1000,
            "end_ns": made.end * 1000,
            "start_thread_id": made.thread,
            "end_thread_id": made.thread,
            "fwd_thread_id": 0,
            "device_type": device,
            "correlation_id": made.id,
            "linked_correlation_id": linked,
            # Torch 2.15 looks for device work only at events that have one.
            "external_id": linked or made.id,
            "nbytes": made.bytes,
            "shapes": [[] if any(isinstance(size, list) for size in shape) else shape for shape in made.shapes],
            "is_user_annotation": made.cat.endswith("user_annotation"),
            "cuda_elapsed_us": -1,
            "flops": 0,
            "stack": [],
            "extra_meta": {},
        }
        return lambda: values.get(asked, 0)


def torch_table(events: Sequence[Made], *, by_shapes: bool = False, **table: Any) -> str:
    """The table that torch prints for a profile with these events."""
    from torch.autograd import profiler, profiler_util

    untyped: Any = profiler_util
    result = SimpleNamespace(events=lambda: [_KinetoEvent(made) for made in events], trace_start_ns=lambda: 0)
    # A call of its runtime is enough: only a profile of the device has one.
    use_device = "cuda" if any(made.cat in {*DEVICE_CATEGORIES, "cuda_runtime"} for made in events) else None
    stand_in: Any = SimpleNamespace(use_device=use_device)
    parsed = profiler.profile._parse_kineto_results(stand_in, result)  # type: ignore[arg-type]
    profile_memory = any(made.name == "[memory]" for made in events)
    found = untyped.EventList(parsed, use_device=use_device, profile_memory=profile_memory)
    found._build_tree()
    text: str = found.key_averages(group_by_input_shapes=by_shapes).table(**table)
    return text
