"""Remedies for an out-of-memory error: up to three, each with the Lightning or torch setting that applies it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.analysis.run.rows import text, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["HOST_REST", "OTHER_TENSORS", "SETUP", "UNHELD", "Situation", "next_steps"]

STEPS: Final = 3
_HELD_BY_PYTHON: Final = (
    "Find the objects that hold the tensors listed above: many of the same size that outlive their step are usually in "
    "a list or an attribute (store loss.item() or .detach().cpu() instead)."
)
SETUP: Final = "setup"
MOST_SAVED: Final = "the modules with the most saved activations"
CHECKPOINT: Final = "wrap their forward in torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
WITHOUT_GRADIENTS: Final = ("validation_step", "test_step", "predict_step")
OTHER_TENSORS: Final = "other tensors held by Python"
# Allocated bytes that neither the model, its optimizers nor a Python object hold.
UNHELD: Final = "the rest: saved activations and temporaries"
HOST_REST: Final = "the rest: Python objects, libraries and saved activations"


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The facts that select the remedies.

    Attributes:
        cause: as :data:`lightning_memprof.analysis.oom.causes.Cause`.
        is_host: whether host memory ran out, rather than device memory.
        phase: phase of the step; :data:`SETUP` before the first step.
        function: the module's step method, such as ``validation_step``.
        modules: paths of the modules that allocated most, largest first.
        largest: label of the largest holder; None where unknown.
        is_expandable: whether the allocator already uses expandable segments.
        training: the manifest's ``training`` row, with ``world_size``.

    """

    cause: str
    is_host: bool
    phase: str | None
    function: str | None
    modules: tuple[str, ...]
    largest: str | None
    is_expandable: bool
    training: Mapping[str, Any]


def next_steps(situation: Situation) -> tuple[str, ...]:
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
        steps = _too_large(situation)
    else:
        steps = _full(situation)
    return tuple(dict.fromkeys(steps))[:STEPS]


def _fragmented(situation: Situation) -> Iterator[str]:
    if situation.is_expandable:
        yield (
            "Segments are already expandable: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,"
            "garbage_collection_threshold:0.8 to release unused blocks earlier."
        )
    else:
        yield (
            "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the program starts: segments then grow in "
            "place, which avoids free gaps between them."
        )
    yield (
        "Use the same shapes in every step: pad or bucket the batches and set DataLoader(drop_last=True), so that the "
        "allocator can reuse blocks."
    )
    yield "Call torch.cuda.empty_cache() between stages with different shapes, for example in on_validation_end."
    yield _smaller_batch(situation)


def _other_process(situation: Situation) -> Iterator[str]:
    yield "Run nvidia-smi to see which processes use the device, and stop leftovers of earlier runs."
    if (whole(situation.training, "world_size") or 1) > 1:
        yield "Give each rank its own device: Trainer(devices=...) with as many devices as ranks."
    else:
        yield (
            "Use a free device: Trainer(devices=lightning.pytorch.accelerators.find_usable_cuda_devices(1)), "
            "or CUDA_VISIBLE_DEVICES."
        )
    yield ("If processes must share the device, limit each with torch.cuda.set_per_process_memory_fraction(0.5).")
    yield _smaller_batch(situation)


def _setup(situation: Situation) -> Iterator[str]:
    """Yield remedies for a failure before the first step, where only the model and loaded weights use memory."""
    if situation.cause == "limited":
        yield "Raise the fraction in torch.cuda.set_per_process_memory_fraction, or remove the call."
    yield (
        "Shard the model over devices: Trainer(strategy=ModelParallelStrategy()) and fully_shard in configure_model, "
        "or Trainer(strategy='fsdp')."
    )
    if _has_full_precision(situation):
        yield 'Halve the model itself with Trainer(precision="bf16-true").'
    yield (
        "Load weights with torch.load(..., map_location='cpu', mmap=True): on the device they would exist twice until "
        "load_state_dict returns."
    )
    yield "Keep large tables, buffers and evaluation-only models on the host."


def _too_large(situation: Situation) -> Iterator[str]:
    yield _smaller_batch(situation)
    if precision := _precision(situation):
        yield precision
    yield (
        "Split the operation on the line above into chunks; for attention, use "
        "torch.nn.functional.scaled_dot_product_attention, which never builds the full attention matrix."
    )
    yield "Shard the model over devices: Trainer(strategy='fsdp')."


