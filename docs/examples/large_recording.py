"""A finding: the recording takes a lot of disk space."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from lightning_memprof.judge.finding import Evidence, Finding, Severity
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.units import GIB, format_bytes

if TYPE_CHECKING:
    from lightning_memprof.judge.facts import Facts

# Copying a recording to a laptop takes minutes from here on.
NOTABLE_BYTES: Final = 10 * GIB
FEWER_WINDOWS: Final = Remedy(
    id="keep_fewer_windows",
    text="Remove old windows: MemProfilerCallback(budget=Budget(keep_windows=10)).",
)


def large_recording(facts: Facts, notable_bytes: int = NOTABLE_BYTES) -> list[Finding]:
    """Find a recording that takes a lot of disk space, and the collector that wrote the most."""
    by_collector: Counter[str] = Counter()
    for artifact in facts.run.artifacts:
        by_collector[artifact.collector] += artifact.size_bytes or 0
    total = by_collector.total()
    if total < notable_bytes:
        return []
    name, largest = by_collector.most_common(1)[0]
    return [
        Finding(
            rule="large_recording",
            severity=Severity.INFO,
            title=f"The recording takes {format_bytes(total)}, most of them from {name}.",
            why=f"{name} wrote {format_bytes(largest)} in {len(facts.run.artifacts)} files.",
            remedies=(FEWER_WINDOWS,),
            evidence=tuple(
                Evidence(artifact=artifact.path, rank=artifact.rank, window=artifact.window)
                for artifact in facts.run.artifacts
                if artifact.collector == name
            ),
            numbers={"bytes": total, "collector": name, "collector_bytes": largest},
            weight=largest / total,
        )
    ]
