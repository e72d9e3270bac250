"""The storages that operators make on a device, from their first tensor to their end."""

from __future__ import annotations

import weakref
from array import array
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_memprof.capture.observe import Link, wrapped
from lightning_memprof.capture.sources.tensors import dense_parts
from lightning_memprof.capture.torch_internals import (
    DataDependentOutputException,
    FakeTensor,
    TorchDispatchMode,
    _current_graph_task_id,
    tree_leaves,
)
from lightning_memprof.errors import MemprofError
from lightning_memprof.estimation.kernels import Buffer, InPlace, in_order, kernel_buffers, laid_out, storage_bytes
from lightning_memprof.estimation.program_lines import LOOPS, ON_CUDA, user_line
from lightning_memprof.estimation.requests import Requests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import nn

    from lightning_memprof.estimation.simulated_device import Target


_READS: Final = ("aten._local_scalar_dense.default", "numpy")
_GEMM: Final = frozenset({"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"})
# A loop that waits for a value never ends.
_MOST_READS: Final = 50_000
GRANULE: Final = 512
"""CUDA's allocator rounds requests up to this many bytes."""
LABELS: Final = ("category", "dtype", "module", "operator")


class Part(NamedTuple):
    """Where a part of a step begins.

    Attributes:
        position: in the requests.
        step: number of the optimizer's step, from 0.
        name: ``forward``, ``backward``, ``optimizer`` or ``validation``.
    """

    position: int
    step: int
    name: str


class Peak(NamedTuple):
    """The moment with most live bytes.

    Attributes:
        live_bytes: in granules.
        position: of the request that reaches it.
        numbers: of the live storages.
    """

    live_bytes: int
    position: int
    numbers: tuple[int, ...]


class Values(NamedTuple):
    """The values that are assumed where a program reads those of tensors."""

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


