"""Waiting for data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.analysis.findings.model import Evidence, Finding, Severity, percent
from lightning_memprof.analysis.rows import mapping, text, whole
from lightning_memprof.units import format_ns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightning_memprof.analysis.run import Rank

__all__ = ["input_bound"]

# Below a tenth even a loader that costs nothing would make the run less than 1.12 times as fast.
NOTABLE_SHARE: Final = 0.10
# From three tenths on the loader decides how long the run takes: a perfect one gains 1.4 times and more.
SEVERE_SHARE: Final = 0.30
# The start of workers falls into the first fetches; fewer steps than these show little else.
MIN_STEPS: Final = 3
# Where the first fetch of each epoch holds this part of all waiting, workers are started again each epoch.
EPOCH_STARTS_SHARE: Final = 0.5
MORE_WORKERS: Final = 4
DEFAULT_PREFETCH: Final = 2


def input_bound(evidence: Evidence) -> Finding | None:
    """Say that the step waits for its batch, and which settings of the DataLoader to change."""
    worst = evidence.worst("data_wait")
    if worst is None:
        return None
    rank, statistics = worst
    share = statistics.share("data_wait")
    if share <= NOTABLE_SHARE or statistics.used < MIN_STEPS:
        return None
    loaders = _dataloaders(rank)
    at_epoch_starts = _share_at_epoch_starts(rank)
    wait_ns = statistics.breakdown_ns["data_wait"] or 0
    return Finding(
        rule="input_bound",
        severity=Severity.CRITICAL if share >= SEVERE_SHARE else Severity.WARNING,
        sentence=f"Training waits for data {percent(share)} of the time{evidence.on_rank(rank)}.",
        evidence=(
            f"{format_ns(wait_ns)} of a {format_ns(statistics.mean_ns)} step go by before the batch is there"
            + (", most of it in few steps" if statistics.median_shares["data_wait"] < share / 2 else "")
            + (
                f", {percent(at_epoch_starts)} of it at the start of epochs"
                if at_epoch_starts >= EPOCH_STARTS_SHARE
                else ""
            )
            + (f"; {_settings(loaders[0])}" if loaders else "")
            + "."
        ),
        next_steps=_next_steps(rank, loaders, at_epoch_starts),
        numbers={
            "rank": rank.rank,
            "data_wait_share": share,
            "data_wait_ns": wait_ns,
            "duration_ns": statistics.mean_ns,
            "epoch_starts_share": at_epoch_starts,
            "dataloaders": loaders,
        },
        weight=share,
    )


def _dataloaders(rank: Rank) -> list[Mapping[str, Any]]:
    loaders = rank.training.get("dataloaders") if rank.training else None
    return [one for one in loaders if isinstance(one, dict)] if isinstance(loaders, list) else []


def _share_at_epoch_starts(rank: Rank) -> float:
    """Return which part of the waiting, after the run's first fetch, lies in the first steps of later epochs."""
    rows = rank.pulse[1:]
    total = sum(row["data_wait_ns"] or 0 for row in rows)
    starts = sum(
        row["data_wait_ns"] or 0
        for before, row in zip(rank.pulse, rows, strict=False)
        if row["epoch"] != before["epoch"]
    )
    return starts / total if total else 0.0


def _settings(loader: Mapping[str, Any]) -> str:
    names = ("num_workers", "persistent_workers", "pin_memory", "prefetch_factor")
    return ", ".join(f"{name}={loader[name]}" for name in names if name in loader)


def _next_steps(rank: Rank, loaders: Sequence[Mapping[str, Any]], at_epoch_starts: float) -> tuple[str, ...]:
    """Name the settings that are not yet used, in the order in which they usually help."""
    if not loaders:
        return ("Fetch batches in parallel with the step: DataLoader(num_workers=4, persistent_workers=True).",)
    loader = loaders[0]
    steps: list[str] = []
    workers = whole(loader, "num_workers") or 0
    cores = whole(mapping(rank.facts, "environment"), "cpu_count")
    if workers == 0:
        wanted = min(MORE_WORKERS, cores) if cores else MORE_WORKERS
        steps.append(
            f"Fetch batches in other processes: DataLoader(num_workers={wanted}, persistent_workers=True); "
            "num_workers is 0."
        )
    else:
        if loader.get("persistent_workers") is False:
            steps.append("Keep the workers from epoch to epoch: DataLoader(persistent_workers=True); it is False.")
        if cores is None or workers < cores:
            wanted = min(2 * workers, cores) if cores else 2 * workers
            steps.append(f"Use more workers: DataLoader(num_workers={wanted}); it is {workers}.")
        prefetch = whole(loader, "prefetch_factor") or DEFAULT_PREFETCH
        steps.append(
            f"Let each worker fetch further ahead: DataLoader(prefetch_factor={2 * prefetch}); it is {prefetch}."
        )
        if at_epoch_starts < EPOCH_STARTS_SHARE and steps[0].startswith("Keep"):
            steps.append(steps.pop(0))
    if loader.get("pin_memory") is False and not (text(rank.facts, "device") or "cpu").startswith("cpu"):
        steps.append("Copy batches to the device while it works: DataLoader(pin_memory=True); it is False.")
    steps.append(
        "If the workers are busy all the time, do less per sample: decode and tokenise once, ahead of training."
    )
    return tuple(steps)
