from __future__ import annotations

import gc
import itertools
import json
import pickle
import pickletools
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fake_devices import FakeCuda
from lightning_memprof.artifacts.series import PHASES
from lightning_memprof.capture.base import RunContext
from lightning_memprof.capture.collectors.allocator_history import AllocatorHistory
from lightning_memprof.capture.collectors.oom import OOMAutopsy, OomWatch, memory_error
from lightning_memprof.capture.session import Session
from lightning_memprof.capture.sources import holders
from lightning_memprof.capture.sources.oom_state import (
    Frame,
    forward_sources,
    frames_of,
    host_memory,
    live_tensors,
    module_of,
    phase_of,
)
from lightning_memprof.errors import ConfigError
from lightning_memprof.schedule import Action, Point, Schedule
from lightning_memprof.units import GIB, MIB
from recorded_rows import read_rows
from sessions import Tensors, context, drive, positions, session


class Greedy(nn.Module):
    """Asks the fake device for memory in its forward."""

    def __init__(self, cuda: FakeCuda | None = None, ask: Callable[[int], object] = lambda _: None) -> None:
        super().__init__()
        self.ask = cuda.run_out if cuda is not None else ask
        self.inner = nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        kept = self.inner(values)
        self.ask(3 * GIB)
        return kept


class Tower(nn.Module):
    def __init__(self, top: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), top])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            values = block(values)
        return values


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with FakeCuda().installed() as fake:
        yield fake


@pytest.fixture
def run(cuda: FakeCuda, tmp_path: Path) -> Iterator[RunContext]:
    with context(tmp_path, "cuda:0") as made:
        yield made


def never(_: int) -> Action:
    return Action.NONE


@contextmanager
def watched(run: RunContext, **options: Any) -> Iterator[tuple[Session, OomWatch]]:
    with session(run, never, []) as made, OOMAutopsy(**options).watch(run) as watch:
        yield made, watch


def rows(run: RunContext, kind: str = "oom") -> list[dict[str, Any]]:
    return [row for row in read_rows(run.sink.manifest.path)[0] if row["kind"] == kind]


def events(run: RunContext) -> list[dict[str, Any]]:
    document = json.loads((run.sink.place.directory / "oom.rank00000.json").read_text())
    return list(document["events"])


def snapshot(run: RunContext) -> dict[str, Any]:
    data = (run.sink.place.directory / "cuda_oom_rank_0.pickle").read_bytes()
    found: dict[str, Any] = pickle.loads(data)  # noqa: S301 our own
    return found


