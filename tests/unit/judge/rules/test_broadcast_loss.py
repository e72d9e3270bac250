"""A loss whose prediction and target broadcast, and what else broadcasts beside a loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from passes import event, found


def loss(*inside: str, operator: str = "aten::mse_loss") -> list[dict[str, Any]]:
    """A loss of 900 us in forward after the call that broadcasts, with what that calls, and its backward."""
    return [
        event("aten::broadcast_tensors", 100, 120),
        *(event(name, 101 + 5 * at, 104 + 5 * at) for at, name in enumerate(inside)),
        event(operator, 200, 1_100),
        event(f"{operator}_backward", 2_910, 2_990),
    ]


@pytest.mark.parametrize("operator", ["aten::mse_loss", "aten::l1_loss", "aten::huber_loss"])
def test_a_loss_of_two_shapes_is_named(tmp_path: Path, operator: str) -> None:
    finding = found(tmp_path, *loss("aten::expand", "aten::expand", operator=operator))["broadcast_loss"]
    assert finding.title.startswith(f"The loss broadcasts: {operator.removeprefix('aten::')} gets")
    assert "squeeze(-1)" in finding.next_steps[0]
    assert finding.recovers is not None
    spent = finding.numbers["ns"]
    assert finding.recovers.min == pytest.approx(spent / 2, rel=0.01)
    assert finding.recovers.max == pytest.approx(spent, rel=0.01)


def test_a_loss_of_equal_shapes_is_not(tmp_path: Path) -> None:
    assert "broadcast_loss" not in found(tmp_path, *loss())


def test_nor_is_what_else_broadcasts_beside_a_loss(tmp_path: Path) -> None:
    normal = [event("aten::broadcast_tensors", 1_200, 1_250), event("aten::expand", 1_210, 1_215)]
    assert "broadcast_loss" not in found(tmp_path / "both", *loss(), *normal)
    assert "broadcast_loss" not in found(tmp_path / "alone", *normal)
