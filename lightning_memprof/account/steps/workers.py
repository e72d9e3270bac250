"""The DataLoader workers of a rank: memory, the parts of their time, and how many of them remove the wait for data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from lightning_memprof.artifacts.series import LoaderCallRow, LoaderQueueRow, ProcessRow
from lightning_memprof.read.run.model import Rank

# Fewer batches do not represent a worker.
MIN_BATCHES: Final = 4
# Fewer looks at the fetches of all workers show no usual place.
MIN_LOOKS: Final = 20


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker: memory at its last sample, and means over its life; None is not available.

    The shares are of the time between its first and its last sample; ``blocked_share`` is neither on a core, nor ready
    for one, nor without work: a wait for disk, network, a lock or sleep. The times are per batch.
    """

    pid: int
    number: int | None
    dataset: str | None
    pss_bytes: int | None
    private_bytes: int | None
    shared_bytes: int | None
    added_bytes: int | None
    batches: int | None
    fetch_ns: float | None
    collate_ns: float | None
    cpu_share: float | None
    core_wait_share: float | None
    io_share: float | None
    queue_share: float | None
    read_bytes: int | None
    exit_code: int | None

    @property
    def blocked_share(self) -> float | None:
        """The share of waits inside the data set."""
        known = (self.cpu_share, self.core_wait_share, self.queue_share)
        if any(part is None for part in known):
            return None
        return max(0.0, 1 - sum(part or 0.0 for part in known))


def workers(rank: Rank) -> list[Worker]:
    """Return the workers of a rank in the order of their process ids."""
    found: dict[int, list[ProcessRow]] = {}
    for row in rank.read(ProcessRow).rows:
        if row.kind == "worker" and row.pid is not None:
            found.setdefault(row.pid, []).append(row)
    return [_worker(pid, rows) for pid, rows in sorted(found.items())]


def _worker(pid: int, rows: Sequence[ProcessRow]) -> Worker:
    first, last = rows[0], rows[-1]
    sampled = next((row for row in reversed(rows) if row.pss_bytes is not None), last)
    elapsed = (last.time_ns or 0) - (first.time_ns or 0)

    def share(column: str) -> float | None:
        before, after = getattr(first, column), getattr(last, column)
        if before is None or after is None or elapsed <= 0:
            return None
        return float(min(max((after - before) / elapsed, 0.0), 1.0 if column != "cpu_ns" else math.inf))

    own = [row.private_bytes for row in rows if row.private_bytes is not None]
    return Worker(
        pid=pid,
        number=last.worker,
        dataset=last.dataset,
        pss_bytes=sampled.pss_bytes,
        private_bytes=sampled.private_bytes,
        shared_bytes=sampled.shared_bytes,
        added_bytes=own[-1] - own[0] if len(own) > 1 else None,
        batches=last.batches,
        fetch_ns=_mean(last.fetch_ns, last.batches),
        collate_ns=_mean(last.collate_ns, last.batches),
        cpu_share=share("cpu_ns"),
        core_wait_share=share("core_wait_ns"),
        io_share=share("io_wait_ns"),
        queue_share=share("queue_wait_ns"),
        read_bytes=last.read_bytes,
        exit_code=last.exit_code,
    )


def _mean(total: int | None, number: int | None) -> float | None:
    return total / number if total is not None and number else None


def private_memory(rank: Rank) -> list[int]:
    """Return the private memory of all workers in each sample."""
    rows = rank.read(ProcessRow).rows
    return [row.private_bytes for row in rows if row.kind == "workers" and row.private_bytes is not None]


class Call(msgspec.Struct, frozen=True):
    """A function inside the fetches of a data set: means per batch; the shares sum to 1. ``count`` may be unknown."""

    dataset: str | None
    function: str
    count: float | None
    self_ns: float
    total_ns: float
    share: float


def calls(rank: Rank) -> list[Call]:
    """Return the functions inside fetches of all workers, those with the most self time first."""
    sums: dict[str | None, dict[str | None, list[float]]] = {}
    for row in (*rank.in_windows(LoaderCallRow), *_seen(rank)):
        times = sums.setdefault(row.dataset, {}).setdefault(row.function, [0, 0, 0])
        times[:] = times[0] + (row.count or 0), times[1] + (row.self_ns or 0), times[2] + (row.total_ns or 0)
    found = []
    for dataset, functions in sums.items():
        batches, _, fetch_ns = functions.pop(None, [0, 0, 0])
        for name, (count, own_ns, total_ns) in functions.items() if batches and fetch_ns else ():
            means = count / batches or None, own_ns / batches, total_ns / batches
            found.append(Call(dataset, name or "", *means, own_ns / fetch_ns))
    return sorted(found, key=lambda call: -call.self_ns)


