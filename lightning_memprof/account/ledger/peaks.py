"""What GPUs reach at most, by the data sheets of their vendors, and what operators reach of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from lightning_memprof.account.ledger.model import OperatorWork
from lightning_memprof.units import format_bytes, format_ns, percent

_TYPES: Final = ("float32", "float16", "bfloat16", "tf32")
# Finding, calling and recording an operator takes the host some µs, a launch as long: shorter calls compute little.
TINY_NS: Final = {True: 10_000, False: 20_000}
TERA: Final = 1e12
# Clocks above those of the data sheet reach a little more than its figures; a share beyond is of another peak.
_MOST: Final = 1.05


class Peaks(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a device reaches: floating-point operations per second by dtype, and bytes per second.

    ``source`` says where the figures come from. The type ``tf32`` is float32 in tensor cores.
    """

    source: str
    bytes_per_s: float
    flops_per_s: Mapping[str, float] = msgspec.field(default_factory=dict)


class _Gpu(NamedTuple):
    """Dense figures of a data sheet: GB/s, and TFLOP/s by type; None for types that the GPU does not have.

    ``words`` are those of a device's name in a trace that tell this GPU from all others.
    """

    words: str
    source: str
    gb_per_s: float
    float32: float
    float16: float | None
    bfloat16: float | None
    tf32: float | None


