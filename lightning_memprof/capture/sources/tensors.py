"""Bytes of tensors and their storages: parameters, buffers, gradients, optimizer state, the batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any, Final

import torch
from torch import nn

from lightning_memprof.capture.sources.compiled import plain_path
from lightning_memprof.capture.torch_internals import DisableTorchFunction, is_traceable_wrapper_subclass

# Types with their own storage, unless they are sparse.
PLAIN_TENSORS: Final = (torch.Tensor, nn.Parameter)
# Types of state entries whose size changes only with the number of entries.
_COUNTED_BY_KEY: Final = (torch.Tensor, int, float, bool, type(None))
_DEPTH: Final = 16
_COMPRESSED_ROWS: Final = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS: Final = ("ccol_indices", "row_indices", "values")


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with their own storage in a tensor: itself, or its components.

    For a ``DTensor`` that is this rank's part, for a sparse tensor its indices and values. The program's
    ``__torch_function__`` is not called. A tensor without storage, such as an uninitialized parameter, has none.
    """
    found: list[torch.Tensor] = []
    pending = [tensor]
    with DisableTorchFunction():
        while pending:
            part = pending.pop()
            if parts := _parts(part):
                pending.extend(parts)
                continue
            with suppress(NotImplementedError, RuntimeError, ValueError):
                part.untyped_storage()
                found.append(part)
    return found


def storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return the storages of a tensor's :func:`dense_parts`."""
    with DisableTorchFunction():
        return [part.untyped_storage() for part in dense_parts(tensor)]


def local_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return a tensor's storage on this rank; None if it has several, or none yet."""
    try:
        if type(tensor) in PLAIN_TENSORS:
            return tensor.untyped_storage()
        with DisableTorchFunction():
            local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
            return local.untyped_storage()
    except Exception:  # noqa: BLE001 sparse, functional and other wrapped tensors raise different exceptions
        return None


def storage_sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of all storages of tensors by ``untyped_storage()._cdata``.

    That is a storage's identity while it exists; the data pointer of an empty one is 0. On the meta device it has no
    bytes.
    """
    sizes: dict[int, int] = {}
    for tensor in tensors:
        found: Iterable[torch.UntypedStorage] = ()
        if type(tensor) in PLAIN_TENSORS:
            try:
                storage = tensor.untyped_storage()
                sizes[storage._cdata] = 0 if tensor.is_meta else storage.nbytes()  # noqa: SLF001 as in the docstring
            except (NotImplementedError, RuntimeError):
                found = storages(tensor)
        else:
            found = storages(tensor)
        for storage in found:
            sizes[storage._cdata] = storage.nbytes()  # noqa: SLF001 as in the docstring
    return sizes


def local_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's own elements on this rank, not of its whole storage."""
    if type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided:
        return 0 if tensor.is_meta else tensor.nbytes
    with suppress(NotImplementedError, RuntimeError, ValueError), DisableTorchFunction():
        parts = _parts(tensor)
        return sum(map(local_bytes, parts)) if parts else tensor.nbytes
    return 0


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the components of a tensor; none if it has its own storage."""
    if type(tensor) not in PLAIN_TENSORS and is_traceable_wrapper_subclass(tensor):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]
        return [part for part in inner if isinstance(part, torch.Tensor)]
    if tensor.layout is torch.strided:
        return ()
    if tensor.layout is torch.sparse_coo:
        return (tensor._indices(), tensor._values())  # noqa: SLF001 the public ones reject uncoalesced tensors
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [getattr(tensor, name)() for name in _COMPRESSED_ROWS]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [getattr(tensor, name)() for name in _COMPRESSED_COLUMNS]
    return ()


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested mappings, sequences, sets and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and not isinstance(value, (str, bytes)):
        inner: Iterable[Any] = ()
        if isinstance(value, Mapping):
            inner = value.values()
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            inner = value
        elif is_dataclass(value) and not isinstance(value, type):
            inner = (getattr(value, field.name) for field in fields(value))
        for part in inner:
            yield from tensors_in(part, depth - 1)


def batch_bytes(batch: Any) -> tuple[int, set[int]]:
    """Return the bytes of a batch, and the storages of which it is a slice, by ``untyped_storage()._cdata``.

    A slice of a larger tensor counts as the slice: the rest belongs to the data set. Several views of a storage count
    no more than the storage.
    """
    given: dict[int, tuple[int, int]] = {}
    for tensor in tensors_in(batch):
        key = size = 0
        for storage in storages(tensor):
            key, size = storage._cdata, size + storage.nbytes()  # noqa: SLF001 the data pointer of an empty one is 0
        given[key] = (given.get(key, (0, 0))[0] + local_bytes(tensor), size)
    return sum(min(used, size) for used, size in given.values()), {
        key for key, (used, size) in given.items() if used < size
    }


def optimizer_state_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Return the bytes of all tensors in the optimizers' state, including step counters, each storage once."""
    tensors = (tensor for optimizer in optimizers for tensor in tensors_in(dict(optimizer.state)))
    return sum(storage_sizes(tensors).values())