def _seen(rank: Rank) -> Iterator[LoaderCallRow]:
    """Yield what the looks at fetches saw, for all fetches of each worker."""
    last = {row.pid: row for row in rank.read(ProcessRow).rows if row.functions}
    if sum(row.looks or 0 for row in last.values()) < MIN_LOOKS:
        return
    for row in last.values():
        scale = (row.fetch_ns or 0) / sum(own for own, _ in row.functions.values())
        yield LoaderCallRow(dataset=row.dataset, count=row.batches, total_ns=row.fetch_ns)
        for name, (own, total) in row.functions.items():
            times = round(own * scale), round(total * scale)
            yield LoaderCallRow(dataset=row.dataset, function=name, self_ns=times[0], total_ns=times[1])


def pinning_ns(rank: Rank) -> float | None:
    """Return the time in which a batch is copied into pinned memory; None where none was, in recorded windows."""
    rows = rank.in_windows(LoaderQueueRow)
    return _mean(sum(row.pinning_ns or 0 for row in rows), sum(row.pinned or 0 for row in rows))


def ready_batches(rank: Rank) -> list[int]:
    """Return how many batches are ready each time that the loop asks for one, in recorded windows."""
    return [row.ready for row in rank.in_windows(LoaderQueueRow) if row.ready is not None]


class Loading(msgspec.Struct, frozen=True, kw_only=True):
    """What one batch costs a worker.

    ``fetch_ns`` without waits for a core, of which ``cpu_ns`` are on a core, and ``collate_ns`` in ``collate_fn``.
    ``lock_share`` of the fetches the worker waits for a lock of several processes, mostly at the line ``lock``.
    """

    fetch_ns: float
    cpu_ns: float
    collate_ns: float = 0.0
    lock_share: float = 0.0
    lock: str | None = None

    @property
    def is_cpu_bound(self) -> bool:
        """Whether a worker computes most of the time that a batch takes."""
        return self.cpu_ns > self.fetch_ns / 2

    def workers_for(self, step_ns: float) -> int:
        """Return how many workers finish a batch in each step of ``step_ns``, which is without the wait for data."""
        return max(1, math.ceil(self.fetch_ns / step_ns)) if step_ns > 0 else 1


def loading(rank: Rank) -> Loading | None:
    """Return the cost of a batch, from the first sample of each worker to its last; None where none has counted.

    The first batch of a worker opens files: it is excluded where there are later ones.
    """
    spans = list(_spans(rank))
    batches = sum(after.batches - before.batches for before, after in spans if after.batches and before.batches)
    if batches < MIN_BATCHES:
        return None

    def per_batch(column: str) -> float:
        return sum((getattr(after, column) or 0) - (getattr(before, column) or 0) for before, after in spans) / batches

    cpu, fetch = per_batch("fetch_cpu_ns"), per_batch("fetch_ns")
    waited = per_batch("core_wait_ns")
    last = [after for _, after in spans]
    looks, locks = sum(row.looks or 0 for row in last), sum(row.lock_waits or 0 for row in last)
    return Loading(
        fetch_ns=max(fetch - waited, cpu),
        cpu_ns=cpu,
        collate_ns=per_batch("collate_ns"),
        lock_share=locks / looks if looks >= MIN_LOOKS else 0.0,
        lock=max(last, key=lambda row: row.lock_waits or 0).lock,
    )


def _spans(rank: Rank) -> Iterator[tuple[ProcessRow, ProcessRow]]:
    rows = [row for row in rank.read(ProcessRow).rows if row.kind == "worker" and row.batches and row.fetch_ns]
    rows.sort(key=lambda row: row.pid or 0)
    for _, found in itertools.groupby(rows, key=lambda row: row.pid):
        samples = list(found)
        if len(samples) > 1:
            yield samples[0], samples[-1]


def workers_end(rank: Rank) -> bool:
    """Return whether workers end and others start within an epoch, as those of a short loader that begins again."""
    loaders = rank.training.dataloaders if rank.training is not None else []
    processes = {row.pid for row in rank.read(ProcessRow).rows if row.kind == "worker"}
    is_one_epoch = len({row["epoch"] for row in rank.pulse}) == 1
    return is_one_epoch and len(loaders) > 1 and len(processes) > 2 * sum(each.num_workers or 0 for each in loaders)
