"""Who refers to an object: the chain from a variable of the program to it, in words, and the line that assigns it."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from time import thread_time_ns
from types import (
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.capture.sources.assignments import Place
from lightning_memprof.capture.sources.objects import referrers

if TYPE_CHECKING:
    from torch import nn

CONTAINERS: Final = (list, dict, set, deque)
CYCLE: Final = "reference cycle"
_LRU_CACHE: Final = type(lru_cache(maxsize=1)(len))
_PLUMBING: Final = (tuple, CellType, FunctionType, MethodType, FrameType, TracebackType, ModuleType)
# A chain of more references says nothing more; one that branches more is not followed everywhere: 25 ms each.
_DEPTH: Final = 10
_WIDTH: Final = 6
# An object of one of these classes is known by its class: what refers to it is Lightning's.
_KNOWN_BASES: Final = frozenset({"Callback", "Logger", "Trainer", "LightningDataModule", "Dataset", "Optimizer"})
_KINDS: Final = (
    ("Optimizer", "optimizer state"),
    ("Metric", "metric state"),
    ("Logger", "logger"),
    ("Callback", "callback"),
    ("Dataset", "data set"),
)
_HOOKS: Final = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_MODULE_DICTS: Final = ("_buffers", "_parameters", "_modules")
_OURS: Final = "lightning_memprof."
_INDEX: Final = re.compile(r"\[[^\]]*\]")
# The links of a linked list.
_REPEATED: Final = re.compile(r"((?:\.\w+|\[\.\.\.\])+?)\1+(?!\w)")
_WRITTEN: Final = (str, int, float, bool, bytes, type(None))
_LONGEST_KEY: Final = 40


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The chain of references that keeps an object alive, in words; refers to no object.

    Attributes:
        kind: ``attribute``, ``global variable``, ``class attribute``, ``closure``, ``lru_cache``, ``generator``,
            ``forward hook``, ``callback``, ``logger``, ``metric state``, ``optimizer state`` or ``reference cycle``.
        chain: ``LitGPT.history[412]``.
        places: where the source may assign it, the most specific first.
        bound: largest number of entries of the container, None if it has no limit.
        owner_id: ``id`` of the container that refers to the object, 0 for another object.
        entries: their number.
    """

    kind: str
    chain: str
    places: tuple[Place, ...] = ()
    bound: int | None = None
    owner_id: int = 0
    entries: int = 0

    @property
    def place(self) -> str:
        """The chain for all elements of its containers."""
        return _REPEATED.sub(r"\1", _INDEX.sub("[...]", self.chain))


def type_name(value: Any) -> str:
    """Return the class of a value; not its ``__class__``, which may be the program's code."""
    return type(value).__name__


def is_known(kind: type) -> bool:
    """Whether a class is one of Lightning's or torch's that refer to the whole training."""
    return not _KNOWN_BASES.isdisjoint(base.__name__ for base in kind.__mro__)


def is_container(value: Any) -> bool:
    """Return whether a value is a list, dict, set or deque, or of a class derived from one."""
    return is_container_type(type(value))


def is_container_type(kind: type) -> bool:
    """Return whether a class is that of a list, dict, set or deque, or derived from one."""
    return issubclass(kind, CONTAINERS)


def length_of(container: Any) -> int:
    """Return the number of entries; not by the method of a derived class, which may be the program's code."""
    base: Any = next(base for base in CONTAINERS if issubclass(type(container), base))
    length: int = base.__len__(container)
    return length


def entries_of(container: Any) -> list[Any]:
    """Return the entries of a container, the values of a dict; as :func:`length_of`."""
    if issubclass(type(container), dict):
        return list(dict.values(container))
    base: Any = next(base for base in CONTAINERS if issubclass(type(container), base))
    return list(base.__iter__(container))


def bound_of(container: Any) -> int | None:
    """Return the largest number of entries that a container or an ``lru_cache`` will have, None without a limit."""
    if issubclass(type(container), deque):
        limit: int | None = container.maxlen
        return limit
    if type(container) is _LRU_CACHE:
        size: int | None = container.cache_info().maxsize
        return size
    return None


def attributes_of(owner: Any) -> dict[str, Any]:
    """Return the ``__dict__`` of an object, without its own code; empty without one."""
    try:
        found = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


