"""The allocator model against torch's own allocator: the same requests, the same addresses and bytes."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_memprof.estimation.allocator import Block, CachingAllocator, OutOfMemoryError
from lightning_memprof.estimation.allocator_settings import parse_settings
from lightning_memprof.units import MIB

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

DEFAULT = "expandable_segments:False"
CONFIGURATIONS = [
    "expandable_segments:False",
    "expandable_segments:False,max_split_size_mb:32",
    "expandable_segments:False,max_split_size_mb:20,max_non_split_rounding_mb:40",
    "expandable_segments:False,roundup_power2_divisions:4",
    "expandable_segments:False,roundup_power2_divisions:[4:2,16:8,>:1]",
    "expandable_segments:False,garbage_collection_threshold:0.6",
    "expandable_segments:True",
    "expandable_segments:True,max_split_size_mb:32,roundup_power2_divisions:8",
]
# Each makes one sequence of up to 250 requests.
EXAMPLES = settings(
    max_examples=150,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def device() -> Iterator[torch.device]:
    if not torch.cuda.is_available() or torch.cuda.get_allocator_backend() != "native":
        pytest.skip("the accelerator's allocator is not CUDA's native one")
    torch.cuda.init()
    yield torch.device("cuda", 0)
    configure(DEFAULT)
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    gc.collect()
    torch.cuda.empty_cache()


def configure(configuration: str) -> None:
    """Change the allocator's settings; what is not named gets its default, but for expandable segments."""
    found = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    found(configuration)


def figures() -> tuple[int, int, int, int, int]:
    """Allocated and reserved bytes, their peaks, retries."""
    stats = torch._C._cuda_memoryStats(0)
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return allocated["current"], reserved["current"], allocated["peak"], reserved["peak"], stats["num_alloc_retries"]


@dataclass
class Pair:
    """A device and its model, which get the same requests on a stream that nothing else uses.

    `shifts` are the distances between a segment's addresses and those in the model.
    """

    model: CachingAllocator
    stream: torch.cuda.Stream
    base: tuple[int, ...]
    live: list[tuple[torch.Tensor, Block]]
    shifts: dict[int, int] = field(default_factory=dict)

    def allocate(self, nbytes: int) -> None:
        with torch.cuda.stream(self.stream):
            try:
                tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda:0")
            except torch.OutOfMemoryError:
                with pytest.raises(OutOfMemoryError):
                    self.model.malloc(nbytes)
                return
        block = self.model.malloc(nbytes)
        shift = tensor.data_ptr() - block.address
        assert self.shifts.setdefault(segment_of(block), shift) == shift
        self.live.append((tensor, block))

    def free(self, index: int) -> None:
        self.live[index], self.live[-1] = self.live[-1], self.live[index]
        _, block = self.live.pop()
        self.model.free(block)

    def compare(self) -> None:
        model = self.model
        expected = (
            model.allocated_bytes,
            model.reserved_bytes,
            model.peak_allocated_bytes,
            model.peak_reserved_bytes,
            model.retries,
        )
        assert tuple(now - before for now, before in zip(figures(), self.base, strict=True)) == expected


def segment_of(block: Block) -> int:
    while block.before is not None:
        block = block.before
    return block.address


def pair(configuration: str, limit: int | None = None, capacity: int | None = None) -> Pair:
    """Empty the device's cache and start afresh, with at most `limit` bytes by the process's fraction."""
    configure(configuration)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(0)
    base, total = figures(), torch.cuda.mem_get_info(0)[1]
    fraction = 1.0 if limit is None else (base[1] + limit) / total
    torch.cuda.set_per_process_memory_fraction(fraction, 0)
    return Pair(
        model=CachingAllocator(
            parse_settings(configuration),
            capacity_bytes=capacity,
            limit_bytes=int(fraction * total) - base[1],
        ),
        stream=torch.cuda.Stream(0),
        base=base,
        live=[],
    )


def run(both: Pair, chance: random.Random, length: int, largest: int) -> None:
    """Make requests whose sizes repeat, as those of a training do, among them each boundary of the allocator."""
    edges = [512, MIB, 2 * MIB, 10 * MIB, 12 * MIB, 20 * MIB, 32 * MIB, 40 * MIB]
    sizes = [edge + chance.choice((-1, 0, 1)) for edge in edges if edge < largest]
    sizes += [int(2 ** chance.uniform(0, largest.bit_length() - 1)) for _ in range(12)]
    keep = chance.choice((0.45, 0.5, 0.55))
    for i in range(length):
        if chance.random() < 0.01:
            torch.cuda.empty_cache()
            both.model.empty_cache()
        elif both.live and chance.random() > keep:
            both.free(chance.randrange(len(both.live)))
        else:
            fresh = chance.random() < 0.2
            both.allocate(chance.randrange(1, largest) if fresh else chance.choice(sizes))
        if i % 16 == 0:
            both.compare()
    both.compare()
    while both.live:
        both.free(-1)
    both.compare()


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_the_model_reserves_what_torch_reserves(device, configuration):
    @EXAMPLES
    @given(seed=st.integers(0, 2**32), length=st.integers(1, 250), largest=st.sampled_from([MIB, 24 * MIB, 200 * MIB]))
    def check(seed: int, length: int, largest: int) -> None:
        run(pair(configuration), random.Random(seed), length, largest)

    check()


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_at_a_limit_the_model_releases_retries_and_fails_as_torch_does(device, configuration):
    @EXAMPLES
    @given(seed=st.integers(0, 2**32), length=st.integers(1, 250), limit=st.integers(1, 300))
    def check(seed: int, length: int, limit: int) -> None:
        run(pair(configuration, limit * MIB), random.Random(seed), length, 64 * MIB)

    check()
