"""What keeps memory that grows, in words, with its remedy."""

from __future__ import annotations

from typing import Final, NamedTuple

from lightning_memprof.account.ledger.growth import Growth
from lightning_memprof.account.memory.report import RankMemory
from lightning_memprof.artifacts.series import WITH_GRAPH, HolderRow, HookRow
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Evidence
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import GIB, format_bytes

_LOADER: Final = "[DataLoader]"


class Cause(NamedTuple):
    """The cause of a growth: its owner for the title, the evidence, and the remedy.

    ``link`` stands before the owner, ``graph`` and ``line`` after it; ``action`` is the Trainer's.
    """

    owner: str
    why: str
    remedy: Remedy
    action: str | None = None
    link: str = " in "
    graph: str = ""
    line: str = ""


def holder_cause(holder: HolderRow) -> Cause:
    """Return the cause of memory that a variable holds."""
    place = (holder.place or "").removesuffix("[...]")
    graph = WITH_GRAPH if holder.keeps_graphs else ""
    count = f"{holder.added:,} " if holder.added else ""
    line = f" ({holder.line})" if holder.line else ""
    size = format_bytes(holder.added_bytes or 0)
    # "46 bytes" is a size.
    content = "bytes objects" if holder.content == "bytes" else holder.content
    why = f"since step {holder.since_step}, {place} gained {count}{content} ({size})"
    detached = (
        "; store .detach() or .item() where the tensor is not needed" if "Tensor" in (holder.content or "") else ""
    )
    source = f": {holder.source.strip()}" if holder.source else ""
    assigned = f", assigned in {holder.line}{source}" if holder.line else ""
    needless = do.WITHOUT_GRAPHS if holder.keeps_graphs else do.COPY_PARTS if holder.keeps_whole else None
    remedy = (needless or do.BOUND_HOLDER).filled(place=place, assigned=assigned, detached=detached)
    return Cause(place, why, remedy, graph=graph, line=line)


def growth_text(growth: Growth) -> str:
    """Return how much and how fast memory grew, after its name."""
    return (
        f"rose steadily by {format_bytes(growth.added)} in {growth.steps} steps: 1 GiB every "
        f"{GIB / growth.per_step:,.0f} steps"
    )


def dataset_name(rank: Rank) -> str | None:
    """Return the class of the data set of the recorded fetches, None if there are none."""
    actions = (row.action or "" for row in rank.recorded(HookRow))
    found = next((action for action in actions if action.startswith(_LOADER)), None)
    return found.removeprefix(_LOADER).rpartition(".")[0] if found is not None else None


def file_of(facts: Facts, rank: Rank, name: str) -> Evidence:
    """Return a file of the whole run as evidence."""
    return Evidence(artifact=f"{facts.run.directory.name}/{name}", rank=rank.rank)


def rank_memory(facts: Facts, rank: Rank) -> RankMemory | None:
    """Return the recorded tensors of a rank, None if there are none."""
    ranks = facts.memory.ranks if facts.memory is not None else ()
    return next((memory for memory in ranks if memory.rank == rank.rank), None)
