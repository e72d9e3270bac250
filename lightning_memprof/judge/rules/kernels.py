"""Inefficient work: small operators and kernels, kernels without tensor cores, what one fused kernel can do."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, grouped, total
from lightning_memprof.account.parts import BUSY, Part
from lightning_memprof.account.trace.model import HostOperators, Kernel, TraceReport
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    ALL_AT_ONCE,
    CHANNELS_LAST,
    FUSE_KERNELS,
    FUSE_OPERATORS,
    FUSED_ATTENTION,
    LARGER_KERNELS,
    LAUNCH_AT_ONCE,
    LOWER_PRECISION,
    MIXED_PRECISION,
    MORE_WORK,
    MULTIPLES_OF_8,
    TF32,
    UNDER_AUTOCAST,
    VECTORIZE,
    Remedy,
)
from lightning_memprof.judge.rule import PASSES, Detail, Fact, Found, Rule
from lightning_memprof.judge.traces import (
    computed,
    computing,
    device_traces,
    listed,
    remedies,
    scaled,
    seen_in,
    shorter_name,
    times,
    total_ns,
)
from lightning_memprof.units import format_ns, percent

SHOWN: Final = 3
CALLING: Final = (*PASSES, Part.OPTIMIZER, Part.UNTRACKED)

# The for-loop of an optimizer, of gradient clipping or of weight averaging: a few kernels per parameter.
SIMPLE: Final = ("elementwise_kernel", "reduce_kernel", "fill")
FUSED: Final = "multi_tensor_apply"
# Convolutions that need channels-last input and get channels-first: a copy before and after each.
MOVING: Final = ("batched_transpose", "nchwToNhwc", "nhwcToNchw")


def small_kernels(facts: Facts) -> Iterator[Found]:
    """Yield the computation in very short kernels, without the time in which the device waits for their launches."""
    for trace, ledger in device_traces(facts):
        small = [kernel for kernel in computing(trace) if kernel.total_ns < POLICY.short_kernel_ns * kernel.count]
        count, steps = sum(kernel.count for kernel in small), max(len(trace.steps), 1)
        # Kernels from before the steps take time in the recording, and belong to no step of it.
        inside = count - sum(trace.outside.get(kernel.name, 0) for kernel in small)
        if inside <= 0:
            continue
        line = computed(trace, ledger, small)
        most = sorted(small, key=lambda kernel: kernel.count, reverse=True)[:SHOWN]
        number = f"{inside / steps:,.0f} kernels per step" if len(trace.steps) > 1 else f"{count:,} kernels"
        yield (
            Fact(source=trace, ledger=ledger, lines=(line,)),
            Detail(
                fields={"number": number, "short": f"{POLICY.short_kernel_ns / 1000:g} µs"},
                measured=(
                    f"They take {format_ns(total_ns(small) / count)} on average; the most frequent: "
                    f"{listed((kernel.name, round(kernel.count / steps)) for kernel in most)}"
                ),
                remedies=_next_for_kernels(trace, small, count),
                is_note=True,
                numbers={"kernels": count},
                evidence=seen_in(trace),
            ),
        )


def _next_for_kernels(trace: TraceReport, small: list[Kernel], count: int) -> tuple[Remedy, ...]:
    """Return the next steps; many elementwise kernels and no multi-tensor kernel suggest an optimizer loop."""
    simple = sum(kernel.count for kernel in small if any(part in kernel.name for part in SIMPLE))
    moved = sum(kernel.count for kernel in trace.kernels if any(part in kernel.name for part in MOVING))
    layout = (CHANNELS_LAST,) if moved * 10 >= count else ()
    fused = any(FUSED in kernel.name or "fused" in kernel.name.lower() for kernel in trace.kernels)
    optimizer = (ALL_AT_ONCE,) if simple * 2 >= count and not fused else ()
    return remedies(
        trace, *layout, FUSE_KERNELS, LAUNCH_AT_ONCE.filled(mode=', mode="reduce-overhead"'), *optimizer, LARGER_KERNELS
    )


IN_OPTIMIZER: Final = "Optimizer.step#"


def small_operators(facts: Facts) -> Iterator[Found]:
    """Yield the calls of very short operators in steps on a host alone, without the cost of recording them."""
    for trace in facts.steady_traces:
        found, ledger = trace.host_operators, trace.host_ledger
        if found is None or ledger is None:
            continue
        recording_ns = found.events * POLICY.event_ns
        lines = scaled(ledger.of(*CALLING), found.small_ns + found.between_ns - recording_ns)
        if not lines:
            continue
        is_optimizer = bool(found.places) and found.places[0][0].startswith(IN_OPTIMIZER)
        first = (
            (ALL_AT_ONCE, FUSE_OPERATORS)
            if is_optimizer
            else (FUSE_OPERATORS, VECTORIZE.filled(owner="the program"), ALL_AT_ONCE)
        )
        yield (
            Fact(source=trace, ledger=ledger, lines=lines),
            Detail(
                fields={"number": f"{found.operators:,} operators"},
                measured=_measured(found, recording_ns),
                remedies=remedies(trace, *first, MORE_WORK),
                numbers={
                    "operators": found.operators,
                    "median_ns": found.median_ns,
                    "small_ns": found.small_ns,
                    "between_ns": found.between_ns,
                    "recording_ns": recording_ns,
                },
                evidence=seen_in(trace),
            ),
        )


def _measured(found: HostOperators, recording_ns: int) -> str:
    places = f", in {listed(found.places[:SHOWN])}" if found.places else ""
    return (
        f"Short operators (median {format_ns(found.median_ns)}) take {format_ns(found.small_ns)} of a "
        f"{format_ns(found.step_ns)} step and the gaps between them {format_ns(found.between_ns)}, minus about "
        f"{format_ns(recording_ns)} of recording; the most frequent: {listed(found.names[:SHOWN])}{places}"
    )


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
# Kernels of half precision.
HALF: Final = re.compile(r"bf16|bfloat16|f16f16|hgemm|_h\d+cudnn|nvjet_\w+?_[th]s[th]_")


def products_in_32_bits(facts: Facts) -> Iterator[Found]:
    """Yield the computation in 32-bit matrix multiplications on a device that has tensor cores."""
    for trace, ledger in device_traces(facts):
        kernels = computing(trace)
        ordinary = sorted((each for each in kernels if _is_ordinary(each.name)), key=lambda each: -each.total_ns)
        if not ordinary or not _has_tensor_cores(trace, ordinary):
            continue
        tensor = (each for each in kernels if not _is_ordinary(each.name) and TENSOR.search(each.name.lower()))
        tensor_ns, ordinary_ns, compute_ns = total_ns(tensor), total_ns(ordinary), total_ns(kernels)
        attention_ns = total_ns(kernel for kernel in ordinary if ATTENTION.search(kernel.name.lower()))
        is_attention = attention_ns >= POLICY.most * ordinary_ns
        where = _attention_module(ledger) if is_attention else ""
        # A few kernels of half precision may be the program's own casts.
        half_ns = total_ns(kernel for kernel in kernels if HALF.search(kernel.name.lower()))
        is_mixed = half_ns >= POLICY.verdict * compute_ns
        yield (
            Fact(source=trace, ledger=ledger, lines=(computed(trace, ledger, ordinary),)),
            Detail(
                says="32-bit attention takes {share}{inside}{name}{rank}." if is_attention else "",
                fields={"inside": ", in " if where else "", "name": where},
                measured=(
                    f"They take {format_ns(ordinary_ns)} of {format_ns(compute_ns)} of kernel time, "
                    f"{format_ns(ordinary[0].total_ns)} in {shorter_name(ordinary[0].name)}; "
                    f"{format_ns(tensor_ns) if tensor_ns else 'none'} with tensor cores"
                ),
                why="The program uses half precision elsewhere." if is_mixed else "",
                remedies=(UNDER_AUTOCAST,) if is_mixed else _next_for_products(trace, ordinary),
                # A device that waits would only wait longer.
                is_note=ledger.share(*BUSY) < 1 - POLICY.verdict,
                numbers={
                    "tensor_ns": tensor_ns,
                    "kernels": [kernel.name for kernel in ordinary[:SHOWN]],
                    "devices": list(dict.fromkeys(trace.devices)),
                },
                evidence=seen_in(trace),
            ),
        )


def _attention_module(ledger: TimeLedger) -> str:
    """Return the modules whose attention takes most of the device's time, empty where the trace does not tell."""
    lines = grouped(ledger.of(Part.COMPUTE))
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


