"""Which container a slope is in, and whether it will end: of searches at steps 65 and 199 since step 17."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fake_runs import FakeRun, make_run
from findings import noisy
from lightning_memprof.account.ledger.growth import Growth, Holders, left_by_windows, steady_growth
from lightning_memprof.artifacts.series import HolderRow
from lightning_memprof.read.run.load import load_run
from lightning_memprof.units import MIB

SLOPE = Growth(bytes_per_step=MIB, added_bytes=182 * MIB, start_bytes=100 * MIB, steps=182)


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


def test_one_search_does_not_tell_a_cache_from_a_leak() -> None:
    assert not Holders(searches(15, 36, 47)[1:], SLOPE).ends


def left(tmp_path: Path, rss: Callable[[int], int], windows: tuple[tuple[int, ...], ...] = ((20, 21),)) -> int | None:
    fake = FakeRun(steps=60, windows=windows, trace=False, rss_bytes=rss)
    return left_by_windows(load_run(make_run(tmp_path, fake)).lead.pulse, "rss_bytes")


@pytest.mark.parametrize("slope", [0, 9 * MIB])
def test_memory_that_a_window_leaves_is_told_from_growth(tmp_path: Path, slope: int) -> None:
    jump = left(tmp_path / "jump", lambda step: 500 * MIB + slope * step + (112 * MIB if step >= 20 else 0))
    assert jump == pytest.approx(112 * MIB, rel=0.01)
    assert left(tmp_path / "none", lambda step: 500 * MIB + slope * step) == 0


def test_memory_that_windows_close_together_leave_is_compared_around_all_of_them(tmp_path: Path) -> None:
    windows = tuple((start, start + 1) for start in range(6, 44, 8))
    size = left(tmp_path, lambda step: (500 + min(max(step - 5, 0), 40)) * MIB, windows)
    assert size == pytest.approx(40 * MIB, rel=0.1)


def test_noise_around_a_window_is_not_what_it_left(tmp_path: Path) -> None:
    assert left(tmp_path, noisy) == 0


def test_a_window_at_the_start_cannot_say_what_it_left(tmp_path: Path) -> None:
    assert left(tmp_path, lambda step: (500 + 100 * (step > 1)) * MIB, ((2, 3),)) is None


def test_few_steps_cannot_show_growth(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path, FakeRun(steps=18, rss_bytes=lambda step: (100 + 50 * step) * MIB)))
    assert steady_growth(run.lead.pulse, "rss_bytes") is None


def up_and_down(tmp_path: Path, text: str, leak: int = 0) -> Growth | None:
    levels = [int(level) for level in text.split()]
    fake = FakeRun(
        steps=len(levels),
        rss_bytes=lambda step: (levels[step] + leak * step) * MIB,
        windows=((11, 12), (24, 25)),
    )
    return steady_growth(load_run(make_run(tmp_path, fake)).lead.pulse, "rss_bytes")


# Two recorded healthy trainings: the allocator's pools move, and windows leave memory behind.
POOLS = (
    """533 533 540 545 548 548 553 546 553 555 555 600 613 600 590 580 570 568 568 568
    571 585 576 590 600 637 620 571 575 580 585 590 570 581 584 589 583 593 593 573""",
    """457 557 570 554 553 570 551 572 575 581 572 602 679 600 603 603 603 607 598 598
    612 603 606 606 615 682 615 605 605 616 616 603 603 603 611 598 601 615 615 615""",
)


@pytest.mark.parametrize("levels", POOLS)
def test_memory_that_goes_up_and_down_between_windows_does_not_grow(tmp_path: Path, levels: str) -> None:
    assert up_and_down(tmp_path, levels) is None


@pytest.mark.parametrize("levels", POOLS)
def test_a_leak_shows_through_pools_that_go_up_and_down(tmp_path: Path, levels: str) -> None:
    growth = up_and_down(tmp_path, levels, leak=8)
    assert growth is not None
    assert growth.bytes_per_step == pytest.approx(8 * MIB, rel=0.4)