_HOPPER: Final = "NVIDIA H100 datasheet"
_VOLTA: Final = "NVIDIA V100 datasheet"
_PASCAL: Final = "NVIDIA Tesla P100 datasheet"
_GA102: Final = "NVIDIA Ampere GA102 GPU architecture whitepaper"
_ADA: Final = "NVIDIA Ada GPU architecture whitepaper"
_BLACKWELL: Final = "NVIDIA RTX Blackwell GPU architecture whitepaper"
# Without sparsity, at boost clock; a name has the first entry of whose words it has all. Of GeForce GPUs the figures
# with float32 accumulation, of MI200 those of one die, which is a device of its own; AMD's float32 is that of matrices.
_GPUS: Final = (
    _Gpu("GB200", "NVIDIA GB200 NVL72 datasheet", 8000, 80, 2500, 2500, 1250),
    _Gpu("B200", "NVIDIA HGX B200 datasheet", 8000, 75, 2250, 2250, 1100),
    _Gpu("B100", "NVIDIA Blackwell architecture technical brief", 8000, 60, 1750, 1750, 875),
    _Gpu("GH200 144G", "NVIDIA GH200 datasheet (HBM3e)", 4900, 67, 989, 989, 494),
    _Gpu("GH200", "NVIDIA GH200 datasheet (HBM3)", 4000, 67, 989, 989, 494),
    _Gpu("H200 NVL", "NVIDIA H200 datasheet (NVL)", 4800, 60, 835, 835, 417),
    _Gpu("H200", "NVIDIA H200 datasheet (SXM)", 4800, 67, 989, 989, 494),
    _Gpu("H100 NVL", f"{_HOPPER} (NVL)", 3900, 60, 835, 835, 417),
    _Gpu("H100 PCIe", f"{_HOPPER} (PCIe)", 2000, 51, 756, 756, 378),
    _Gpu("H100", f"{_HOPPER} (SXM)", 3350, 67, 989, 989, 494),
    _Gpu("H20", "NVIDIA H20 datasheet", 4000, 44, 148, 148, 74),
    _Gpu("A100 80GB PCIe", "NVIDIA A100 datasheet (80GB PCIe)", 1935, 19.5, 312, 312, 156),
    _Gpu("A100 80GB", "NVIDIA A100 datasheet (80GB SXM)", 2039, 19.5, 312, 312, 156),
    _Gpu("A100 PCIe", "NVIDIA A100 datasheet (40GB)", 1555, 19.5, 312, 312, 156),
    _Gpu("A100", "NVIDIA A100 datasheet (40GB)", 1555, 19.5, 312, 312, 156),
    _Gpu("A30", "NVIDIA A30 datasheet", 933, 10.3, 165, 165, 82),
    _Gpu("A40", "NVIDIA A40 datasheet", 696, 37.4, 149.7, 149.7, 74.8),
    _Gpu("A10", "NVIDIA A10 datasheet", 600, 31.2, 125, 125, 62.5),
    _Gpu("A10G", "NVIDIA A10G datasheet", 600, 31.5, 70, 70, 35),
    _Gpu("A2", "NVIDIA A2 datasheet", 200, 4.5, 18, 18, 9),
    _Gpu("L40S", "NVIDIA L40S datasheet", 864, 91.6, 362, 362, 183),
    _Gpu("L40", "NVIDIA L40 datasheet", 864, 90.5, 181, 181, 90.5),
    _Gpu("L4", "NVIDIA L4 datasheet", 300, 30.3, 121, 121, 60),
    _Gpu("V100S PCIe", f"{_VOLTA} (V100S)", 1134, 16.4, 130, None, None),
    _Gpu("V100", f"{_VOLTA} (SXM2)", 900, 15.7, 125, None, None),
    _Gpu("V100 PCIe", f"{_VOLTA} (PCIe)", 900, 14, 112, None, None),
    _Gpu("P100 SXM2", f"{_PASCAL} (SXM2)", 732, 10.6, 21.2, None, None),
    _Gpu("P100 PCIe 16GB", f"{_PASCAL} (PCIe)", 732, 9.3, 18.7, None, None),
    _Gpu("T4", "NVIDIA T4 datasheet", 320, 8.1, 65, None, None),
    _Gpu("Quadro RTX 8000", "NVIDIA Turing GPU architecture whitepaper", 672, 16.3, 130.5, None, None),
    _Gpu("Quadro RTX 6000", "NVIDIA Turing GPU architecture whitepaper", 672, 16.3, 130.5, None, None),
    _Gpu("RTX A6000", "NVIDIA RTX A6000 datasheet", 768, 38.7, 154.8, 154.8, 77.4),
    _Gpu("RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation datasheet", 960, 91.1, 364.2, 364.2, 182.1),
    _Gpu("RTX PRO 6000 Workstation", "NVIDIA RTX PRO 6000 Blackwell datasheet", 1792, 125, 503.8, 503.8, 251.9),
    _Gpu("RTX PRO 6000 Server", "NVIDIA RTX PRO 6000 Blackwell Server datasheet", 1597, 120, None, None, None),
    _Gpu("RTX 5090", _BLACKWELL, 1792, 104.8, 209.5, 209.5, 104.8),
    _Gpu("RTX 5080", _BLACKWELL, 960, 56.3, 112.6, 112.6, 56.3),
    _Gpu("RTX 5070 Ti", _BLACKWELL, 896, 43.9, 87.9, 87.9, 43.9),
    _Gpu("RTX 5070", _BLACKWELL, 672, 30.9, 61.7, 61.7, 30.9),
    _Gpu("RTX 4090", _ADA, 1008, 82.6, 165.2, 165.2, 82.6),
    _Gpu("RTX 4080 SUPER", _ADA, 736, 52.2, 104.4, 104.4, 52.2),
    _Gpu("RTX 4080", _ADA, 717, 48.7, 97.5, 97.5, 48.7),
    _Gpu("RTX 4070 Ti SUPER", _ADA, 672, 44.1, 88.2, 88.2, 44.1),
    _Gpu("RTX 4070 Ti", _ADA, 504, 40.1, 80.2, 80.2, 40.1),
    _Gpu("RTX 4070 SUPER", _ADA, 504, 35.5, 71, 71, 35.5),
    _Gpu("RTX 4070", _ADA, 504, 29.1, 58.3, 58.3, 29.1),
    _Gpu("RTX 4060 Ti", _ADA, 288, 22.1, 44.1, 44.1, 22.1),
    _Gpu("RTX 4060", _ADA, 272, 15.1, 30.2, 30.2, 15.1),
    _Gpu("RTX 3090 Ti", _GA102, 1008, 40, 80, 80, 40),
    _Gpu("RTX 3090", _GA102, 936, 35.6, 71, 71, 35.6),
    _Gpu("RTX 3080 Ti", _GA102, 912, 34.1, 68.2, 68.2, 34.1),
    _Gpu("RTX 3080", _GA102, 760, 29.8, 59.5, 59.5, 29.8),
    _Gpu("RTX 3070", _GA102, 448, 20.3, 40.6, 40.6, 20.3),
    _Gpu("MI355X", "AMD Instinct MI355X data sheet", 8000, 157.3, 2516.6, 2516.6, None),
    _Gpu("MI350X", "AMD Instinct MI350X data sheet", 8000, 144.2, 2306.9, 2306.9, None),
    _Gpu("MI325X", "AMD Instinct MI325X data sheet", 6000, 163.4, 1307.4, 1307.4, 653.7),
    _Gpu("MI300X", "AMD Instinct MI300X data sheet", 5300, 163.4, 1307.4, 1307.4, 653.7),
    _Gpu("MI300A", "AMD Instinct MI300A data sheet", 5300, 122.6, 980.6, 980.6, 490.3),
    _Gpu("MI250X", "AMD Instinct MI250X data sheet (one die)", 1638, 47.9, 191.5, 191.5, None),
    _Gpu("MI250", "AMD Instinct MI250 data sheet (one die)", 1638, 45.3, 181, 181, None),
    _Gpu("MI210", "AMD Instinct MI210 data sheet", 1638, 45.3, 181, 181, None),
    _Gpu("MI100", "AMD Instinct MI100 data sheet", 1229, 46.1, 184.6, 92.3, None),
)
_WORD: Final = re.compile(r"[a-z0-9]+")
# They make another GPU, or a part of one, of a name: it has the figures of an entry with the same words only.
_VARIANTS: Final = frozenset(("d", "laptop", "mobile", "max", "mig", "nvl", "pcie", "super", "ti", "ada", "3e", "64gb"))


