"""Measures of a rank that several rules share: steps that stand out, loading, and the use of cores."""

from __future__ import annotations

import itertools
import statistics as stats
from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec

from lightning_memprof.account.ledger.model import TimeLedger, total
from lightning_memprof.account.steps.lines import Spot, action_spot, collate_spot
from lightning_memprof.account.steps.statistics import typical_steps
from lightning_memprof.account.steps.system import systems
from lightning_memprof.account.steps.workers import Call, Loading, calls, loading, workers
from lightning_memprof.artifacts.manifest import DataLoaderFacts
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    FETCH_AT_ONCE,
    Remedy,
)
from lightning_memprof.read.run.model import Rank

# The first slow steps show a period; comparing all pairs takes long.
COMPARED: Final = 12
MOST: Final = POLICY.most
ENDINGS: Final = {1: "st", 2: "nd", 3: "rd"}


class Rhythm(msgspec.Struct, frozen=True, kw_only=True):
    """The few of ``seen`` steps that hold most of a phase's time, and the phase's mean in them.

    ``period`` is the regular distance between them in steps, None if there is none. ``ends_epochs``: each of them is
    the last step of its epoch; ``starts_epochs``: each is the first.
    """

    steps: tuple[int, ...]
    seen: int
    mean_ns: int
    period: int | None
    ends_epochs: bool
    starts_epochs: bool = False

    @property
    def is_hiccup(self) -> bool:
        """Whether a busy machine explains these steps."""
        if self.mean_ns * len(self.steps) < POLICY.hiccups_ns:
            return True
        if self.period is not None or ((self.ends_epochs or self.starts_epochs) and len(self.steps) > 1):
            return False
        return self.mean_ns < (POLICY.long_hiccup_ns if len(self.steps) < POLICY.calls else POLICY.hiccup_ns)

    @property
    def repeats(self) -> bool:
        """Whether the steps have a period, or a place in each epoch."""
        return self.period is not None or (len(self.steps) > 1 and (self.ends_epochs or self.starts_epochs))

    @property
    def subject(self) -> str:
        """The steps as the subject of a sentence: ``Every 10th step``, ``2 of 56 steps``."""
        count = len(self.steps)
        if self.ends_epochs:
            return "The last step of each epoch" if count > 1 else "The last step of the epoch"
        if self.starts_epochs and count > 1:
            return "The first step of each epoch"
        if self.period is not None:
            return f"Every {_ordinal(self.period)} step"
        return f"{count} of {self.seen} steps" if count > 1 else f"1 of {self.seen} steps (step {self.steps[0]})"

    @property
    def verb(self) -> str:
        """``takes`` or ``take``, to agree with the subject."""
        named = self.period is not None or self.ends_epochs or self.starts_epochs
        return "take" if len(self.steps) > 1 and not named else "takes"


def rhythm(rank: Rank, phase: str) -> Rhythm | None:
    """Return the few steps that hold most of a phase's time, or None if it is spread over all steps."""
    typical = typical_steps(rank)
    if typical is None:
        return None
    spent = [(step, breakdown[phase] or 0) for step, _, breakdown in typical.steps]
    found = few_steps(rank, spent, stands_out=POLICY.stands_out)
    held = found.mean_ns * len(found.steps) if found is not None else 0
    return found if held >= POLICY.most * sum(ns for _, ns in spent) else None


def few_steps(rank: Rank, spent: Sequence[tuple[int, int]], *, stands_out: float) -> Rhythm | None:
    """Return the steps that take ``stands_out`` times the median, or None if they are not few.

    A busy machine delays some step in every run: steps that stand out by little beside the others are ignored.

    Args:
        rank: the rank of the steps.
        spent: ``(step, nanoseconds)``.
        stands_out: multiple of the median.
    """
    if not spent:
        return None
    median = stats.median(ns for _, ns in spent)
    standing_out = [(step, ns) for step, ns in spent if ns > stands_out * median]
    least = POLICY.most * _weighted_median([ns - median for _, ns in standing_out])
    large = [(step, ns) for step, ns in standing_out if ns - median >= least]
    if not large or len(large) > POLICY.few * len(spent):
        return None
    steps = tuple(step for step, _ in large)
    last = {row["epoch"]: row["step"] for row in rank.pulse}
    first = {row["epoch"]: row["step"] for row in reversed(rank.pulse)}
    return Rhythm(
        steps=steps,
        seen=len(spent),
        mean_ns=round(sum(ns for _, ns in large) / len(large)),
        period=_period(steps) or _period_of_places(steps, [step for step, _ in spent]),
        ends_epochs=set(steps) <= set(last.values()),
        starts_epochs=set(steps) <= set(first.values()),
    )


