from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import loading
from lightning_memprof.capture import loader_workers
from lightning_memprof.capture.loader_workers import (
    counted_workers,
    exit_code,
    stuck_workers,
    waits_for_lock,
    worker_batches,
    worker_counts,
    worker_memory,
    worker_pids,
    worker_times,
)
from lightning_memprof.units import KIB, MIB

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")]
SHARING = ("private", "shared")
FORK = multiprocessing.get_context("fork")


# It touches 24 MiB, computes for a while, and waits for the end of its input.
BURN = """
import os, sys
held = bytearray(os.urandom(1 << 20)) * 24
while sum(os.times()[:2]) < 0.3:
    sum(range(1000))
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def burner() -> Iterator[int]:
    """A process that waits; it shares no pages with this one."""
    command = [sys.executable, "-c", BURN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid


def mappings(pid: int) -> dict[str, int]:
    """The sums over all mappings of a process, in bytes; each mapping is rounded to KiB."""
    lines = [line.split() for line in Path(f"/proc/{pid}/smaps").read_text().splitlines()]
    kinds = {"pss": ["Pss:"], **{kind: [f"{kind.title()}_{s}:" for s in ("Clean", "Dirty")] for kind in SHARING}}
    return {kind: KIB * sum(int(line[1]) for line in lines if line[0] in names) for kind, names in kinds.items()}


def test_memory_is_that_of_the_processes_mappings(burner: int) -> None:
    # Other processes that map the same libraries may come and go meanwhile.
    before, found, after = mappings(burner), worker_memory(burner), mappings(burner)
    for kind in ("pss", *SHARING):
        least, most = sorted((before[kind], after[kind]))
        assert 0.99 * least <= found[f"{kind}_bytes"] <= 1.01 * most
    assert found["private_bytes"] > 24 * MIB


def test_processor_time_is_that_of_the_process(burner: int) -> None:
    fields = Path(f"/proc/{burner}/stat").read_text().rpartition(")")[2].split()
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    assert worker_times(burner)["cpu_ns"] == pytest.approx(seconds * 1e9, rel=0.05)
    assert seconds >= 0.28


def test_a_process_that_is_gone_has_no_figures() -> None:
    worker = FORK.Process(target=int)
    worker.start()
    worker.join()
    assert worker.pid is not None
    assert worker_memory(worker.pid) == {}
    assert worker_times(worker.pid) == {}


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_workers_count_their_batches_with_every_start_method(start: str) -> None:
    # A class that each new process can import.
    samples = TensorDataset(torch.arange(24.0).reshape(12, 2))
    plain = [batch.tolist() for (batch,) in DataLoader(samples, batch_size=2)]
    with counted_workers():
        loader = DataLoader(
            samples, batch_size=2, num_workers=2, persistent_workers=True, multiprocessing_context=start
        )
        for epoch in (1, 2):
            assert [batch.tolist() for (batch,) in loader] == plain
            assert [len(worker_batches(pid)) for pid in worker_pids()] == [3 * epoch, 3 * epoch]
            counts = [worker_counts(pid) for pid in worker_pids()]
            assert [(found["worker"], found["dataset"]) for found in counts] == [
                (0, "TensorDataset"),
                (1, "TensorDataset"),
            ]
            assert [found["batches"] for found in counts] == [3 * epoch, 3 * epoch]
            for found in counts:
                assert found["fetch_ns"] >= found["collate_ns"] > 0
                assert found["queue_wait_ns"] > 0
        for pid in worker_pids():
            assert sum(ns for _, ns in worker_batches(pid)) == worker_counts(pid)["fetch_ns"]
        del loader


SAMPLES = 4


def seen_functions(start: str, samples: Any, **settings: Any) -> dict[str, tuple[float, float]]:
    """Return milliseconds per batch of each function that a worker was seen in: self and total."""
    with counted_workers():
        loader = DataLoader(
            samples,
            batch_size=SAMPLES,
            num_workers=1,
            persistent_workers=True,
            multiprocessing_context=start,
            **settings,
        )
        list(loader)
        (counts,) = (worker_counts(pid) for pid in worker_pids())
        del loader
    scale = counts["fetch_ns"] / sum(own for own, _ in counts["functions"].values()) / counts["batches"] / loading.MS
    return {name: (own * scale, total * scale) for name, (own, total) in counts["functions"].items()}


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_looks_share_a_fetch_among_its_functions(start: str) -> None:
    found = seen_functions(start, Subset(loading.Images(), range(SAMPLES * 16)), collate_fn=loading.batched)
    inside = ("Decode.__call__", "Flip.forward", "read", "scaled")
    assert {*inside, "batched", "Images.__getitem__", "Chain.__call__"} <= {*found}
    assert all(found[name][0] == found[name][1] for name in (*inside, "batched"))
    own, total = found["Images.__getitem__"]
    # It sleeps 8 of 16 ms.
    assert max(found, key=lambda name: found[name][0]) == "Decode.__call__"
    assert own < total / 2
    assert total == pytest.approx(own + sum(found[name][0] for name in (*inside, "Chain.__call__")))


def test_looks_see_iterable_data_sets_and_computing_ones() -> None:
    found = seen_functions("fork", loading.Stream(SAMPLES * 16))
    # It sleeps 8 of 10 ms.
    assert found["Stream.__iter__"][1] >= found["Decode.__call__"][0] > 0.5 * found["Stream.__iter__"][1]
    # Python's lock is not released in a fetch, which is shorter than the interval between switches.
    found = seen_functions("fork", Computing())
    assert found["Computing.turned"][0] > 0


class Computing(Dataset[torch.Tensor]):
    """A fetch of some 2 ms, in Python."""

    def __len__(self) -> int:
        return SAMPLES * 400

    def turned(self) -> float:
        return float(sum(number % 7 for number in range(10_000)))

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.turned())


def stuck(start: str, *, is_deaf: bool) -> tuple[list[Any], list[float]]:
    """Return what workers answer that wait in their first fetch, and the samples after it."""
    event = multiprocessing.get_context(start).Event()
    data = loading.Waiting(event, is_deaf=is_deaf)
    with counted_workers():
        samples = iter(DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=start))
        until = time.monotonic() + 60
        while not all(waits_in_fetch(pid) for pid in worker_pids()) and time.monotonic() < until:
            time.sleep(0.01)
        with pytest.MonkeyPatch.context() as patch:
            # Workers may have no core for long; one without a handler is not waited for.
            patch.setattr(loader_workers, "_ANSWERS_IN_S", 60.0)
            found = list(stuck_workers())
        event.set()
        return found, [sample.item() for sample in samples]


def waits_in_fetch(pid: int) -> bool:
    """Whether a worker has received an index, and waits for the event."""
    counts, call = worker_counts(pid), Path(f"/proc/{pid}/syscall").read_text()
    return bool(counts.get("queue_wait_ns")) and waits_for_lock(call)


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_a_worker_in_a_fetch_answers_with_its_stack_and_continues(start: str) -> None:
    found, samples = stuck(start, is_deaf=False)
    text = Path(loading.__file__).read_text().splitlines()
    line = next(number for number, line in enumerate(text, 1) if line.endswith("# waits"))
    assert [worker for worker, _ in found] == [0, 1]
    for _, stack in found:
        assert (loading.__file__, line, "__getitem__") in stack
        assert stack[0][2] in ("wait", "acquire", "__enter__")
        assert stack[-1][2] == "fetch"
    assert samples == [0.0, 1.0]


def test_a_worker_whose_handler_is_gone_is_not_signalled() -> None:
    assert stuck("fork", is_deaf=True) == ([], [0.0, 1.0])


class Slow(Dataset[torch.Tensor]):
    """Each sample sleeps, one at a time where there is a lock: of several processes, or a file's."""

    def __init__(self, guard: Any) -> None:
        self.guard = guard

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if isinstance(self.guard, Path):
            with self.guard.open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                time.sleep(0.05)
                return torch.zeros(1)
        with self.guard:
            time.sleep(0.05)
            return torch.zeros(1)


