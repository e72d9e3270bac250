from __future__ import annotations

from pathlib import Path

import pytest

from fake_runs import FakeRun, make_run
from known import known
from lightning_memprof.account.ledger.growth import Growth, steady_growth
from lightning_memprof.read.run.load import load_run
from lightning_memprof.units import MIB


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
    growth = known(up_and_down(tmp_path, levels, leak=8))
    assert growth.per_step == pytest.approx(8 * MIB, rel=0.4)
