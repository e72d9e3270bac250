"""The cores that a rank uses, and those that others leave."""

from __future__ import annotations

import msgspec

from lightning_memprof.account.steps.system import systems
from lightning_memprof.artifacts.series import ProcessRow
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.read.run.model import Rank


def torch_threads(rank: Rank) -> int | None:
    """Return how many threads an operator of a rank uses; None where the run does not say."""
    count = rank.training.threads if rank.training else None
    started = rank.facts.environment.get("torch_threads")
    return count or (started if type(started) is int else None)


def ranks_on_host(facts: Facts, rank: Rank) -> list[Rank]:
    """Return the ranks on the machine of a rank, with it."""
    return [other for other in facts.run.ranks if other.facts.host == rank.facts.host]


def is_oversubscribed(facts: Facts, rank: Rank) -> bool:
    """Return whether operators use many more threads than there are cores."""
    cores, threads = rank.facts.cpu_count or 0, torch_threads(rank) or 0
    return bool(cores) and threads * len(ranks_on_host(facts, rank)) >= POLICY.threads_per_core * cores


class CoreLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The cores in use in the recorded steps, in cores.

    Attributes:
        all_cores: of the machine.
        process: by one rank's process.
        workers: by its DataLoader workers.
        own: by all ranks of the machine, with their workers.
        others: by other programs.
    """

    all_cores: int
    process: float
    workers: float
    own: float
    others: float

    @property
    def free(self) -> float:
        """The cores that other programs leave for the training."""
        return self.all_cores - self.others


def core_load(facts: Facts, rank: Rank) -> CoreLoad | None:
    """Return who uses the cores of a rank's machine; None where that was not recorded."""
    here = {other.rank for other in ranks_on_host(facts, rank)}
    figures = next((system.figures for system in systems(facts.run) if system.rank in here), {})
    process, machine = figures.get("process_cpu_percent"), figures.get("machine_cpu_percent")
    all_cores, workers_percent = rank.facts.environment.get("cpu_count"), figures.get("workers_cpu_percent")
    if process is None or machine is None or not isinstance(all_cores, int):
        return None
    by_workers = workers_percent.mean / 100 if workers_percent else 0.0
    # The ranks of a training run do the same work.
    own = min(len(here) * (process.mean / 100 + by_workers), all_cores)
    return CoreLoad(
        all_cores=all_cores,
        process=process.mean / 100,
        workers=by_workers,
        own=own,
        others=max(machine.mean * all_cores / 100 - own, 0.0),
    )


def busiest_thread(rank: Rank) -> ProcessRow | None:
    """Return the other Python thread that ran longest; None where none did, or was watched for long enough."""
    rows = [row for row in rank.read(ProcessRow).rows if row.kind == "thread" and row.elapsed_ns]
    elapsed = rows[-1].elapsed_ns or 0 if rows else 0
    if elapsed < POLICY.thread_ns:
        return None
    return max((row for row in rows if row.elapsed_ns == elapsed), key=lambda row: row.cpu_ns or 0)


def free_cores(facts: Facts, rank: Rank) -> float | None:
    """Return the cores that other programs and other ranks leave for a rank, at least one; None where unknown."""
    load, cores = core_load(facts, rank), rank.facts.cpu_count
    if cores is None:
        return None
    return max((min(load.free, cores) if load is not None else cores) / len(ranks_on_host(facts, rank)), 1.0)
