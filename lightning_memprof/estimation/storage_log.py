"""The storages of a training: when each is made and ends, and what it is."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from lightning_memprof.estimation.requests import Requests

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["GRANULE", "LABELS", "Part", "Peak", "StorageLog"]

GRANULE: Final = 512
"""CUDA's allocator rounds requests up to this many bytes."""
LABELS: Final = ("category", "dtype", "module", "operator")


class Part(NamedTuple):
    """Where a part of a step begins.

    Attributes:
        position: in the requests.
        step: number of the optimizer's step, from 0.
        name: ``forward``, ``backward`` or ``optimizer``.

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


@dataclass(frozen=True, kw_only=True)
class StorageLog:
    """The storages of a fit: when each is made and ends, and what it is.

    Attributes:
        granule: bytes to which each storage is rounded up: 512 on CUDA, 1 on the CPU.
        requests: what is asked of the allocator, in order.
        sizes: bytes by number of the storage.
        parts: the parts of the steps.

    """

    granule: int
    requests: Requests = field(default_factory=Requests)
    sizes: array[int] = field(default_factory=lambda: array("q"))
    parts: list[Part] = field(default_factory=list)
    _labels: dict[str, array[int]] = field(default_factory=lambda: {name: array("l") for name in LABELS})
    _names: _Names = field(default_factory=_Names)
    _changed: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def add(self, size: int, **labels: str) -> int:
        """Add a storage with all of :data:`LABELS`; return its number."""
        number = self.requests.allocate(size)
        self.sizes.append(size)
        for name, column in self._labels.items():
            column.append(self._names.number(labels[name]))
        return number

    def begin(self, step: int, part: str) -> None:
        """Note that a part of a step begins."""
        self.parts.append(Part(len(self.requests), step, part))

    def set_category(self, number: int, category: str) -> None:
        """Change the category of a storage from now on."""
        before, now = self._labels["category"][number], self._names.number(category)
        if before != now:
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
        """Return what a storage takes of the allocator, in bytes."""
        return -(-self.sizes[number] // self.granule) * self.granule

    def live(self) -> Iterator[int]:
        """Yield the live bytes after each request."""
        live = 0
        for event in self.requests.events:
            live += -self.rounded(~event) if event < 0 else -(-event // self.granule) * self.granule
            yield live

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
