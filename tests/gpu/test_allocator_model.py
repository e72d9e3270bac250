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

pytestmark = pytest.mark.gpu

# There the model gets the device's addresses: the first allocation of a segment is at its start.
BY_ADDRESS = torch.__version__ < "2.12"
DEFAULT = "expandable_segments:False"
CONFIGURATIONS = [
    "expandable_segments:False",
    "expandable_segments:False,max_split_size_mb:32",
    "expandable_segments:True",
    "expandable_segments:True,max_split_size_mb:32",
]
SEEDS, LENGTHS = st.integers(0, 2**32), st.integers(1, 400)
EXAMPLES = settings(
    max_examples=200,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def device() -> Iterator[torch.device]:
    if not torch.cuda.is_available() or torch.cuda.get_allocator_backend() != "native":
        pytest.skip("the accelerator's allocator is not CUDA's native one")
    if "2.12" <= torch.__version__ < "2.13":
        pytest.skip("torch 2.12 orders free blocks by their age, which is not modeled")
    torch.cuda.init()
    gc.collect()
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
    """A device and its model, which get the same requests on streams that nothing else uses.

    `shifts` are the distances between a segment's addresses and those in the model.
    """

    model: CachingAllocator
    streams: list[torch.cuda.Stream]
    retries: int
    live: list[tuple[torch.Tensor, Block]] = field(default_factory=list)
    shifts: dict[int, int] = field(default_factory=dict)

    def allocate(self, nbytes: int, stream: int) -> None:
        with torch.cuda.stream(self.streams[stream]):
            try:
                tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda:0")
            except torch.OutOfMemoryError:
                with pytest.raises(OutOfMemoryError):
                    self.model.malloc(nbytes, stream)
                return
        address = tensor.data_ptr()
        if BY_ADDRESS and not self.model.settings.expandable_segments:
            self.model._place = lambda _: address
        block = self.model.malloc(nbytes, stream)
        shift = address - block.address
        assert self.shifts.setdefault(segment_of(block), shift) == shift
        self.live.append((tensor, block))

    def free(self, index: int) -> None:
        self.live[index], self.live[-1] = self.live[-1], self.live[index]
        _, block = self.live.pop()
        self.model.free(block)

    def compare(self) -> None:
        model = self.model
        assert figures() == (
            model.allocated_bytes,
            model.reserved_bytes,
            model.peak_allocated_bytes,
            model.peak_reserved_bytes,
            self.retries + model.retries,
        )


def segment_of(block: Block) -> int:
    while block.before is not None:
        block = block.before
    return block.address


def pair(configuration: str, limit: int | None = None) -> Pair:
    """Empty the device's cache and start afresh, with at most `limit` bytes more by the process's fraction."""
    configure(configuration)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(0)
    allocated, reserved, _, _, retries = figures()
    free, total = torch.cuda.mem_get_info(0)
    fraction = 1.0 if limit is None else (reserved + limit) / total
    torch.cuda.set_per_process_memory_fraction(fraction, 0)
    allowed = None if limit is None else int(fraction * total)
    model = CachingAllocator(parse_settings(configuration), reserved + free, allowed)
    model.allocated_bytes = model.peak_allocated_bytes = allocated
    model.reserved_bytes = model.peak_reserved_bytes = reserved
    return Pair(model=model, streams=[torch.cuda.Stream(0), torch.cuda.Stream(0)], retries=retries)


def run(both: Pair, seed: int, length: int, largest: int) -> None:
    """Make requests whose sizes repeat, as those of a training do, among them each boundary of the allocator."""
    chance = random.Random(seed)
    edges = [512, MIB, 2 * MIB, 10 * MIB, 12 * MIB, 20 * MIB, 32 * MIB, 40 * MIB]
    sizes = [edge + chance.choice((-1, 0, 1)) for edge in edges if edge < largest]
    sizes += [int(2 ** chance.uniform(0, largest.bit_length() - 1)) for _ in range(12)]
    keep = chance.choice((0.45, 0.5, 0.55))
    second = chance.choice((0, 0.2))
    for i in range(length):
        if chance.random() < 0.01:
            torch.cuda.empty_cache()
            both.model.empty_cache()
        elif both.live and chance.random() > keep:
            both.free(chance.randrange(len(both.live)))
        else:
            fresh = chance.random() < 0.2
            nbytes = chance.randrange(1, largest) if fresh else chance.choice(sizes)
            both.allocate(nbytes, int(chance.random() < second))
        if i % 16 == 0:
            both.compare()
    both.compare()
    while both.live:
        both.free(-1)
    both.compare()


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_the_model_reserves_what_torch_reserves(device, configuration):
    @EXAMPLES
    @given(seed=SEEDS, length=LENGTHS, largest=st.sampled_from([MIB, 24 * MIB, 200 * MIB]))
    def check(seed: int, length: int, largest: int) -> None:
        run(pair(configuration), seed, length, largest)

    check()


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_at_a_limit_the_model_releases_retries_and_fails_as_torch_does(device, configuration):
    @EXAMPLES
    @given(seed=SEEDS, length=LENGTHS, limit=st.integers(1, 300))
    def check(seed: int, length: int, limit: int) -> None:
        run(pair(configuration, limit * MIB), seed, length, 64 * MIB)

    check()


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_where_the_device_has_no_more_the_model_releases_retries_and_fails_as_torch_does(device, configuration):
    if "FAKE" not in torch.cuda.get_device_name(0):
        pytest.skip("takes all memory of the device")

    @EXAMPLES
    @given(seed=SEEDS, length=LENGTHS, left=st.integers(1, 150))
    def check(seed: int, length: int, left: int) -> None:
        torch.cuda.empty_cache()
        configure(DEFAULT)
        others = torch.empty(torch.cuda.mem_get_info(0)[0] - left * 2 * MIB, dtype=torch.uint8, device="cuda:0")
        run(pair(configuration), seed, length, 64 * MIB)
        del others

    check()
