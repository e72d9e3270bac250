"""What devices reach: the table of GPUs, and the measurement of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_memprof.account.ledger.model import OperatorWork
from lightning_memprof.account.ledger.peaks import SWITCH, Peaks, achieved_by, device_peaks, machine_peaks


@pytest.mark.parametrize(
    ("name", "bfloat16", "gb_per_s"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 3350e9),
        ("NVIDIA H100 PCIe", 756e12, 2000e9),
        ("NVIDIA H200", 989e12, 4800e9),
        ("NVIDIA A100-SXM4-80GB", 312e12, 2039e9),
        ("NVIDIA A100-SXM4-40GB", 312e12, 1555e9),
        ("NVIDIA L40S", 362e12, 864e9),
        ("NVIDIA L4", 121e12, 300e9),
        ("Tesla V100-SXM2-32GB", None, 900e9),
        ("Tesla T4", None, 320e9),
        ("AMD Instinct MI300X VF", 1307.4e12, 5300e9),
    ],
)
def test_a_gpu_has_the_figures_of_its_data_sheet(name: str, bfloat16: float | None, gb_per_s: float) -> None:
    peaks = device_peaks(name)
    assert peaks is not None
    assert peaks.flops_per_s.get("bfloat16") == bfloat16
    assert peaks.bytes_per_s == gb_per_s
    assert "data" in peaks.source


@pytest.mark.parametrize("name", ["NVIDIA L40", "AMD Radeon Graphics", "device 0", ""])
def test_the_peaks_of_another_gpu_are_unknown(name: str) -> None:
    assert device_peaks(name) is None


@pytest.mark.slow
def test_this_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    first = machine_peaks(tmp_path)
    assert first is not None
    assert first.flops_per_s["float32"] > 1e6
    assert first.bytes_per_s > 1e6
    assert [path.name for path in tmp_path.iterdir()] == ["machine.json"]
    saved = json.loads((tmp_path / "machine.json").read_text())
    saved["bytes_per_s"] = 7.0
    (tmp_path / "machine.json").write_text(json.dumps(saved))
    again = machine_peaks(tmp_path)
    assert again is not None
    assert again.bytes_per_s == 7.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"machine": ["elsewhere", 1, "1"], "bytes_per_s": 1, "source": "x"}']
)
def test_a_damaged_cache_or_one_of_another_machine_is_replaced(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    (tmp_path / "machine.json").write_text(text)
    found = machine_peaks(tmp_path)
    assert found is not None
    assert found.bytes_per_s > 1e6
    assert json.loads((tmp_path / "machine.json").read_text())["bytes_per_s"] == found.bytes_per_s


def test_the_measurement_can_be_disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert machine_peaks(tmp_path) is None
    assert not list(tmp_path.iterdir())


PEAKS = Peaks(source="a device", bytes_per_s=1e12, flops_per_s={"bfloat16": 100e12, "float32": 10e12, "tf32": 50e12})


def work(**changes: Any) -> OperatorWork:
    usual: dict[str, Any] = {
        "part": "compute",
        "module": "net",
        "operator": "aten::mm",
        "shapes": "64x64",
        "dtype": "bfloat16",
        "ns": 1e6,
        "count": 2.0,
        "flops": 40e9,
        "bytes": 1e8,
    }
    return OperatorWork(**{**usual, **changes})


def test_the_rates_of_operators_are_shares_of_what_their_device_reaches() -> None:
    achieved = achieved_by([work(), work(shapes="8x8", ns=1e6 - 1, flops=20e9)], PEAKS, on_device=True)
    assert achieved is not None
    assert achieved.on == " on 64x64 tensors"
    assert achieved.share == pytest.approx(0.3)
    assert achieved.text == (
        "aten::mm in bfloat16 reaches 30 TFLOP/s, 30% of the 100 TFLOP/s of a device; a call takes 500 µs."
    )
    assert not achieved.is_tiny
    assert not achieved.by_memory


def test_the_nearer_of_the_two_peaks_bounds_an_operator() -> None:
    achieved = achieved_by([work(operator="aten::add", flops=0, bytes=8e8)], PEAKS, on_device=True)
    assert achieved is not None
    assert achieved.by_memory
    assert achieved.share == pytest.approx(0.8)
    product = achieved_by([work(flops=1e9, bytes=8e8)], PEAKS, on_device=True)
    assert product is not None
    assert product.by_memory


def test_float32_faster_than_float32_can_be_is_tf32() -> None:
    slow = achieved_by([work(dtype="float32", flops=9e9)], PEAKS, on_device=True)
    fast = achieved_by([work(dtype="float32", flops=40e9)], PEAKS, on_device=True)
    assert slow is not None
    assert fast is not None
    assert slow.share == pytest.approx(0.9)
    assert fast.share == pytest.approx(0.8)


def test_without_peaks_the_rate_alone_is_known_and_without_inputs_nothing() -> None:
    achieved = achieved_by([work(ns=1e4, count=10)], None, on_device=True)
    assert achieved is not None
    assert achieved.share is None
    assert achieved.is_tiny
    assert " of the " not in achieved.text
    assert achieved_by([], PEAKS, on_device=True) is None
