"""Judges a run as on a machine with free cores, which that of the tests is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from lightning_memprof.account.ledger.run import run_ledger
from lightning_memprof.account.parts import Part

if TYPE_CHECKING:
    from lightning_memprof.account.ledger.model import TimeLedger, TimeLine


def with_free_cores(*run: Any) -> TimeLedger | None:
    """Return the ledger of a run without its waits for a core: what other processes take is not the training's.

    For ``monkeypatch.setattr(facts, "run_ledger", with_free_cores)``.
    """
    ledger = run_ledger(*run)
    if ledger is None:
        return None
    of_training = 1 - ledger.share(Part.CORE_WAIT)

    def running(line: TimeLine) -> TimeLine:
        # With cores, calls of what only computes are alike.
        computes = line.part in {Part.COMPILE, Part.GC_PAUSES} and line.count
        return replace(line, longest_ns=round(line.ns / line.count)) if computes else line

    return replace(
        ledger,
        step_ns=ledger.step_ns * of_training,
        median_ns=ledger.median_ns * of_training,
        lines=tuple(running(line) for line in ledger.lines if line.part != Part.CORE_WAIT),
    )
