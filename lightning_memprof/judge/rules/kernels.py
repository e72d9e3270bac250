"""Inefficient work: small operators and kernels, kernels without tensor cores, what one fused kernel can do."""

from __future__ import annotations

import re
from typing import Final

from lightning_memprof.account.ledger.model import grouped
from lightning_memprof.judge.finding import Finding, Recovery, Severity, titled
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    ALL_AT_ONCE,
    COMBINE_OPERATORS,
    CONVOLUTION_LAYOUT,
    FUSE_KERNELS,
    FUSED_ATTENTION,
    LARGER_KERNELS,
    LARGER_OPERATORS,
    LAUNCH_AS_GRAPHS,
    LOWER_PRECISION,
    MIXED_PRECISION,
    MULTIPLES_OF_8,
    TF32,
    UNDER_AUTOCAST,
    WITHOUT_LOOPS,
    Remedy,
)
from lightning_memprof.judge.traces import (
    computing,
    listed,
    on_rank,
    recovered_ns,
    remedies,
    seen_in,
    share_of_time,
    shorter_name,
    span,
    times,
    total_ns,
)
from lightning_memprof.read.trace.model import HostOperators, Kernel, TraceReport
from lightning_memprof.units import format_ns, percent

SHOWN: Final = 3

# A launch takes 3 to 10 µs on the host: with kernels this short, the device waits as soon as the host is late.
SHORT_NS: Final = 10_000
# Above this share of computing time in short kernels, fusing them is worth the compilation time.
NOTABLE_SMALL: Final = 0.25
# With fewer kernels per step there is little to fuse.
MANY_KERNELS: Final = 300
# The for-loop of an optimizer, of gradient clipping or of weight averaging: a few kernels per parameter.
SIMPLE: Final = ("elementwise_kernel", "reduce_kernel", "fill")
FUSED: Final = "multi_tensor_apply"
# Convolutions that need channels-last input and get channels-first: a copy before and after each.
MOVING: Final = ("batched_transpose", "nchwToNhwc", "nhwcToNchw")
# A fused kernel reads and writes once what four in a row read and write; not all of them can be fused.
FUSED_TIME: Final = (0.0, 0.75)


def many_small_kernels(trace: TraceReport) -> Finding | None:
    """Find computing time in very short kernels, and the most frequent ones.

    Recovers nothing to three quarters of their time. Lost: the time of compilation, once.
    """
    kernels = [kernel for kernel in computing(trace) if kernel.count]
    small = [kernel for kernel in kernels if kernel.total_ns <= SHORT_NS * kernel.count]
    compute_ns, small_ns, count = total_ns(kernels), total_ns(small), sum(kernel.count for kernel in small)
    steps = max(len(trace.steps), 1)
    # Kernels from before the steps take time in the recording, and belong to no step of it.
    inside = count - sum(trace.outside.get(kernel.name, 0) for kernel in small)
    share = share_of_time(trace, small_ns)
    if share < POLICY.note or small_ns <= NOTABLE_SMALL * compute_ns or inside < MANY_KERNELS * steps:
        return None
    most = sorted(small, key=lambda kernel: kernel.count, reverse=True)[:SHOWN]
    simple = sum(kernel.count for kernel in small if any(part in kernel.name for part in SIMPLE))
    number = f"{inside / steps:,.0f} kernels per step" if len(trace.steps) > 1 else f"{count:,} kernels"
    return Finding(
        rule="many_small_kernels",
        # If the device waits for them, gpu_idle reports it; on a busy device there is less to gain.
        severity=Severity.INFO,
        title=f"{number}{on_rank(trace)} below {format_ns(SHORT_NS)} take {percent(share)} of {span(trace)}.",
        why=(
            f"They take {format_ns(small_ns / count)} on average; the most frequent: "
            f"{listed((kernel.name, round(kernel.count / steps)) for kernel in most)}."
        ),
        remedies=_next_for_kernels(trace, simple, count),
        evidence=seen_in(trace),
        numbers={
            "share": share,
            "kernels": count,
            "steps": len(trace.steps),
            "small_ns": small_ns,
            "compute_ns": compute_ns,
            "elementwise": simple,
            "most_frequent": [kernel.name for kernel in most],
        },
        weight=share,
        recovers=recovered_ns(trace.device_ledger, FUSED_TIME, "compute", recorded_ns=small_ns * inside / count),
    )


