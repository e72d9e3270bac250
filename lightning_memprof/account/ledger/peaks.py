"""What devices reach at most, by the figures of vendors or measured on this machine, and what operators reach of it."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import asdict

from lightning_memprof.account.ledger.model import OperatorWork
from lightning_memprof.units import format_bytes, format_ns, percent

SWITCH: Final = "LIGHTNING_MEMPROF_BENCHMARK"
"""Environment variable: with the value 0 this machine is not measured."""
_TYPES: Final = ("float32", "float16", "bfloat16", "tf32")
_CACHE: Final = "machine.json"
_SIDE: Final = 1024
_COPIED: Final = 64 << 20
_REPEATS: Final = 5
# Finding, calling and recording an operator takes the host some µs, a launch as long: shorter calls compute little.
TINY_NS: Final = {True: 10_000, False: 20_000}
TERA: Final = 1e12


class Peaks(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a device reaches: floating-point operations per second by dtype, and bytes per second.

    ``source`` says where the figures come from. The type ``tf32`` is float32 in tensor cores.
    """

    source: str
    bytes_per_s: float
    flops_per_s: Mapping[str, float] = msgspec.field(default_factory=dict)


class _Gpu(NamedTuple):
    """Dense figures of a data sheet: GB/s, and TFLOP/s by type; None for types that the GPU does not have."""

    pattern: str
    source: str
    gb_per_s: float
    float32: float
    float16: float
    bfloat16: float | None
    tf32: float | None


# Without sparsity, at boost clock. The name of a device in a trace has the first pattern that fits. Of GeForce GPUs the
# figures with float32 accumulation, of MI250X those of one die, which is a device of its own; AMD's float32 is that of
# matrices.
_GPUS: Final = (
    _Gpu("H200", "NVIDIA H200 datasheet (SXM)", 4800, 67, 989, 989, 494),
    _Gpu("H100 PCIe", "NVIDIA H100 datasheet (PCIe)", 2000, 51, 756, 756, 378),
    _Gpu("H100", "NVIDIA H100 datasheet (SXM)", 3350, 67, 989, 989, 494),
    _Gpu("A100.*80GB", "NVIDIA A100 datasheet (80GB SXM)", 2039, 19.5, 312, 312, 156),
    _Gpu("A100", "NVIDIA A100 datasheet (40GB)", 1555, 19.5, 312, 312, 156),
    _Gpu("L40S", "NVIDIA L40S datasheet", 864, 91.6, 362, 362, 183),
    _Gpu(r"\bL4\b", "NVIDIA L4 datasheet", 300, 30.3, 121, 121, 60),
    _Gpu("V100", "NVIDIA V100 datasheet (SXM2)", 900, 15.7, 125, None, None),
    _Gpu(r"\bT4\b", "NVIDIA T4 datasheet", 320, 8.1, 65, None, None),
    _Gpu("RTX 4090", "NVIDIA Ada GPU architecture whitepaper", 1008, 82.6, 165, 165, 82.6),
    _Gpu("RTX 3090", "NVIDIA Ampere GA102 GPU architecture whitepaper", 936, 35.6, 71, 71, 35.6),
    _Gpu("MI250X", "AMD Instinct MI250X data sheet (one die)", 1638, 47.9, 191.5, 191.5, None),
    _Gpu("MI300X", "AMD Instinct MI300X data sheet", 5300, 163.4, 1307.4, 1307.4, 653.7),
)


def device_peaks(name: str) -> Peaks | None:
    """Return the peaks of a GPU by its name in a trace, None for one that is not in the table."""
    gpu = next((gpu for gpu in _GPUS if re.search(gpu.pattern, name)), None)
    if gpu is None:
        return None
    rates = {dtype: rate * 1e12 for dtype, rate in gpu._asdict().items() if dtype in _TYPES and rate is not None}
    return Peaks(source=gpu.source, bytes_per_s=gpu.gb_per_s * 1e9, flops_per_s=rates)


def machine_peaks(directory: Path | None = None) -> Peaks | None:
    """Return what this machine's processor reaches in NumPy: measured once in 0.3 s, then read from the user's cache.

    None where the measurement is disabled by ``LIGHTNING_MEMPROF_BENCHMARK=0``.

    Args:
        directory: of the cache; by default the user's.
    """
    if os.environ.get(SWITCH) == "0":
        return None
    known = [platform.node(), os.cpu_count(), np.__version__]
    cache = (directory or _user_cache()) / _CACHE
    try:
        saved = json.loads(cache.read_text(encoding="utf-8"))
        if saved.pop("machine") == known:
            return Peaks(**saved)
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        pass  # none, of another machine or version, or damaged: measured again
    found = _measured()
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        temporary = cache.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"machine": known, **asdict(found)}), encoding="utf-8")
        temporary.replace(cache)
    except OSError:
        pass  # a home that cannot be written costs a measurement each time
    return found


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-memprof"


def _measured() -> Peaks:
    matrix = np.ones((_SIDE, _SIDE), np.float32)
    product = np.empty_like(matrix)
    source = np.ones(_COPIED, np.uint8)
    target = np.empty_like(source)
    gemm_s = _fastest(lambda: np.matmul(matrix, matrix, out=product))
    copy_s = _fastest(lambda: np.copyto(target, source))
    return Peaks(
        source=f"this machine: float32 matrices of {_SIDE}x{_SIDE} and a copy of {format_bytes(_COPIED)} in NumPy",
        bytes_per_s=2 * _COPIED / copy_s,
        flops_per_s={"float32": 2 * _SIDE**3 / gemm_s},
    )


def _fastest(run: Callable[[], object]) -> float:
    """Return seconds of the fastest of a few runs: other programs only slow it down."""
    times = []
    for _ in range(_REPEATS):
        begin = perf_counter()
        run()
        times.append(perf_counter() - begin)
    return max(min(times), 1e-9)


class Achieved(msgspec.Struct, frozen=True, kw_only=True):
    """What operators reach, against what their device reaches at most.

    Attributes:
        on: their most expensive operands, for a sentence: ``" on 64x64 tensors"``.
        text: a sentence with the rates.
        is_tiny: whether a call takes no longer than it costs to make it.
        by_memory: whether memory bounds them, and not arithmetic.
        share: of the peak that bounds them, None where it is unknown.
        dtype: of the operands.
        numbers: the same for programs: FLOP/s, bytes/s, and the peaks with their source.
        pairs: operands that are broadcast to a value for each pair of theirs, if most of the work is on that result.
    """

    on: str
    text: str
    is_tiny: bool
    by_memory: bool
    share: float | None
    dtype: str
    numbers: Mapping[str, Any]
    pairs: str = ""


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
    against = f", {percent(share)} of the {limit} of {peaks.source}" if peaks and share is not None else ""
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
    return f"{per_s / 1e12:,.3g} TFLOP/s" if per_s >= TERA else f"{per_s / 1e9:,.3g} GFLOP/s"
