"""Which lines of a ledger the worth of each finding comes from: none recovers more than they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.account.ledger.model import TimeLedger
from lightning_memprof.judge.verdict import ROWS

if TYPE_CHECKING:
    from lightning_memprof.account.ledger.memory import ByteLedger
    from lightning_memprof.judge import Finding


PASSES: Final = ("forward", "backward")
WORK: Final = (*PASSES, "optimizer")
AWAKE: Final = (
    *WORK, "callback", "module_hook", "forward_hook", "backward_hook", "self_log", "metric", "logging", "transfer",
    "data_wait", "untracked",
)  # fmt: skip
# Parts of a time ledger, or categories of a byte ledger.
LINES: Final[Mapping[str, tuple[str, ...]]] = {
    **{row.id: row.of for rows in ROWS.values() for row in rows},
    "optimizer_bound": ("optimizer", "compute"),
    "straggler": ("rank_wait",),
}


def held(rule: str, ledger: TimeLedger | ByteLedger) -> float:
    """Return what the lines of a rule hold."""
    if LINES[rule] == ("rank_wait",) and isinstance(ledger, TimeLedger):
        return ledger.communicates("rank_wait")
    of: Any = [line for line in ledger.lines if getattr(line, "part", getattr(line, "category", "")) in LINES[rule]]
    return sum(getattr(line, "ns", getattr(line, "bytes", 0)) for line in of)


def out_of_bounds(findings: Iterable[Finding], *ledgers: TimeLedger | ByteLedger | None) -> list[str]:
    """Return the findings that recover more than the lines of each ledger of their whole hold, or less than nothing."""
    found = []
    for finding in findings:
        if (worth := finding.recovers) is None:
            continue
        if finding.rule not in LINES:
            found.append(f"{finding.rule}: add what it recovers from to LINES in tests/support/ledger_lines.py")
            continue
        wholes = ("step_ns",) if worth.unit == "ns" else ("peak_bytes",)
        of = [
            ledger
            for ledger in ledgers
            if ledger is not None and worth.whole in {getattr(ledger, whole, None) for whole in wholes}
        ]
        most = max((held(finding.rule, ledger) for ledger in of), default=-1.0)
        if not 0 <= worth.min <= worth.max <= most * (1 + 1e-9):
            found.append(f"{finding.rule}: {worth.min} to {worth.max} of {most} in {worth.whole}")
    return found
