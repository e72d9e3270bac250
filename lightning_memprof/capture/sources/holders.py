"""Who keeps a tensor alive: what the garbage collector sees of it.

A saved activation often has a Python wrapper that nothing in Python refers to: autograd alone keeps it.
"""

from __future__ import annotations

import gc
import sys
from types import CellType, FrameType, GeneratorType, ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["holder_name", "referenced", "tracked_tensors"]

# A whole program has millions of objects, and the list of what they refer to is several times as long.
_AT_ONCE: Final = 10_000
_DEPTH: Final = 4
_CLOSURE: Final = "closure"
_CONTAINERS: Final = (list, tuple, dict, set, frozenset)


def tracked_tensors() -> list[torch.Tensor]:
    """Return all tensors that the garbage collector tracks."""
    # isinstance of a proxy may run the program's code; its type does not.
    return [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]


def referenced(tensors: list[torch.Tensor]) -> set[int]:
    """Return the ``id`` of each tensor that an object refers to; ``tensors`` itself and local variables do not count.

    Takes about a second per million objects of the program.
    """
    ids = {id(tensor) for tensor in tensors}
    ours = {id(tensors), id(ids)}
    objects = [value for value in gc.get_objects() if not _is_running(value) and id(value) not in ours]
    found: set[int] = set()
    for start in range(0, len(objects), _AT_ONCE):
        found.update(ids.intersection(map(id, gc.get_referents(*objects[start : start + _AT_ONCE]))))
    return found


def holder_name(value: Any, ours: Collection[int]) -> str | None:
    """Return what holds a value, in words: ``list Model.history``, ``dict train.CACHE``; None if nothing does.

    Args:
        value: a tensor.
        ours: the ``id`` of each object that does not count, because it is the caller's own.

    """
    kind: str | None = None
    for _ in range(_DEPTH):
        owners = _owners(value, ours)
        # A container with a name says more than one without.
        places = sorted(filter(None, map(_place, owners, [value] * len(owners))), key=_CLOSURE.__eq__)
        if places or not owners:
            return " ".join(filter(None, (kind, *places[:1]))) or None
        value = owners[0]
        kind = kind or type(value).__name__
    return kind


def _owners(value: Any, ours: Collection[int]) -> list[Any]:
    """Return what refers to a value. The caller must not use it in a comprehension: a cell would refer to it."""
    return [owner for owner in gc.get_referrers(value) if not _is_running(owner) and id(owner) not in ours]


def _is_running(value: Any) -> bool:
    """Tell whether a value is a frame or a running generator, which hold local variables."""
    return type(value) is FrameType or (type(value) is GeneratorType and value.gi_running)


def _place(owner: Any, value: Any) -> str | None:
    """Return the name of an attribute, a global variable or a closure that is ``value``."""
    if type(owner) is CellType:
        return _CLOSURE
    if type(owner) is dict:
        key = next((key for key, item in owner.items() if item is value), None)
        module = sys.modules.get(name) if isinstance(name := owner.get("__name__"), str) else None
        if type(module) is ModuleType and vars(module) is owner:
            return f"{name}.{key}"
        # A class shows its attributes only through a proxy.
        owners = (item for item in gc.get_referrers(owner) if isinstance(item, type) or _attributes(item) is owner)
        instance = next(owners, None)
        return None if instance is None else f"{_class_name(instance)}.{key}"
    if type(owner) in _CONTAINERS:
        return None
    return next((f"{_class_name(owner)}.{key}" for key, item in _attributes(owner).items() if item is value), None)


def _class_name(owner: Any) -> str:
    return owner.__name__ if isinstance(owner, type) else type(owner).__name__


def _attributes(owner: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}
