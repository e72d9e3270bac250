"""What DataLoaders and their workers spend on a batch."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_memprof.account.ledger.model import TimeLedger, total
from lightning_memprof.account.steps.lines import Spot, action_spot, collate_spot
from lightning_memprof.account.steps.workers import Call, Loading, calls, loading, workers
from lightning_memprof.artifacts.manifest import DataLoaderFacts
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.cores import core_load, free_cores, torch_threads
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.read.run.model import Rank


def sample_method(loaders: Sequence[DataLoaderFacts]) -> str:
    """Return the method of the data set that makes a sample."""
    return "__iter__" if loaders and loaders[0].is_iterable else "__getitem__"


def loaders_of(rank: Rank) -> Sequence[DataLoaderFacts]:
    """Return the DataLoaders of the training, as far as the run knows them."""
    return rank.training.dataloaders if rank.training else ()


def workers_of(rank: Rank) -> int:
    """Return the worker processes of the loader: as configured, else as many as were seen."""
    loaders = loaders_of(rank)
    if loaders:
        return loaders[0].num_workers or 0
    return 1 + max((worker.number for worker in workers(rank) if worker.number is not None), default=-1)


def one_by_one(rank: Rank, ledger: TimeLedger) -> tuple[str, tuple[Remedy, ...]]:
    """Return that the training process fetches many samples, one by one in little time for each, and the remedy."""
    loaders = loaders_of(rank)
    lines = [line for line in ledger.of("data_wait") if line.name.endswith((".fetch", ".collate"))]
    samples = (loaders[0].batch_size or 0) if loaders and not loaders[0].is_iterable else 0
    if samples < POLICY.many_samples or loaders[0].num_workers or not 0 < total(lines) < POLICY.row_ns * samples:
        return "", ()
    return f"one by one, {samples:,} in a batch", (do.FETCH_AT_ONCE.filled(samples=samples),)


def cores_of_loading(facts: Facts, rank: Rank, ledger: TimeLedger) -> float | None:
    """Return how many cores the training process keeps busy in recorded steps, if its wait for data mostly computes.

    Operators keep no more than their threads busy; further processor time belongs to the wait. None where the wait
    sleeps, or the run does not say.
    """
    load, threads = core_load(facts, rank), torch_threads(rank)
    if load is None or threads is None:
        return None
    wait = ledger.ns("data_wait")
    operators = (ledger.step_ns - wait - ledger.ns("core_wait")) * min(threads, rank.facts.cpu_count or threads)
    return load.process if load.process * ledger.step_ns - operators >= POLICY.most * wait else None


def takes_turns(rank: Rank) -> Loading | None:
    """Return the cost of a batch where workers wait for one another at a lock, else None."""
    cost, most = loading(rank), max((loader.num_workers or 0 for loader in loaders_of(rank)), default=0)
    return cost if cost is not None and most > 1 and cost.lock_share >= POLICY.locked else None


def worker_method(rank: Rank) -> str:
    """Return the function or the method in which workers spend most of a batch."""
    cost, slow = loading(rank), slow_function(rank)
    if slow is not None:
        return slow.function
    return "collate_fn" if cost and cost.collate_ns > cost.fetch_ns / 2 else sample_method(loaders_of(rank))


def in_workers(rank: Rank) -> tuple[str, str]:
    """Return the slow part of the workers, and whether they compute or wait in it; empty where it is not known."""
    cost = loading(rank)
    if cost is None or not loaders_of(rank):
        return "", ""
    method = worker_method(rank)
    datasets = {worker.dataset for worker in workers(rank)} if method.startswith("__") else set()
    named = f"{datasets.pop()}.{method}" if len(datasets) == 1 and None not in datasets else method
    return named, "computing" if cost.is_cpu_bound else "waiting for disk, network, a lock or sleep"


def slow_function(rank: Rank) -> Call | None:
    """Return the function that takes half of the fetches in workers or more, in recorded windows."""
    return next((call for call in calls(rank) if call.share >= POLICY.most), None)


def wanted_workers(facts: Facts, rank: Rank, ledger: TimeLedger) -> int | None:
    """Return the number of workers that removes the wait, from their times; None where more of them would not.

    A worker takes ``fetch`` ns for a batch, the loop one batch every ``step`` ns without its wait: ``fetch / step``
    workers keep up, rounded up. What they and the training process compute needs cores: those that other programs and
    other ranks leave.
    """
    cost, number = loading(rank), workers_of(rank)
    step_ns = ledger.step_ns - ledger.ns("data_wait")
    if cost is None or not number or step_ns <= 0:
        return None
    cores, free, load = rank.facts.cpu_count, free_cores(facts, rank), core_load(facts, rank)
    own_ns = load.process * ledger.step_ns if load is not None else step_ns
    if free is not None and cost.is_cpu_bound and own_ns + cost.cpu_ns > step_ns * free:
        return None
    wanted = cost.workers_for(step_ns)
    is_many = cores is not None and wanted > POLICY.many_per_core * max(cores, number)
    return wanted if wanted > number and not is_many else None


def line_of_samples(rank: Rank, part: tuple[str, str] | None) -> Spot | None:
    """Return where the program makes samples, or batches of them, in the training process."""
    if part is not None and part[1] == "collate":
        return collate_spot(rank)
    if part is not None and part[1] == "sampler":
        return action_spot(rank, "__iter__")
    return action_spot(rank, sample_method(loaders_of(rank))) if part is not None and part[1] == "fetch" else None