def _full(situation: Situation) -> Iterator[str]:
    if situation.cause == "limited":
        yield "Raise the fraction in torch.cuda.set_per_process_memory_fraction, or remove the call."
    if situation.function in WITHOUT_GRADIENTS:
        yield (
            "This step needs no gradients: keep Trainer(inference_mode=True), store no outputs on the device between "
            "batches, and use a smaller batch_size in its DataLoader."
        )
    if situation.phase == "optimizer":
        yield _optimizer(situation)
    if situation.largest == OTHER_TENSORS:
        yield _HELD_BY_PYTHON
    if situation.largest in (None, UNHELD):
        modules = " and ".join(situation.modules) or MOST_SAVED
        yield f"Checkpoint {modules}: {CHECKPOINT}"
    yield _smaller_batch(situation)
    if precision := _precision(situation):
        yield precision
    yield _optimizer(situation)
    yield "Shard parameters, gradients and optimizer state over devices: Trainer(strategy='fsdp')."


def _host(situation: Situation) -> Iterator[str]:
    if situation.cause == "limited":
        yield (
            "Raise the limit: ulimit -v unlimited in the shell that starts the program, or more memory for its "
            "container or job (docker run --memory, sbatch --mem)."
        )
    workers, waits = _workers(situation), situation.phase in ("data_wait", SETUP)
    if workers > 1 or (workers and waits):
        fewer = f"num_workers={workers // 2}" + (", prefetch_factor=1" if workers > 1 else "")
        yield (
            f"Use fewer data loading processes: DataLoader({fewer}), and memory-map large arrays with "
            "numpy.load(mmap_mode='r')."
        )
    elif waits:
        yield "Memory-map large files instead of reading them: numpy.load(mmap_mode='r'), torch.load(mmap=True)."
    if situation.phase == SETUP:
        yield (
            "Create large modules in configure_model with fully_shard, so that each process holds its shard only, or "
            "on torch.device('meta') until their weights are loaded."
        )
        if _has_full_precision(situation):
            yield 'Halve the model itself with Trainer(precision="bf16-true").'
    if situation.phase == "optimizer":
        yield _optimizer(situation)
    if situation.largest == HOST_REST:
        yield (
            "Look for growing containers: lists of step outputs (store loss.item() or .detach().cpu()), caches in a "
            "Dataset; lightning-memprof show has the RSS of every step."
        )
    if situation.largest == OTHER_TENSORS:
        yield _HELD_BY_PYTHON
    yield _smaller_batch(situation)
    if precision := _precision(situation):
        yield precision
    if situation.function not in WITHOUT_GRADIENTS:
        yield f"Checkpoint {MOST_SAVED}: {CHECKPOINT}"
    yield _optimizer(situation)


def _smaller_batch(situation: Situation) -> str:
    times = 2 * (whole(situation.training, "accumulate_grad_batches") or 1)
    size = _batch_size(situation)
    half = f"DataLoader(batch_size={size // 2})" if size and size > 1 else "half the batch size"
    if situation.function in WITHOUT_GRADIENTS:
        return f"Use {half}: outside of training this does not change the results."
    return f"Use {half} and Trainer(accumulate_grad_batches={times}): same gradients from smaller batches."


def _precision(situation: Situation) -> str | None:
    return 'Halve the activations with Trainer(precision="bf16-mixed").' if _has_full_precision(situation) else None


def _has_full_precision(situation: Situation) -> bool:
    return (text(situation.training, "precision") or "32-true").startswith(("32", "64"))


def _optimizer(situation: Situation) -> str:
    optimizers = situation.training.get("optimizers")
    first = optimizers[0] if isinstance(optimizers, list) and optimizers and isinstance(optimizers[0], dict) else {}
    name = text(first, "name") or "AdamW"
    if situation.is_host or first.get("fused") is True:
        return f"Use an optimizer with less state: an 8-bit {name} (bitsandbytes), or torch.optim.Adafactor."
    return (
        f"Reduce the memory of the optimizer step: {name}(..., fused=True) avoids the parameter-sized temporaries of "
        "foreach=True; an 8-bit optimizer (bitsandbytes) needs a quarter of the state."
    )


def _batch_size(situation: Situation) -> int | None:
    return _first_loader(situation, "batch_size")


def _workers(situation: Situation) -> int:
    return _first_loader(situation, "num_workers") or 0


def _first_loader(situation: Situation, key: str) -> int | None:
    loaders = situation.training.get("dataloaders")
    first = loaders[0] if isinstance(loaders, list) and loaders and isinstance(loaders[0], dict) else {}
    return whole(first, key)