def _next_for_kernels(trace: TraceReport, simple: int, count: int) -> tuple[Remedy, ...]:
    """Return the next steps; many elementwise kernels and no multi-tensor kernel suggest an optimizer loop."""
    moved = sum(kernel.count for kernel in trace.kernels if any(part in kernel.name for part in MOVING))
    layout = (CONVOLUTION_LAYOUT,) if moved * 10 >= count else ()
    fused = any(FUSED in kernel.name or "fused" in kernel.name.lower() for kernel in trace.kernels)
    optimizer = (ALL_AT_ONCE,) if simple * 2 >= count and not fused else ()
    return remedies(trace, *layout, FUSE_KERNELS, LAUNCH_AS_GRAPHS, *optimizer, LARGER_KERNELS)


# A small model's healthy step calls 100 to 300 operators; a thousand at 3 µs or more each justify a change of code.
MANY_OPERATORS: Final = 1_000
# From half on, arithmetic is the smaller part of the step; a transformer of four layers on a CPU has 8%.
NOTABLE_CALLING: Final = 0.50
# Cost of torch's profiler per operator on the host: 1.5 µs, measured on a CPU with 10,000 per step.
EVENT_NS: Final = 1_500
# Compiled C++ calls the operators that are left; arithmetic and what cannot be compiled stay.
CALLED_LESS: Final = (0.2, 0.8)
IN_OPTIMIZER: Final = "Optimizer.step#"


def many_small_operators(trace: TraceReport) -> Finding | None:
    """Find a step on the host that mostly calls very short operators, and the most frequent ones.

    Recovers 20% to 80% of the time in calls, without the cost of recording them.
    """
    found = trace.host_operators
    if found is None or found.operators < MANY_OPERATORS:
        return None
    recording_ns = found.events * EVENT_NS
    step_ns, calling_ns = found.step_ns - recording_ns, found.small_ns + found.between_ns - recording_ns
    share = calling_ns / step_ns if step_ns > 0 else 0.0
    if share <= NOTABLE_CALLING:
        return None
    is_optimizer = bool(found.places) and found.places[0][0].startswith(IN_OPTIMIZER)
    return Finding(
        rule="many_small_operators",
        # A compiler saves much of it and a rewritten loop nearly all, but not every loop can be rewritten.
        severity=Severity.WARNING,
        title=(
            f"Launch-bound on the host: calling {found.operators:,} operators takes {percent(share)} of each step"
            f"{on_rank(trace)}."
        ),
        why=_why_operators(found, recording_ns),
        remedies=remedies(
            trace,
            *((ALL_AT_ONCE, COMBINE_OPERATORS) if is_optimizer else (COMBINE_OPERATORS, WITHOUT_LOOPS, ALL_AT_ONCE)),
            LARGER_OPERATORS,
        ),
        evidence=seen_in(trace),
        numbers={
            "share": share,
            "operators": found.operators,
            "median_ns": found.median_ns,
            "small_ns": found.small_ns,
            "between_ns": found.between_ns,
            "step_ns": found.step_ns,
            "recording_ns": recording_ns,
            "steps": found.steps,
            "most_frequent": [name for name, _ in found.names],
            "most_in": [name for name, _ in found.places],
        },
        weight=share,
        recovers=recovered_ns(
            trace.host_ledger,
            CALLED_LESS,
            *("forward", "backward", "optimizer", "untracked"),
            recorded_ns=calling_ns * (trace.host_ledger.steps if trace.host_ledger else 1),
        ),
    )


def _why_operators(found: HostOperators, recording_ns: int) -> str:
    places = f", in {listed(found.places[:SHOWN])}" if found.places else ""
    return (
        f"Short operators (median {format_ns(found.median_ns)}) take {format_ns(found.small_ns)} of a "
        f"{format_ns(found.step_ns)} step and the gaps between them {format_ns(found.between_ns)}, minus about "
        f"{format_ns(recording_ns)} of recording; the most frequent: {listed(found.names[:SHOWN])}{places}."
    )