def _weighted_median(values: Sequence[float]) -> float:
    """Return the value up to which the sorted values hold half of the sum."""
    half, total = sum(values) / 2, 0.0
    for value in sorted(values):
        total += value
        if total >= half:
            return value
    return 0.0


def _period(steps: Sequence[int]) -> int | None:
    gaps = Counter(after - before for before, after in itertools.pairwise(steps))
    if sum(gaps.values()) < 2:  # two steps have one distance: it cannot repeat
        return None
    gap, count = gaps.most_common(1)[0]
    return gap if gap > 1 and count >= POLICY.regular * sum(gaps.values()) else None


def _period_of_places(steps: Sequence[int], seen: Sequence[int]) -> int | None:
    """Return the distance at which nearly each step is slow, for periods with other slow steps in between."""
    slow, known, found = set(steps), set(seen), Counter[int]()
    first, last = min(known), max(known)
    for before, after in itertools.combinations(steps[:COMPARED], 2):
        period = after - before
        places = [step for step in range(first + (before - first) % period, last + 1, period) if step in known]
        hits = sum(step in slow for step in places)
        if (
            period > 1
            and len(places) >= POLICY.rhythm
            and hits >= max(POLICY.each * len(places), POLICY.regular * len(slow))
        ):
            found[period] = max(found[period], hits)
    # Of 7 and 14 the shorter one has more of the slow steps.
    return found.most_common(1)[0][0] if found else None


def _ordinal(number: int) -> str:
    return f"{number}{'th' if 10 <= number % 100 <= 20 else ENDINGS.get(number % 10, 'th')}"


def sample_method(loaders: Sequence[DataLoaderFacts]) -> str:
    """Return the method of the data set that makes a sample."""
    return "__iter__" if loaders and loaders[0].is_iterable else "__getitem__"


def steps_until_full(facts: Facts, rank: Rank, bytes_per_step: float, *, on_host: bool) -> int | None:
    """Return how many more steps growing memory lasts; None if longer than the training, or if either is unknown."""
    ledger, training = facts.byte_ledgers.get(rank.rank), rank.training
    if ledger is None or training is None or (ledger.place == "host") != on_host or not ledger.limit_bytes:
        return None
    steps = (training.max_steps or 0) * (training.accumulate_grad_batches or 1)
    ends = min((end for end in (steps, (training.num_batches or 0) * (training.max_epochs or 0)) if end > 0), default=0)
    free = (ledger.limit_bytes - ledger.outside_bytes) / ledger.sharing - ledger.peak_bytes
    left = max(free, 0) / bytes_per_step
    return round(left) if left < ends - len(rank.pulse) else None


def one_by_one(rank: Rank, ledger: TimeLedger) -> tuple[str, tuple[Remedy, ...]]:
    """Return that the training process fetches many samples, one by one in little time for each, and the remedy."""
    loaders = loaders_of(rank)
    lines = [line for line in ledger.of("data_wait") if line.name.endswith((".fetch", ".collate"))]
    samples = (loaders[0].batch_size or 0) if loaders and not loaders[0].is_iterable else 0
    if samples < POLICY.many_samples or loaders[0].num_workers or not 0 < total(lines) < POLICY.row_ns * samples:
        return "", ()
    return f"one by one, {samples:,} in a batch", (FETCH_AT_ONCE.filled(samples=samples),)


def loaders_of(rank: Rank) -> Sequence[DataLoaderFacts]:
    """Return the DataLoaders of the training, as far as the run knows them."""
    return rank.training.dataloaders if rank.training else ()


def workers_of(rank: Rank) -> int:
    """Return the worker processes of the loader: as configured, else as many as were seen."""
    loaders = loaders_of(rank)
    if loaders:
        return loaders[0].num_workers or 0
    return 1 + max((worker.number for worker in workers(rank) if worker.number is not None), default=-1)


def torch_threads(rank: Rank) -> int | None:
    """Return how many threads an operator of a rank uses; None where the run does not say."""
    count = rank.training.threads if rank.training else None
    started = rank.facts.environment.get("torch_threads")
    return count or (started if type(started) is int else None)


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


def free_cores(facts: Facts, rank: Rank) -> float | None:
    """Return the cores that other programs and other ranks leave for a rank, at least one; None where unknown."""
    load, cores = core_load(facts, rank), rank.facts.cpu_count
    if cores is None:
        return None
    return max((min(load.free, cores) if load is not None else cores) / len(ranks_on_host(facts, rank)), 1.0)