@pytest.mark.parametrize(
    ("guard", "is_lock"),
    [
        pytest.param(lambda _: multiprocessing.Lock(), True, id="lock of processes"),
        pytest.param(lambda path: path / "lock", True, id="lock of a file"),
        pytest.param(lambda _: contextlib.nullcontext(), False, id="sleep"),
        pytest.param(lambda _: multiprocessing.Semaphore(3), False, id="free lock"),
    ],
)
def test_a_worker_sees_that_it_waits_for_a_lock_of_others_and_at_which_line(
    guard: Callable[[Path], Any], is_lock: bool, tmp_path: Path
) -> None:
    with counted_workers():
        loader = DataLoader(
            Slow(guard(tmp_path)), batch_size=4, num_workers=3, persistent_workers=True, multiprocessing_context="fork"
        )
        list(loader)
        found = [worker_counts(pid) for pid in worker_pids()]
        del loader
    share = sum(counts["lock_waits"] for counts in found) / sum(counts["looks"] for counts in found)
    # Two of three wait for the third.
    assert share > 0.4 if is_lock else share < 0.2
    if is_lock:
        assert {counts["lock"].partition(":")[0] for counts in found} == {"__getitem__ (test_loader_workers.py"}


@pytest.mark.parametrize(
    ("call", "waits"),
    [
        ("202 0x7f94c381c000 0x109 0x0 0x0 0x0 0xffffffff 0x7ffd 0x7f94", True),
        ("202 0x559990ce2530 0x89 0x0 0x7ffd 0x0 0xffffffff 0x7ffd 0x7f94", False),  # of threads of one process
        ("73 0xd 0x2 0x0 0x7f94 0x0 0x0 0x7ffd 0x7f94", True),
        ("72 0x11 0x7 0x7ffd 0x7f94 0x0 0x0 0x7ffd 0x7f94", True),
        ("72 0x11 0x1 0x7ffd 0x7f94 0x0 0x0 0x7ffd 0x7f94", False),
        ("230 0x1 0x1 0x7ffd 0x0 0x0 0x0 0x7ffd 0x7f94", False),
        ("running", False),
        ("", False),
    ],
)
def test_locks_of_several_processes_are_told_by_the_call_of_the_kernel(
    call: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="x86_64"))
    assert waits_for_lock(call) == waits


