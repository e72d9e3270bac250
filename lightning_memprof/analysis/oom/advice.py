"""Three things to try where memory ran out, each with a setting of Lightning or torch to try it with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.analysis.run.rows import text, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["HOST_REST", "OTHER_TENSORS", "SETUP", "UNHELD", "Situation", "next_steps"]

STEPS: Final = 3
_KEPT: Final = (
    "Look who keeps the tensors that are listed above: many of one size that outlive their step are a list's or an "
    "attribute's (keep loss.item(), or .detach().cpu())."
)
SETUP: Final = "setup"
WITHOUT_GRADIENTS: Final = ("validation_step", "test_step", "predict_step")
# What the model, its optimizers and Python's own tensors leave of the allocated bytes.
UNHELD: Final = "the rest: what autograd keeps for backward, and temporaries"

OTHER_TENSORS: Final = "other tensors that Python holds"
HOST_REST: Final = "the rest: Python's objects, libraries, and what only autograd holds"


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What the advice depends on.

    Attributes:
        cause: why it did not fit.
        is_host: whether it was the host's memory.
        phase: of the step; :data:`SETUP` before the first one.
        function: the module's step function.
        modules: those that hold most, largest first.
        largest: what holds most, in words; None where it is not known.
        is_expandable: whether the allocator's segments are expandable already.
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
    """Return three steps, the likeliest to help first."""
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
            "Segments are expandable already: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,"
            "garbage_collection_threshold:0.8, so that blocks that lie unused are given back earlier."
        )
    else:
        yield (
            "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the program starts: segments then grow, and "
            "free pieces no longer lie between them."
        )
    yield (
        "Give every step the same shapes: pad or bucket the batches, and DataLoader(drop_last=True); pieces of one "
        "size are used again."
    )
    yield "Call torch.cuda.empty_cache() between stages of different shapes, in on_validation_end for instance."
    yield _smaller_batch(situation)


def _other_process(situation: Situation) -> Iterator[str]:
    yield "Look who is on the device with nvidia-smi, and end what is left over of earlier runs."
    if (whole(situation.training, "world_size") or 1) > 1:
        yield "See that each rank has a device of its own: Trainer(devices=...) with as many devices as ranks."
    else:
        yield (
            "Take a device that is free: Trainer(devices=lightning.pytorch.accelerators.find_usable_cuda_devices(1)), "
            "or CUDA_VISIBLE_DEVICES."
        )
    yield (
        "Where the device has to be shared, agree on shares with torch.cuda.set_per_process_memory_fraction(0.5) in "
        "each process."
    )
    yield _smaller_batch(situation)


def _setup(situation: Situation) -> Iterator[str]:
    """Before the first step there is neither a batch nor an activation: it is the model, and what is loaded."""
    if situation.cause == "limited":
        yield "Raise what torch.cuda.set_per_process_memory_fraction allows this process, or leave the call out."
    yield (
        "Shard the model over devices: Trainer(strategy=ModelParallelStrategy()) and fully_shard in configure_model, "
        "or Trainer(strategy='fsdp')."
    )
    if _has_full_precision(situation):
        yield 'Halve the model itself with Trainer(precision="bf16-true").'
    yield (
        "Load weights with torch.load(..., map_location='cpu', mmap=True): loaded to the device they lie there twice "
        "until load_state_dict is done."
    )
    yield "Keep what need not be there on the host: large tables and buffers, and models that only evaluate."


def _too_large(situation: Situation) -> Iterator[str]:
    yield _smaller_batch(situation)
    if precision := _precision(situation):
        yield precision
    yield (
        "Split the operation on the line above into chunks; for attention, "
        "torch.nn.functional.scaled_dot_product_attention never builds the whole matrix of weights."
    )
    yield "Shard what is this large over devices: Trainer(strategy='fsdp')."


def _full(situation: Situation) -> Iterator[str]:
    if situation.cause == "limited":
        yield "Raise what torch.cuda.set_per_process_memory_fraction allows this process, or leave the call out."
    if situation.function in WITHOUT_GRADIENTS:
        yield (
            "This step needs no gradients: leave Trainer(inference_mode=True), keep no outputs on the device between "
            "batches, and give its DataLoader a smaller batch_size."
        )
    if situation.phase == "optimizer":
        yield _optimizer(situation)
    if situation.largest == OTHER_TENSORS:
        yield _KEPT
    if situation.largest in (None, UNHELD):
        where = (
            f" {' and '.join(situation.modules)}" if situation.modules else " the modules that keep most for backward"
        )
        yield f"Checkpoint{where}: wrap their forward in torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
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
            f"Let fewer processes load data: DataLoader({fewer}), and map large arrays from disk with "
            "numpy.load(mmap_mode='r')."
        )
    elif waits:
        yield "Map large files instead of reading them: numpy.load(mmap_mode='r'), torch.load(mmap=True)."
    if situation.phase == SETUP:
        yield (
            "Make large modules in configure_model under fully_shard, where each process holds its part, or on "
            "torch.device('meta') until their weights are loaded."
        )
        if _has_full_precision(situation):
            yield 'Halve the model itself with Trainer(precision="bf16-true").'
    if situation.phase == "optimizer":
        yield _optimizer(situation)
    if situation.largest == HOST_REST:
        yield (
            "Look for what grows: lists that keep a step's outputs (keep loss.item(), or .detach().cpu()), caches in "
            "a Dataset; lightning-memprof show has the resident size of every step."
        )
    if situation.largest == OTHER_TENSORS:
        yield _KEPT
    yield _smaller_batch(situation)
    if precision := _precision(situation):
        yield precision
    if situation.function not in WITHOUT_GRADIENTS:
        yield (
            "Checkpoint the modules that keep most for backward: wrap their forward in "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
        )
    yield _optimizer(situation)


def _smaller_batch(situation: Situation) -> str:
    times = 2 * (whole(situation.training, "accumulate_grad_batches") or 1)
    size = _batch_size(situation)
    half = f"DataLoader(batch_size={size // 2})" if size and size > 1 else "half the batch size"
    if situation.function in WITHOUT_GRADIENTS:
        return f"Take {half}: nothing else is changed by it outside of training."
    return f"Take {half} and Trainer(accumulate_grad_batches={times}): the same gradients from smaller pieces."


def _precision(situation: Situation) -> str | None:
    return 'Halve the activations with Trainer(precision="bf16-mixed").' if _has_full_precision(situation) else None


def _has_full_precision(situation: Situation) -> bool:
    return (text(situation.training, "precision") or "32-true").startswith(("32", "64"))


def _optimizer(situation: Situation) -> str:
    optimizers = situation.training.get("optimizers")
    first = optimizers[0] if isinstance(optimizers, list) and optimizers and isinstance(optimizers[0], dict) else {}
    name = text(first, "name") or "AdamW"
    if situation.is_host or first.get("fused") is True:
        return f"Keep less state for each parameter: an 8-bit {name} (bitsandbytes), or torch.optim.Adafactor."
    return (
        f"Make the optimizer's step need less: {name}(..., fused=True) needs no intermediates of the size of "
        "all parameters, as foreach=True does; an 8-bit one (bitsandbytes) keeps a quarter of the state."
    )


def _batch_size(situation: Situation) -> int | None:
    return _first_loader(situation, "batch_size")


def _workers(situation: Situation) -> int:
    return _first_loader(situation, "num_workers") or 0


def _first_loader(situation: Situation, key: str) -> int | None:
    loaders = situation.training.get("dataloaders")
    first = loaders[0] if isinstance(loaders, list) and loaders and isinstance(loaders[0], dict) else {}
    return whole(first, key)
