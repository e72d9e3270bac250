"""Saved activations, read from autograd's graph without hooks and without unpacking."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from lightning_memprof.capture.sources.tensors import PLAIN_TENSORS, storage_sizes, storages
from lightning_memprof.capture.torch_internals import SavedTensor

_SAVED: Final = "_raw_saved_"
_LEAF: Final = "variable"
# A Python number becomes a tensor of the left type. As a tensor of the program it keeps that beside one of the right.
_NARROWER: Final = MappingProxyType(
    {
        wide: torch.empty((), dtype=narrow, device="cpu")
        for wide, narrow in (
            (torch.float64, torch.float32), (torch.int64, torch.int32), (torch.complex128, torch.complex64)
        )
    }
)  # fmt: skip
# The sequence number of a leaf.
_LEAF_NUMBER: Final = 1 << 62
# Where torch.compile stores saved tensors that need no version check.
_COMPILED: Final = "_tensors_no_vc_check"
_WRAPPED_NUMBER_BYTES: Final = 16
# torch's name for a C++ node without a Python class, such as a scripted module's.
_OPAQUE: Final = "CppFunction"
# Of torch 2.13's nodes, without what they save: 580 in a chain of additions, 680 in a GRU, 790 with batch norm.
_NODE_BYTES: Final = 600


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A region under non-reentrant checkpointing; ``function`` is its function, or None if unknown."""

    function: Any


class _Opaque:
    """The saved values of a node that does not show them."""


# (sequence number of the node that saved it first, bytes, dtype, the checkpoint whose input it is or None).
SavedStorage = tuple[int, int, torch.dtype, "Checkpoint | None"]


@dataclass
class SavedStorages:
    """The saved activations of one graph.

    Attributes:
        storages: each storage once, by the node that saved it first, in order of time.
        uncounted: saved values of unknown size: packed by another program's hooks, or saved by a node that does not
            show them, such as a scripted module's or a C++ function's.
        nodes: of the graph, those that were read.
        is_cut: whether it has more.
    """

    storages: list[SavedStorage] = field(default_factory=list)
    uncounted: int = 0
    nodes: int = field(default=0, compare=False)
    is_cut: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of all storages."""
        return sum(size for _, size, _, _ in self.storages)

    @property
    def held_bytes(self) -> int:
        """Bytes that end with the graph, those of its nodes estimated: a backward frees only the storages."""
        return self.bytes + self.nodes * _NODE_BYTES


class SavedGraph:
    """Reads the graphs of losses; holds information about node types, but no node and no tensor.

    A C++ node has its values under ``_raw_saved_*``, a Python node under ``_raw_saved_tensors``. The ``data`` of such a
    value is the stored object: the result of pack hooks if there are any. A non-reentrant checkpoint packs nothing and
    saves its inputs, which are found through its hook.

    Not included: tensors on the ``ctx`` of a custom function that are not from ``save_for_backward``; tensors saved by
    an in-place operation on a view (torch hides the node inside ``CopySlices``); branches that do not lead to the loss.

    About 2 µs per node.
    """

    def __init__(self) -> None:
        self._readers: dict[type, tuple[bool, Callable[[Any], Any] | None]] = {}
        # Leaf types whose variables were all skipped: half of the nodes, which need not be visited again.
        self._passed_over: tuple[type, ...] = ()

    def read(
        self, root: torch.Tensor, skip: Iterable[int] = (), seen: set[Any] | None = None, most: int = sys.maxsize
    ) -> SavedStorages:
        """Return the saved activations in the graph of ``root``.

        Args:
            root: the root of a backward.
            skip: storages to exclude, by ``untyped_storage()._cdata``: those of parameters and buffers. The storages of
                each ``nn.Parameter`` in the graph are excluded too: under FSDP2 they differ from the model's. If all of
                a graph's are in ``skip``, those of later graphs are not read.
            seen: nodes that are not read again; those of this graph are added.
            most: size of ``seen`` at which the walk ends.
        """
        seen = set() if seen is None else seen
        if root.grad_fn is None or root.grad_fn in seen:
            return SavedStorages()
        known = len(seen)
        saved, leaves = self._walk(root.grad_fn, seen, most)
        skip = set(skip)
        if leaves:
            parameters = set(storage_sizes([leaf for leaf in leaves.values() if isinstance(leaf, nn.Parameter)]))
            if len(parameters) == len(leaves) and parameters <= skip:
                self._passed_over = tuple({type(node) for node in leaves})
            skip |= parameters
        # The first node owns a storage that is saved twice. The walk has no order of time; sequence numbers have.
        saved.sort(key=itemgetter(0))
        found = _Collected(skip).all(saved)
        found.nodes, found.is_cut = len(seen) - known, len(seen) >= most
        return found

    def _walk(self, root: Any, seen: set[Any], most: int) -> tuple[list[tuple[int, Any]], dict[Any, torch.Tensor]]:
        """Return ``(sequence number, saved values)`` of every node with saved values, and the variables of leaves."""
        readers, passed_over = self._readers, self._passed_over
        saved: list[tuple[int, Any]] = []
        leaves: dict[Any, torch.Tensor] = {}
        # The set holds the nodes: otherwise each visit would create a new Python object for the same node.
        seen.add(root)
        pending = [root]
        while pending and len(seen) < most:
            node = pending.pop()
            kind = type(node)
            if kind not in readers:
                readers[kind] = _reader(kind)
            is_leaf, reader = readers[kind]
            if reader is not None:
                try:
                    if is_leaf:
                        leaves[node] = reader(node)
                    else:
                        saved.append((node._sequence_nr(), reader(node)))  # noqa: SLF001 torch has no public one
                except RuntimeError:
                    pass  # a Python node whose values are released
            for following, _ in node.next_functions:
                if following is not None and type(following) not in passed_over and following not in seen:
                    seen.add(following)
                    pending.append(following)
        return saved, leaves


def saved_by_functions(roots: Iterable[torch.Tensor], since: int) -> Iterator[torch.Tensor]:
    """Yield the tensors that compiled code and other functions in Python saved in the graphs of ``roots``.

    Args:
        roots: results of a forward.
        since: sequence number of autograd; what earlier nodes saved is not included.
    """
    pending = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            with suppress(RuntimeError):  # its values are released
                for value in (*node._raw_saved_tensors, *getattr(node, _COMPILED, ())):  # noqa: SLF001 torch has no public one
                    data = value.data
                    if isinstance(data, torch.Tensor):
                        yield data
        for following, _ in node.next_functions:
            if following is not None and following not in seen and since <= following._sequence_nr() < _LEAF_NUMBER:  # noqa: SLF001 torch has no public one
                seen.add(following)
                pending.append(following)


class _Collected:
    """Collects storages, each once."""

    def __init__(self, seen: set[int]) -> None:
        self.result = SavedStorages()
        self._seen = seen
        self._frames: set[int] = set()

    def all(self, saved: Iterable[tuple[int, Any]]) -> SavedStorages:
        """Add the saved values of every node; the inner loop."""
        seen, found = self._seen, self.result.storages
        for number, values in saved:
            for value in values if type(values) is tuple else (values,):
                data: Any = None
                try:
                    data = value.data
                    storage = data.untyped_storage() if type(data) in PLAIN_TENSORS else None
                except (AttributeError, NotImplementedError, RuntimeError):
                    storage = None
                if storage is None:
                    self._add(number, value, None)
                    continue
                key = storage._cdata  # noqa: SLF001 the data pointer of an empty one is 0
                if key not in seen:
                    size = storage.nbytes()
                    if size > _WRAPPED_NUMBER_BYTES or not (size == 0 or _is_wrapped_number(data)):
                        seen.add(key)
                        found.append((number, size, data.dtype, None))
        return self.result

    def _add(self, number: int, value: Any, checkpoint: Checkpoint | None) -> None:
        """Add a node's saved value: a saved tensor, a plain tensor, several of them, or nothing."""
        if isinstance(value, SavedTensor):
            try:
                data = value.data
            except RuntimeError:
                # C++ hooks.
                self.result.uncounted += 1
                return
            if isinstance(data, torch.Tensor):
                self._tensor(number, data, checkpoint)
            elif data is not None:
                self._packed(number, data, value)
        elif isinstance(value, (tuple, list)):
            for item in value:
                self._add(number, item, checkpoint)
        elif isinstance(value, torch.Tensor):
            self._tensor(number, value, checkpoint)
        elif isinstance(value, _Opaque):
            self.result.uncounted += 1

    def _tensor(self, number: int, data: torch.Tensor, checkpoint: Checkpoint | None) -> None:
        found = tuple(storages(data))
        self.result.uncounted += not found
        for storage in found:
            key, size = storage._cdata, storage.nbytes()  # noqa: SLF001 the data pointer of an empty one is 0
            if key not in self._seen and size and not (size <= _WRAPPED_NUMBER_BYTES and _is_wrapped_number(data)):
                self._seen.add(key)
                self.result.storages.append((number, size, data.dtype, checkpoint))

    def _packed(self, number: int, data: Any, value: Any) -> None:
        """Add the result of another program's pack hook."""
        frame = _checkpoint_frame(value.unpack_hook)
        if frame is not None:
            if id(frame) not in self._frames:
                self._frames.add(id(frame))
                self._add(number, _checkpoint_inputs(frame), Checkpoint(_cell(frame.recompute_fn, "fn")))
            return
        parts = data if isinstance(data, (tuple, list)) else ()
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        for tensor in tensors:
            self._tensor(number, tensor, None)
        self.result.uncounted += not tensors


