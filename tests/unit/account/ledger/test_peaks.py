"""What devices reach: the table of GPUs, and the rates of operators against it."""

from __future__ import annotations

from typing import Any

import pytest

from known import known
from lightning_memprof.account.ledger.model import OperatorWork
from lightning_memprof.account.ledger.peaks import Peaks, achieved_by, device_peaks


@pytest.mark.parametrize(
    ("name", "bfloat16", "gb_per_s"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 3350e9),
        ("NVIDIA H100 PCIe", 756e12, 2000e9),
        ("NVIDIA H100 NVL", 835e12, 3900e9),
        ("NVIDIA H200 NVL", 835e12, 4800e9),
        ("NVIDIA GH200 480GB", 989e12, 4000e9),
        ("NVIDIA GH200 144G HBM3e", 989e12, 4900e9),
        ("NVIDIA GB200", 2500e12, 8000e9),
        ("NVIDIA A100-SXM4-80GB", 312e12, 2039e9),
        ("NVIDIA A100 80GB PCIe", 312e12, 1935e9),
        ("NVIDIA A100-PCIE-40GB", 312e12, 1555e9),
        ("Tesla V100-SXM2-32GB", None, 900e9),
        ("Tesla V100-PCIE-16GB", None, 900e9),
        ("Tesla V100S-PCIE-32GB", None, 1134e9),
        ("NVIDIA RTX 6000 Ada Generation", 364.2e12, 960e9),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8e12, 1792e9),
        ("NVIDIA GeForce RTX 4070", 58.3e12, 504e9),
        ("NVIDIA GeForce RTX 4070 SUPER", 71e12, 504e9),
        ("NVIDIA GeForce RTX 4070 Ti", 80.2e12, 504e9),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 88.2e12, 672e9),
        ("AMD Instinct MI250X / MI250", 191.5e12, 1638e9),
        ("AMD Instinct MI300X VF", 1307.4e12, 5300e9),
    ],
)
def test_a_gpu_has_the_figures_of_its_data_sheet(name: str, bfloat16: float | None, gb_per_s: float) -> None:
    peaks = known(device_peaks(name))
    assert peaks.flops_per_s.get("bfloat16") == bfloat16
    assert peaks.bytes_per_s == gb_per_s
    assert "data" in peaks.source or "whitepaper" in peaks.source


@pytest.mark.parametrize(
    "name",
    [
        "AMD Radeon Graphics",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA H20-3e",
        "NVIDIA H200L",
        "device 0",
        "",
    ],
)
def test_the_peaks_of_another_gpu_are_unknown(name: str) -> None:
    assert device_peaks(name) is None


def test_gpus_of_one_kind_have_its_peaks_and_of_several_kinds_none() -> None:
    assert device_peaks("Tesla T4", "Tesla T4") == device_peaks("Tesla T4")
    assert device_peaks("Tesla T4", "NVIDIA A100-SXM4-80GB") is None
    assert device_peaks() is None


PEAKS = Peaks(source="data sheet", bytes_per_s=1e12, flops_per_s={"bfloat16": 100e12, "float32": 10e12, "tf32": 50e12})


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
    achieved = known(achieved_by([work(), work(shapes="8x8", ns=1e6 - 1, flops=20e9)], PEAKS, on_device=True))
    assert achieved.on == " on 64x64 tensors"
    assert achieved.share == pytest.approx(0.3)
    assert achieved.text == (
        "aten::mm in bfloat16 reaches 30 TFLOP/s, 30% of the 100 TFLOP/s in the data sheet; a call takes 500 µs."
    )
    assert not achieved.is_tiny
    assert not achieved.by_memory


def test_the_nearer_of_the_two_peaks_bounds_an_operator() -> None:
    achieved = known(achieved_by([work(operator="aten::add", flops=0, bytes=8e8)], PEAKS, on_device=True))
    assert achieved.by_memory
    assert achieved.share == pytest.approx(0.8)
    product = known(achieved_by([work(flops=1e9, bytes=8e8)], PEAKS, on_device=True))
    assert product.by_memory


def test_float32_faster_than_float32_can_be_is_tf32() -> None:
    slow = achieved_by([work(dtype="float32", flops=9e9)], PEAKS, on_device=True)
    fast = achieved_by([work(dtype="float32", flops=40e9)], PEAKS, on_device=True)
    assert slow is not None
    assert fast is not None
    assert slow.share == pytest.approx(0.9)
    assert fast.share == pytest.approx(0.8)


@pytest.mark.parametrize(("ns", "share"), [(1e6, 1.04), (0.9e6, None)])
def test_more_than_a_device_can_reach_is_no_share_of_it(ns: float, share: float | None) -> None:
    achieved = known(achieved_by([work(ns=ns, flops=104e9)], PEAKS, on_device=True))
    assert achieved.share == pytest.approx(share)
    assert (" of the " in achieved.text) == (share is not None)


def test_without_peaks_the_rate_alone_is_known_and_without_inputs_nothing() -> None:
    achieved = known(achieved_by([work(ns=1e4, count=10)], None, on_device=True))
    assert achieved.share is None
    assert achieved.is_tiny
    assert " of the " not in achieved.text
    assert achieved_by([], PEAKS, on_device=True) is None
