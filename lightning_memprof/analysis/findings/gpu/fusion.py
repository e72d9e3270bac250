"""Work of several kernels that one fused kernel does: attention, the loop of an optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.compute import FOREACH
from lightning_memprof.analysis.findings.model import Finding, Recovery
from lightning_memprof.analysis.findings.program.lines import FUSED_ATTENTION
from lightning_memprof.analysis.findings.traces import (
    ALL_AT_ONCE,
    NOTABLE_SHARE,
    on_rank,
    remedies,
    remedy,
    seen_in,
    times,
)
from lightning_memprof.units import format_ns, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.trace.model import TraceReport

MOST: Final = 3
COMPILE: Final = remedy("Fuse what is between the products: torch.compile(model).", "eager")
SOFTMAX: Final = "aten::_softmax"
PRODUCTS: Final = frozenset({"aten::bmm", "aten::baddbmm"})
# What programs do to the attention matrix, forward and backward; each reads and writes all of it.
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
        and low <= ns / count <= high
        and count in ({often, 2 * often} if name in ALSO_BACKWARD else {often})
    }
    spent = sum(found.values())
    share = spent / ledger.step_ns
    if share <= NOTABLE_SHARE:
        return None
    worth = Recovery(unit="ns", min=ON_CHIP[0] * spent, max=ON_CHIP[1] * spent, whole=ledger.step_ns)
    span = "each step" if trace.steps else "the recorded time"
    most = sorted(found, key=lambda name: -found[name])
    return Finding(
        rule="unfused_attention",
        sentence=(
            f"Unfused attention: softmax and what else runs on the attention matrix take {percent(share)} of {span}"
            f"{on_rank(trace)}."
        ),
        why=(
            f"{', '.join(f'{name} takes {format_ns(found[name])}' for name in most[:MOST])}; the softmax runs "
            f"{times(round(often * ledger.steps))}, beside {round(products * ledger.steps):,} batched products."
        ),
        next_steps=remedies(trace, FUSED_ATTENTION, COMPILE),
        evidence=seen_in(trace),
        numbers={"share": share, "ns": spent, "operators": most, "count": often, "steps": ledger.steps},
        **worth.parts,
    )


# A kernel of all parameters reads and writes each state once, and of many small parameters it saves the launches.
IN_ONE_KERNEL: Final = (0.4, 0.9)


def optimizer_loop(trace: TraceReport) -> Finding | None:
    """Find an optimizer whose kernels update the parameters one by one.

    Recovers 40% to 90% of the time of its kernels.
    """
    ledger, window, program = trace.device_ledger, trace.gpu_window, trace.program
    if ledger is None or window is None or not window.compute_ns or program.loop_optimizer not in FOREACH:
        return None
    spent = ledger.ns("compute") * min(program.loop_ns / window.compute_ns, 1.0)
    share = spent / ledger.step_ns
    if share <= NOTABLE_SHARE:
        return None
    worth = Recovery(unit="ns", min=IN_ONE_KERNEL[0] * spent, max=IN_ONE_KERNEL[1] * spent, whole=ledger.step_ns)
    return Finding(
        rule="optimizer_loop",
        sentence=(
            f"Optimizer-bound: kernels of {program.loop_optimizer}, which updates its parameters one by one, take "
            f"{percent(share)} of {'each step' if trace.steps else 'the recorded time'}{on_rank(trace)}."
        ),
        why=f"They take {format_ns(spent)} of {format_ns(ledger.step_ns)}; none of them updates several parameters.",
        next_steps=remedies(trace, ALL_AT_ONCE),
        evidence=seen_in(trace),
        numbers={"share": share, "ns": spent, "optimizer": program.loop_optimizer},
        **worth.parts,
    )
