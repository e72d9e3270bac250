"""Memory that runs out in a real training: the autopsy, and the exception that goes on."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fake_devices import FakeCuda
from lightning_memprof import MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.capture.base import RunContext
from lightning_memprof.capture.collectors.allocator_history import AllocatorHistory
from lightning_memprof.capture.collectors.oom import OOMAutopsy
from lightning_memprof.collectors import Pulse
from lightning_memprof.integration import attachment
from lightning_memprof.read.run.load import load_run
from lightning_memprof.report.printers.json import to_json
from lightning_memprof.report.view import run_view
from lightning_memprof.units import GIB, MIB
from training import Perceptron, Raises, loader, manifest, only_run, program, rows_of, trainer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space are Linux's")


class Allocates(nn.Module):
    """Keeps memory of the fake device for each forward, as activations are kept."""

    def __init__(self, cuda: FakeCuda, size: int) -> None:
        super().__init__()
        self.size = size
        self.device = [cuda]

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.device[0].allocate(self.size)
        return values


class AllocatesToo(Allocates):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values)


class Fills(Perceptron):
    """Fills the fake device with its forwards and then asks for more than is left, at one step and place."""

    def __init__(self, cuda: FakeCuda, step: int, place: str = "training_step", asked: int = 78 * GIB) -> None:
        super().__init__()
        self.fake = [cuda]
        self.at = step, place
        self.asked = asked
        self.net = nn.Sequential(
            nn.Linear(8, 16), Allocates(cuda, 3 * GIB), nn.Linear(16, 1), AllocatesToo(cuda, 2 * GIB)
        )  # fmt: skip

    def run_out(self, place: str) -> None:
        if self.at == (self.trainer.global_step, place):
            self.fake[0].run_out(self.asked)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda _: self.run_out("backward"))
        self.run_out("training_step")
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.run_out("validation_step")

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.run_out("on_before_zero_grad")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """The Trainer's model stays on the CPU, and collectors are told that it is on the fake device."""

    def context(**facts: Any) -> RunContext:
        return RunContext(**{**facts, "device": torch.device("cuda:0")})

    monkeypatch.setattr(attachment, "RunContext", context)
    with FakeCuda().installed() as fake:
        yield fake


def recorder(**options: Any) -> MemProfilerCallback:
    collectors = [Pulse(), AllocatorHistory(), OOMAutopsy(**options)]
    return MemProfilerCallback(schedule=Schedule(wait=2), collectors=collectors, output=OutputOptions(on_error="raise"))