class Broken(Dataset[torch.Tensor]):
    """Raises for its first sample, as a collate function may for its batch."""

    def __init__(self, collated: bool) -> None:
        self.collated = collated

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.collated:
            raise ValueError(index)
        return torch.zeros(index + 1)


@pytest.mark.parametrize("collated", [False, True])
def test_the_exception_of_a_worker_is_the_one_without_counters(collated: bool) -> None:
    def message() -> str:
        loader = DataLoader(Broken(collated), batch_size=2, num_workers=1, multiprocessing_context="fork")
        with pytest.raises((ValueError, RuntimeError)) as caught:
            list(loader)
        return str(caught.value)

    plain = message()
    with counted_workers():
        assert message() == plain
    assert "in fetch" in plain


class Endless(Dataset[torch.Tensor]):
    """Its fetch never returns."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return self[index]


def test_a_worker_sends_the_exception_of_calls_that_are_too_deep() -> None:
    with counted_workers(), pytest.raises(RecursionError, match="Caught RecursionError in DataLoader worker process 0"):
        list(DataLoader(Endless(), num_workers=1, multiprocessing_context="fork"))


def test_torchs_loop_is_back_afterwards() -> None:
    place = loader_workers._utils.worker
    before = place._worker_loop
    with counted_workers():
        assert place._worker_loop is loader_workers.worker_loop
        with counted_workers():
            assert place._worker_loop is loader_workers.worker_loop
        assert place._worker_loop is loader_workers.worker_loop
    assert place._worker_loop is before


def test_another_programs_loop_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    place = loader_workers._utils.worker
    monkeypatch.setattr(place, "_worker_loop", other := lambda *_: None)
    with counted_workers():
        assert place._worker_loop is other
    assert place._worker_loop is other


def test_the_exit_code_is_read_without_reaping() -> None:
    for end, code in ((lambda: os._exit(3), 3), (lambda: os.kill(os.getpid(), signal.SIGKILL), -9)):
        worker = FORK.Process(target=end)
        worker.start()
        assert worker.pid is not None
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        assert exit_code(worker) == code
        worker.join()
        assert worker.exitcode == exit_code(worker) == code
