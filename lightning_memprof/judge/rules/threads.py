"""A Python thread that computes while the training thread waits for Python's lock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from lightning_memprof.account.ledger.model import TimeLine
from lightning_memprof.account.parts import Part
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.cores import busiest_thread
from lightning_memprof.judge.fact import Fact
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.rule import Detail, Found, Rule
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_ns, percent

# Parts in which the training thread has no reason to sleep.
AWAKE: Final = (
    Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER, Part.CALLBACK, Part.MODULE_HOOK, Part.FORWARD_HOOK,
    Part.BACKWARD_HOOK, Part.SELF_LOG, Part.METRIC, Part.LOGGING, Part.TRANSFER, Part.DATA_WAIT, Part.UNTRACKED,
)  # fmt: skip


def busy_threads(facts: Facts) -> Iterator[Found]:
    """Yield the thread that computes most while the training thread sleeps: at most one of them has Python's lock."""
    found = [each for rank in facts.run.ranks if (each := _busiest(facts, rank)) is not None]
    yield from sorted(found, key=lambda each: -each[0].ns)[:1]


def _busiest(facts: Facts, rank: Rank) -> tuple[Fact, Detail] | None:
    ledger, row = facts.ledgers.get(rank.rank), busiest_thread(rank)
    # With an accelerator the training thread sleeps for that, too.
    if ledger is None or row is None or not rank.facts.is_cpu:
        return None
    elapsed = row.elapsed_ns or 1
    busy, asleep = (row.cpu_ns or 0) / elapsed, (row.asleep_ns or 0) / elapsed
    workers = any(loader.num_workers for loader in rank.training.dataloaders) if rank.training else False
    asleep -= ledger.share(Part.RANK_WAIT, Part.DATA_WAIT) if workers else ledger.share(Part.RANK_WAIT)
    ns = max(min(min(busy, asleep) * ledger.step_ns, ledger.ns(*AWAKE)), 0.0)
    detail = Detail(
        fields={"thread": (row.thread or "").partition(" (")[0], "busy": percent(busy), "asleep": percent(asleep)},
        measured=f"{row.thread} ran for {format_ns(row.cpu_ns or 0)} of {format_ns(elapsed)}",
        why="Only one Python thread runs at a time (GIL).",
        remedies=(do.THREAD_LESS.filled(owner=row.thread),),
        numbers={"thread": row.thread, "cores": busy, "asleep_share": asleep},
    )
    line = TimeLine(part=Part.FORWARD, name=row.thread or "", ns=ns)
    return Fact(source=rank, ledger=ledger, lines=(line,)), detail


ROWS: Final = (
    Rule(
        id="busy_thread",
        about="Another Python thread holds the GIL, which the training thread needs for every operator that it calls.",
        when=(
            "The time is the thread's CPU time, at most the sleep of the training thread without its waits for workers "
            "and other ranks. Linux only, and only on a CPU."
        ),
        trade_off="The thread's results are older.",
        of=AWAKE,
        find=busy_threads,
        says="Busy thread: {thread} uses {busy} of a core; the training thread sleeps {asleep} of each step{rank}.",
        each=True,
        # The training thread may sleep for another reason: a disk, a lock of a library.
        saves=(0.25, 1.0),
    ),
)
