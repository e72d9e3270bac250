"""What to do about a failed allocation: the remedies that fit its cause, its phase and the Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from lightning_memprof.account.oom.autopsy import Autopsy
from lightning_memprof.account.oom.causes import HOST_REST, OTHER_TENSORS, SETUP, UNHELD
from lightning_memprof.artifacts.manifest import DataLoaderFacts
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.remedies import Remedy

STEPS: Final = 3
MOST_SAVED: Final = "the modules with the most saved activations"
HALF_BATCH: Final = do.SMALLER_BATCH.filled(batch="half the batch size", times=2)
GROWING_SEGMENTS: Final = do.EXPANDABLE_SEGMENTS.filled(settings="expandable_segments:True")
WITHOUT_GRADIENTS: Final = ("validation_step", "test_step", "predict_step")


def remedies_for(event: Autopsy) -> tuple[Remedy, ...]:
    """Return up to three remedies, the most promising first."""
    if event.is_host and event.cause != "too large":
        steps = _host(event)
    elif event.cause == "fragmented":
        steps = _fragmented(event)
    elif event.cause == "other process":
        steps = iter((do.STOP_OTHERS, do.FREE_DEVICE))
    elif event.phase == SETUP:
        steps = _setup(event)
    elif event.cause == "too large":
        steps = iter((_smaller_batch(event), *_bfloat16(event), do.SPLIT_OPERATION, do.SHARD_MODEL))
    else:
        steps = _full(event)
    return tuple(dict.fromkeys(steps))[:STEPS]


def _fragmented(event: Autopsy) -> Iterator[Remedy]:
    if not event.is_expandable:
        yield GROWING_SEGMENTS
    yield do.FEW_SHAPES
    yield do.RETURN_CACHE
    yield _smaller_batch(event)


def _setup(event: Autopsy) -> Iterator[Remedy]:
    """Yield remedies for a failure before the first step, where only the model and loaded weights use memory."""
    if event.cause == "limited":
        yield do.RAISE_LIMIT.filled(limit="torch.cuda.set_per_process_memory_fraction")
    yield do.SHARD_MODEL
    if _has_full_precision(event):
        yield do.SMALLER_WEIGHTS
    yield do.MAP_FILE


def _full(event: Autopsy) -> Iterator[Remedy]:
    if event.cause == "limited":
        yield do.RAISE_LIMIT.filled(limit="torch.cuda.set_per_process_memory_fraction")
    if event.phase == "optimizer":
        yield do.LESS_OPTIMIZER_STATE
    if event.largest == OTHER_TENSORS:
        yield do.RELEASE_TENSORS.filled(made="the tensors listed above")
    is_saved = event.largest in (None, UNHELD)
    if is_saved and event.modules:
        yield do.CHECKPOINTING.filled(blocks=" and ".join(event.modules))
    yield _smaller_batch(event)
    if is_saved and not event.modules:
        yield do.CHECKPOINTING.filled(blocks=MOST_SAVED)
    yield from _bfloat16(event)
    yield do.LESS_OPTIMIZER_STATE
    yield do.SHARD_MODEL


def _host(event: Autopsy) -> Iterator[Remedy]:
    if event.cause == "limited":
        yield do.RAISE_LIMIT.filled(limit="ulimit -v unlimited, docker run --memory, sbatch --mem")
    workers, waits = _loader(event).num_workers or 0, event.phase in ("data_wait", SETUP)
    if workers > 1 or (workers and waits):
        yield do.FEWER_WORKERS.filled(workers=workers // 2)
    elif waits:
        yield do.MAP_FILE
    if event.phase == SETUP:
        yield do.SHARD_MODEL
        if _has_full_precision(event):
            yield do.SMALLER_WEIGHTS
    if event.phase == "optimizer":
        yield do.LESS_OPTIMIZER_STATE
    if event.largest == HOST_REST:
        yield do.RELEASE_TENSORS.filled(made="step outputs or cached samples")
    if event.largest == OTHER_TENSORS:
        yield do.RELEASE_TENSORS.filled(made="the tensors listed above")
    yield _smaller_batch(event)
    yield from _bfloat16(event)
    if event.place["function"] not in WITHOUT_GRADIENTS:
        yield do.CHECKPOINTING.filled(blocks=MOST_SAVED)
    yield do.LESS_OPTIMIZER_STATE


def _smaller_batch(event: Autopsy) -> Remedy:
    if event.place["function"] in WITHOUT_GRADIENTS:
        return do.SMALLER_INPUT
    size = _loader(event).batch_size
    half = f"DataLoader(batch_size={size // 2})" if size and size > 1 else "half the batch size"
    return do.SMALLER_BATCH.filled(batch=half, times=2 * (event.training.accumulate_grad_batches or 1))


def _bfloat16(event: Autopsy) -> tuple[Remedy, ...]:
    return (do.BFLOAT16,) if _has_full_precision(event) else ()


def _has_full_precision(event: Autopsy) -> bool:
    return (event.training.precision or "32-true").startswith(("32", "64"))


def _loader(event: Autopsy) -> DataLoaderFacts:
    return next(iter(event.training.dataloaders), DataLoaderFacts())
