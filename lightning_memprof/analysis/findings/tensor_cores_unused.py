"""Matrix products on the ordinary cores of a GPU that has tensor cores."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Finding, Severity
from lightning_memprof.analysis.findings.trace_parts import on_rank, seen_in, shorter_name
from lightning_memprof.units import format_ns, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.trace.model import Kernel, TraceReport

__all__ = ["tensor_cores_unused"]

# Tensor cores take about a fourth of the time: of a fifth of the whole that leaves a gain of 1.2 times.
NOTABLE_SHARE: Final = 0.20
# How the libraries name kernels that multiply in 32 bits: cuBLAS, cuDNN (of all ages), CUTLASS.
ORDINARY: Final = re.compile(
    r"sgemm|_scudnn_|simt|_engine<float|_convolve_sgemm<float|gemv|winograd\w*<float|f32f32_f32f32_f32|_ffma_",
)
# And those that use tensor cores, by instruction or by type.
TENSOR: Final = re.compile(
    r"tensorop|hmma|imma|wmma|884|1688|16816|tf32|bf16|f16f16|hgemm|fp8|e4m3|_h\d+cudnn|flash|fmha|warpgroup",
)
# The first generation (Volta) and what came after; older ones and other makers' have none, or name them otherwise.
HAS_TENSOR_CORES: Final = re.compile(
    r"\b(V100|T4|TITAN (V|RTX)|Quadro (GV|RTX)|RTX|A\d{1,3}0?G?|L4|L40S?|H\d{2,3}|GH200|B\d{3}|GB\d{3}|PG\d{3})\b",
)
BY_KERNEL: Final = re.compile(r"^(volta|turing|ampere|sm[789]\d|sm1\d\d|cutlass_[789]\d)_")
# They have neither bfloat16 nor TF32.
EARLY: Final = re.compile(r"\b(V100|T4|TITAN (V|RTX)|Quadro (GV|RTX))\b|^volta_|^turing_")


def tensor_cores_unused(trace: TraceReport) -> list[Finding]:
    """Say which part of the computing time goes to 32-bit matrix products, where the device could do them faster."""
    computing = [kernel for kernel in trace.kernels if kernel.kind == "compute"]
    total_ns = sum(kernel.total_ns for kernel in computing)
    ordinary = [kernel for kernel in computing if _is_ordinary(kernel.name)]
    ordinary_ns = sum(kernel.total_ns for kernel in ordinary)
    if not total_ns or ordinary_ns / total_ns <= NOTABLE_SHARE or not _has_tensor_cores(trace, ordinary):
        return []
    share = ordinary_ns / total_ns
    tensor_ns = sum(
        kernel.total_ns for kernel in computing if not _is_ordinary(kernel.name) and TENSOR.search(kernel.name.lower())
    )
    worst = max(ordinary, key=lambda kernel: kernel.total_ns)
    # Later devices run kernels that are named after Volta too: only without the device's name do they tell.
    early = any(EARLY.search(text) for text in _named_devices(trace) or [kernel.name for kernel in ordinary])
    return [
        Finding(
            rule="tensor_cores_unused",
            # Whether a model can be trained in fewer bits is not in a trace.
            severity=Severity.INFO,
            sentence=f"Matrix products in 32 bits take {percent(share)} of the computing time{on_rank(trace)}: the "
            "tensor cores are not used for them.",
            why=(
                f"{format_ns(ordinary_ns)} of {format_ns(total_ns)} in kernels, most in {shorter_name(worst.name)}; "
                f"{format_ns(tensor_ns) if tensor_ns else 'none'} in kernels that use tensor cores."
            ),
            next_steps=_next_steps(early=early),
            evidence=seen_in(trace),
            numbers={
                "share": share,
                "ordinary_ns": ordinary_ns,
                "tensor_ns": tensor_ns,
                "compute_ns": total_ns,
                "kernels": [kernel.name for kernel in sorted(ordinary, key=lambda kernel: -kernel.total_ns)[:3]],
                "devices": list(dict.fromkeys(trace.devices)),
            },
            weight=share,
        )
    ]


def _is_ordinary(name: str) -> bool:
    low = name.lower()
    return bool(ORDINARY.search(low)) and not TENSOR.search(low)


def _has_tensor_cores(trace: TraceReport, ordinary: list[Kernel]) -> bool:
    named = _named_devices(trace)
    if named:
        return any(HAS_TENSOR_CORES.search(device) for device in named)
    return any(BY_KERNEL.search(kernel.name) for kernel in ordinary)


def _named_devices(trace: TraceReport) -> list[str]:
    """Leave out devices of which the trace has the number only."""
    return [device for device in trace.devices if not device.startswith("device ")]


def _next_steps(*, early: bool) -> tuple[str, ...]:
    if early:
        return (
            'Train in mixed precision: Trainer(precision="16-mixed").',
            "Make the sizes of layers and batches multiples of 8.",
        )
    return (
        'Train in mixed precision: Trainer(precision="bf16-mixed").',
        'Or keep 32 bits and multiply in TF32: torch.set_float32_matmul_precision("high").',
        "Make the sizes of layers and batches multiples of 8.",
    )