class HolderSearch:
    """Searches for the holders of objects, until the time is up. Keep it no longer than the search.

    Each step up a chain asks the garbage collector for all referrers of an object, about 25 ms in a program of 300,000
    objects. Local variables of running functions are not found: they hold their value until the function returns.

    Args:
        model: its modules are named by their path; None without one.
        seconds: limit of all searches together, of processor time.
    """

    def __init__(self, model: nn.Module | None, seconds: float = 2.0) -> None:
        # Not the clock: where others use the cores, a search would end with half of the truth.
        self._until_ns = thread_time_ns() + round(seconds * 1e9)
        # Copies: another thread may import a module.
        modules = [(name, module) for name, module in list(sys.modules.items()) if type(module) is ModuleType]
        self._globals = {id(vars(module)): name for name, module in modules if name != "__mp_main__"}
        self._named: dict[int, tuple[str, list[Place]]] = {}
        if model is not None:
            types = {path: type(module) for path, module in model.named_modules()}
            for path, module in model.named_modules():
                parent, _, name = path.rpartition(".")
                places = [Place.of_attribute(types[parent], name)] if path else []
                self._named[id(module)] = f"{type_name(model)}.{path}".rstrip("."), places
        self._hooks = dict(_hooks(model)) if model is not None else {}
        # Our own objects that refer to what is searched for, by ``id``.
        self._chains: dict[int, list[Any]] = {}
        self._ours: set[int] = {id(self._named), id(self._chains)}
        if sys.version_info < (3, 11):
            # Later versions do not show the frames of running functions.
            for frame in sys._current_frames().values():  # noqa: SLF001 the documented way to all stacks
                at: FrameType | None = frame
                while at is not None:
                    self._ours.add(id(at))
                    at = at.f_back

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return thread_time_ns() > self._until_ns

    def ignore(self, *owners: Any) -> None:
        """Exclude objects of the caller."""
        self._ours.update(map(id, owners))

    def find(self, value: Any) -> Holder | None:
        """Return the holder of a value; None if no object refers to it, or the time is up.

        The shortest chain from a variable; a chain that starts at an object without a name if there is no other.
        """
        reached = [value]
        self.ignore(reached)
        try:
            chain = self._climb(reached)
            return None if chain is None else self._described(chain)
        finally:
            # An object of the program may get the address of one that ends.
            self._ours.discard(id(reached))
            reached.clear()

    def _climb(self, reached: list[Any]) -> list[Any] | None:
        """Return the chain to the first entry of ``reached``, to which the objects are added that lead to it."""
        # By ``id``, the index of the object below.
        below = {id(reached[0]): -1}
        begin, instance = 0, -1
        is_cycle = is_cut = False
        for _ in range(_DEPTH):
            end = len(reached)
            for at in range(begin, min(begin + _WIDTH, end)):
                owners = self._owners(reached[at])
                for owner in owners:
                    if id(owner) in below:
                        is_cycle = True
                        continue
                    if (known := self._chains.get(id(owner))) is not None:
                        return [*known, *_chain(reached, below, at)]
                    below[id(owner)] = at
                    reached.append(owner)
                    if self._is_root(owner, reached[at]):
                        return self._remembered(_from_instance(_chain(reached, below, len(reached) - 1)))
                    if instance < 0 and _is_instance(owner):
                        instance = len(reached) - 1
                # It would be found as an owner of them.
                owners.clear()
                if self.is_over:
                    return _chain(reached, below, instance) or None
            if len(reached) == end:
                # If everything that leads to the value is known, no variable of the program is among it.
                is_cycle = is_cycle and not is_cut
                return [CYCLE, *_chain(reached, below, begin)] if is_cycle else _chain(reached, below, instance) or None
            is_cut = is_cut or len(reached) - end > _WIDTH
            begin = end
        return _chain(reached, below, instance) or None

    def _remembered(self, chain: list[Any]) -> list[Any]:
        """Keep the chains to the owners in a chain: other values have the same ones."""
        for length, owner in enumerate(chain[:-1], 1):
            if id(owner) not in self._chains:
                self._chains[id(owner)] = part = chain[:length]
                self._ours.add(id(part))
        return chain

    def _owners(self, value: Any) -> list[Any]:
        """Return what refers to a value. The caller must not use it in a comprehension: a cell would refer to it."""
        ours = self._ours
        found = referrers(value)
        return [owner for owner in found if id(owner) not in ours and not _is_ours(owner)]

    def _is_root(self, owner: Any, value: Any) -> bool:
        kind = type(owner)
        if id(owner) in self._globals or id(owner) in self._named or kind in (_LRU_CACHE, GeneratorType):
            return True
        if kind is FunctionType:
            return value is not owner.__globals__
        return issubclass(kind, type) or is_known(kind)

    def _described(self, chain: list[Any]) -> Holder:
        if type(chain[0]) is str:
            names = list(dict.fromkeys(type_name(part) for part in chain[1:] if not _is_plumbing(part)))
            places = tuple(place for part in chain[1:] if (place := Place.of_class(type(part))) is not None)
            return Holder(kind=CYCLE, chain=" -> ".join([CYCLE, *names, *names[:1]]), places=places)
        kind, text, found = self._words(chain)
        bounds = [bound for part in chain[:-1] if (bound := bound_of(part)) is not None]
        known = attributes_of(chain[0])
        if kind == "optimizer state" and any(part is known.get("state") for part in chain):
            # One entry per parameter.
            bounds.append(sum(len(group["params"]) for group in known["param_groups"]))
        owner = chain[-2]
        return Holder(
            kind=kind,
            chain=text,
            places=tuple(found),
            bound=bounds[-1] if bounds else None,
            owner_id=id(owner) if is_container(owner) else 0,
            entries=length_of(owner) if is_container(owner) else 0,
        )

    def _words(self, chain: list[Any]) -> tuple[str, str, list[Place]]:
        """Return kind and text of a chain, and the places that may assign it, the most specific first."""
        kind, text, at, places = self._root(chain)
        while at < len(chain) - 1:
            owner, held = chain[at], chain[at + 1]
            if held is attributes_of(owner) and at + 2 < len(chain):
                # The dictionary of attributes is no step for a reader.
                key = _key(held, chain[at + 2])
                text += _attribute(key)
                places.insert(0, Place.of_attribute(type(owner), key))
                at += 2
                continue
            word, place = _step(owner, held)
            text += word
            if place is not None:
                places.insert(0, place)
            at += 1
        return kind, text, places

    def _root(self, chain: list[Any]) -> tuple[str, str, int, list[Place]]:
        """Return the kind and the name of the first object, the position of the next, and the place that assigns it."""
        root, held = chain[0], chain[1]
        kind = type(root)
        if (module := self._globals.get(id(root))) is not None:
            key = _key(root, held)
            return "global variable", f"{module}.{key}", 1, [Place.of_global(module, key)]
        if kind is _LRU_CACHE:
            function = getattr(root, "__wrapped__", None)
            name = f"{getattr(root, '__module__', '?')}.{getattr(root, '__qualname__', '?')}"
            return "lru_cache", f"lru_cache of {name}", 1 + (type(held) is dict), [Place.of_function(function)]
        if kind is GeneratorType:
            name = root.__qualname__
            return "generator", f"generator {name}", 1, [Place.of_local(root.gi_code, name)]
        if kind is FunctionType:
            return self._function(root, chain)
        if issubclass(kind, type):
            # The class's own dictionary.
            key = _key(held, chain[2]) if type(held) is dict and len(chain) > 2 else None
            words = f"{root.__name__}.{key}" if key else root.__name__
            places = [Place.of_attribute(root, key)] if key else []
            return "class attribute", words, 2 if key else 1, places
        bases = {base.__name__ for base in kind.__mro__}
        words = next((words for base, words in _KINDS if base in bases), "attribute")
        name, places = self._named.get(id(root), (kind.__name__, []))
        return words, name, 0, list(places)

    def _function(self, function: Any, chain: list[Any]) -> tuple[str, str, int, list[Place]]:
        hook = self._hooks.get(id(function))
        name = function.__qualname__
        words = f"{hook} {name}" if hook else name
        cells = function.__closure__ or ()
        if len(chain) > 2 and type(chain[2]) is CellType:
            number = next((number for number, cell in enumerate(cells) if cell is chain[2]), 0)
            variable = function.__code__.co_freevars[number]
            place = Place.of_closure(function, variable)
            return "forward hook" if hook else "closure", f"{words} (closure variable {variable})", 3, [place]
        if chain[1] is function.__defaults__:
            words = f"{words} (default argument)"
        return "forward hook" if hook else "function", words, 1, [Place.of_function(function)]


