"""Runs without a training: for tests of whatever reads a run directory."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from fake_memory import START_NS, FakeMemory, allocation_events, write_memory
from lightning_memprof.artifacts.manifest import SCHEMA_VERSION
from lightning_memprof.artifacts.naming import TraceName, pulse_name
from lightning_memprof.artifacts.pulse import encode_pulse
from lightning_memprof.artifacts.series import PHASES, PULSE_COLUMNS
from lightning_memprof.artifacts.sink import ArtifactSpec, RunPlace, Sink, claim_run_place
from lightning_memprof.schedule import Mark, Point, Window
from lightning_memprof.units import MIB

if TYPE_CHECKING:
    from pathlib import Path


Phases = Mapping[str, int]

STRATEGY: Final = "SingleDeviceStrategy"
HEALTHY: Final[Phases] = {
    "data_wait": 400_000,
    "forward": 6_000_000,
    "backward": 10_000_000,
    "optimizer": 1_200_000,
    "callbacks": 100_000,
    "other": 500_000,
}
MARKS: Final = (
    Point.BATCH_START,
    Point.AFTER_FORWARD,
    Point.BEFORE_BACKWARD,
    Point.AFTER_BACKWARD,
    Point.BEFORE_OPTIMIZER_STEP,
    Point.BATCH_END,
)


def _healthy_phases(rank: int, step: int) -> Phases:
    slower = 1 + rank * 0.01 + (4 if step == 0 else 0) + (step % 5) * 0.01
    return {phase: round(ns * slower) for phase, ns in HEALTHY.items()}


def _steady_rss(step: int) -> int:
    return 500 * MIB + (step % 3) * 4096


@dataclass(frozen=True, kw_only=True)
class FakeRun:
    """What a made-up run looks like; the defaults are a healthy one on a CPU.

    Args:
        steps: number of steps of every rank.
        world_size: number of ranks.
        stage: ``fit``, ``validate``, ``test`` or ``predict``.
        phases: ``(rank, step)`` to nanoseconds by phase.
        rss_bytes: step to resident size.
        device_bytes: step to allocated bytes; None is a run without an accelerator.
        windows: the recorded steps of each window; the step before is its warmup.
        training: fields of the manifest's ``training`` row to replace.
        environment: the same of the environment in its ``run`` row.
        endings: how ranks end that do not finish: a message of an exception, or None where the rank was killed.
        trace: whether each window has an operator trace.
        memory: what the memory collectors saw in each window; None is a run without them.
        loading: the parts of a fetch that take an equal part of the data wait: ``Images.fetch``.
        actions: further ones of each recorded step, in its optimizer step.
        padding: positions of a recorded batch, those that are padding, and of these the ones beyond the longest sample.
        samples: of a batch, where ``padding`` is set.
        elements: of a rank's batch in a recorded step.
        core_wait_ns: step to the wait for a core since the previous reading; None is a step without a reading.
        other_profiler: step to the number of a profiler that is not ours; None where there is none.

    """

    steps: int = 30
    world_size: int = 1
    stage: str = "fit"
    phases: Callable[[int, int], Phases] = _healthy_phases
    rss_bytes: Callable[[int], int] = _steady_rss
    device_bytes: Callable[[int], int] | None = None
    windows: tuple[tuple[int, ...], ...] = ((2, 3),)
    training: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    endings: Mapping[int, str | None] = field(default_factory=dict)
    trace: bool = True
    memory: FakeMemory | None = field(default_factory=FakeMemory)
    loading: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    padding: tuple[int, int, int] | None = None
    elements: Callable[[int, int], int] | None = None
    samples: int = 32
    core_wait_ns: Callable[[int], int | None] = lambda _: None
    other_profiler: Callable[[int], int | None] = lambda _: None

    @property
    def device(self) -> str:
        """Where the model would have run."""
        return "cpu" if self.device_bytes is None else "cuda:0"


def make_run(root: Path, fake: FakeRun | None = None) -> Path:
    """Write a run below ``root`` as a training would, through the same writers.

    Args:
        root: the log directory; made where it is missing. A second run in it gets its own directory.
        fake: what the run looks like.

    Returns:
        The run directory.

    """
    fake = fake or FakeRun()
    place = claim_run_place(root)
    for rank in range(fake.world_size):
        _write_rank(place, rank, fake)
    return place.directory


def add_series(
    run: Path, collector: str, rows: Iterable[Mapping[str, Any]], *, window: int = 0, torn: str = ""
) -> None:
    """Add rows of rank 0, as a collector would, to its series of a window; ``torn`` is a partial last line."""
    path = run / f"window{window:03d}/rank00000.{collector}.jsonl"
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.write(torn)
    listed = {"kind": "artifact", "time_ns": 1, "collector": collector, "type": "series", "window": window}
    listed |= {"path": f"{run.name}/window{window:03d}/{path.name}", "size_bytes": path.stat().st_size}
    with (run / "manifest.rank00000.jsonl").open("a") as manifest:
        manifest.write(json.dumps(listed) + "\n")


def set_epochs(directory: Path, steps: int) -> None:
    """Make each epoch of the pulse this many steps long."""
    pulse = directory / "pulse.rank00000.csv"
    header, *lines = pulse.read_text().splitlines()
    rows = [line.split(",") for line in lines]
    for row in rows:
        row[2] = str(int(row[0]) // steps)
    pulse.write_text("\n".join([header, *map(",".join, rows)]) + "\n")


def _write_rank(place: RunPlace, rank: int, fake: FakeRun) -> None:
    with closing(Sink(place, rank)) as sink:
        sink.manifest.append("run", **_facts(place, rank, fake))
        sink.manifest.append("training", **{**_training(fake), **fake.training})
        if fake.device_bytes is None:
            sink.manifest.append("unavailable", collector="allocator", reason="no accelerator")
        for index, steps in enumerate(fake.windows):
            _write_window(sink, Window(index, (steps[0] - 1,), steps), fake)
        _write_pulse(sink, fake)
        ending = fake.endings.get(rank, "")
        if ending is not None:
            sink.manifest.append(
                "end",
                status="exception" if ending else "finished",
                exception=ending or None,
                steps=fake.steps,
                overhead={
                    "pulse_ns": 9_000 * fake.steps,
                    "windows_ns": 40_000_000,
                    "collectors_ns": {"host": 2_000_000, "hooks": 3_000_000, "operator_trace": 35_000_000},
                },
            )


def _facts(place: RunPlace, rank: int, fake: FakeRun) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "stage": fake.stage,
        "rank": rank,
        "local_rank": rank,
        "node_rank": 0,
        "world_size": fake.world_size,
        "host": "node0",
        "pid": 1000 + rank,
        "strategy": STRATEGY,
        "accelerator": "CPUAccelerator" if fake.device == "cpu" else "CUDAAccelerator",
        "device": fake.device,
        "root": str(place.root.absolute()),
        "schedule": {"wait": 1, "warmup": 1, "active": 2, "repeat": 1},
        "collectors": ["pulse", "host", "allocator", "hooks", "functions", "saved_tensors", "operator_trace"],
        "environment": {"python": "3.11.7", "torch": "2.13.0", "lightning": "2.6.6", "cpu_count": 8}
        | dict(fake.environment),
    }


def _training(fake: FakeRun) -> dict[str, Any]:
    return {
        "num_batches": fake.steps,
        "max_steps": fake.steps,
        "max_epochs": 1,
        "accumulate_grad_batches": 1,
        "precision": "32-true",
        "model": "LitGPT",
        "parameters": 3_210_000,
        "parameter_bytes": 12_840_000,
        "optimizers": [
            {"name": "AdamW", "foreach": None, "fused": True, "parameters": 3_210_000, "device": fake.device}
        ],
        "dataloaders": [
            {
                "num_workers": 2,
                "batch_size": 8,
                "pin_memory": False,
                "prefetch_factor": 2,
                "persistent_workers": True,
            }
        ],
    }


def _write_pulse(sink: Sink, fake: FakeRun) -> None:
    window_of = {step: index for index, steps in enumerate(fake.windows) for step in (steps[0] - 1, *steps)}
    rows: list[list[int | None]] = []
    start = START_NS
    for step in range(fake.steps):
        phases = fake.phases(sink.rank, step)
        duration = sum(phases.values())
        on_device: list[int | None] = [None] * (1 + len(PHASES))
        if fake.device_bytes is not None:
            # The device's clock does not tell callbacks apart.
            on_device = [
                duration - phases["callbacks"],
                *(None if name == "callbacks" else phases[name] for name in PHASES),
            ]
        peak = max(map(fake.device_bytes, range(step + 1))) if fake.device_bytes is not None else None
        rows.append(
            [
                step, step, 0, window_of.get(step), start, duration, *(phases[name] for name in PHASES),
                fake.rss_bytes(step), peak, *on_device, fake.core_wait_ns(step), fake.other_profiler(step),
            ]
        )  # fmt: skip
        start += duration
    path = sink.place.directory / pulse_name(sink.rank)
    path.write_text(",".join(PULSE_COLUMNS) + "\n" + encode_pulse(rows), encoding="ascii")
    sink.list_artifact(ArtifactSpec(path, "pulse", "pulse"))


def _write_window(sink: Sink, window: Window, fake: FakeRun) -> None:
    steps = [*window.warmup, *window.active]
    sink.manifest.append(
        "window", window=window.index, event="open", warmup_steps=list(window.warmup), active_steps=list(window.active)
    )
    recorded = tuple(step for step in window.active if step < fake.steps)
    hooks: list[dict[str, Any]] = []
    with sink.series(window, "host") as write:
        for step in steps:
            start = START_NS + step * 20_000_000
            hooks += _hook_rows(step, start, fake.phases(sink.rank, step), fake, recorded=step in recorded)
            for index, point in enumerate(MARKS):
                mark = Mark(step, step, point, step in recorded, start + index)
                rss = fake.rss_bytes(step) + index * MIB
                uss = rss // 2 if point in (Point.BATCH_START, Point.BATCH_END) else None
                write(mark, rss_bytes=rss, uss_bytes=uss, vms_bytes=4 * rss, peak_rss_bytes=rss + 8 * MIB)
    sink.write_rows(window, "hooks", hooks)
    if fake.padding is not None or fake.elements is not None:
        names = ("samples", "positions", "padded", "beyond_longest")
        counts = dict(zip(names, (fake.samples, *(fake.padding or (0, 0, 0))), strict=True))
        with sink.series(window, "throughput") as write:
            for step in recorded:
                counts["elements"] = fake.elements(sink.rank, step) if fake.elements is not None else 0
                write(Mark(step, step, Point.STEP_END, True, START_NS + step * 20_000_000), **counts)
    if fake.device_bytes is not None:
        _write_allocator(sink, window, fake)
    if fake.memory is not None:
        write_memory(sink, Window(window.index, window.warmup, recorded), fake.memory, (fake.stage, fake.device))
    if fake.trace:
        name = TraceName(
            fake.stage, "fts_extended_pytorch_profiler", sink.rank, STRATEGY, "training_step", START_NS + window.index
        )
        with sink.file(ArtifactSpec(sink.place.root / str(name), "trace", "operator_trace", window.index)) as temporary:
            temporary.write_bytes(gzip.compress(json.dumps(_trace(recorded, fake.memory)).encode(), mtime=0))
    truncated = recorded != window.active
    sink.manifest.append(
        "window",
        window=window.index,
        event="close",
        steps=list(recorded),
        truncated=truncated,
        reason="the run ended" if truncated else None,
    )


def _write_allocator(sink: Sink, window: Window, fake: FakeRun) -> None:
    if fake.device_bytes is None:
        return
    with sink.series(window, "allocator") as write:
        for step in (*window.warmup, *window.active):
            for index, point in enumerate(MARKS):
                allocated = fake.device_bytes(step)
                values = {
                    "allocated_bytes.all.current": allocated,
                    "allocated_bytes.all.peak": allocated + 64 * MIB,
                    "reserved_bytes.all.current": allocated + 128 * MIB,
                    "reserved_bytes.all.peak": allocated + 128 * MIB,
                    "num_alloc_retries": 0,
                    "num_ooms": 0,
                }
                mark = Mark(step, step, point, step in window.active, START_NS + step * 20_000_000 + index)
                write(mark, device=fake.device, **values)


def _hook_rows(step: int, start: int, phases: Phases, fake: FakeRun, *, recorded: bool) -> list[dict[str, Any]]:
    """Lay the phases out as Lightning nests them: forward and backward inside of the optimizer step."""
    data, forward, backward = phases["data_wait"], phases["forward"], phases["backward"]
    optimizer, callbacks = phases["optimizer"], phases["callbacks"]
    batch, loading = start + data, fake.loading
    after = batch + forward + backward + optimizer
    laid_out = (
        ("step", start, sum(phases.values()), -1),
        ("[_TrainingEpochLoop].train_dataloader_next", start, data, 0),
        *(
            (f"[DataLoader]{part}", start + data // len(loading) * at, data // len(loading), 1)
            for at, part in enumerate(loading)
        ),
        ("run_training_batch", batch, forward + backward + optimizer, 0),
        ("[LightningModule]LitGPT.optimizer_step", batch, forward + backward + optimizer, 1),
        (f"[Strategy]{STRATEGY}.training_step", batch, forward, 2),
        (f"[Strategy]{STRATEGY}.backward", batch + forward, backward, 2),
        *((action, batch + forward + backward + at, 1, 2) for at, action in enumerate(fake.actions)),
        ("[Callback]TQDMProgressBar.on_train_batch_end", after, callbacks, 0),
    )
    return [
        {
            "step": step,
            "global_step": step,
            "recorded": recorded,
            "action": action,
            "start_ns": begin,
            "duration_ns": duration,
            "depth": depth,
        }
        for action, begin, duration, depth in laid_out
    ]


def _trace(steps: tuple[int, ...], memory: FakeMemory | None) -> dict[str, Any]:
    def event(name: str, category: str, ts: float, dur: float) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": {}}

    events = []
    for index, step in enumerate(steps):
        begin = index * 20_000.0
        events.append(event(f"ProfilerStep#{step}", "user_annotation", begin, 18_000.0))
        events.append(event("aten::linear", "cpu_op", begin + 500, 6_000.0))
        events.append(event("aten::addmm", "cpu_op", begin + 600, 5_000.0))
        if memory is not None:
            events += allocation_events(memory, begin + 700)
    return {"schemaVersion": 1, "baseTimeNanoseconds": START_NS, "traceEvents": events}
