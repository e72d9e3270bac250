"""What to do about a failed allocation: the remedies that fit its cause, its phase and the Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from lightning_memprof.account.oom.causes import HOST_REST, OTHER_TENSORS, SETUP, UNHELD, Situation
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
    FIND_TENSOR_HOLDERS,
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


def remedies_for(situation: Situation) -> tuple[Remedy, ...]:
    """Return up to three remedies, the most promising first."""
    if situation.is_host and situation.cause != "too large":
        steps = _host(situation)
    elif situation.cause == "fragmented":
        steps = _fragmented(situation)
    elif situation.cause == "other process":
        steps = _other_process(situation)
    elif situation.phase == SETUP:
        steps = _setup(situation)
    elif situation.cause == "too large":
        steps = iter((_half_batch(situation), *_half_precision(situation), SPLIT_OPERATION, SHARD_MODEL))
    else:
        steps = _full(situation)
    return tuple(dict.fromkeys(steps))[:STEPS]


def _fragmented(situation: Situation) -> Iterator[Remedy]:
    yield RELEASE_EARLIER if situation.is_expandable else EXPANDABLE_SEGMENTS
    yield FEW_LENGTHS
    yield EMPTY_BETWEEN_STAGES
    yield _half_batch(situation)


def _other_process(situation: Situation) -> Iterator[Remedy]:
    yield STOP_OTHERS
    yield OWN_DEVICES if (situation.world_size or 1) > 1 else FREE_DEVICE
    yield LIMIT_SHARES
    yield _half_batch(situation)


def _setup(situation: Situation) -> Iterator[Remedy]:
    """Yield remedies for a failure before the first step, where only the model and loaded weights use memory."""
    if situation.cause == "limited":
        yield RAISE_FRACTION
    yield SHARD_MODEL
    if _has_full_precision(situation):
        yield HALF_MODEL
    yield LOAD_MAPPED
    yield TABLES_ON_HOST


def _full(situation: Situation) -> Iterator[Remedy]:
    if situation.cause == "limited":
        yield RAISE_FRACTION
    if situation.function in WITHOUT_GRADIENTS:
        yield EVALUATE_WITHOUT_GRADIENTS
    if situation.phase == "optimizer":
        yield _smaller_state(situation)
    if situation.largest == OTHER_TENSORS:
        yield FIND_TENSOR_HOLDERS
    is_saved = situation.largest in (None, UNHELD)
    if is_saved and situation.modules:
        yield CHECKPOINT_BLOCKS.filled(blocks=" and ".join(situation.modules))
    yield _half_batch(situation)
    if is_saved and not situation.modules:
        yield CHECKPOINT_BLOCKS.filled(blocks=MOST_SAVED)
    yield from _half_precision(situation)
    yield _smaller_state(situation)
    yield SHARD_MODEL


def _host(situation: Situation) -> Iterator[Remedy]:
    if situation.cause == "limited":
        yield RAISE_MEMORY_LIMIT
    workers, waits = _loader(situation).num_workers or 0, situation.phase in ("data_wait", SETUP)
    if workers > 1 or (workers and waits):
        fewer = f"num_workers={workers // 2}" + (", prefetch_factor=1" if workers > 1 else "")
        yield FEWER_LOADING_PROCESSES.filled(fewer=fewer)
    elif waits:
        yield MAP_FILE
    if situation.phase == SETUP:
        yield CREATE_SHARDED
        if _has_full_precision(situation):
            yield HALF_MODEL
    if situation.phase == "optimizer":
        yield _smaller_state(situation)
    if situation.largest == HOST_REST:
        yield FIND_CONTAINERS
    if situation.largest == OTHER_TENSORS:
        yield FIND_TENSOR_HOLDERS
    yield _half_batch(situation)
    yield from _half_precision(situation)
    if situation.function not in WITHOUT_GRADIENTS:
        yield CHECKPOINT_BLOCKS.filled(blocks=MOST_SAVED)
    yield _smaller_state(situation)


def _half_batch(situation: Situation) -> Remedy:
    size = _loader(situation).batch_size
    half = f"DataLoader(batch_size={size // 2})" if size and size > 1 else "half the batch size"
    if situation.function in WITHOUT_GRADIENTS:
        return SMALLER_EVALUATION_BATCH.filled(half=half)
    return HALF_BATCH.filled(half=half, times=2 * (situation.training.accumulate_grad_batches or 1))


def _half_precision(situation: Situation) -> tuple[Remedy, ...]:
    return (HALF_PRECISION,) if _has_full_precision(situation) else ()


def _has_full_precision(situation: Situation) -> bool:
    return (situation.training.precision or "32-true").startswith(("32", "64"))


def _smaller_state(situation: Situation) -> Remedy:
    optimizer = next(iter(situation.training.optimizers), OptimizerFacts())
    if situation.is_host or optimizer.fused:
        return LESS_STATE
    return FUSED_STATES.filled(optimizer=optimizer.name or "AdamW")


def _loader(situation: Situation) -> DataLoaderFacts:
    return next(iter(situation.training.dataloaders), DataLoaderFacts())
