"""Waiting for data."""

from __future__ import annotations

import statistics as stats
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.analysis.findings.model import MIN_STEPS, SHORT_STEP_NS, Facts, Finding
from lightning_memprof.analysis.findings.rhythm import rhythm, severity
from lightning_memprof.analysis.run.rows import mapping, text, whole
from lightning_memprof.units import format_ns, percent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightning_memprof.analysis.run.load import Rank

__all__ = ["input_bound"]

# Below a tenth even a loader that costs nothing would make the run less than 1.12 times as fast.
NOTABLE_SHARE: Final = 0.10
# From three tenths on the loader decides how long the run takes: a perfect one gains 1.4 times and more.
SEVERE_SHARE: Final = 0.30
# The fetch of a batch that is ready takes less than this in the Trainer: no setting of the loader saves it.
MIN_COST_NS: Final = 2_000_000
# With fewer turns of the workers than these, a few steps that wait are no rhythm.
MIN_TURNS: Final = 4
# Where the first fetch of each epoch holds this part of all waiting, workers are started again each epoch.
EPOCH_STARTS_SHARE: Final = 0.5
MORE_WORKERS: Final = 4
# From so many workers a core on, it is not the number of workers that is missing.
MANY_WORKERS_PER_CORE: Final = 4
DEFAULT_PREFETCH: Final = 2


def input_bound(facts: Facts) -> list[Finding]:
    """Say that the step waits for its batch, and which settings of the DataLoader to change."""
    worst = facts.worst("data_wait")
    if worst is None:
        return []
    rank, statistics = worst
    share = statistics.share("data_wait")
    if share <= NOTABLE_SHARE or statistics.used < MIN_STEPS:
        return []
    wait_ns = statistics.breakdown_ns["data_wait"] or 0
    if statistics.mean_ns < SHORT_STEP_NS and wait_ns < MIN_COST_NS:
        return []
    loaders = _dataloaders(rank)
    in_few_steps = _in_few_steps(rank, share, loaders)
    at_epoch_starts = _share_at_epoch_starts(rank)
    return [
        Finding(
            rule="input_bound",
            severity=severity(share, SEVERE_SHARE, rhythm(rank, "data_wait")),
            sentence=f"Training waits for data {percent(share)} of the time{facts.on_rank(rank)}.",
            why=(
                f"{format_ns(wait_ns)} of a {format_ns(statistics.mean_ns)} step go by before the batch is there"
                + (", most of it in few steps" if in_few_steps else "")
                + (
                    f", {percent(at_epoch_starts)} of it at the start of epochs"
                    if at_epoch_starts >= EPOCH_STARTS_SHARE
                    else ""
                )
                + (f"; {_settings(loaders[0])}" if loaders else "")
                + "."
            ),
            next_steps=_next_steps(rank, loaders, at_epoch_starts, in_few_steps=in_few_steps),
            evidence=(facts.pulse(rank), *facts.recorded(rank, "hooks")),
            numbers={
                "rank": rank.rank,
                "data_wait_share": share,
                "data_wait_ns": wait_ns,
                "duration_ns": statistics.mean_ns,
                "epoch_starts_share": at_epoch_starts,
                "in_few_steps": in_few_steps,
                "dataloaders": loaders,
            },
            weight=share,
        )
    ]


def _dataloaders(rank: Rank) -> list[Mapping[str, Any]]:
    loaders = rank.training.get("dataloaders") if rank.training else None
    return [loader for loader in loaders if isinstance(loader, dict)] if isinstance(loaders, list) else []


def _in_few_steps(rank: Rank, share: float, loaders: Sequence[Mapping[str, Any]]) -> bool:
    """Say whether the loader keeps up but for a few steps.

    Workers that began together finish together: of N of them one step in N waits for all. So what counts is the
    waiting in a turn of as many steps as there are workers.
    """
    typical = rank.typical_steps
    turn = max((whole(loaders[0], "num_workers") if loaders else None) or 1, 1)
    if typical is None or (turn > 1 and len(typical.steps) < MIN_TURNS * turn):
        return False
    waits = [(breakdown["data_wait"] or 0, duration) for _, duration, breakdown in typical.steps]
    turns = [waits[start : start + turn] for start in range(0, len(waits) - turn + 1, turn)]
    shares = [sum(ns for ns, _ in turn) / (sum(duration for _, duration in turn) or 1) for turn in turns]
    return stats.median(shares) < share / 2


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


def _next_steps(
    rank: Rank, loaders: Sequence[Mapping[str, Any]], at_epoch_starts: float, *, in_few_steps: bool
) -> tuple[str, ...]:
    """Name the settings that are not yet used, in the order in which they usually help."""
    if not loaders:
        return ("Fetch batches in parallel with the step: DataLoader(num_workers=4, persistent_workers=True).",)
    loader = loaders[0]
    steps: list[str] = []
    workers = whole(loader, "num_workers") or 0
    cores = whole(mapping(rank.facts, "environment"), "cpu_count")
    epochs = at_epoch_starts >= EPOCH_STARTS_SHARE
    if workers == 0:
        wanted = min(MORE_WORKERS, cores) if cores else MORE_WORKERS
        steps.append(
            f"Fetch batches in other processes: DataLoader(num_workers={wanted}, persistent_workers=True); "
            "num_workers is 0."
        )
    else:
        keep = "Keep the workers from epoch to epoch: DataLoader(persistent_workers=True); it is False."
        restarted = loader.get("persistent_workers") is False
        steps += [keep] if restarted and epochs else []
        if in_few_steps and not epochs:
            steps.append(_further_ahead(loader))
        steps.append(_more_workers(workers, cores))
        steps += [keep] if restarted and not epochs else []
    if loader.get("pin_memory") is False and not (text(rank.facts, "device") or "cpu").startswith("cpu"):
        steps.append("Copy batches to the device while it works: DataLoader(pin_memory=True); it is False.")
    steps.append("Do less per sample: make __getitem__ faster, or decode and tokenise once, ahead of training.")
    return tuple(steps)


def _further_ahead(loader: Mapping[str, Any]) -> str:
    """Batches in stock cover a few slow ones; they do not help workers that are slower than the training."""
    prefetch = whole(loader, "prefetch_factor") or DEFAULT_PREFETCH
    return f"Let each worker fetch further ahead: DataLoader(prefetch_factor={2 * prefetch}); it is {prefetch}."


def _more_workers(workers: int, cores: int | None) -> str:
    named = "worker" if workers == 1 else f"{workers} workers"
    behind = f"The {named} cannot keep up: "
    if cores is not None and workers >= MANY_WORKERS_PER_CORE * cores:
        return f"{behind}make __getitem__ faster, or preprocess the samples once, ahead of training."
    if cores is not None and workers >= cores:
        return (
            f"{behind}make __getitem__ faster, or preprocess once; if it waits for disk or network, more workers than "
            f"the {cores} cores help too: DataLoader(num_workers={2 * workers})."
        )
    wanted = min(2 * workers, cores) if cores else 2 * workers
    return f"{behind}use DataLoader(num_workers={wanted}), or make __getitem__ faster."
