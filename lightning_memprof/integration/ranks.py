"""Which ranks record windows with every collector: decided by each rank for itself, without a collective."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

from lightning_memprof.errors import ConfigError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_memprof.integration.settings import Settings

__all__ = ["Ranks", "check_ranks", "choice_note", "for_this_rank", "group_timeout_seconds", "is_chosen"]

Ranks = Literal["all", "none"] | int | list[int] | dict[str, int] | None

# More would write more than anybody reads, and a shared file system feels it.
_FEW: Final = 8


def check_ranks(ranks: Any) -> Any:
    """Refuse what chooses no ranks.

    Args:
        ranks: ``"all"``, ``"none"``, a list of global ranks, a count (that many from rank 0 on), ``{"every": N}``, or
            None: all of up to 8 ranks, else the first of each node.

    Raises:
        ConfigError: it is something else.

    """
    if isinstance(ranks, dict):
        good = list(ranks) == ["every"] and _is_count(ranks["every"])
    elif isinstance(ranks, (list, tuple)):
        good = True
        for rank in ranks:
            if type(rank) is not int or rank < 0:
                msg = f"ranks={ranks!r}: {rank!r} is no global rank; give integers from 0, or 'all'"
                raise ConfigError(msg)
    else:
        good = ranks in (None, "all", "none") or _is_count(ranks)
    if not good:
        msg = (
            f"ranks={ranks!r}: must be 'all', 'none', a list of global ranks, a count of at least 1, "
            "{'every': N} with N of at least 1, or None"
        )
        raise ConfigError(msg)
    return ranks


def is_chosen(ranks: Ranks, *, rank: int, world_size: int, local_rank: int) -> bool:
    """Say whether a rank records windows with every collector.

    Args:
        ranks: the choice, see :func:`check_ranks`.
        rank: the global rank.
        world_size: number of ranks.
        local_rank: number of the rank on its node, from 0.

    """
    if ranks is None:
        return world_size <= _FEW or local_rank == 0
    if isinstance(ranks, str):
        return ranks == "all"
    if isinstance(ranks, int):
        return rank < ranks
    if isinstance(ranks, dict):
        return rank % ranks["every"] == 0
    return rank in ranks


def choice_note(ranks: Ranks, world_size: int) -> str | None:
    """Return what the report's reader should know of the choice; None where every rank is chosen."""
    if ranks is None:
        if world_size <= _FEW:
            return None
        return "windows have every collector on the first rank of each node; ranks='all' gives them to all"
    if all(is_chosen(ranks, rank=rank, world_size=world_size, local_rank=0) for rank in range(world_size)):
        return None
    return f"windows have every collector on these ranks only: ranks={ranks!r}"


def for_this_rank(settings: Settings, trainer: Trainer) -> Settings:
    """Return what this rank records: all that is wanted, or of it what is light enough for every rank."""
    chosen = is_chosen(
        settings.ranks, rank=trainer.global_rank, world_size=trainer.world_size, local_rank=trainer.local_rank
    )
    if chosen:
        return settings
    light = [(collector, asked) for collector, asked in settings.collectors if collector.every_rank]
    return replace(settings, collectors=light, every_collector=False)


def group_timeout_seconds(trainer: Trainer) -> float | None:
    """Return after how long the process group gives up a rank that does not come; None where nobody waits for it."""
    timeout = getattr(trainer.strategy, "_timeout", None)
    return timeout.total_seconds() if trainer.world_size > 1 and isinstance(timeout, timedelta) else None


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1