def _hooks(model: nn.Module) -> Iterator[tuple[int, str]]:
    for path, module in model.named_modules():
        for name, words in _HOOKS.items():
            for hook in list(attributes_of(module).get(name, {}).values()):
                yield id(hook), f"{words} of {type_name(model)}{'.' * bool(path)}{path}:"


def _is_ours(owner: Any) -> bool:
    """Whether an object is this package's, or the running stack's."""
    kind = type(owner)
    if kind in (FunctionType, _LRU_CACHE):
        return str(getattr(owner, "__module__", "")).startswith(_OURS)
    if kind is FrameType:
        return str(owner.f_globals.get("__name__", "")).startswith(_OURS)
    if kind is GeneratorType:
        return bool(owner.gi_running or "lightning_memprof" in owner.gi_code.co_filename)
    # An iterator is a running loop's, in nearly all cases.
    return kind.__module__.startswith(_OURS) or kind is CodeType or kind.__name__.endswith("iterator")


def _is_instance(owner: Any) -> bool:
    return bool(attributes_of(owner)) and not _is_plumbing(owner)


def _chain(reached: list[Any], below: dict[int, int], at: int) -> list[Any]:
    """Return the objects from that at an index down to the first; empty below 0."""
    chain: list[Any] = []
    while at >= 0:
        chain.append(reached[at])
        at = below[id(reached[at])]
    return chain


