"""The module of a Python stack, found by the source lines of the modules' forwards.

A stack has files and lines but no objects. Modules that share class and callers are therefore indistinguishable: the
result then is the pattern that their paths share.
"""

from __future__ import annotations

import re
from collections import defaultdict
from math import inf
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.analysis.run.rows import mapping

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["ModuleStacks"]

PythonFrame = tuple[str, int, str]

_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")


class ModuleStacks:
    """Maps Python stacks to module paths.

    Args:
        forwards: ``{"sources": [[file, first line, last line], ...], "modules": {path: [class, index of source]}}``;
            entries of another form are ignored.

    """

    def __init__(self, forwards: Mapping[str, Any]) -> None:
        self._classes: dict[str, str] = {}
        self._sources: dict[str, int | None] = {}
        for path, written in (mapping(forwards, "modules") or {}).items():
            match written:
                case [str() as name, (int() | None) as source]:
                    self._classes[path], self._sources[path] = name, source
        self._lines: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        sources = forwards.get("sources")
        for index, place in enumerate(sources if isinstance(sources, list) else ()):
            match place:
                case [str() as file, int() as first, int() as last]:
                    self._lines[file].append((first, last, index))
        self._paths: dict[int | None, list[str]] = defaultdict(list)
        for path, source in self._sources.items():
            self._paths[source].append(path)
        self._known: dict[tuple[int, ...], str | None] = {}

    def name_of(self, stack: Iterable[PythonFrame]) -> str | None:
        """Return the module whose forward a stack (innermost frame first) was in, or None.

        ``"blocks.3.attention"`` where it is unique; ``"blocks.*.attention (Attention)"`` for one of several.
        """
        chain = tuple(source for frame in reversed([*stack]) if (source := self._source_of(frame)) is not None)
        if chain not in self._known:
            self._known[chain] = self._named(chain)
        return self._known[chain]

    def _source_of(self, frame: PythonFrame) -> int | None:
        file, line, _ = frame
        found = [(last - first, index) for first, last, index in self._lines.get(file, ()) if first <= line <= last]
        return min(found)[1] if found else None

    def _named(self, chain: tuple[int, ...]) -> str | None:
        if not chain:
            return None
        # A forward that is not a child of its caller is a base class's, called by the override.
        candidates = (self._candidates(chain[:length]) for length in range(len(chain), 0, -1))
        paths = next((paths for paths in candidates if paths), self._paths[chain[-1]])
        classes = sorted({self._classes[path] for path in paths})
        if len(paths) == 1:
            return paths[0] or classes[0]
        patterns = {_NUMBER.sub("*", path) for path in paths}
        name = patterns.pop() if len(patterns) == 1 else f"{len(paths)} modules"
        return f"{name} ({', '.join(classes[:3])})"

    def _candidates(self, chain: tuple[int, ...]) -> list[str]:
        """Return the modules in which a chain of forwards can end.

        A module is usually called through all of its parents: the candidates are those with the fewest missing ones.
        """
        missing = {path: self._missing(path, chain[:-1]) for path in self._paths[chain[-1]]}
        least = min(missing.values(), default=inf)
        return [path for path, count in missing.items() if count == least < inf]

    def _missing(self, path: str, callers: tuple[int, ...]) -> float:
        """Return how many parents of ``path`` are not among the callers; infinite where a caller is not a parent."""
        parts = path.split(".") if path else []
        above = [self._sources.get(".".join(parts[:length])) for length in range(len(parts))]
        known = [source for source in above if source is not None]
        rest = iter(known)
        return (
            len(known) - len(callers)
            if all(any(candidate == caller for candidate in rest) for caller in callers)
            else inf
        )
