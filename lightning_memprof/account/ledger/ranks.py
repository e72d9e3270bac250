"""Collectives of several ranks: each rank waits until the last one arrives, then they transfer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from lightning_memprof.account.ledger.model import TimeLedger, TimeLine
from lightning_memprof.account.parts import Part
from lightning_memprof.account.ranks.arrivals import WindowWaits, trace_track, window_waits
from lightning_memprof.account.ranks.lateness import meeting_ns
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.read.run.model import Rank
from lightning_memprof.read.trace.communication import Collective
from lightning_memprof.read.trace.intervals import Intervals, difference, intersection, length_within, union


def log_waits(
    ranks: Sequence[Rank], recorded: Mapping[int | None, TimeLedger | None], *, has_straggler: bool
) -> dict[int, float]:
    """Return how long each rank waits for others in ``self.log`` in the mean step; empty where no trace shows it.

    Its own work there, which a trace tells from collectives, is the same on all ranks. Of several collectives in a step
    the first one ends the lead of a rank: without a straggler, the waits in the others are the cost of logging.
    """
    spent = {rank.rank: meeting_ns(rank)[Part.SELF_LOG] for rank in ranks}
    own = [
        spent[rank] * ledger.ns(Part.SELF_LOG) / ledger.ns(Part.SELF_LOG, Part.RANK_WAIT)
        for rank, ledger in recorded.items()
        if rank in spent and ledger is not None and ledger.ns(Part.RANK_WAIT)
    ]
    met = max((sum(line.count for line in each.of("rank_wait")) for each in recorded.values() if each), default=0.0)
    meetings = 1.0 if has_straggler else max(met, 1.0)
    return {rank: max(ns - min(own), 0.0) / meetings for rank, ns in spent.items()} if own else {}


def meeting_ranks(traces: Sequence[TraceReport]) -> Iterator[tuple[dict[int, TraceReport], WindowWaits]]:
    """Yield traces of several ranks and the same steps, by rank, with the waiting in their collectives."""
    groups: dict[tuple[int, ...], dict[int, TraceReport]] = defaultdict(dict)
    for trace in traces:
        if trace.rank is not None and trace.arrivals:
            groups[tuple(step.number for step in trace.steps)].setdefault(trace.rank, trace)
    for steps, ranks in groups.items():
        if len(ranks) > 1:
            tracks = [trace_track(rank, ranks[rank].arrivals) for rank in sorted(ranks)]
            yield ranks, window_waits(tracks, len(steps) or 1)


def across_ranks(traces: Sequence[TraceReport]) -> tuple[TraceReport, ...]:
    """Return traces in their order; where their ranks meet, the wait for the last one is a line of communication."""
    found: dict[int, TraceReport] = {}
    for ranks, waits in meeting_ranks(traces):
        for rank, trace in ranks.items():
            found[id(trace)] = with_waits(trace, waits.of(trace_track(rank, trace.arrivals)))
    return tuple(found.get(id(trace), trace) for trace in traces)


def with_waits(trace: TraceReport, waits_ns: Mapping[int, int]) -> TraceReport:
    """Return a trace whose ledgers divide their communication into ``rank_wait`` and the transfer itself.

    Args:
        trace: of one rank.
        waits_ns: the wait in each collective by its start (Unix ns); the others are transfers.
    """
    on_host = [call for call in trace.arrivals if call.device == "host"]
    on_device = [call for call in trace.arrivals if call.device != "host"]
    return replace(
        trace,
        host_ledger=_divided(trace.host_ledger, on_host, waits_ns),
        device_ledger=_divided(trace.device_ledger, on_device, waits_ns),
    )


def _divided(ledger: TimeLedger | None, calls: Sequence[Collective], waits_ns: Mapping[int, int]) -> TimeLedger | None:
    """Return a ledger with each line of communication in two; while another collective transfers, none waits."""
    if ledger is None or not ledger.exposed or not calls:
        return ledger
    starts, ends = (np.array([getattr(call, name) for call in calls], np.int64) for name in ("start_ns", "end_ns"))
    ready = starts + np.array([waits_ns.get(call.start_ns, 0) for call in calls], np.int64)
    exposed = Intervals(*np.array(ledger.exposed, np.int64).T)
    waiting = difference(intersection(exposed, union(starts, ready)), union(ready, ends))
    reached = np.maximum.accumulate(np.append(starts[0], ends[:-1]))
    own = length_within(waiting, np.maximum(starts, reached), np.maximum(ends, reached))
    waited: Counter[str] = Counter()
    for call, ns in zip(calls, own.tolist(), strict=True):
        waited[call.name] += ns
    divided: list[TimeLine] = []
    for line in ledger.communication:
        ns = min(waited[line.name] / ledger.steps, line.ns)
        divided += [replace(line, part=Part.RANK_WAIT, ns=ns), replace(line, ns=line.ns - ns)]
    kept = sorted((line for line in divided if line.ns), key=lambda line: -line.ns)
    return replace(ledger, communication=tuple(kept))
