"""Remedies for the memory of a device, as the program of its snapshot applies them."""

from __future__ import annotations

from typing import Final

from lightning_memprof.read.snapshot.frames import is_lightning, is_training
from lightning_memprof.read.snapshot.growth import Growth
from lightning_memprof.read.snapshot.report import DeviceReport

SMALLER_BATCH: Final = "Use a smaller batch with Trainer(accumulate_grad_batches=2): saved activations shrink with it."
SMALLER_PASSES: Final = "Use a smaller batch, and step the optimizer after several: saved activations shrink with it."
SMALLER_INPUT: Final = "Use a smaller batch or shorter inputs: activations and caches shrink with them."
HALF: Final = "Train in mixed precision: Trainer(precision='bf16-mixed')."
AUTOCAST: Final = "Train in mixed precision: torch.autocast('cuda', dtype=torch.bfloat16) around forward and loss."
SMALLER: Final = (
    "If these are weights, load them in fewer bytes (dtype=torch.bfloat16); if it is a cache, make it smaller."
)
WEIGHTS: Final = "Load the weights in fewer bytes: dtype=torch.bfloat16."
SAVED: Final = "Save fewer activations: torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)."
WITHOUT_GRADIENTS: Final = (
    "Run the model under torch.no_grad() if it does not train; else save fewer activations: "
    "torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)."
)
CACHE: Final = (
    "Make the cache smaller: a shorter maximum length, or fewer sequences at once; with vLLM, "
    "LLM(gpu_memory_utilization=..., max_model_len=...)."
)
PARAMETER_GRADIENTS: Final = (
    "Free gradients earlier: step each parameter in backward (Tensor.register_post_accumulate_grad_hook); with several "
    "GPUs, shard them: "
)
OPTIMIZER: Final = "Use an optimizer with smaller states, such as 8-bit Adam; with several GPUs, shard them: "
WHO_KEEPS: Final = (
    "Record a run with MemProfilerCallback(): if memory grows, its page names the variable that keeps it."
)


def smaller_batch(device: DeviceReport) -> str:
    """Return how to use a smaller batch."""
    if not is_training(device.snapshot):
        return SMALLER_INPUT
    return SMALLER_BATCH if is_lightning(device.snapshot) else SMALLER_PASSES


def fewer_bytes(device: DeviceReport) -> str:
    """Return how to use fewer bytes per number."""
    if not is_training(device.snapshot):
        return SMALLER
    return HALF if is_lightning(device.snapshot) else AUTOCAST


def sharded(device: DeviceReport, remedy: str) -> str:
    """Return a remedy that ends with how to shard a model."""
    how = "Trainer(strategy='fsdp')" if is_lightning(device.snapshot) else "torch.distributed.fsdp.fully_shard(model)"
    return f"{remedy}{how}."


def freed_growth(device: DeviceReport, growth: Growth) -> tuple[str, ...]:
    """Return how to free blocks that pile up."""
    keeps = (
        f"Find what keeps the tensors of {growth.site}, such as a list: store numbers (.item()) or copies on the host "
        "(.detach().cpu()), or clear it."
    )
    return (keeps, WHO_KEEPS) if is_lightning(device.snapshot) else (keeps,)