def _from_instance(chain: list[Any]) -> list[Any]:
    """Return a chain from its root; an object that only a function holds is known by its class."""
    if type(chain[0]) in (FunctionType, GeneratorType):
        return chain[next((at for at in range(1, len(chain) - 1) if _is_instance(chain[at])), 0) :]
    return chain


def _is_plumbing(owner: Any) -> bool:
    return is_container(owner) or type(owner) in _PLUMBING


def _key(mapping: dict[Any, Any], value: Any) -> Any:
    """Return the key of a value in a dictionary, ``?`` if it has gone."""
    return next((key for key, item in list(dict.items(mapping)) if item is value), "?")


def _key_text(key: Any) -> str:
    """Return a key as it is written, of other types their name: a ``__repr__`` may be the program's."""
    parts = key if type(key) is tuple else (key,)
    if not all(type(part) in _WRITTEN for part in parts):
        return type_name(key)
    text = repr(key)
    return text if len(text) <= _LONGEST_KEY else "..."


def _attribute(key: Any) -> str:
    return "" if key in _MODULE_DICTS else f".{key}"


def _step(owner: Any, held: Any) -> tuple[str, Place | None]:
    """Return the words for one reference: an index, a key, a frame, an attribute."""
    kind = type(owner)
    words = ""
    if issubclass(kind, dict):
        words = f"[{_key_text(_key(owner, held))}]"
    elif issubclass(kind, (list, tuple, deque)):
        entries = list(tuple.__iter__(owner)) if issubclass(kind, tuple) else entries_of(owner)
        number = next((number for number, item in enumerate(entries) if item is held), None)
        words = f"[{'...' if number is None else number}]"
    elif issubclass(kind, (set, frozenset)):
        words = "[...]"
    elif kind is FrameType:
        code = owner.f_code
        words = f" -> frame of {code.co_name} ({code.co_filename.rpartition('/')[2]}:{owner.f_lineno})"
    elif issubclass(kind, BaseException):
        words = f" -> {kind.__name__}"
    elif kind not in (CellType, TracebackType):
        return _attribute_step(owner, held)
    return words, None


def _attribute_step(owner: Any, held: Any) -> tuple[str, Place | None]:
    kind = type(owner)
    key = _key(attributes_of(owner), held)
    if key == "?":
        slots = (slot for base in kind.__mro__ for slot in vars(base).values() if type(slot) is MemberDescriptorType)
        key = next((slot.__name__ for slot in slots if _slot(owner, slot) is held), "?")
    return ("", None) if key == "?" else (_attribute(key), Place.of_attribute(kind, key))


def _slot(owner: Any, slot: MemberDescriptorType) -> Any:
    try:
        return slot.__get__(owner)
    except AttributeError:
        return None