# TF32 on them takes half of the time of a GeForce at most, half precision a quarter; data sheets of A100 and H100 give
# an eighth for TF32.
ON_TENSOR_CORES: Final = (0.5, 0.85)
# A device that is busy for this share decides how long a step takes.
BUSY: Final = 0.9
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
# For traces without compute capabilities.
HAS_TENSOR_CORES: Final = re.compile(
    r"\b(V100|T4|TITAN (V|RTX)|Quadro (GV|RTX)|RTX|A\d{1,3}0?G?|L4|L40S?|H\d{2,3}|GH200|B\d{3}|GB\d{3}|PG\d{3})\b",
)
BY_KERNEL: Final = re.compile(r"^(volta|turing|ampere|sm[789]\d|sm1\d\d|cutlass_[789]\d)_")
# They have neither bfloat16 nor TF32.
EARLY: Final = re.compile(r"\b(V100|T4|TITAN (V|RTX)|Quadro (GV|RTX))\b|^volta_|^turing_")
# Kernels of half precision: a few may be the program's own casts.
SOME_HALF: Final = 0.1
HALF: Final = re.compile(r"bf16|bfloat16|f16f16|hgemm|_h\d+cudnn|nvjet_\w+?_[th]s[th]_")


def tensor_cores_unused(trace: TraceReport) -> Finding | None:
    """Find computing time in 32-bit matrix multiplications on a device that has tensor cores.

    Recovers a half to 85% of their time. Lost: bits of the products.
    """
    kernels = computing(trace)
    compute_ns = total_ns(kernels)
    ordinary = [kernel for kernel in kernels if _is_ordinary(kernel.name)]
    ordinary_ns = total_ns(ordinary)
    share = share_of_time(trace, ordinary_ns)
    if share < POLICY.note or not _has_tensor_cores(trace, ordinary):
        return None
    tensor_ns = total_ns(
        kernel for kernel in kernels if not _is_ordinary(kernel.name) and TENSOR.search(kernel.name.lower())
    )
    ordinary.sort(key=lambda kernel: -kernel.total_ns)
    early = _is_early(trace, ordinary)
    attention_ns = total_ns(kernel for kernel in ordinary if ATTENTION.search(kernel.name.lower()))
    is_attention = 2 * attention_ns >= ordinary_ns
    where = _attention_module(trace) if is_attention else ""
    # Then the program computes in half precision elsewhere.
    half_ns = total_ns(kernel for kernel in kernels if HALF.search(kernel.name.lower()))
    is_mixed = half_ns >= SOME_HALF * compute_ns
    recovers = recovered_ns(trace.device_ledger, ON_TENSOR_CORES, "compute", recorded_ns=ordinary_ns)
    window = trace.gpu_window
    is_busy = window is not None and window.busy_ns >= BUSY * window.window_ns
    return Finding(
        rule="tensor_cores_unused",
        # Not every model can be trained in lower precision; a device that waits would only wait longer.
        severity=min(max(recovers.severity, Severity.INFO), Severity.WARNING)
        if recovers and is_busy
        else Severity.INFO,
        title=titled(
            f"{'32-bit attention takes' if is_attention else '32-bit matrix multiplications without tensor cores take'}"
            f" {percent(share)} of {span(trace)}{', in {name}' if where else ''}{on_rank(trace)}.",
            name=where,
        ),
        why=(
            f"{format_ns(ordinary_ns)} of {format_ns(compute_ns)} in kernels, "
            f"{format_ns(ordinary[0].total_ns)} of it in {shorter_name(ordinary[0].name)}; "
            f"{format_ns(tensor_ns) if tensor_ns else 'none'} with tensor cores."
            f"{' The program uses half precision elsewhere.' if is_mixed else ''}"
        ),
        remedies=(UNDER_AUTOCAST,) if is_mixed else _next_for_products(trace, early=early),
        evidence=seen_in(trace),
        numbers={
            "share": share,
            "ordinary_ns": ordinary_ns,
            "tensor_ns": tensor_ns,
            "compute_ns": compute_ns,
            "kernels": [kernel.name for kernel in ordinary[:SHOWN]],
            "devices": list(dict.fromkeys(trace.devices)),
        },
        weight=share,
        recovers=recovers,
    )


def _attention_module(trace: TraceReport) -> str:
    """Return the modules whose attention takes most of the device's time, empty where the trace does not tell."""
    lines = grouped(trace.device_ledger.of("compute")) if trace.device_ledger is not None else []
    return next((line.module or "" for line in lines if "efficient_attention" in (line.operator or "")), "")