def test_a_device_that_runs_out_of_memory_leaves_an_autopsy_and_the_very_exception(
    cuda: FakeCuda, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Fills(cuda, 7, asked=50 * GIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 50\.00 GiB") as caught:
        trainer(tmp_path, recorder(history="always")).fit(made, loader())
    assert not hasattr(caught.value, "__notes__")
    run = only_run(tmp_path)
    first, last = rows_of(run, "oom")
    assert (first["number"], first["ended_run"], last["number"], last["ended_run"]) == (0, False, 0, True)
    assert (last["step"], last["phase"], last["function"], last["point"]) == (
        7, "forward", "training_step", "batch_start",
    )  # fmt: skip
    assert (last["module"], last["module_class"], last["window"]) == ("", "Fills", None)
    assert (last["asked_bytes"], last["limit_bytes"], last["seen"]) == (50 * GIB, 80 * GIB, "observer")
    assert rows_of(run, "end")[0]["exception"].startswith("OutOfMemoryError: CUDA out of memory")
    assert rows_of(run, "error") == []
    printed = capsys.readouterr()
    assert "out of memory on cuda:0 (rank 0), step 7, forward, in Fills, no window open" in " ".join(
        printed.err.split()
    )
    assert "out of memory" not in printed.out


def test_the_holders_are_named_by_line_and_module_and_add_up(cuda: FakeCuda, tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        trainer(tmp_path, recorder(history="always")).fit(Fills(cuda, 9, asked=45 * GIB), loader())
    document = to_json(run_view(load_run(tmp_path)))
    (found,) = document["oom"]
    assert (found["cause"], found["memory"]["allocated_bytes"]) == ("full", 10 * 5 * GIB)
    assert [(holder["name"], holder["bytes"] // GIB, holder["blocks"]) for holder in found["by_module"]] == [
        ("net.1", 30, 10),
        ("net.3", 20, 10),
    ]
    (line,) = found["by_stack"]
    assert line["name"].startswith(f"{__file__}(")
    assert line["name"].endswith(": forward")
    assert line["bytes"] == 10 * 5 * GIB
    assert len(found["remedies"]) == 3
    assert "net.1 and net.3" in found["remedies"][0]["text"]
    assert document["verdict"]["rule"] == "out_of_memory"


@pytest.mark.parametrize(("step", "window"), [(1, None), (4, 0)])
def test_by_default_the_ring_is_there_in_a_window_and_else_the_page_says_how_to_have_it(
    cuda: FakeCuda, tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int, window: int | None
) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        trainer(tmp_path, recorder()).fit(Fills(cuda, step), loader())
    run = only_run(tmp_path)
    assert rows_of(run, "oom")[-1]["window"] == window
    snapshot = pickle.loads((run / "cuda_oom_rank_0.pickle").read_bytes())  # noqa: S301 our own
    assert bool(snapshot["device_traces"][0]) == (window is not None)
    said = " ".join(capsys.readouterr().err.split())
    assert ('OOMAutopsy(history="always")' in said) == (window is None)
    assert cuda.history == "off"


@pytest.mark.parametrize(
    ("place", "phase", "function"),
    [
        ("training_step", "forward", "training_step"),
        ("backward", "backward", None),
        ("on_before_zero_grad", "optimizer", None),
        ("validation_step", "forward", "validation_step"),
    ],
)
def test_the_phase_is_that_of_the_failed_request(
    cuda: FakeCuda, tmp_path: Path, place: str, phase: str, function: str | None
) -> None:
    made = Fills(cuda, 4, place)
    with pytest.raises(torch.OutOfMemoryError):
        trainer(tmp_path, recorder(), val_check_interval=4, num_sanity_val_steps=0).fit(made, loader(), loader(1))
    row = rows_of(only_run(tmp_path), "oom")[-1]
    assert (row["phase"], row["function"]) == (phase, function)
    assert row["module_class"] == "Fills"


def test_before_the_first_step_is_watched_too(cuda: FakeCuda, tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        trainer(tmp_path, recorder()).fit(Fills(cuda, 0, "validation_step"), loader(), loader(1))
    row = rows_of(only_run(tmp_path), "oom")[-1]
    assert (row["step"], row["seen"], row["function"]) == (None, "observer", "validation_step")


def test_an_error_that_the_program_catches_changes_nothing_and_is_on_the_page(
    cuda: FakeCuda, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Careful(Fills):
        def run_out(self, place: str) -> None:
            with suppress(torch.OutOfMemoryError):
                super().run_out(place)

    made = Careful(cuda, 5)
    trainer(tmp_path, recorder()).fit(made, loader())
    plain = Fills(cuda, 99)
    trainer(tmp_path / "plain").fit(plain, loader())
    for mine, theirs in zip(made.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    (row,) = rows_of(only_run(tmp_path, "memprofiler"), "oom")
    assert row["ended_run"] is False
    page = " ".join(capsys.readouterr().out.split())
    assert "caught: the run continued" in page
    assert "ran out of memory 1 time, last in step 5" in page


def test_the_profiler_alone_explains_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MemoryError):
        trainer(tmp_path, profiler="fts_extended").fit(Raises(MemoryError(), 5), loader())
    (row,) = rows_of(only_run(tmp_path), "oom")
    assert (row["step"], row["ended_run"]) == (5, True)
    assert "out of memory on the host (rank 0), step 5" in " ".join(capsys.readouterr().err.split())


PROGRAM = """
    import resource
    import torch
    from lightning_memprof import MemProfilerCallback

    class Greedy(Perceptron):
        def training_step(self, batch, batch_idx):
            if batch_idx == 5:
                self.kept = torch.ones({mib}, 1 << 18)
                {ask}
            return super().training_step(batch, batch_idx)

    resource.setrlimit(resource.RLIMIT_AS, ({limit}, resource.getrlimit(resource.RLIMIT_AS)[1]))
    callbacks = [MemProfilerCallback()] if sys.argv[1] == "with" else []
    try:
        trainer(Path(sys.argv[1]), *callbacks).fit(Greedy(), loader())
    finally:
        error = sys.exc_info()[1]
        print(type(error).__name__, getattr(error, "__notes__", None), error.__context__, str(error)[:60])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ask", "asked", "cause"),
    [
        ("torch.empty(7 << 30, dtype=torch.uint8)", 7 * GIB, "limited"),
        ("bytearray(7 << 30)", None, "limited"),
        ("torch.empty(1 << 55, dtype=torch.uint8)", 2**55, "too large"),
    ],
)
def test_a_host_that_runs_out_of_memory_ends_with_the_same_exception_and_exit_code(
    ask: str,
    asked: int | None,
    cause: str,
    tmp_path: Path,
    run_program: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    # The address space of torch itself is some GiB large, resident or not.
    (tmp_path / "program.py").write_text(program(PROGRAM.format(ask=ask, mib=100, limit=6 * GIB)))
    bare, recorded = (run_program("program.py", how, OMP_NUM_THREADS="1") for how in ("without", "with"))
    assert recorded.returncode == bare.returncode == 1, recorded.stderr[-3000:]
    assert recorded.stdout.splitlines()[-1] == bare.stdout.splitlines()[-1]
    assert recorded.stderr.splitlines()[-1] == bare.stderr.splitlines()[-1]
    run = only_run(tmp_path / "with")
    (row,) = rows_of(run, "oom")
    assert (row["memory"], row["asked_bytes"], row["ended_run"], row["step"]) == ("host", asked, True, 5)
    assert (row["phase"], row["module_class"]) == ("forward", "Greedy")
    said = " ".join(recorded.stderr.split())
    assert "out of memory on the host (rank 0), step 5, forward, in Greedy" in said
    assert f"{cause}: " in said
    assert "float32 [100, 262144]" in said
    (found,) = to_json(run_view(load_run(run)))["oom"]
    assert found["cause"] == cause
    assert len(found["remedies"]) == 3
    tensors = {tensor["name"]: tensor["bytes"] for tensor in found["tensors"]}
    assert tensors["float32 [100, 262144]"] == 100 * MIB
    assert manifest(run)[-1]["kind"] == "end"
    assert json.loads((run / "oom.rank00000.json").read_text())["events"][0]["host"]["rlimit_as_bytes"] == 6 * GIB


SMALL_OBJECTS = """
    import resource
    import psutil
    from lightning_memprof import MemProfilerCallback
    from lightning_memprof.collectors import OOMAutopsy, Pulse

    class Hoards(Perceptron):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                limit = psutil.Process().memory_info().vms + (200 << 20)
                resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
                self.kept = []
                # Until there is no room for half a MiB: with not a byte left CPython raises SystemError in its place.
                while True:
                    self.kept.append(bytearray(200))
                    if len(self.kept) % 1000 == 0:
                        bytearray(1 << 19)
            return super().training_step(batch, batch_idx)

    callback = MemProfilerCallback(collectors=[Pulse(), OOMAutopsy()])
    trainer(Path("run"), callback).fit(Hoards(), loader())
"""


@pytest.mark.slow
def test_where_small_objects_took_the_last_byte_there_is_room_to_say_so(
    tmp_path: Path, run_program: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (tmp_path / "program.py").write_text(program(SMALL_OBJECTS))
    done = run_program("program.py", OMP_NUM_THREADS="1")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "MemoryError"), done.stderr[-3000:]
    (row,) = rows_of(only_run(tmp_path / "run"), "oom")
    assert (row["memory"], row["step"], row["ended_run"]) == ("host", 3, True)
    assert "the rest: Python objects" in " ".join(done.stderr.split())
