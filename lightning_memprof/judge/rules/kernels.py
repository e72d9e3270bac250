"""Inefficient work of a device: kernels without tensor cores, and what one fused kernel can do."""

from __future__ import annotations

import re
from typing import Final

from lightning_memprof.account.ledger.model import TimeLedger, grouped
from lightning_memprof.account.parts import BUSY, Part
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.rule import Detail, InTrace, Rule
from lightning_memprof.judge.traces import (
    computed,
    computing,
    remedies,
    shorter_name,
    times,
    total_ns,
)
from lightning_memprof.units import format_ns, percent

SHOWN: Final = 3
# Names of 32-bit matrix multiplication kernels: cuBLAS, cuDNN (all versions), CUTLASS.
ORDINARY: Final = re.compile(
    r"sgemm|_scudnn_|simt|_engine<float|_convolve_sgemm<float|gemv|winograd\w*<float|f32f32_f32f32_f32|_ffma_",
)
# Attention whose inputs have 32 bits; its products may be TF32, in three passes.
ATTENTION: Final = re.compile(r"fmha_cutlass\w_f32_")
# Names of kernels that use tensor cores, by instruction or by type.
TENSOR: Final = re.compile(
    r"tensorop|nvjet|hmma|imma|wmma|884|1688|16816|tf32|bf16|f16f16|hgemm|fp8|e4m3|_h\d+cudnn|flash|fmha|warpgroup",
)
# NVIDIA's first devices with tensor cores, and the first with bfloat16 and TF32 in them.
VOLTA: Final = (7, 0)
AMPERE: Final = (8, 0)
# Its GTX 16 has the capability, 7.5, and no tensor cores; other vendors number their devices differently.
WITHOUT_TENSOR_CORES: Final = re.compile(r"GTX 16\d\d|AMD|Radeon|Instinct|\bgfx")
# Kernels of half precision.
HALF: Final = re.compile(r"bf16|bfloat16|__half|f16f16|hgemm|_h\d+cudnn|nvjet_\w+?_[th]s[th]_")


def products_in_32_bits(trace: TraceReport, ledger: TimeLedger) -> InTrace | None:
    """Return the computation in 32-bit matrix multiplications on a device that has tensor cores."""
    kernels = computing(trace)
    ordinary = sorted((each for each in kernels if _is_ordinary(each.name)), key=lambda each: -each.total_ns)
    # The lowest of the devices.
    capability = min((found for found in trace.capabilities if any(found)), default=(0, 0))
    if not ordinary or capability < VOLTA or any(map(WITHOUT_TENSOR_CORES.search, trace.devices)):
        return None
    tensor = (each for each in kernels if not _is_ordinary(each.name) and TENSOR.search(each.name.lower()))
    tensor_ns, ordinary_ns, compute_ns = total_ns(tensor), total_ns(ordinary), total_ns(kernels)
    attention_ns = total_ns(kernel for kernel in ordinary if ATTENTION.search(kernel.name.lower()))
    is_attention = attention_ns >= POLICY.most * ordinary_ns
    where = _attention_module(ledger) if is_attention else ""
    # A few kernels of half precision may be the program's own casts.
    half_ns = total_ns(kernel for kernel in kernels if HALF.search(kernel.name.lower()))
    is_mixed = half_ns >= POLICY.verdict * compute_ns
    faster = (do.FLOAT16,) if capability < AMPERE else (do.BFLOAT16, do.SMALLER_WEIGHTS, do.TF32)
    return (computed(trace, ledger, ordinary),), Detail(
        says="32-bit attention takes {share}{inside}{name}{rank}." if is_attention else "",
        fields={"inside": ", in " if where else "", "name": where},
        measured=(
            f"They take {format_ns(ordinary_ns)} of {format_ns(compute_ns)} of kernel time, "
            f"{format_ns(ordinary[0].total_ns)} in {shorter_name(ordinary[0].name)}; "
            f"{format_ns(tensor_ns) if tensor_ns else 'none'} with tensor cores"
        ),
        why="The program uses half precision elsewhere." if is_mixed else "",
        remedies=(do.UNDER_AUTOCAST,) if is_mixed else remedies(trace, *faster),
        # A device that waits would only wait longer.
        is_note=ledger.share(*BUSY) < 1 - POLICY.verdict,
        numbers={
            "tensor_ns": tensor_ns,
            "kernels": [kernel.name for kernel in ordinary[:SHOWN]],
            "devices": list(dict.fromkeys(trace.devices)),
        },
    )


