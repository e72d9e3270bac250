"""Which container a slope is in, and whether it will end: of searches at steps 65 and 199 since step 17."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from lightning_memprof.account.ledger.growth import Growth
from lightning_memprof.account.ledger.holders import Holders
from lightning_memprof.artifacts.series import HolderRow
from lightning_memprof.units import MIB

SLOPE = Growth(per_step=MIB, added=182 * MIB, start=100 * MIB, steps=182)


def searches(start: int, middle: int, end: int, bound: int | None = None) -> list[HolderRow]:
    """Return the searches that find a container with these numbers of entries of 1 MiB, which are all the growth."""
    return [
        HolderRow(
            kind="attribute", place="Model.kept[...]", step=step, since_step=17, count=count, added=count - start,
            added_bytes=max(count - start, 182 if step == 199 else 0) * MIB, bound=bound,
        )
        for step, count in ((65, middle), (199, end))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "ends"),
    [
        pytest.param((17, 65, 199), False, id="one each step"),
        pytest.param((1017, 1065, 1199), False, id="one each step, with entries from the start"),
        pytest.param((0, 1, 4), False, id="one in every fifty steps"),
        pytest.param((15, 36, 47), True, id="a table for each random length"),
        pytest.param((10, 10, 100), False, id="begins late"),
    ],
)
def test_a_container_that_gains_fewer_and_fewer_entries_fills_up(counts: tuple[int, int, int], *, ends: bool) -> None:
    holders = Holders(searches(*counts), SLOPE)
    assert holders.ends is ends
    assert (holders.main is None) is ends


def test_a_container_near_its_limit_fills_up() -> None:
    assert Holders(searches(17, 65, 199, bound=300), SLOPE).ends
    assert not Holders(searches(17, 65, 199, bound=10**9), SLOPE).ends


@pytest.mark.parametrize("content", ["Tensor[] with its graph", "Tensor[9] of a larger tensor"])
def test_what_a_bounded_container_keeps_needlessly_does_not_fill_it_up(content: str) -> None:
    rows = [replace(row, content=content) for row in searches(17, 65, 199, bound=300)]
    holders = Holders(rows, SLOPE)
    assert not holders.ends
    assert holders.main == rows[-1]


def test_one_search_does_not_tell_a_cache_from_a_leak() -> None:
    assert not Holders(searches(15, 36, 47)[1:], SLOPE).ends
