from __future__ import annotations

import pytest

from lightning_memprof.estimation.allocator import AllocatorSettings, CachingAllocator
from lightning_memprof.estimation.requests import Band, Requests, demand, perturbed, replay
from lightning_memprof.units import MIB


def recorded(*sizes: int) -> Requests:
    """Requests of so many MiB; a negative number frees that allocation, counted from 1."""
    requests = Requests()
    for size in sizes:
        if size < 0:
            requests.free(-size - 1)
        else:
            requests.allocate(size * MIB)
    return requests


def replayed(requests: Requests) -> CachingAllocator:
    """An unlimited allocator after the requests."""
    allocator = CachingAllocator()
    assert replay(requests, allocator)
    return allocator


def band_of(requests: Requests) -> Band:
    return perturbed(requests, AllocatorSettings())


def test_a_replay_gives_the_peaks():
    allocator = replayed(recorded(40, 30, -1, 20, 20, -2))
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (70 * MIB, 70 * MIB)
    assert allocator.retries == 0


def test_a_replay_ends_at_the_request_that_fails():
    allocator = CachingAllocator(capacity_bytes=80 * MIB)
    assert not replay(recorded(40, 30, -1, 60, 20), allocator)
    assert (allocator.retries, allocator.peak_reserved_bytes) == (1, 70 * MIB)


def test_an_allocation_of_no_bytes_has_a_number_and_no_memory():
    requests = Requests()
    empty, full = requests.allocate(0), requests.allocate(1)
    assert (empty, full, len(requests)) == (0, 1, 2)
    requests.free(empty)
    requests.free(full)
    assert replayed(requests).peak_allocated_bytes == 512


def test_requests_of_another_stream_use_its_own_pool():
    requests = Requests()
    requests.free(requests.allocate(4 * MIB, stream=7))
    requests.allocate(4 * MIB)
    assert replayed(requests).peak_reserved_bytes == 40 * MIB


def test_the_band_is_repeatable_and_contains_the_plain_replay():
    requests = Requests()
    for step in range(3):
        numbers = [requests.allocate((size + step) * MIB // 2) for size in range(1, 60)]
        for number in numbers[::2] + numbers[1::2]:
            requests.free(number)
    band = band_of(requests)
    assert band == band_of(requests)
    assert band.low_bytes <= replayed(requests).peak_reserved_bytes <= band.high_bytes
    assert band.low_bytes < band.high_bytes


def test_the_likely_peak_is_that_of_most_replays():
    """A segment of exactly 100 MiB cannot be used again for 512 bytes more; nearly every other size can."""
    requests = Requests()
    requests.free(requests.allocate(100 * MIB))
    requests.allocate(100 * MIB + 512)
    band = band_of(requests)
    assert replayed(requests).peak_reserved_bytes == band.high_bytes == 202 * MIB
    assert band.likely_bytes < 130 * MIB


def test_the_likely_peak_is_the_plain_one_where_perturbed_ones_differ_by_their_own_bytes():
    requests = recorded(40, 30, -1, 20)
    assert band_of(requests).likely_bytes == replayed(requests).peak_reserved_bytes


def test_a_perturbation_leaves_the_requests_as_they_are():
    requests = recorded(40, 30, -1, 60, 20)
    before = requests.events[:]
    band_of(requests)
    assert requests.events == before


def workspace_requests() -> tuple[Requests, int]:
    """Two tensors of 20 MiB, and between them a workspace of 100 MiB that is free again."""
    requests = Requests()
    requests.allocate(20 * MIB)
    workspace = requests.allocate(100 * MIB)
    requests.free(workspace)
    requests.allocate(20 * MIB)
    return requests, workspace


def test_requests_without_an_allocation_keep_the_numbers_of_the_others() -> None:
    requests, workspace = workspace_requests()
    assert replayed(requests.without([workspace])).peak_allocated_bytes == 40 * MIB
    assert replayed(requests).peak_allocated_bytes == 120 * MIB


def test_the_band_of_a_demand_reaches_from_no_workspace_to_all() -> None:
    requests, workspace = workspace_requests()
    found = demand(requests, AllocatorSettings(), workspaces=[workspace])
    assert found.reserved.low_bytes < found.reserved.likely_bytes == 40 * MIB < 120 * MIB < found.reserved.high_bytes


@pytest.mark.parametrize(
    ("capacities", "fits"),
    [
        ((60 * MIB, 60 * MIB), None),  # without the workspace alone
        ((30 * MIB, 35 * MIB), False),
        ((1024 * MIB, 1024 * MIB), True),
        ((122 * MIB, 122 * MIB), True),
    ],
)
def test_a_demand_fits_if_it_does_with_and_without_workspaces(capacities: tuple[int, int], fits: bool | None) -> None:
    requests, workspace = workspace_requests()
    assert demand(requests, AllocatorSettings(), workspaces=[workspace], capacities=capacities).fits is fits


def test_a_demand_fits_where_the_allocator_releases_what_it_has_cached() -> None:
    requests = Requests()
    requests.free(requests.allocate(60 * MIB))
    requests.allocate(80 * MIB)
    found = demand(requests, AllocatorSettings(), capacities=(100 * MIB, 100 * MIB))
    assert (found.fits, found.retries, found.reserved.likely_bytes) == (True, 1, 80 * MIB)


def test_the_band_contains_the_likely_value_where_only_released_caches_make_it_fit() -> None:
    requests = Requests()
    requests.free(requests.allocate(600 * MIB))
    workspace = requests.allocate(300 * MIB)
    requests.allocate(800 * MIB)
    found = demand(requests, AllocatorSettings(), workspaces=[workspace], capacities=(1000 * MIB, 1000 * MIB))
    assert (found.fits, found.reserved.low_bytes, found.reserved.likely_bytes) == (None, 800 * MIB, 800 * MIB)
