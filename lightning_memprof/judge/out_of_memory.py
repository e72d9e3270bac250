"""What to do about a failed allocation: the remedies that fit its cause, its phase and the Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from lightning_memprof.account.oom.autopsy import Autopsy
from lightning_memprof.account.oom.causes import HOST_REST, OTHER_TENSORS, SETUP, UNHELD
from lightning_memprof.artifacts.manifest import DataLoaderFacts, OptimizerFacts
from lightning_memprof.judge.remedies import (
    CHECKPOINT_BLOCKS,
    CREATE_SHARDED,
    EMPTY_BETWEEN_STAGES,
    EVALUATE_WITHOUT_GRADIENTS,
    EXPANDABLE_SEGMENTS,
    FEW_LENGTHS,
    FEWER_LOADING_PROCESSES,
    FIND_CONTAINERS,
    FREE_DEVICE,
    FUSED_STATES,
    HALF_BATCH,
    HALF_MODEL,
    HALF_PRECISION,
    LESS_STATE,
    LIMIT_SHARES,
    LOAD_MAPPED,
    MAP_FILE,
    OWN_DEVICES,
    RAISE_FRACTION,
    RAISE_MEMORY_LIMIT,
    RELEASE_EARLIER,
    RELEASE_TENSORS,
    SHARD_MODEL,
    SMALLER_EVALUATION_BATCH,
    SPLIT_OPERATION,
    STOP_OTHERS,
    TABLES_ON_HOST,
    Remedy,
)

STEPS: Final = 3
MOST_SAVED: Final = "the modules with the most saved activations"
WITHOUT_GRADIENTS: Final = ("validation_step", "test_step", "predict_step")


def remedies_for(event: Autopsy) -> tuple[Remedy, ...]:
    """Return up to three remedies, the most promising first."""
    if event.is_host and event.cause != "too large":
        steps = _host(event)
    elif event.cause == "fragmented":
        steps = _fragmented(event)
    elif event.cause == "other process":
        steps = _other_process(event)
    elif event.phase == SETUP:
        steps = _setup(event)
    elif event.cause == "too large":
        steps = iter((_half_batch(event), *_half_precision(event), SPLIT_OPERATION, SHARD_MODEL))
    else:
        steps = _full(event)
    return tuple(dict.fromkeys(steps))[:STEPS]


def _fragmented(event: Autopsy) -> Iterator[Remedy]:
    yield RELEASE_EARLIER if event.is_expandable else EXPANDABLE_SEGMENTS
    yield FEW_LENGTHS
    yield EMPTY_BETWEEN_STAGES
    yield _half_batch(event)


def _other_process(event: Autopsy) -> Iterator[Remedy]:
    yield STOP_OTHERS
    yield OWN_DEVICES if (event.world_size or 1) > 1 else FREE_DEVICE
    yield LIMIT_SHARES
    yield _half_batch(event)


def _setup(event: Autopsy) -> Iterator[Remedy]:
    """Yield remedies for a failure before the first step, where only the model and loaded weights use memory."""
    if event.cause == "limited":
        yield RAISE_FRACTION
    yield SHARD_MODEL
    if _has_full_precision(event):
        yield HALF_MODEL
    yield LOAD_MAPPED
    yield TABLES_ON_HOST


def _full(event: Autopsy) -> Iterator[Remedy]:
    if event.cause == "limited":
        yield RAISE_FRACTION
    if event.place["function"] in WITHOUT_GRADIENTS:
        yield EVALUATE_WITHOUT_GRADIENTS
    if event.phase == "optimizer":
        yield _smaller_state(event)
    if event.largest == OTHER_TENSORS:
        yield RELEASE_TENSORS.filled(made="the tensors listed above", record="")
    is_saved = event.largest in (None, UNHELD)
    if is_saved and event.modules:
        yield CHECKPOINT_BLOCKS.filled(blocks=" and ".join(event.modules))
    yield _half_batch(event)
    if is_saved and not event.modules:
        yield CHECKPOINT_BLOCKS.filled(blocks=MOST_SAVED)
    yield from _half_precision(event)
    yield _smaller_state(event)
    yield SHARD_MODEL


def _host(event: Autopsy) -> Iterator[Remedy]:
    if event.cause == "limited":
        yield RAISE_MEMORY_LIMIT
    workers, waits = _loader(event).num_workers or 0, event.phase in ("data_wait", SETUP)
    if workers > 1 or (workers and waits):
        fewer = f"num_workers={workers // 2}" + (", prefetch_factor=1" if workers > 1 else "")
        yield FEWER_LOADING_PROCESSES.filled(fewer=fewer)
    elif waits:
        yield MAP_FILE
    if event.phase == SETUP:
        yield CREATE_SHARDED
        if _has_full_precision(event):
            yield HALF_MODEL
    if event.phase == "optimizer":
        yield _smaller_state(event)
    if event.largest == HOST_REST:
        yield FIND_CONTAINERS
    if event.largest == OTHER_TENSORS:
        yield RELEASE_TENSORS.filled(made="the tensors listed above", record="")
    yield _half_batch(event)
    yield from _half_precision(event)
    if event.place["function"] not in WITHOUT_GRADIENTS:
        yield CHECKPOINT_BLOCKS.filled(blocks=MOST_SAVED)
    yield _smaller_state(event)


def _half_batch(event: Autopsy) -> Remedy:
    size = _loader(event).batch_size
    half = f"DataLoader(batch_size={size // 2})" if size and size > 1 else "half the batch size"
    if event.place["function"] in WITHOUT_GRADIENTS:
        return SMALLER_EVALUATION_BATCH.filled(half=half)
    return HALF_BATCH.filled(half=half, times=2 * (event.training.accumulate_grad_batches or 1))


def _half_precision(event: Autopsy) -> tuple[Remedy, ...]:
    return (HALF_PRECISION,) if _has_full_precision(event) else ()


def _has_full_precision(event: Autopsy) -> bool:
    return (event.training.precision or "32-true").startswith(("32", "64"))


def _smaller_state(event: Autopsy) -> Remedy:
    optimizer = next(iter(event.training.optimizers), OptimizerFacts())
    if event.is_host or optimizer.fused:
        return LESS_STATE
    return FUSED_STATES.filled(optimizer=optimizer.name or "AdamW")


def _loader(event: Autopsy) -> DataLoaderFacts:
    return next(iter(event.training.dataloaders), DataLoaderFacts())
