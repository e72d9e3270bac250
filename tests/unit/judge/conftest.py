"""Every fault of these tests is also one of the property that no finding recovers more than its lines hold."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest

from ledger_lines import out_of_bounds
from lightning_memprof.account.ledger.memory import ByteLedger, snapshot_bytes
from lightning_memprof.account.ledger.model import TimeLedger
from lightning_memprof.account.snapshot.report import SnapshotReport
from lightning_memprof.judge import Facts, Finding, verdict


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check what the rules return where a test examines a run or files."""
    guarded = verdict._guarded

    def checked(rule: Callable[..., Any], *facts: Any, name: str | None = None) -> list[Finding]:
        found = guarded(rule, *facts, name=name)
        if any(each.recovers for each in found):
            assert out_of_bounds(found, *ledgers(facts[0])) == []
        return found

    monkeypatch.setattr(verdict, "_guarded", checked)


def ledgers(facts: Any) -> list[TimeLedger | ByteLedger]:
    if isinstance(facts, Facts):
        return [
            *facts.ledgers.values(),
            *facts.byte_ledgers.values(),
            *facts.resident_ledgers.values(),
            *chain.from_iterable(map(ledgers, (*facts.traces, *facts.steady_traces, *facts.snapshots))),
        ]
    if isinstance(facts, SnapshotReport):
        return [*map(snapshot_bytes, facts.devices)]
    return [ledger for ledger in (facts.host_ledger, facts.device_ledger) if ledger is not None]