class _Names:
    """Numbers for names, so that a row is a few bytes."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []

    def number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self._names)
            self._names.append(name)
        return self._numbers[name]

    def __getitem__(self, number: int) -> str:
        return self._names[number]

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, kw_only=True)
class StorageLog:
    """The storages of a fit: when each is made and ends, and what it is.

    Attributes:
        granule: bytes to which each storage is rounded up: 512 on CUDA, 1 on the CPU.
        requests: allocations and frees, in order.
        sizes: bytes by number of the storage.
        parts: the parts of the steps.
        optional: numbers of the storages that a library may need or not; they do not count as live.
    """

    granule: int
    requests: Requests = field(default_factory=Requests)
    sizes: array[int] = field(default_factory=lambda: array("q"))
    parts: list[Part] = field(default_factory=list)
    optional: set[int] = field(default_factory=set)
    _labels: dict[str, array[int]] = field(default_factory=lambda: {name: array("l") for name in LABELS})
    _names: _Names = field(default_factory=_Names)
    _changed: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def add(self, size: int, stream: int = 0, **labels: str) -> int:
        """Add a storage with all of :data:`LABELS`; return its number."""
        number = self.requests.allocate(size, stream)
        self.sizes.append(size)
        for name, column in self._labels.items():
            column.append(self._names.number(labels[name]))
        return number

    def again(self, number: int, size: int, stream: int) -> int:
        """Add a storage like another one; return its number."""
        labels = {name: self._names[column[number]] for name, column in self._labels.items()}
        return self.add(size, stream, **labels)

    def begin(self, step: int, part: str) -> None:
        """Note that a part of a step begins."""
        self.parts.append(Part(len(self.requests), step, part))

    def set_category(self, number: int, category: str) -> None:
        """Set the category of a storage, of a gradient from now on: before, it is a temporary."""
        before, now = self._labels["category"][number], self._names.number(category)
        if before != now and category == "gradient":
            self._changed.setdefault(number, []).append((len(self.requests), before))
        self._labels["category"][number] = now

    def set_module(self, number: int, module: str) -> None:
        """Change the module that a storage belongs to."""
        self._labels["module"][number] = self._names.number(module)

    def label(self, number: int, label: str, position: int) -> str:
        """Return a label of a storage after the request at ``position``."""
        if label == "category":
            for since, before in self._changed.get(number, ()):
                if position < since:
                    return self._names[before]
        return self._names[self._labels[label][number]]

    def rounded(self, number: int) -> int:
        """Return what a storage takes of the allocator, in bytes; 0 for an optional one."""
        return 0 if number in self.optional else -(-self.sizes[number] // self.granule) * self.granule

    def live(self) -> Iterator[int]:
        """Yield the live bytes after each request."""
        live = number = 0
        for event in self.requests.events:
            if event < 0:
                live -= self.rounded(~event)
            else:
                live += self.rounded(number)
                number += 1
            yield live

    def curve(self, first: int, points: int) -> dict[str, list[int]]:
        """Return live bytes by category among the requests from position ``first``.

        Args:
            first: where the curve begins.
            points: at most so many; each is the moment with most live bytes of a range of requests, in order.
        """
        events = self.requests.events
        width = max(1, -(-(len(events) - first) // points))
        live = dict.fromkeys(range(len(self._names)), 0)
        number, total, highest = 0, 0, -1
        found: list[dict[int, int]] = []
        category = self._labels["category"][:]
        for owner, earlier in self._changed.items():
            category[owner] = earlier[0][1]
        changes = self._changes()
        for position, event in enumerate(events):
            while changes and changes[-1][0] <= position:
                _, owner, now = changes.pop()
                size = self.rounded(owner)
                live[category[owner]] -= size
                live[now] += size
                category[owner] = now
            made = event >= 0
            owner, number = (number, number + 1) if made else (~event, number)
            size = self.rounded(owner) if made else -self.rounded(owner)
            live[category[owner]] += size
            total += size
            if position < first:
                continue
            if (position - first) % width == 0:
                found.append({})
                highest = -1
            if total > highest:
                highest, found[-1] = total, dict(live)
        used = [name for name in live if any(moment[name] for moment in found)]
        return {self._names[name]: [moment[name] for moment in found] for name in used}

    def _changes(self) -> list[tuple[int, int, int]]:
        """Return when a storage's category changes, the storage, and its category from then on; the last one first."""
        found = []
        for number, changes in self._changed.items():
            now = [before for _, before in changes[1:]] + [self._labels["category"][number]]
            found += [(since, number, after) for (since, _), after in zip(changes, now, strict=True)]
        return sorted(found, key=lambda change: change[0], reverse=True)

    def peak(self, first: int = 0) -> Peak:
        """Return the first moment with most live bytes among the requests from position ``first``."""
        live_bytes, position = max(
            ((live, -position) for position, live in enumerate(self.live()) if position >= first), default=(0, 0)
        )
        return Peak(live_bytes, -position, tuple(self._live_at(-position)))

    def _live_at(self, position: int) -> Iterable[int]:
        numbers: dict[int, None] = {}
        made = 0
        for event in islice(self.requests.events, position + 1):
            if event < 0:
                del numbers[~event]
            else:
                numbers[made] = None
                made += 1
        return numbers

    def part_at(self, position: int) -> Part | None:
        """Return the part of a step that a request belongs to; None before the first step."""
        return next((part for part in reversed(self.parts) if part.position <= position), None)

    def by(self, peak: Peak, *labels: str) -> Counter[tuple[str, ...]]:
        """Return the bytes that are live at a peak by their labels."""
        found: Counter[tuple[str, ...]] = Counter()
        for number in peak.numbers:
            found[tuple(self.label(number, label, peak.position) for label in labels)] += self.rounded(number)
        return found


class StorageTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each storage that operators make on a device, and its end.

    Attributes:
        log: the storages.
        assumed: the places where values were read from tensors, which have none.

    Args:
        device: the device whose storages count.
        target: the kind of device to imitate.
        values: assumed where the program reads a value of a tensor.
    """

    def __init__(self, device: torch.device, target: Target, values: Values | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = StorageLog(granule=target.granule)
        self.assumed: dict[Assumed, None] = {}
        self._reads: Counter[str] = Counter()
        self._values = values or Values()
        self._kind = device.type
        self._target = target
        self._in_place = InPlace(device) if target.is_gpu else None
        self._with_workspace: set[str] = set()
        self._part = "setup"
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        # Numbers of storages that were freed by a change of their size to 0.
        self._empty: set[int] = set()
        self._paths: dict[nn.Module, str] = {}
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
        self._paths = {module: path for path, module in model.named_modules()}
        self._hooks.callback(register_module_forward_pre_hook(self._enter).remove)
        self._hooks.callback(register_module_forward_hook(self._leave, always_call=True).remove)

    def mark(self, step: int, part: str) -> None:
        """Note that a part of a step begins, by the name that :class:`Part` gives it."""
        self._part = part
        self._reads.clear()
        self.log.begin(step, part)

    def label(self, tensors: Iterable[tuple[str | None, Any]], category: str) -> None:
        """Set the category of tensors' storages, and their module's path where it is not None."""
        for path, tensor in tensors:
            for part in dense_parts(tensor):
                known = self._live.get(part.untyped_storage()._cdata)  # noqa: SLF001 no public one
                if known is not None:
                    self.log.set_category(known[1], category)
                    if path is not None:
                        self.log.set_module(known[1], path)

    def __enter__(self) -> StorageTracer:  # noqa: PYI034 Python 3.10 has no Self
        # No dispatch mode sees a storage change its size, as FSDP's gathered parameters do.
        self._hooks.enter_context(wrapped(torch.UntypedStorage, "resize_", self._resizing))
        self._hooks.enter_context(wrapped(torch.Tensor, "__format__", _formatting))
        self._hooks.enter_context(wrapped(torch.Tensor, "numpy", self._to_numpy))
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
        try:
            result = func(*args, **kwargs or {})
        except DataDependentOutputException:
            result = self._assume(name, args)
        if self._target.is_gpu:
            result = laid_out(name, args, result)
        for leaf in tree_leaves(in_order(name, result)):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self._kind:
                self._add(leaf, name, args)
            elif isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda":
                raise MemprofError(f"estimate: {ON_CUDA.format(place=f' at {user_line()}')}")
        if name in _GEMM:
            self._first_gemm()
        if self._target.is_gpu and not self._is_paused:
            self._note_buffers(kernel_buffers(name, args, result, self._target.resident_threads))
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
        if (path := self._paths.get(module)) is not None:
            self._modules.append(path)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if module in self._paths and self._modules:
            self._modules.pop()

    def _add(self, tensor: torch.Tensor, operator: str, args: Any) -> None:
        for part in dense_parts(tensor):
            storage = part.untyped_storage()
            key = storage._cdata  # noqa: SLF001 no public one
            known = self._live.get(key)
            if (known is not None and known[0]() is storage) or storage.nbytes() == 0:
                continue
            number = self._new(storage_bytes(operator, args, part), self._category(), str(part.dtype), operator)
            self._live[key] = (weakref.ref(storage, self._ender(key)), number)

    def _ender(self, key: int) -> Any:
        def ended(ref: object) -> None:
            known = self._live.get(key)
            if known is not None and known[0] is ref:
                del self._live[key]
                self._free(known[1])

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
            if known is not None and known[0]() is storage:
                self._free(known[1])
                number = known[1]
                if size:
                    number = self.log.again(number, size, self._stream_number())
                    self._live[key] = (known[0], number)
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
        # Autograd also runs inside a forward, for a penalty of gradients. Checkpointed modules run forward again inside
        # autograd: what they make there is saved too.
        is_backward = _current_graph_task_id() != -1
        return "temporary" if is_backward and not self._modules else "activation"

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