def device_peaks(*names: str) -> Peaks | None:
    """Return the peaks of GPUs by their names in a trace, None for one that is not in the table, and for others."""
    words = {*_WORD.findall(names[0].lower())} if len({*names}) == 1 else set()
    variants = words & _VARIANTS
    gpu = next((gpu for gpu in _GPUS if variants <= {*gpu.words.lower().split()} <= words), None)
    if gpu is None:
        return None
    rates = {dtype: rate * 1e12 for dtype, rate in gpu._asdict().items() if dtype in _TYPES and rate is not None}
    return Peaks(source=gpu.source, bytes_per_s=gpu.gb_per_s * 1e9, flops_per_s=rates)


class Achieved(msgspec.Struct, frozen=True, kw_only=True):
    """What operators reach, against what their device reaches at most.

    Attributes:
        on: their most expensive operands, for a sentence: ``" on 64x64 tensors"``.
        text: a sentence with the rates.
        is_tiny: whether a call takes no longer than it costs to make it.
        by_memory: whether memory bounds them, and not arithmetic.
        share: of the peak that bounds them, None where it is unknown, or more than they can reach.
        dtype: of the operands.
        numbers: the same for programs: FLOP/s, bytes/s, and the peaks with their source.
    """

    on: str
    text: str
    is_tiny: bool
    by_memory: bool
    share: float | None
    dtype: str
    numbers: Mapping[str, Any]


def achieved_by(work: Sequence[OperatorWork], peaks: Peaks | None, *, on_device: bool) -> Achieved | None:
    """Return the rates of operators together; None where no inputs were recorded.

    Args:
        work: the operators.
        peaks: of their device; None where it is unknown, and only the rates are known.
        on_device: whether they run on an accelerator.
    """
    ns, count = sum(each.ns for each in work), sum(each.count for each in work)
    if not work or not ns or not count:
        return None
    first = max(work, key=lambda each: each.ns)
    flops, moved = 1e9 * sum(each.flops for each in work) / ns, 1e9 * sum(each.bytes for each in work) / ns
    most = dict(peaks.flops_per_s) if peaks else {}
    # Tensor cores multiply float32 as TF32 where the program allows it: then it is faster than float32 can be.
    known = most.get("tf32" if first.dtype == "float32" and flops > most.get("float32", flops) else first.dtype)
    of_flops = flops / known if known else None
    of_memory = moved / peaks.bytes_per_s if peaks else None
    by_memory = not flops or (of_flops is not None and of_memory is not None and of_memory > of_flops)
    share, peak = (of_memory, peaks and peaks.bytes_per_s) if by_memory else (of_flops, known)
    if by_memory:
        rate, limit = f"{format_bytes(moved)}/s", f"{format_bytes(peak or 0)}/s"
    else:
        rate, limit = _flops(flops), _flops(peak or 0)
    if share is not None and share > _MOST:
        share = None
    against = f", {percent(share)} of the {limit} in the {peaks.source}" if peaks and share is not None else ""
    return Achieved(
        on=f" on {first.shapes} tensors",
        text=f"{first.operator} in {first.dtype} reaches {rate}{against}; a call takes {format_ns(ns / count)}.",
        is_tiny=ns / count < TINY_NS[on_device],
        by_memory=by_memory,
        share=share,
        dtype=first.dtype,
        numbers={
            "shapes": first.shapes,
            "dtype": first.dtype,
            "flops_per_s": flops,
            "bytes_per_s": moved,
            "peak_flops_per_s": known,
            "peak_bytes_per_s": peaks.bytes_per_s if peaks else None,
            "peak_source": peaks.source if peaks else None,
        },
    )


def _flops(per_s: float) -> str:
    rate, unit = (per_s / 1e12, "TFLOP/s") if per_s >= TERA else (per_s / 1e9, "GFLOP/s")
    return f"{float(f'{rate:.3g}'):,g} {unit}"