def _is_ordinary(name: str) -> bool:
    low = name.lower()
    return bool(ATTENTION.search(low)) or (bool(ORDINARY.search(low)) and not TENSOR.search(low))


def _has_tensor_cores(trace: TraceReport, ordinary: list[Kernel]) -> bool:
    if capability := _capability(trace):
        return capability >= VOLTA and not any(map(WITHOUT_TENSOR_CORES.search, trace.devices))
    named = _named_devices(trace)
    if named:
        return any(HAS_TENSOR_CORES.search(device) for device in named)
    return any(BY_KERNEL.search(kernel.name) for kernel in ordinary)


def _is_early(trace: TraceReport, ordinary: list[Kernel]) -> bool:
    """Return whether tensor cores have neither bfloat16 nor TF32."""
    if capability := _capability(trace):
        return capability < AMPERE
    # Later devices run kernels with Volta in their name too: the names count only if the device is unknown.
    return any(EARLY.search(text) for text in _named_devices(trace) or [kernel.name for kernel in ordinary])


def _capability(trace: TraceReport) -> tuple[int, int] | None:
    """Return the lowest compute capability of the devices, None if none is known."""
    return min((capability for capability in trace.capabilities if any(capability)), default=None)


def _named_devices(trace: TraceReport) -> list[str]:
    """Return the devices whose name the trace has, not only their number."""
    return [device for device in trace.devices if not device.startswith("device ")]


def _next_for_products(trace: TraceReport, *, early: bool) -> tuple[Remedy, ...]:
    precision, dtype = ("16", "float16") if early else ("bf16", "bfloat16")
    scaler = " with torch.amp.GradScaler()" if early else ""
    return remedies(
        trace,
        MIXED_PRECISION.filled(precision=f"{precision}-mixed", dtype=dtype, scaler=scaler),
        LOWER_PRECISION.filled(precision=f"{precision}-true", dtype=dtype),
        *(() if early else (TF32,)),
        MULTIPLES_OF_8,
    )


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
# Of the softmax's time: half precision beside single, a dropout that writes its mask too.
SAME_MATRIX: Final = (0.3, 3.0)
# The fused kernel keeps the matrix on the chip; its backward computes it again.
ON_CHIP: Final = (0.5, 0.9)


def unfused_attention(trace: TraceReport) -> Finding | None:
    """Find attention of separate operators: what reads and writes the attention matrix between its two products.

    An operator belongs to it if it runs as often as the softmax, for about as long. Recovers a half to 90% of their
    time.
    """
    ledger = trace.device_ledger
    calls: dict[str, tuple[float, float]] = {}
    for line in ledger.of("compute") if ledger is not None else ():
        count, ns = calls.get(line.operator or "", (0.0, 0.0))
        calls[line.operator or ""] = (count + line.count, ns + line.ns)
    often, softmax_ns = calls.get(SOFTMAX, (0.0, 0.0))
    products = sum(count for name, (count, _) in calls.items() if name in PRODUCTS)
    if ledger is None or not softmax_ns or products < 2 * often:
        return None
    low, high = (part * softmax_ns / often for part in SAME_MATRIX)
    found = {
        name: ns
        for name, (count, ns) in calls.items()
        if name in ON_MATRIX
        and count in ({often, 2 * often} if name in ALSO_BACKWARD else {often})
        and low <= ns / count <= high
    }
    spent = sum(found.values())
    share = spent / ledger.step_ns
    worth = Recovery(unit="ns", min=ON_CHIP[0] * spent, max=ON_CHIP[1] * spent, whole=ledger.step_ns)
    if worth.share < POLICY.note:
        return None
    most = sorted(found, key=lambda name: -found[name])
    return Finding(
        rule="unfused_attention",
        title=(
            f"Unfused attention: operators on the attention matrix take {percent(share)} of {span(trace)}"
            f"{on_rank(trace)}."
        ),
        why=(
            f"{', '.join(f'{name} takes {format_ns(found[name])}' for name in most[:SHOWN])}; the softmax runs "
            f"{times(round(often * ledger.steps))}, with {round(products * ledger.steps):,} batched products."
        ),
        remedies=remedies(trace, FUSED_ATTENTION, FUSE_KERNELS),
        evidence=seen_in(trace),
        numbers={"share": share, "ns": spent, "operators": most, "count": often, "steps": ledger.steps},
        **worth.parts,
    )
