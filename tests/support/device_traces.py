"""Traces of a made-up training on a device, event by event: a host that launches, and a device that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kineto import write_trace

LAUNCH_US = 5
DELAY_US = 3
BASE_NS = 1_700_000_000_000_000_000
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
STEPS = 4
KERNELS = 25
KERNEL_US = 400
GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_tn"


class Recording:
    """Times in us; ``now`` is the host's, ``free`` when the device has done what it was given."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now = 1_000
        self.free = 0
        self._correlation = 0

    @contextmanager
    def inside(self, name: str, cat: str = "user_annotation") -> Iterator[None]:
        start = self.now
        yield
        self._add(cat, name, start, self.now)

    def work(self, us: int, name: str = "aten::add") -> None:
        with self.inside(name, "cpu_op"):
            self.now += us

    def python(self, us: int) -> None:
        self.now += us

    def call(self, name: str, us: int) -> None:
        with self.inside(name, "cuda_runtime"):
            self.now += us

    def launch(self, us: int, name: str = GEMM, stream: int = 7, at: int | None = None) -> None:
        started = self._launched("cudaLaunchKernel")
        start = started if at is None else at
        self._add("kernel", name, start, start + us, stream, device=0, stream=stream, correlation=self._correlation)
        if at is None:
            self.free = start + us

    def copy(self, us: int, name: str, size: int) -> None:
        start = self._launched("cudaMemcpyAsync")
        self._add(
            "gpu_memcpy", name, start, start + us, 7, device=0, stream=7, correlation=self._correlation, bytes=size
        )
        self.free = start + us

    def synchronize(self, operator: str | None = None) -> None:
        """Let the host wait until the device has nothing left."""
        if operator is None:
            self.call("cudaDeviceSynchronize", max(self.free - self.now, 0) + 2)
            return
        with self.inside(operator, "cpu_op"):
            self.copy(2, "Memcpy DtoH (Device -> Pinned)", 4)
            self.call("cudaStreamSynchronize", max(self.free - self.now, 0) + 2)

    def write(self, path: Path, **metadata: Any) -> Path:
        usual = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}],
            "baseTimeNanoseconds": BASE_NS,
        }
        return write_trace(path, self.events, **{**usual, **metadata})

    def _launched(self, how: str) -> int:
        """Launch something on the stream that everything waits in, and return when it can begin."""
        self._correlation += 1
        self._add("cuda_runtime", how, self.now, self.now + LAUNCH_US, correlation=self._correlation)
        self.now += LAUNCH_US
        return max(self.now + DELAY_US, self.free)

    def _add(self, cat: str, name: str, start: int, end: int, lane: int | None = None, **args: Any) -> None:
        where = {"pid": 77, "tid": 77} if lane is None else {"pid": 0, "tid": lane}
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, **where, "ts": start, "dur": end - start, "args": args}
        )


def training(
    path: Path,
    fault: Callable[[Recording, int], None] = lambda _made, _kernel: None,
    before: Callable[[Recording], None] = lambda _made: None,
    kernel_us: int = KERNEL_US,
) -> Path:
    """Four steps of 25 kernels; ``fault`` is called after each kernel, ``before`` before each step's first one."""
    made = Recording()
    for step in range(STEPS):
        with made.inside(f"ProfilerStep#{step + 5}"):
            before(made)
            for kernel in range(KERNELS):
                made.work(20, "aten::linear")
                made.launch(kernel_us)
                fault(made, kernel)
    return made.write(path)


def communicating(path: Path, long_us: int, *, freeing: bool, overlapped: bool = True) -> Path:
    """A collective for each fifth kernel, of which the last one takes ``long_us``."""
    made = Recording()
    for step in range(STEPS):
        with made.inside(f"ProfilerStep#{step + 5}"):
            for kernel in range(KERNELS):
                made.work(20, "aten::linear")
                made.launch(KERNEL_US)
                if kernel % 5 == 0:
                    last = step == STEPS - 1 and kernel == KERNELS - 5
                    made.launch(long_us if last else 300, NCCL, 21, (made.free - 350) if overlapped else None)
                    if last and freeing:
                        made.call("cudaFree", made.free - made.now + 900)
                        made.call("cudaMalloc", 300)
    return made.write(path, distributedInfo={"backend": "nccl", "rank": 1, "world_size": 8})


class Met(NamedTuple):
    """A collective of one rank: process group, step, and times in us."""

    group: str
    step: int
    start_us: int
    end_us: int


def paired_ranks(compute_ms: Callable[[int, int], float], steps: int = 6) -> dict[int, list[Met]]:
    """Return the collectives of eight ranks: pairs meet after the computation, then four ranks of each half.

    Args:
        compute_ms: of a rank and a step.
        steps: of all ranks.
    """
    now = dict.fromkeys(range(8), 1_000)
    met: dict[int, list[Met]] = {rank: [] for rank in now}
    pairs: dict[str, Iterable[int]] = {f"tp{pair}": (2 * pair, 2 * pair + 1) for pair in range(4)}
    halves: dict[str, Iterable[int]] = {f"dp{half}": range(half, 8, 2) for half in (0, 1)}
    for step in range(steps):
        for rank in now:
            now[rank] += round(1000 * compute_ms(rank, step))
        for group, ranks in (pairs | halves).items():
            end = max(now[rank] for rank in ranks) + 100
            for rank in ranks:
                met[rank].append(Met(group, step, now[rank], end))
                now[rank] = end
    return met