def _reader(kind: type) -> tuple[bool, Callable[[Any], Any] | None]:
    """Return whether a node type is a leaf, and the function that reads a leaf's variable or a node's values."""
    if kind.__name__ == _OPAQUE:
        return False, lambda _: _Opaque()
    names = [name for name in dir(kind) if name.startswith(_SAVED)]
    if not names:
        return (True, attrgetter(_LEAF)) if hasattr(kind, _LEAF) else (False, None)
    if issubclass(kind, torch.autograd.function.BackwardCFunction):
        return False, lambda node: (node._raw_saved_tensors, getattr(node, _COMPILED, ()))  # noqa: SLF001
    return False, attrgetter(*names)


def _is_wrapped_number(data: torch.Tensor) -> bool:
    """Return whether it is a Python number as a tensor: type promotion ignores its dtype."""
    if data.dim() or data.dtype not in _NARROWER:
        return False
    return torch.result_type(data, _NARROWER[data.dtype]) != data.dtype


def _cell(function: Any, name: str) -> Any:
    """Return the value of a function's closure variable, or None."""
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or closure is None or name not in code.co_freevars:
        return None
    with suppress(ValueError):
        return closure[code.co_freevars.index(name)].cell_contents
    return None


def _checkpoint_frame(unpack_hook: Any) -> Any:
    """Return the ``torch.utils.checkpoint`` frame of a non-reentrant checkpoint's hook, or None."""
    frame = _cell(unpack_hook, "frame")
    return frame if hasattr(frame, "recompute_fn") else None


def _checkpoint_inputs(frame: Any) -> Any:
    """Return a checkpoint's saved inputs: saved tensors, or before torch 2.13 those of a node."""
    if (saved := getattr(frame, "saved_args", None)) is not None:
        return saved
    node = getattr(getattr(frame, "input_saver", None), "grad_fn", None)
    return getattr(node, "_raw_saved_tensors", ())
