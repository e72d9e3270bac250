"""The storages that operators make on a device, from their first tensor to their end."""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_memprof.capture.observe import Link, wrapped
from lightning_memprof.capture.sources.tensors import dense_parts
from lightning_memprof.capture.torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    TorchDispatchMode,
    _current_graph_task_id,
    tree_leaves,
)
from lightning_memprof.errors import MemprofError
from lightning_memprof.estimation.kernels import (
    Buffer,
    InPlace,
    in_order,
    kernel_buffers,
    laid_out,
    likely_result,
    storage_bytes,
)
from lightning_memprof.estimation.program_lines import LOOPS, ON_CUDA, is_in_metric, user_line
from lightning_memprof.estimation.requests import Part, StorageLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import nn

    from lightning_memprof.estimation.simulated_device import Target


# Operators that copy between devices, and which of their arguments they read.
_MOVES: Final = MappingProxyType({"aten._to_copy.default": 0, "aten.copy_.default": 1})
_READS: Final = ("aten._local_scalar_dense.default", "numpy")
_GEMM: Final = frozenset({"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"})
# Of a line in a part of a step: a loop that waits for a value never ends, since that does not change.
_MOST_READS: Final = 5_000


class Values(NamedTuple):
    """The values that are assumed where a program reads those of tensors.

    Attributes:
        number: where it reads a number.
        condition: where it reads True or False.
    """

    number: int = 1
    condition: bool = False


class Assumed(NamedTuple):
    """A place where the program reads a value of a tensor.

    Attributes:
        place: file and line.
        is_condition: whether the value is True or False.
    """

    place: str
    is_condition: bool


class StorageTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each storage that operators make on a device, and its end.

    Attributes:
        log: the storages.
        host: those that operators make in host memory beside a GPU.
        moved: bytes that each step copies to the device and back, by step and whether they go to the device.
        assumed: the places where values were read from tensors, which have none.
        metrics: the places where a metric has shapes that depend on values.

    Args:
        device: the device whose storages count.
        target: the kind of device to imitate.
        values: assumed where the program reads a value of a tensor.
    """

    def __init__(self, device: torch.device, target: Target, values: Values | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = StorageLog(granule=target.granule)
        self.host = StorageLog(granule=1)
        self.moved: Counter[tuple[int, bool]] = Counter()
        self.assumed: dict[Assumed, None] = {}
        self.metrics: dict[str, None] = {}
        self._reads: Counter[str] = Counter()
        self._values = values or Values()
        self._kind = device.type
        self._target = target
        self._in_place = InPlace(device) if target.is_gpu else None
        self._with_workspace: set[str] = set()
        self._step, self._part = 0, "setup"
        self._live: dict[int, tuple[weakref.ref[Any], StorageLog, int]] = {}
        # Numbers of storages that were freed by a change of their size to 0.
        self._empty: set[int] = set()
        # By the identity of a module, which is kept alive.
        self._paths: dict[int, tuple[str, nn.Module]] = {}
        self._modules: list[str] = []
        self._hooks = ExitStack()
        self._made: str | None = None
        self._is_paused = False
        self._stream = getattr(getattr(torch, self._kind, None), "current_stream", None)

    @contextmanager
    def making(self, category: str) -> Iterator[None]:
        """Give a category to the storages that are made inside."""
        earlier, self._made = self._made, category
        try:
            yield
        finally:
            self._made = earlier

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing inside: operators that compute shapes alone."""
        earlier, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = earlier

    def name_modules(self, model: nn.Module) -> None:
        """Give each storage that follows the path of the module in whose forward it is made."""
        self._paths = {id(module): (path, module) for path, module in model.named_modules()}
        self._hooks.callback(register_module_forward_pre_hook(self._enter).remove)
        self._hooks.callback(register_module_forward_hook(self._leave, always_call=True).remove)

    def mark(self, step: int, part: str) -> None:
        """Note that a part of a step begins, by the name that :class:`Part` gives it."""
        self._step, self._part = step, part
        self._reads.clear()
        self.log.parts.append(Part(len(self.log.requests), step, part))

    def label(self, tensors: Iterable[tuple[str | None, Any]], category: str) -> None:
        """Set the category of tensors' storages, and their module's path where it is not None."""
        for path, tensor in tensors:
            for part in dense_parts(tensor):
                known = self._live.get(part.untyped_storage()._cdata)  # noqa: SLF001 no public one
                if known is not None:
                    _, log, number = known
                    log.set_category(number, category)
                    if path is not None:
                        log.set_module(number, path)

    def __enter__(self) -> StorageTracer:  # noqa: PYI034 Python 3.10 has no Self
        # No dispatch mode sees a storage change its size, as FSDP's gathered parameters do.
        self._hooks.enter_context(wrapped(torch.UntypedStorage, "resize_", self._resizing))
        self._hooks.enter_context(wrapped(torch.Tensor, "__format__", _formatting))
        self._hooks.enter_context(wrapped(torch.Tensor, "numpy", self._to_numpy))
        # No tensor without data can be pinned.
        self._hooks.enter_context(wrapped(torch.Tensor, "pin_memory", self._pinning))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        self._hooks.close()
        self._paths.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        # The DTensor splits itself; the operators on its parts come here.
        if DTensor in types:
            return NotImplemented
        if self._is_paused:
            return func(*args, **kwargs or {})
        name = str(func)
        if self._in_place is not None:
            func = self._in_place.operator(name, args) or func
        result = self._run(func, name, args, kwargs or {})
        if self._target.is_gpu:
            result = laid_out(name, args, result)
        self._note_move(name, args, result)
        for leaf in tree_leaves(in_order(name, result)):
            kind = leaf.device.type if isinstance(leaf, torch.Tensor) else ""
            if kind == self._kind:
                self._add(leaf, name, args)
            elif kind == "cpu" and isinstance(leaf, FakeTensor):
                self._add_on_host(leaf, name, is_pinned=bool((kwargs or {}).get("non_blocking")))
            elif kind == "cuda":
                raise MemprofError(f"estimate: {ON_CUDA.format(place=f' at {user_line()}')}")
        if name in _GEMM:
            self._first_gemm()
        if self._target.is_gpu and not self._is_paused:
            self._note_buffers(kernel_buffers(name, args, result, self._target.resident_threads))
        return result

    def _run(self, func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            return self._assume(name, args)
        except DynamicOutputShapeException:
            result = likely_result(func, args, kwargs) if is_in_metric() else None
            if result is None:
                raise
            self.metrics[user_line().partition(" (in ")[0]] = None
            return result

    def _note_buffers(self, buffers: Iterable[Buffer]) -> None:
        numbers = []
        for buffer in buffers:
            number = self._new(buffer.size, "workspace", "torch.uint8", buffer.label)
            if buffer.is_optional:
                self.log.optional.add(number)
            if buffer.is_optional or buffer.is_brief:
                self.log.requests.free(number)
            else:
                numbers.append(number)
        for number in numbers:
            self.log.requests.free(number)

    def _enter(self, module: nn.Module, _: Any) -> None:
        if (known := self._paths.get(id(module))) is not None:
            self._modules.append(known[0])

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if id(module) in self._paths and self._modules:
            self._modules.pop()

    def _add(self, tensor: torch.Tensor, operator: str, args: Any) -> None:
        for part in dense_parts(tensor):
            storage = part.untyped_storage()
            key = storage._cdata  # noqa: SLF001 no public one
            known = self._live.get(key)
            if (known is not None and known[0]() is storage) or storage.nbytes() == 0:
                continue
            number = self._new(storage_bytes(operator, args, part), self._category(), str(part.dtype), operator)
            self._live[key] = (weakref.ref(storage, self._ender(key)), self.log, number)

    def _add_on_host(self, tensor: torch.Tensor, operator: str, *, is_pinned: bool) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()  # noqa: SLF001 no public one
        known = self._live.get(key)
        if (known is None or known[0]() is not storage) and nbytes:
            # Source: PowerOf2Ceil in aten/src/ATen/core/CachingHostAllocator.h.
            size = 1 << (nbytes - 1).bit_length() if is_pinned else nbytes
            dtype, category = str(tensor.dtype), self._category()
            number = self.host.add(size, category=category, dtype=dtype, module="", operator=operator)
            self._live[key] = (weakref.ref(storage, self._ender(key)), self.host, number)

    def _note_move(self, operator: str, args: Any, result: Any) -> None:
        if operator in _MOVES and args[_MOVES[operator]].device.type != result.device.type:
            self.moved[self._step, result.device.type == self._kind] += result.nbytes

    def _pinning(self, link: Link) -> Callable[..., Any]:
        def pin(tensor: torch.Tensor, *args: Any) -> Any:
            if not isinstance(tensor, FakeTensor):
                return link.call(tensor, *args)
            with self.paused():
                found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            self._add_on_host(found, "pin_memory", is_pinned=True)
            return found

        return pin

    def _ender(self, key: int) -> Any:
        def ended(ref: object) -> None:
            known = self._live.get(key)
            if known is not None and known[0] is ref:
                del self._live[key]
                if known[1] is self.log:
                    self._free(known[2])
                else:
                    known[1].requests.free(known[2])

        return ended

    def _free(self, number: int) -> None:
        if number not in self._empty:
            self.log.requests.free(number)
        self._empty.discard(number)

    def _resizing(self, link: Link) -> Callable[..., Any]:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = link.call(storage, size)
            key = storage._cdata  # noqa: SLF001 no public one
            known = self._live.get(key)
            if known is not None and known[0]() is storage and known[1] is self.log:
                number = known[2]
                self._free(number)
                if size:
                    number = self.log.again(number, size, self._stream_number())
                    self._live[key] = (known[0], self.log, number)
                else:
                    self._empty.add(number)
            return result

        return resize

    def _to_numpy(self, link: Link) -> Callable[..., Any]:
        def numpy(tensor: torch.Tensor, **named: Any) -> Any:
            if not isinstance(tensor, FakeTensor) or tensor.device.type != "cpu":
                return link.call(tensor, **named)
            number = self._assume("numpy", (tensor,))
            return np.full(tuple(tensor.shape), number, str(tensor.dtype).removeprefix("torch."))

        return numpy

    def _stream_number(self) -> int:
        # The CPU's stream has no number.
        return getattr(self._stream(), "number", 0) if self._stream is not None else 0

    def _category(self) -> str:
        if self._made is not None:
            return self._made
        if self._part not in {"forward", "backward"}:
            return "temporary"
        # Checkpointed modules run forward again inside autograd, and a penalty of gradients has gradients itself: what
        # they make is saved too.
        is_backward = _current_graph_task_id() != -1
        return "temporary" if is_backward and not torch.is_grad_enabled() else "activation"

    def _new(self, size: int, category: str, dtype: str, operator: str) -> int:
        module = self._modules[-1] if self._modules and category != "workspace" else ""
        return self.log.add(
            size, self._stream_number(), category=category, dtype=dtype, module=module, operator=operator
        )

    def _first_gemm(self) -> None:
        thread = "backward" if self._part == "backward" else "forward"
        if self._target.workspace_bytes and thread not in self._with_workspace:
            self._with_workspace.add(thread)
            self._new(self._target.workspace_bytes, "workspace", "torch.uint8", f"cuBLAS in {thread}")

    def _assume(self, name: str, args: Any) -> Any:
        is_condition = name not in _READS or args[0].dtype == torch.bool
        if place := user_line():
            self.assumed[Assumed(place, is_condition)] = None
            self._reads[place] += 1
            if self._reads[place] > _MOST_READS:
                raise MemprofError(f"estimate: {place} reads over {_MOST_READS:,} values in a step: {LOOPS}")
        return self._values.condition if is_condition else self._values.number


def _formatting(link: Link) -> Callable[..., str]:
    def formatted(tensor: torch.Tensor, spec: str) -> str:
        # torch formats the value of plain tensors only.
        is_number = isinstance(tensor, FakeTensor) and tensor.ndim == 0
        return format(tensor.item(), spec) if is_number else str(link.call(tensor, spec))

    return formatted
