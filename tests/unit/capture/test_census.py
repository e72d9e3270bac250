from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from lightning_memprof.capture import census
from lightning_memprof.capture.base import SkipWindow
from lightning_memprof.capture.census import large_objects, take_census
from lightning_memprof.capture.sources.memory import mapped_sizes


def test_a_census_counts_and_keeps_nothing_alive() -> None:
    gc.disable()
    try:
        kept = [torch.ones(17, 3) for _ in range(5)]
        reference = weakref.ref(kept[0])
        taken = take_census(7, 0)
        group = "Tensor", (17, 3), "float32", "cpu"
        assert (taken.tensor_counts[group], taken.tensor_bytes[group]) == (5, 5 * 17 * 3 * 4)
        assert taken.lengths[id(kept)] == 5
        del kept
        assert reference() is None
    finally:
        gc.enable()


def test_only_storages_that_still_live_are_known_from_before() -> None:
    freed, kept = torch.ones(17), torch.ones(17)
    taken = take_census(7, 0)
    addresses = {tensor.untyped_storage()._cdata for tensor in (freed, kept)}
    before = taken.storages()
    del freed
    gone = before - taken.storages()
    assert gone & addresses == gone != set()
    assert kept.untyped_storage()._cdata in taken.storages()


def test_the_bytes_of_a_graph_that_is_not_released_are_counted() -> None:
    root = torch.ones(64, 64, requires_grad=True).exp().exp()
    assert take_census(0, 0).graph_bytes >= 2 * 64 * 64 * 4
    assert root.requires_grad


def test_what_reading_a_graph_makes_visible_is_in_the_first_count() -> None:
    root = torch.ones(31, 37, requires_grad=True).exp().exp().sum()
    counts = [take_census(step, 0).tensor_counts["Tensor", (31, 37), "float32", "cpu"] for step in range(2)]
    assert counts[0] == counts[1]
    assert root.requires_grad


def test_a_program_with_too_many_objects_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census, "_MOST_OBJECTS", 10)
    with pytest.raises(SkipWindow, match=r"objects: a search for holders would take too long"):
        take_census(0, 0)


def test_large_arrays_are_found_though_the_garbage_collector_does_not_track_them() -> None:
    array = np.ones(1 << 18)
    holder = [array, array[:10]]
    found: dict[int, int] = {id(value): size for value, size in large_objects(1 << 20)}
    assert found[id(array)] == array.nbytes
    assert id(holder[1]) not in found


def test_a_mapped_file_is_listed_by_its_path(tmp_path: Any) -> None:
    file = tmp_path / "data.bin"
    np.ones(1 << 16).tofile(file)
    mapped = np.memmap(file, dtype=np.float64, mode="r")
    assert mapped.sum() == 1 << 16
    assert mapped_sizes().get(str(file), 1 << 19) == 1 << 19
