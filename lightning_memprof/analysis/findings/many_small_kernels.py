"""Work that is cut into kernels so short that starting them costs as much as running them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.model import Finding, Severity
from lightning_memprof.analysis.findings.trace_parts import on_rank, seen_in, shorter_name
from lightning_memprof.units import format_ns, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.trace.model import TraceReport

__all__ = ["many_small_kernels"]

# A launch takes 3 to 10 us of the host: a device that runs kernels this short waits as soon as the host does.
SHORT_NS: Final = 10_000
# The part of all computing in short kernels from which fusing them is worth the compiler's time.
NOTABLE_SHARE: Final = 0.25
# With fewer of them a step there is little to fuse.
MANY: Final = 300
SHOWN: Final = 3
# The for-loop of an optimizer, and of what clips gradients or averages weights: a few kernels for each parameter.
SIMPLE: Final = ("elementwise_kernel", "reduce_kernel", "fill")
FUSED: Final = "multi_tensor_apply"
COMPILE: Final = 'Fuse them: torch.compile(model), or torch.compile(model, mode="reduce-overhead") with CUDA graphs.'
OPTIMIZER: Final = "Update all parameters at once: torch.optim.AdamW(..., fused=True), or foreach=True."
# Convolutions that want their channels last, and get them first: a copy before and after each.
MOVING: Final = ("batched_transpose", "nchwToNhwc", "nhwcToNchw")
LAYOUT: Final = "Keep the channels last, as the convolutions want them: model.to(memory_format=torch.channels_last)."
LARGER: Final = "Give each kernel more to do: a larger batch, fused layers (scaled_dot_product_attention, fused norms)."


def many_small_kernels(trace: TraceReport) -> list[Finding]:
    """Say how much of the computing is done in very short kernels, and which ones."""
    computing = [kernel for kernel in trace.kernels if kernel.kind == "compute" and kernel.count]
    total_ns = sum(kernel.total_ns for kernel in computing)
    small = [kernel for kernel in computing if kernel.total_ns <= SHORT_NS * kernel.count]
    small_ns, count = sum(kernel.total_ns for kernel in small), sum(kernel.count for kernel in small)
    steps = max(len(trace.steps), 1)
    if not total_ns or small_ns / total_ns <= NOTABLE_SHARE or count < MANY * steps:
        return []
    share = small_ns / total_ns
    most = sorted(small, key=lambda kernel: kernel.count, reverse=True)[:SHOWN]
    simple = sum(kernel.count for kernel in small if any(part in kernel.name for part in SIMPLE))
    per_step = f"{count / steps:,.0f} kernels a step" if len(trace.steps) > 1 else f"{count:,} kernels"
    return [
        Finding(
            rule="many_small_kernels",
            # Where the device waits for them, another rule says so; a busy device gains something, not everything.
            severity=Severity.INFO,
            sentence=(
                f"{per_step}{on_rank(trace)} take less than {format_ns(SHORT_NS)} each, and {percent(share)} of the "
                "computing time together."
            ),
            why=(
                f"{format_ns(small_ns / count)} each on average; the most frequent are "
                + ", ".join(f"{shorter_name(kernel.name)} ({kernel.count:,})" for kernel in most)
                + "."
            ),
            next_steps=_next_steps(trace, simple, count),
            evidence=seen_in(trace),
            numbers={
                "share": share,
                "kernels": count,
                "steps": len(trace.steps),
                "small_ns": small_ns,
                "compute_ns": total_ns,
                "elementwise": simple,
                "most_frequent": [kernel.name for kernel in most],
            },
            weight=share,
        )
    ]


def _next_steps(trace: TraceReport, simple: int, count: int) -> tuple[str, ...]:
    """Most of them elementwise, and none for many tensors at once: then the optimizer may be a loop too."""
    moved = sum(kernel.count for kernel in trace.kernels if any(part in kernel.name for part in MOVING))
    layout = (LAYOUT,) if moved * 10 >= count else ()
    fused = any(FUSED in kernel.name or "fused" in kernel.name.lower() for kernel in trace.kernels)
    optimizer = (OPTIMIZER,) if simple * 2 >= count and not fused else ()
    return (*layout, COMPILE, *optimizer, LARGER)
