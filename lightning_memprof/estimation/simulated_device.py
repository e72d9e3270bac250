"""A device without memory: tensors on it have shape, dtype and device, and operators on them compute no values.

torch lets one backend be written in Python, under the key PrivateUse1. On that device autograd, autocast and the
optimizers choose what they choose on CUDA, which they do not on ``cpu`` or ``meta``.
"""

from __future__ import annotations

import types
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import _foreach_supported_types
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from lightning_memprof.errors import MemprofError
from lightning_memprof.estimation.attention import CudaAttention
from lightning_memprof.estimation.autocast import cuda_autocast
from lightning_memprof.estimation.storage_log import GRANULE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

__all__ = ["NAME", "Target", "without_data"]

NAME: Final = "simgpu"


class _Mode(FakeTensorMode):
    # A constant is made on the CPU and copied: the device cannot make one.
    avoid_device_init: ClassVar[property] = property(lambda _: True)  # type: ignore[assignment]


def _register() -> None:
    """Register the device in this process; torch has no way to take that back.

    Raises:
        MemprofError: another backend is registered, which happens on machines with such an accelerator.

    """
    current = torch._C._get_privateuse1_backend_name()  # noqa: SLF001 no public one
    if current == NAME:
        return
    if current != "privateuseone":
        raise MemprofError(f"estimate: this process uses the backend {current!r}; torch has room for one: use another")
    module = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: 1,
        current_device=lambda: 0,
        device=lambda _: ExitStack(),
        manual_seed_all=lambda _: None,
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda *_: None,
        synchronize=lambda *_: None,
        empty_cache=lambda: None,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )
    _setup_privateuseone_for_python_backend(NAME, backend_module=module)


@dataclass(frozen=True, kw_only=True)
class Target:
    """The kind of device to imitate.

    Attributes:
        is_gpu: with CUDA's kernels and rounding, otherwise the CPU's.
        workspace_bytes: what cuBLAS keeps for each thread that multiplies matrices.

    """

    is_gpu: bool = True
    workspace_bytes: int = 0

    @property
    def kind(self) -> str:
        """Type of the device on which the operators run without data."""
        return NAME if self.is_gpu else "cpu"

    @property
    def granule(self) -> int:
        """Bytes to which storages are rounded up."""
        return GRANULE if self.is_gpu else 1

    @contextmanager
    def simulated(self) -> Iterator[torch.device]:
        """Run the operators inside without data, those on the returned device as the target would choose them.

        Raises:
            MemprofError: this process uses another backend of its own.

        """
        with ExitStack() as undo:
            if self.is_gpu:
                _register()
                undo.enter_context(cuda_autocast(NAME))
                undo.enter_context(CudaAttention())
                _foreach_supported_types.append(FakeTensor)
                undo.callback(_foreach_supported_types.remove, FakeTensor)
            undo.enter_context(_Mode(allow_non_fake_inputs=True))
            yield torch.device(NAME, 0) if self.is_gpu else torch.device("cpu")


def without_data(model: nn.Module, device: torch.device) -> None:
    """Replace parameters and buffers by ones without data on a device; tied ones stay tied.

    ``Module.to`` cannot: it swaps tensors in place, which fakes refuse.
    """
    made: dict[int, tuple[Any, Any]] = {}

    def replaced(tensor: Any) -> Any:
        if id(tensor) not in made:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, torch.nn.Parameter):
                fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
            # The original is kept: its number must not be given to another tensor.
            made[id(tensor)] = (fake, tensor)
        return made[id(tensor)][0]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):  # noqa: SLF001 setattr would run the user's code
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = replaced(tensor)