def caught(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 whatever it is
        return error
    pytest.fail("nothing was raised")


def test_the_observer_writes_everything_down_before_torch_raises(cuda: FakeCuda, run: RunContext) -> None:
    seen: list[list[dict[str, Any]]] = []
    with watched(run) as (made, _):
        # What torch's observer would be followed by; the file is there already.
        cuda.observers.append(lambda *_: seen.append(rows(run)))
        cuda.allocate(5 * GIB)
        made.begin_step(next(positions([7])))
        made.mark(Point.BATCH_START)
        made.clock.enter(made.clock.slot("forward", PHASES.index("forward")))
        with pytest.raises(torch.OutOfMemoryError):
            cuda.run_out(90 * GIB)
    (row,) = seen[0]
    assert (row["memory"], row["device"], row["asked_bytes"], row["seen"]) == ("device", "cuda:0", 90 * GIB, "observer")
    assert (row["limit_bytes"], row["free_bytes"], row["total_bytes"]) == (80 * GIB, 75 * GIB, 80 * GIB)
    assert (row["allocated_bytes"], row["reserved_bytes"]) == (5 * GIB, 5 * GIB)
    assert (row["step"], row["global_step"], row["epoch"], row["window"]) == (7, 7, 0, None)
    assert (row["phase"], row["point"], row["rank"], row["ended_run"]) == ("forward", "batch_start", 0, False)
    (event,) = events(run)
    assert event["statistics"]["num_ooms"] == 1
    assert event["stack"][0][2] == "run_out"
    assert [name for _, _, name in event["stack"]].index("run_out") < 2
    assert event["host"]["rss_bytes"] > 0
    assert event["unavailable"] == {}


def test_the_snapshot_is_a_pickle_of_protocol_4_with_the_failed_request_as_its_last_event(
    cuda: FakeCuda, run: RunContext
) -> None:
    with watched(run, history="always"):
        cuda.allocate(GIB)
        caught(lambda: cuda.run_out(90 * GIB))
    ring = snapshot(run)["device_traces"][0]
    assert [(entry["action"], entry["size"]) for entry in ring] == [("alloc", GIB), ("oom", 90 * GIB)]
    assert ring[0]["frames"]
    data = (run.sink.place.directory / "cuda_oom_rank_0.pickle").read_bytes()
    assert next(iter(pickletools.genops(data)))[1] == 4
    listed = {(row["type"], row["path"], row["collector"]) for row in rows(run, "artifact")}
    assert listed == {
        ("snapshot", "memprofiler/cuda_oom_rank_0.pickle", "oom"),
        ("blob", "memprofiler/oom.rank00000.json", "oom"),
    }


def test_by_default_the_ring_is_off_outside_windows_and_always_keeps_it_on_through_them(
    cuda: FakeCuda, run: RunContext
) -> None:
    with session(run, Schedule(), [AllocatorHistory()]) as made, OOMAutopsy().watch(run):
        drive(made, range(6))
        assert [call for call, _ in cuda.calls] == ["on", "snapshot", "off"]
    cuda.calls.clear()
    kept = OOMAutopsy(history="always", max_entries=500)
    with session(run, Schedule(), [AllocatorHistory()]) as made, kept.watch(run):
        drive(made, range(6))
        assert [call for call, _ in cuda.calls] == ["on", "snapshot"]
    assert [call for call, _ in cuda.calls] == ["on", "snapshot", "off"]
    assert cuda.calls[0][1]["max_entries"] == 500


def test_the_observer_is_registered_once_and_hears_nothing_after_the_run(cuda: FakeCuda, run: RunContext) -> None:
    for _ in range(3):
        with watched(run):
            assert len(cuda.observers) == 1
    caught(lambda: cuda.run_out(90 * GIB))
    assert rows(run) == []


def test_a_fit_inside_of_a_fit_is_told_as_the_outer_one_is(cuda: FakeCuda, run: RunContext, tmp_path: Path) -> None:
    with context(tmp_path / "inner", "cuda:0") as inner, watched(run), watched(inner):
        caught(lambda: cuda.run_out(90 * GIB))
    assert len(rows(run)) == len(rows(inner)) == 1


@pytest.mark.slow
def test_of_many_events_the_first_few_and_the_one_that_ends_the_run_are_written_down(
    cuda: FakeCuda, run: RunContext
) -> None:
    with watched(run) as (_, watch):
        errors = [caught(partial(cuda.run_out, size * 100 * GIB)) for size in range(1, 8)]
        assert [row["asked_bytes"] // GIB for row in rows(run)] == [100, 200, 300]
        assert [call for call, _ in cuda.calls] == ["snapshot"] * 3
        assert watch.ended_by(errors[-1]) is not None
    assert [row["number"] for row in rows(run)] == [0, 1, 2, 6]
    assert [event["asked_bytes"] // GIB for event in events(run)] == [100, 200, 300, 700]
    assert [event["snapshot"] for event in events(run)] == [None, None, None, "cuda_oom_rank_0.pickle"]
    assert events(run)[0]["unavailable"] == {"snapshot": "replaced by a later event's"}
    assert [event["ended_run"] for event in events(run)] == [False, False, False, True]


def test_an_exception_of_another_kind_writes_nothing(cuda: FakeCuda, run: RunContext) -> None:
    with watched(run) as (_, watch):
        assert watch.ended_by(caught(lambda: int("x"))) is None
    assert rows(run) == []
    assert list(run.sink.place.directory.glob("oom*")) == []


def test_an_error_that_was_raised_from_running_out_of_memory_counts_as_such(cuda: FakeCuda, run: RunContext) -> None:
    def wrapped() -> None:
        try:
            cuda.run_out(90 * GIB)
        except torch.OutOfMemoryError as error:
            msg = "the batch is too large"
            raise ValueError(msg) from error

    with watched(run) as (_, watch):
        event = watch.ended_by(caught(wrapped))
    assert event is not None
    assert event["exception"].startswith("OutOfMemoryError: CUDA out of memory")
    assert len(events(run)) == 1


def test_where_no_observer_was_called_the_exception_says_what_it_can(cuda: FakeCuda, run: RunContext) -> None:
    error = caught(lambda: cuda.run_out(90 * GIB))
    with watched(run) as (_, watch):
        event = watch.ended_by(error)
    assert event is not None
    assert (event["seen"], event["asked_bytes"], event["asked_source"]) == (
        "exception",
        90 * GIB,
        "message, rounded",
    )
    assert event["snapshot"] == "cuda_oom_rank_0.pickle"
    assert event["statistics"]["allocated_bytes.all.current"] == 0


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_the_asking_module_is_named_by_its_path(cuda: FakeCuda, tmp_path: Path, device: str) -> None:
    def refuse(_: int) -> None:
        raise MemoryError

    model = Tower(Greedy(cuda) if device == "cuda:0" else Greedy(ask=refuse))
    with context(tmp_path, device) as made, watched(run := replace(made, model=model)) as (_, watch):
        event = watch.ended_by(caught(lambda: model(torch.ones(1, 4))))
    assert event is not None
    assert (event["module"], event["module_class"]) == ("blocks.1", "Greedy")
    assert rows(run)[-1]["module"] == "blocks.1"


def test_tensors_of_the_failed_step_are_freed_when_the_program_catches_the_error(
    cuda: FakeCuda, run: RunContext
) -> None:
    made = replace(run, model=Tower(Greedy(cuda)))
    alive: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        values = torch.ones(1, 4)
        alive.append(weakref.ref(values))
        with suppress(torch.OutOfMemoryError):
            made.model(values)
        del values
        # The locals of this frame, which runs on, were not copied anywhere.
        assert alive[0]() is None

    gc.disable()
    try:
        with watched(made):
            step()
    finally:
        gc.enable()
    assert len(rows(run)) == 1


def test_nothing_of_a_faulty_recording_reaches_the_program(
    cuda: FakeCuda, run: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with watched(run) as (_, watch):
        monkeypatch.setattr(run.sink, "file", full)
        error = caught(lambda: cuda.run_out(90 * GIB))
        assert type(error) is torch.OutOfMemoryError
        assert watch.ended_by(error) is None
    assert "No space left" in rows(run, "error")[0]["message"]


def test_a_fact_that_cannot_be_had_says_why_and_hides_no_other(
    cuda: FakeCuda, run: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        msg = "no such file"
        raise RuntimeError(msg)

    monkeypatch.setattr("lightning_memprof.capture.collectors.oom.host_memory", broken)
    with watched(run):
        caught(lambda: cuda.run_out(90 * GIB))
    (event,) = events(run)
    assert event["host"] is None
    assert event["unavailable"] == {"host": "RuntimeError: no such file"}
    assert event["held"] is not None


def test_no_file_of_the_autopsy_has_the_secrets_that_an_exception_told(
    run: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    words = "CUDA out of memory. Tried to allocate 20.00 MiB. hf_0123456789 of https://me:hidden@host/x"

    def broken(*_: object) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr("lightning_memprof.capture.collectors.oom.host_memory", broken)
    with watched(run) as (_, watch):
        watch.ended_by(torch.OutOfMemoryError(words))
    (event,) = events(run)
    told = "CUDA out of memory. Tried to allocate 20.00 MiB. *** of https://me:***@host/x"
    assert event["exception"] == f"OutOfMemoryError: {told}"
    assert event["unavailable"]["host"] == f"RuntimeError: {told}"
    assert event["asked_bytes"] == 20 * MIB
    for path in run.sink.place.directory.iterdir():
        assert not any(secret in path.read_bytes() for secret in (b"hf_0123456789", b"hidden")), path


def test_the_time_of_recording_is_no_time_of_the_step(
    cuda: FakeCuda, run: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 1 µs between two readings, and what recording takes.
    readings = itertools.count(step=1_000)
    recorded: list[int] = []

    def reading() -> int:
        return next(readings) + sum(recorded)

    monkeypatch.setattr(time, "perf_counter_ns", reading)
    monkeypatch.setattr("lightning_memprof.capture.clock.perf_counter_ns", reading)
    monkeypatch.setattr("lightning_memprof.capture.collectors.oom.host_memory", lambda: recorded.append(300_000_000))
    with watched(run) as (made, _):
        made.begin_step(next(positions([0])))
        made.clock.enter(made.clock.slot("forward", PHASES.index("forward")))
        caught(lambda: cuda.run_out(90 * GIB))
        made.clock.leave()
        start = made.clock.start_ns
        end_ns, times, _ = made.clock.stop()
    assert sum(recorded) == 300_000_000
    assert sum(times.phases_ns) == end_ns - start < 300_000_000


@pytest.mark.parametrize(
    ("options", "message"),
    [({"history": "never"}, "history='never'"), ({"max_entries": 0}, "max_entries=0")],
)
def test_a_value_that_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OOMAutopsy(**options)


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("x"), "device"),
        (MemoryError(), "host"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes. Error"), "host"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 12 bytes."), "host"),
        (RuntimeError("out of memory"), None),
        (ValueError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes."), None),
        (KeyboardInterrupt(), None),
    ],
)
def test_running_out_of_memory_is_recognised_by_type_and_torchs_cpu_allocator_by_its_words(
    error: BaseException, memory: str | None
) -> None:
    found = memory_error(error)
    assert (None if found is None else found[1]) == memory


@pytest.mark.parametrize(
    ("fail", "size", "source"),
    [
        (lambda: torch.empty(2**60, dtype=torch.uint8), 2**60, "message"),
        (lambda: np.empty(2**60, dtype=np.uint8), 2**60, "exception"),
        (lambda: bytearray(2**60), None, None),
    ],
    ids=["torch", "numpy", "Python"],
)
def test_the_hosts_memory_error_has_the_size_where_its_library_tells_it(
    fail: Callable[[], object], size: int | None, source: str | None, tmp_path: Path
) -> None:
    with context(tmp_path) as run, watched(run) as (_, watch):
        event = watch.ended_by(caught(fail))
    assert event is not None
    assert (event["memory"], event["device"], event["asked_bytes"], event["asked_source"]) == (
        *("host", "cpu", size),
        source,
    )
    assert event["unavailable"] == {"snapshot": "the host's allocator keeps no history"}


def test_bytes_by_category_are_the_closed_form_and_each_storage_counts_once() -> None:
    first, last = nn.Linear(64, 32), nn.Linear(32, 64, bias=False)
    last.weight = nn.Parameter(first.weight.detach().t())  # one storage, two parameters
    model = nn.Sequential(first, nn.BatchNorm1d(32), last)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    view = first.weight.detach()[:4]
    held, tensors = live_tensors(model, [optimizer], torch.device("cpu"))
    parameters = 4 * (64 * 32 + 32 + 32 + 32)
    assert held["parameter_bytes"] == parameters
    assert held["buffer_bytes"] == 4 * (32 + 32) + 8
    gradients = parameters + 4 * 64 * 32
    assert held["gradient_bytes"] == gradients
    assert held["optimizer_state_bytes"] == 2 * gradients + 4 * 5
    assert view.untyped_storage().nbytes() == 4 * 64 * 32
    by_name = {tensor["name"]: tensor for tensor in tensors}
    assert by_name["0.weight.grad"]["category"] == "gradient"
    assert by_name["0.weight.exp_avg"]["category"] == "optimizer_state"


class Keeps(nn.Linear):
    """Keeps tensors in an attribute."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.history: list[torch.Tensor] = []


def test_a_tensor_that_the_program_holds_is_among_the_largest_with_its_shape_and_holder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On a busy machine the search may need more than its seconds.
    monkeypatch.setattr(holders, "thread_time_ns", lambda: 0)
    model = Keeps()
    model.history.append(torch.ones(3, 4 * MIB))
    held, tensors = live_tensors(model, [], torch.device("cpu"))
    assert held["other_bytes"] >= model.history[0].nbytes
    (found,) = (tensor for tensor in tensors if tensor["shape"] == [3, 4 * MIB])
    assert found == {
        "bytes": model.history[0].nbytes,
        "category": "other",
        "name": None,
        "holder": "Keeps.history[...]",
        "shape": [3, 4 * MIB],
        "dtype": "float32",
    }


def test_what_autograd_alone_has_saved_and_local_variables_are_held_by_nobody() -> None:
    before = live_tensors(nn.Linear(2, 2), [], torch.device("cpu"))[0]["other_bytes"]
    local = torch.ones(MIB, requires_grad=True)
    loss = torch.tanh(torch.tanh(local)).sum()
    held, tensors = live_tensors(nn.Linear(2, 2), [], torch.device("cpu"))
    assert loss.grad_fn is not None
    assert held["other_bytes"] - before < local.nbytes
    assert {tensor["category"] for tensor in tensors if tensor["shape"] == [MIB]} == {None}


@pytest.mark.slow
def test_tensors_without_a_storage_are_left_out() -> None:
    def other_bytes() -> int:
        # Others of this process are there as well.
        return live_tensors(nn.Linear(2, 2), [], torch.device("meta"))[0]["other_bytes"]

    before = other_bytes()
    odd = [torch.eye(3).to_sparse(), torch.empty(5, device="meta")]
    assert other_bytes() - before == odd[1].numel() * 4


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([("forward", "m"), ("training_step", "lightning.pytorch.strategies.ddp")], ("forward", "training_step")),
        ([("forward", "m"), ("validation_step", "lightning.pytorch.strategies.ddp")], ("forward", "validation_step")),
        (
            [("_engine_run_backward", "torch.autograd.graph"), ("step", "torch.optim.adam")],
            ("backward", None),
        ),
        ([("_multi_tensor_adam", "torch.optim.adam"), ("step", "torch.optim.adam")], ("optimizer", None)),
        ([("_next_data", "torch.utils.data.dataloader")], ("data_wait", None)),
        ([("model_to_device", "lightning.pytorch.strategies.ddp")], ("setup", None)),
        ([("hook", "mine"), ("_call_callback_hooks", "lightning.pytorch.trainer.call")], ("callbacks", None)),
        ([("main", "__main__")], (None, None)),
        ([], (None, None)),
    ],
)  # fmt: skip
def test_a_stack_tells_the_phase(names: list[tuple[str, str]], expected: tuple[str | None, str | None]) -> None:
    assert phase_of([Frame("f.py", 1, name, module) for name, module in names]) == expected


def test_where_a_forward_is_written_is_known_for_inherited_and_replaced_ones() -> None:
    class Base(nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return values

    class Child(Base):
        pass

    model = nn.Sequential(Base(), Child(), nn.Linear(2, 2))
    model[2].forward = lambda values: values
    found = forward_sources(model)
    assert found["modules"]["0"][0] == "Base"
    assert found["modules"]["1"] == ("Child", found["modules"]["0"][1])
    file, first, last = found["sources"][found["modules"]["2"][1]]
    assert file == __file__
    assert first == last


def test_a_module_is_found_through_recomputation_and_not_among_others_arguments() -> None:
    class Fails(nn.Module):
        calls = 0

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 2:
                raise MemoryError
            return values.sin()

    module = Fails()
    model = nn.ModuleDict({"deep": nn.ModuleList([module])})
    out = checkpoint(module, torch.ones(2, requires_grad=True), use_reentrant=False)
    error = caught(lambda: out.sum().backward())
    assert module_of(error, model) == ("deep.0", "Fails")
    assert module_of(caught(lambda: bytearray(2**60)), model) is None


def test_a_module_that_was_only_an_argument_did_not_ask() -> None:
    class Hook:
        def run(self, module: nn.Module) -> None:
            raise MemoryError

    class Closes(nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            def fail() -> torch.Tensor:
                raise MemoryError(self)

            return fail()

    model = nn.Sequential(Closes())
    assert module_of(caught(lambda: Hook().run(model)), model) is None
    assert module_of(caught(lambda: model[0].forward(torch.ones(1))), model) == ("0", "Closes")


def test_what_was_raised_from_it_shows_where_the_code_was() -> None:
    def asks() -> None:
        raise MemoryError

    def translates() -> None:
        try:
            asks()
        except MemoryError as error:
            raise ValueError from error

    def training_step() -> None:
        translates()

    arrived = caught(training_step)
    assert arrived.__cause__ is not None
    names = [frame.name for frame in frames_of(arrived.__cause__, arrived)]
    assert names[:3] == ["asks", "translates", "training_step"]
    assert names.count("translates") == 1


def test_the_hosts_figures_are_this_process(tmp_path: Path) -> None:
    facts = host_memory()
    assert 0 < (facts["rss_bytes"] or 0) <= (facts["vms_bytes"] or 0)
    assert (facts["available_bytes"] or 0) <= (facts["total_bytes"] or 0)
    assert {"rlimit_as_bytes", "cgroup_limit_bytes", "cgroup_used_bytes"} <= set(facts)


def test_between_steps_and_before_the_first_one_the_place_is_not_known(run: RunContext) -> None:
    names = ("step", "global_step", "epoch", "phase", "point", "window")
    with watched(run) as (made, watch):
        assert [watch._event("host", [], "cpu")[name] for name in names] == [None] * 6
        made.begin_step(next(positions([3])))
        found = [watch._event("host", [], "cpu")[name] for name in names]
        assert found == [3, 3, 0, "other", Point.STEP_START.value, None]


def test_batches_and_optimizers_of_the_run_are_asked_for(cuda: FakeCuda, run: RunContext) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    made = replace(run, model=model, training=Tensors(given_optimizers=[optimizer]))
    with watched(made) as (_, watch):
        event = watch.ended_by(MemoryError())
    assert event is not None
    assert event["held"]["optimizer_state_bytes"] == 4 * (16 + 4)