def fold(paths: Sequence[str], own: dict[str, int]) -> dict[str, int]:
    """Return the sum of each module's bytes and those of its sub-modules.

    Args:
        paths: of all modules, each after its parent, the root ``""`` first.
        own: bytes by path.
    """
    sums = dict.fromkeys(paths, 0)
    sums.update(own)
    for path in reversed(paths):
        if path:
            sums[path.rpartition(".")[0]] += sums[path]
    return sums


class ModelTensors:
    """The places of a model's parameters and buffers; holds no tensor.

    Places are read once: modules that are added later are not included.
    """

    def __init__(self, model: nn.Module) -> None:
        self._known_keys: tuple[list[int], set[int]] | None = None
        self.paths: list[str] = []
        self._buffers: list[tuple[dict[str, torch.Tensor | None], str]] = []
        self._parameters: list[tuple[dict[str, nn.Parameter | None], str, str]] = []
        # Parameters with several places, such as tied weights: each counts once in every module with a place.
        self._tied: list[tuple[dict[str, nn.Parameter | None], str, set[str]]] = []
        places: dict[int, tuple[dict[str, nn.Parameter | None], str, list[str]]] = {}
        for found, module in model.named_modules(remove_duplicate=False):
            path = plain_path(found)
            # A compiled module's wrapper comes first.
            if path == found or not self.paths or self.paths[-1] != path:
                self.paths.append(path)
            for name, parameter in module._parameters.items():  # noqa: SLF001 the place, not the tensor
                if parameter is not None:
                    places.setdefault(id(parameter), (module._parameters, name, []))[2].append(path)  # noqa: SLF001
            self._buffers += [(module._buffers, name) for name in module._buffers.keys()]  # noqa: SLF001, SIM118 a scripted module's have no other way
        for values, name, owners in places.values():
            if len(owners) == 1:
                self._parameters.append((values, name, owners[0]))
            else:
                self._tied.append((values, name, {above for path in owners for above in _and_above(path)}))

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters, each once."""
        slots = (*((values, name) for values, name, _ in self._parameters), *((v, n) for v, n, _ in self._tied))
        found = (_value(values, name) for values, name in slots)
        return [parameter for parameter in found if parameter is not None]

    def buffers(self) -> list[torch.Tensor]:
        """Return the buffers."""
        found = (_value(values, name) for values, name in self._buffers)
        return [buffer for buffer in found if buffer is not None]

    def storage_keys(self) -> set[int]:
        """Return the storages of parameters and buffers, by ``untyped_storage()._cdata``."""
        tensors = (*self.parameters(), *self.buffers())
        if not {nn.Parameter, torch.Tensor}.issuperset(map(type, tensors)):
            return set(storage_sizes(tensors))
        try:
            places = list(map(torch.Tensor.data_ptr, tensors))
        except RuntimeError:
            return set(storage_sizes(tensors))
        # Reading the data pointer costs a fifth of reading the storage. An empty tensor has none.
        if self._known_keys is None or self._known_keys[0] != places or 0 in places:
            self._known_keys = places, set(storage_sizes(tensors))
        return self._known_keys[1]

    def by_module(self) -> dict[str, list[int]]:
        """Return ``[parameter bytes, gradient bytes]`` of each module and those below it, shared parameters once."""
        own_bytes: dict[str, int] = {}
        own_gradients: dict[str, int] = {}
        for values, name, path in self._parameters:
            parameter = _value(values, name)
            if parameter is not None:
                own_bytes[path] = own_bytes.get(path, 0) + local_bytes(parameter)
                if parameter.grad is not None:
                    own_gradients[path] = own_gradients.get(path, 0) + local_bytes(parameter.grad)
        all_bytes, all_gradients = fold(self.paths, own_bytes), fold(self.paths, own_gradients)
        for values, name, paths in self._tied:
            parameter = _value(values, name)
            if parameter is not None:
                size = local_bytes(parameter)
                gradient_size = 0 if parameter.grad is None else local_bytes(parameter.grad)
                for path in paths:
                    all_bytes[path] += size
                    all_gradients[path] += gradient_size
        return {path: [all_bytes[path], all_gradients[path]] for path in self.paths}


def _value(values: Any, name: str) -> Any:
    return values[name] if name in values else None  # noqa: SIM401 the mapping of a scripted module has no ``get``


class PersistentBytes:
    """Bytes of a model and its optimizers that persist from step to step.

    A step that changes neither the tensors nor their sizes costs a third of counting them again.
    """

    def __init__(self, model: ModelTensors) -> None:
        self._model = model
        self._known: tuple[object, dict[str, int], dict[str, list[int]]] | None = None

    def count(self, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[dict[str, int], dict[str, list[int]]]:
        """Return bytes by category, each storage once, and :meth:`ModelTensors.by_module`; under FSDP2 this rank's."""
        parameters, buffers = self._model.parameters(), self._model.buffers()
        gradients = [parameter.grad for parameter in parameters]
        signature = _signature(parameters, gradients, buffers, optimizers)
        if self._known is None or signature is None or self._known[0] != signature:
            persistent = {
                "parameter_bytes": sum(storage_sizes(parameters).values()),
                "buffer_bytes": sum(storage_sizes(buffers).values()),
                "gradient_bytes": sum(storage_sizes(grad for grad in gradients if grad is not None).values()),
                "optimizer_state_bytes": optimizer_state_bytes(optimizers),
            }
            self._known = signature, persistent, self._model.by_module()
        return self._known[1], self._known[2]


def _signature(
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[torch.Tensor | None],
    buffers: Sequence[torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
) -> object:
    """Return a value that changes with the sizes of parameters, gradients, buffers and state; None if not cheap."""
    changing = [*(gradient for gradient in gradients if gradient is not None), *buffers]
    if not ({nn.Parameter}.issuperset(map(type, parameters)) and {torch.Tensor}.issuperset(map(type, changing))):
        return None
    if not {torch.strided}.issuperset([tensor.layout for tensor in (*parameters, *changing)]):
        return None
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    # Optimizer state may contain anything, such as a tensor beside the parameters' dictionaries.
    if not {dict}.issuperset(map(type, states)):
        return None
    if any(type(value) not in _COUNTED_BY_KEY for state in states[:1] for value in state.values()):
        return None
    return (
        list(map(torch.Tensor.data_ptr, parameters)),
        [gradient is None for gradient in gradients],
        [tensor.nbytes for tensor in changing],
        list(map(len, states)),
    )


def _and_above(path: str) -> Iterator[str]:
    """Yield a module's path and those of its parents."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""