def _next_for_products(trace: TraceReport, ordinary: list[Kernel]) -> tuple[Remedy, ...]:
    early = _is_early(trace, ordinary)
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


def unfused_attention(facts: Facts) -> Iterator[Found]:
    """Yield what reads and writes the attention matrix between its two products, in operators of its own.

    An operator belongs to it if it runs as often as the softmax, for about as long: half precision beside single, a
    dropout that writes its mask too.
    """
    for trace, ledger in device_traces(facts):
        calls = {
            operator: (sum(line.count for line in lines), total(lines))
            for operator, lines in _by_operator(ledger.of(Part.COMPUTE)).items()
        }
        often, softmax_ns = calls.get(SOFTMAX, (0.0, 0.0))
        products = sum(count for name, (count, _) in calls.items() if name in PRODUCTS)
        if not softmax_ns or products < 2 * often:
            continue
        low, high = softmax_ns / often / POLICY.multiple, softmax_ns / often * POLICY.multiple
        found = {
            name: ns
            for name, (count, ns) in calls.items()
            if name in ON_MATRIX
            and count in ({often, 2 * often} if name in ALSO_BACKWARD else {often})
            and low <= ns / count <= high
        }
        most = sorted(found, key=lambda name: -found[name])
        yield (
            Fact(
                source=trace,
                ledger=ledger,
                lines=tuple(line for line in ledger.of(Part.COMPUTE) if line.operator in found),
            ),
            Detail(
                measured=(
                    f"{', '.join(f'{name} takes {format_ns(found[name])}' for name in most[:SHOWN])}; the softmax runs "
                    f"{times(round(often * ledger.steps))}, with {round(products * ledger.steps):,} batched products"
                ),
                remedies=remedies(trace, FUSED_ATTENTION, FUSE_KERNELS),
                numbers={"operators": most, "count": often},
                evidence=seen_in(trace),
            ),
        )