def _attention_module(ledger: TimeLedger) -> str:
    """Return the modules whose attention takes most of the device's time, empty where the trace does not tell."""
    lines = grouped(ledger.of(Part.COMPUTE))
    return next((line.module or "" for line in lines if "efficient_attention" in (line.operator or "")), "")


def _is_ordinary(name: str) -> bool:
    low = name.lower()
    is_half = TENSOR.search(low) or HALF.search(low)
    return bool(ATTENTION.search(low)) or (bool(ORDINARY.search(low)) and not is_half)


SOFTMAX: Final = "aten::_softmax"
PRODUCTS: Final = frozenset({"aten::bmm", "aten::baddbmm"})
# What programs do to the attention matrix, forward and backward; each reads and writes the whole of it.
ON_MATRIX: Final = frozenset(
    f"aten::{name}"
    for name in (
        *("_softmax", "_softmax_backward_data", "native_dropout", "native_dropout_backward", "dropout", "mul", "mul_"),
        *("div", "div_", "add", "add_", "masked_fill", "masked_fill_", "where", "copy_", "_to_copy", "tril", "sub"),
    )
)
# Backward of a scaling has the name of the scaling.
ALSO_BACKWARD: Final = frozenset({"aten::mul", "aten::div"})


def unfused_attention(trace: TraceReport, ledger: TimeLedger) -> InTrace | None:
    """Return what reads and writes the attention matrix between its two products, in operators of its own.

    An operator belongs to it if it runs as often as the softmax, for about as long: half precision beside single, a
    dropout that writes its mask too.
    """
    calls: dict[str, tuple[float, float]] = {}
    for line in ledger.of(Part.COMPUTE):
        count, ns = calls.get(line.operator or "", (0.0, 0.0))
        calls[line.operator or ""] = count + line.count, ns + line.ns
    often, softmax_ns = calls.get(SOFTMAX, (0.0, 0.0))
    products = sum(count for name, (count, _) in calls.items() if name in PRODUCTS)
    if not softmax_ns or products < 2 * often:
        return None
    low, high = softmax_ns / often / POLICY.multiple, softmax_ns / often * POLICY.multiple
    found = {
        name: ns
        for name, (count, ns) in calls.items()
        if name in ON_MATRIX
        and count in ({often, 2 * often} if name in ALSO_BACKWARD else {often})
        and low <= ns / count <= high
    }
    most = sorted(found, key=lambda name: -found[name])
    return tuple(line for line in ledger.of(Part.COMPUTE) if line.operator in found), Detail(
        measured=(
            f"{', '.join(f'{name} takes {format_ns(found[name])}' for name in most[:SHOWN])}; the softmax runs "
            f"{times(round(often * ledger.steps))}, with {round(products * ledger.steps):,} batched products"
        ),
        remedies=remedies(trace, do.FUSED_ATTENTION, do.FUSE_OPERATORS),
        numbers={"operators": most, "count": often},
    )


ROWS: Final = (
    Rule(
        id="tensor_cores_unused",
        about=(
            "Kernels whose names indicate 32-bit multiplication on ordinary cores, or attention with 32-bit inputs, "
            "run on a device with tensor cores: NVIDIA from Volta on. In half precision the same product takes about a "
            "quarter of the time; on data-center GPUs since Ampere, TF32 takes an eighth."
        ),
        when=(
            f"`info` if the device is busy for less than {percent(1 - POLICY.verdict)} of the time: it would only wait "
            "longer. Kernel names are not an API."
        ),
        trade_off="Lower precision of the products.",
        of=(Part.COMPUTE,),
        in_trace=products_in_32_bits,
        says="32-bit matrix multiplications without tensor cores take {share}{rank}.",
        # TF32 takes half of the time of a GeForce, half precision a quarter; of A100 and H100 TF32 takes an eighth.
        saves=(0.5, 0.85),
    ),
    Rule(
        id="unfused_attention",
        about="Softmax, dropout, masks and scaling each read and write the whole attention matrix.",
        when=(
            "An operator counts if it runs as often as aten::_softmax (a scaling also twice, for its backward), and "
            f"takes between a third of its time and {POLICY.multiple} times as long."
        ),
        trade_off="The fused kernels return no attention weights.",
        of=(Part.COMPUTE,),
        in_trace=unfused_attention,
        says="Unfused attention: operators on the attention matrix take {share}{rank}.",
        # The fused kernel's backward computes the matrix again.
        saves=(0.5, 0.9),
    ),
)
