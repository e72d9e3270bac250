"""What the memory collectors would have written of a small transformer: four blocks of two layers, and a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_memprof.artifacts.sink import Sink
    from lightning_memprof.schedule import Window


START_NS: Final = 1_700_000_000_000_000_000
BLOCKS: Final = 4
LAYER_PARAMETERS: Final = 256 * KIB
HEAD_PARAMETERS: Final = 512 * KIB


@dataclass(frozen=True, kw_only=True)
class FakeMemory:
    """What the memory collectors of a made-up run saw.

    Args:
        kept_bytes: what each of the eight layers keeps for backward; the head keeps half of it.
        unattributed_bytes: what is kept beside that and belongs to no module.
        attribution: why nothing is attributed; None where it is.
        temporary_bytes: what only a tracker sees; None is a run without ``ModuleMemory``.
        rss_bytes: what a call of ``training_step`` adds to the resident size.

    """

    kept_bytes: int = MIB
    unattributed_bytes: int = 16 * KIB
    attribution: str | None = None
    temporary_bytes: int | None = None
    rss_bytes: int = 3 * MIB

    @property
    def activation_bytes(self) -> int:
        """All that is kept for backward."""
        return 2 * BLOCKS * self.kept_bytes + self.kept_bytes // 2 + self.unattributed_bytes

    @property
    def parameter_bytes(self) -> int:
        """All parameters; as many gradients, and twice as much state of the optimizer."""
        return 2 * BLOCKS * LAYER_PARAMETERS + HEAD_PARAMETERS


def write_memory(sink: Sink, window: Window, fake: FakeMemory, place: tuple[str, str]) -> None:
    """Write what each memory collector would have of a window's active steps; ``place`` is the stage and the device."""
    stage, device = place
    steps = window.active
    sink.write_rows(window, "functions", [row for step in steps for row in _function_rows(fake, step, stage)])
    if stage != "fit":
        return
    sink.write_rows(window, "saved_tensors", [row for step in steps for row in _saved_rows(fake, step)])
    if fake.temporary_bytes is not None and steps:
        sink.write_rows(window, "module_memory", _tracked_rows(fake, fake.temporary_bytes, steps[0], device))


def allocation_events(fake: FakeMemory, start_us: float) -> list[dict[str, Any]]:
    """Return a trace's events of a step in which an operator, a millisecond long, fills what is kept for backward.

    All of it but a quarter is freed 12 ms later.
    """
    count = 4
    size = fake.activation_bytes // count
    events = []
    for index in range(2 * count - 1):
        allocates = index < count
        time = start_us + (100.0 * index if allocates else 12_000.0)
        args = {
            "Device Type": 0,
            "Device Id": -1,
            "Addr": 4096 + (int(start_us) * count + index % count) * max(size, 1),
            "Bytes": size if allocates else -size,
            "Total Allocated": 0,
        }
        event = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 1, "tid": 1}
        events.append({**event, "ts": time, "args": args})
    return events


def _keys(step: int, point: str) -> dict[str, Any]:
    return {"step": step, "global_step": step, "point": point, "recorded": True, "time_ns": START_NS + step}


def _function_rows(fake: FakeMemory, step: int, stage: str) -> Iterator[dict[str, Any]]:
    function = {"fit": "training_step", "validate": "validation_step"}.get(stage, f"{stage}_step")
    call = {"function": function, "number": step + 1, "depth": 0, "thread": None, "raised": None}
    rss = 500 * MIB
    yield {**_keys(step, "start"), **call, "rss": rss, "vms": 4 * rss, "npp_pre_forward": 0, "npp_diff": 0}
    inside = {"rss_pre_forward": rss, "rss_post_forward": rss + fake.rss_bytes, "rss_diff": fake.rss_bytes}
    saved = {"npp_pre_forward": 0, "npp_post_forward": fake.activation_bytes, "npp_diff": fake.activation_bytes}
    yield {**_keys(step, "end"), **call, "rss": rss + fake.rss_bytes, "vms": 4 * rss, **inside, **saved}


def _saved_rows(fake: FakeMemory, step: int) -> Iterator[dict[str, Any]]:
    attributed = fake.attribution is None
    yield {
        **_keys(step, "before_backward"),
        "activation_bytes": fake.activation_bytes,
        "unattributed_bytes": fake.unattributed_bytes if attributed else fake.activation_bytes,
        "storages": 2 * BLOCKS + 2,
        "dtypes": {"float32": fake.activation_bytes},
        "modules": _modules(fake) if attributed else {},
        "attribution": fake.attribution,
    }
    yield {
        **_keys(step, "step_end"),
        "parameters": {name: [size, size] for name, size in _parameters(fake).items()},
        "held": {
            "parameter_bytes": fake.parameter_bytes,
            "buffer_bytes": 0,
            "gradient_bytes": fake.parameter_bytes,
            "optimizer_state_bytes": 2 * fake.parameter_bytes,
            "input_bytes": 64 * KIB,
        },
    }


def _modules(fake: FakeMemory) -> dict[str, list[int]]:
    """Return own bytes, inclusive bytes, calls, nanoseconds in forwards and bytes of input by path."""
    kept, given = fake.kept_bytes, fake.kept_bytes // 4
    modules = {"net": [0, 2 * BLOCKS * kept + kept // 2, 1, 5_000_000, 0]}
    modules["net.blocks"] = [0, 2 * BLOCKS * kept, 1, 4_500_000, given]
    for index in range(BLOCKS):
        modules[f"net.blocks.{index}"] = [0, 2 * kept, 1, 1_100_000, given]
        modules[f"net.blocks.{index}.norm"] = [kept, kept, 1, 200_000, given]
        modules[f"net.blocks.{index}.mix"] = [kept, kept, 1, 800_000, given]
    modules["net.head"] = [kept // 2, kept // 2, 1, 400_000, given]
    return modules


def _parameters(fake: FakeMemory) -> dict[str, int]:
    sizes = {"": fake.parameter_bytes, "net": fake.parameter_bytes, "net.head": HEAD_PARAMETERS}
    sizes["net.blocks"] = 2 * BLOCKS * LAYER_PARAMETERS
    for index in range(BLOCKS):
        sizes[f"net.blocks.{index}"] = 2 * LAYER_PARAMETERS
        sizes[f"net.blocks.{index}.norm"] = sizes[f"net.blocks.{index}.mix"] = LAYER_PARAMETERS
    return sizes


def _tracked_rows(fake: FakeMemory, temporary_bytes: int, step: int, device: str) -> list[dict[str, Any]]:
    held = {
        "parameter": fake.parameter_bytes,
        "gradient": fake.parameter_bytes,
        "optimizer_state": 2 * fake.parameter_bytes,
        "activation": 0,
        "input": 64 * KIB,
        "temporary": 0,
        "other": 0,
    }
    peak = {**held, "activation": fake.activation_bytes, "temporary": temporary_bytes}
    keys = {**_keys(step, "step_end"), "device": device}
    rows = [{**keys, "kind": kind, "total_bytes": sum(sizes.values()), "categories": sizes}
            for kind, sizes in (("peak", peak), ("end", held))]  # fmt: skip
    module = {"kind": "module", "module": "net.head", "state": "peak", "call": 1}
    return [*rows, {**keys, **module, "total_bytes": sum(peak.values()), "categories": peak}]