def _by_operator(lines: Iterable[TimeLine]) -> dict[str, list[TimeLine]]:
    found: dict[str, list[TimeLine]] = defaultdict(list)
    for line in lines:
        found[line.operator or ""].append(line)
    return found


ROWS: Final = (
    Rule(
        id="tensor_cores_unused",
        about=(
            "Kernels whose names indicate 32-bit multiplication on ordinary cores (sgemm, scudnn, simt, cuDNN "
            "engines with float), or attention with 32-bit inputs, run on a device with tensor cores: NVIDIA "
            "from compute capability 7.0 (Volta) on. In half precision the same product takes about a quarter of "
            "the time; on data-center GPUs since Ampere, TF32 takes an eighth."
        ),
        when=(
            f"`info` if the device is busy for less than {percent(1 - POLICY.verdict)} of the time: it would only "
            "wait longer. Kernel names are not an API."
        ),
        trade_off="Lower precision of the products.",
        of=(Part.COMPUTE,),
        find=products_in_32_bits,
        says="32-bit matrix multiplications without tensor cores take {share}{rank}.",
        # TF32 takes half of the time of a GeForce, half precision a quarter; of A100 and H100 TF32 takes an eighth.
        saves=(0.5, 0.85),
    ),
    Rule(
        id="unfused_attention",
        about=(
            "Attention in separate operators: softmax, dropout, masks and scaling between two batched products "
            "read and write the whole attention matrix, which has an entry for each pair of positions. The fused "
            "kernel keeps a block of the matrix on the chip."
        ),
        when=(
            "An operator counts if it runs as often as aten::_softmax (a scaling also twice, for its backward), and "
            f"takes between a third of its time and {POLICY.multiple} times as long."
        ),
        trade_off="The fused kernels return no attention weights.",
        of=(Part.COMPUTE,),
        find=unfused_attention,
        says="Unfused attention: operators on the attention matrix take {share}{rank}.",
        # The fused kernel's backward computes the matrix again.
        saves=(0.5, 0.9),
    ),
    Rule(
        id="many_small_kernels",
        about=(
            f"Kernels that take less than {POLICY.short_kernel_ns / 1000:g} µs on average, by name: each of them "
            "reads and writes memory for little work, and its launch takes the host 3 to 10 µs. A fused kernel "
            "reads and writes once."
        ),
        when="Always `info`: a busy device has little to gain.",
        trade_off="Compile time, once.",
        of=(Part.COMPUTE,),
        find=small_kernels,
        says="{number} shorter than {short} take {share}{rank}.",
        # A fused kernel reads and writes once what four in a row read and write; not all of them can be fused.
        saves=(0.0, 0.75),
    ),
    Rule(
        id="many_small_operators",
        about=(
            "Without a device, the step mostly calls very short operators: torch takes 1 to 10 µs to look up, "
            "check and call an operator, and Python as long to reach it; adding a few numbers takes nanoseconds."
        ),
        when=(
            "Counts ranges shorter than 10 µs inside operators and shorter than 50 µs between them, by the lower "
            f"median of the steps, minus about {POLICY.event_ns / 1000:g} µs for the recording of each event."
        ),
        trade_off="Compile time, once, or code without loops.",
        of=CALLING,
        find=small_operators,
        says="calling {number} takes {share}{rank}.",
        bound="Launch-bound on the host",
        # Compiled C++ calls the operators that are left; arithmetic and what cannot be compiled stay.
        saves=(0.2, 0.8),
        # Until then arithmetic is the larger part of the step: dispatch is 8% of a transformer of four layers on a CPU.
        note=POLICY.bound,
    ),
)
