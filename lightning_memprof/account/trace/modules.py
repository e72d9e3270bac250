"""Threads of the host as trees, and the module of each event: the one around it, in backward that of its forward.

Where Python was recorded, also the place in the program around each event.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_memprof.account.trace.idle import is_own_work
from lightning_memprof.read.stacks import is_library, parse_frame
from lightning_memprof.read.trace.columns import HOST_KINDS, STEP_NAME, Kind, TraceColumns
from lightning_memprof.read.trace.intervals import ROUNDING_NS, Column, exclusive_ends, lookup, nearest, nest

_LIGHTNING: Final = "[pl][module]"
_PYTHON: Final = "nn.Module: "
_BUILTIN: Final = re.compile(r"<built-in (?:function|method) (\S+?)(?: of .*)?>")


class Tree(NamedTuple):
    """The events of one thread, without the steps.

    Attributes:
        rows: ``(m,)`` rows of the trace.
        parents: ``(m,)`` position of the event around each, -1 for none.
        ends: ``(m,)`` ends at which each moment has one innermost event.
    """

    rows: Column
    parents: Column
    ends: Column


class HostThreads:
    """The threads of the host as trees, each made once: nesting takes most of the time of a ledger."""

    def __init__(self, columns: TraceColumns) -> None:
        self._columns = columns
        self.on_host: NDArray[np.bool_] = np.isin(columns.kinds, HOST_KINDS)
        self.on_host &= ~columns.named(STEP_NAME.match)[columns.names]
        self._trees: dict[int, Tree] = {}

    def tree(self, lane: int) -> Tree:
        """Return the tree of a lane, empty where nothing of the host is in it."""
        if lane not in self._trees:
            rows = np.flatnonzero(self.on_host & (self._columns.lanes == lane))
            starts = self._columns.starts[rows]
            nesting = nest(starts, self._columns.ends[rows], slack=ROUNDING_NS)
            self._trees[lane] = Tree(rows, nesting.parents, exclusive_ends(nesting, starts))
        return self._trees[lane]


class Makers(NamedTuple):
    """Rows of the operators of forward that make autograd's nodes, and numbers of the names of their modules."""

    rows: Column
    modules: Column


class Modules:
    """The ranges of modules in a trace: Lightning's, which have paths, else those that torch recorded with stacks.

    Attributes:
        named: by number of a name, whether it is a module's.
    """

    def __init__(self, columns: TraceColumns) -> None:
        self._columns = columns
        prefix = _LIGHTNING if any(name.startswith(_LIGHTNING) for name in columns.name_of) else _PYTHON
        self.named: NDArray[np.bool_] = columns.named(lambda name: name.startswith(prefix))

    def path(self, number: int) -> str | None:
        """Return the path of a module: empty outside modules, None where the trace has none."""
        if number >= 0:
            return self._columns.name_of[number].rpartition(": ")[2]
        return "" if np.any(self.named) else None

    def around(self, rows: Column, parents: Column, forward: Makers | None = None) -> Column:
        """Return the number of the name of each event's module, -1 for none.

        Args:
            rows: ``(m,)`` rows of one thread.
            parents: ``(m,)`` positions of the events around them, -1 for none.
            forward: of the thread that ran forward; None if it is this one.
        """
        names = self._columns.names[rows]
        at = nearest(parents, self.named[names])
        module: Column = np.where(at >= 0, names[at], -1).astype(np.int64)
        makers = self.makers(rows, module) if forward is None else forward
        sequences = self._columns.sequences[rows]
        runs = (sequences >= 0) & self._columns.runs_node[rows]
        if not np.any(runs):
            return module
        around = np.where(parents >= 0, nearest(parents, runs)[parents], -1)
        # A node's function repeats its number.
        runs &= (around < 0) | (sequences != sequences[around])
        made = self._made(rows, runs, makers)
        # A node that runs inside another one belongs to a recomputed forward, of this thread.
        inner = runs & (around >= 0)
        if forward is not None and np.any(inner):
            made = np.where(inner, self._made(rows, inner, self.makers(rows, module)), made)
        node = nearest(parents, runs)
        starts = self._columns.starts[rows]
        recomputes = (at >= 0) & (starts[at] >= starts[node])
        return np.where((node < 0) | recomputes, module, made[node])

    def _made(self, rows: Column, runs: NDArray[np.bool_], makers: Makers) -> Column:
        """Return the module of the operator that made the node of each event that runs one, -1 for none."""
        sequences = self._columns.sequences[rows]
        # Operators read the next sequence number without taking it; the last operator that reads a number takes it.
        order = np.lexsort((self._columns.starts[makers.rows], self._columns.sequences[makers.rows]))
        numbers = self._columns.sequences[makers.rows][order]
        last = np.append(numbers[1:] != numbers[:-1], True)[: len(numbers)]
        numbers, owners = numbers[last], makers.modules[order][last]
        return np.where(runs, lookup(numbers, owners, sequences), -1)

    def makers(self, rows: Column, modules: Column) -> Makers:
        """Return the operators of a thread that make nodes; ``modules`` are those of :meth:`around`."""
        makes = (self._columns.sequences[rows] >= 0) & ~self._columns.runs_node[rows]
        return Makers(rows[makes], modules[makes])


def is_place(name: str) -> bool:
    """Return whether Python of this name is a place in the program: a function of its own files, or a range."""
    frame = parse_frame(name)
    if frame is not None:
        return not is_library(frame.filename)
    return not name.startswith(("<", _PYTHON)) and not is_own_work(name)


class Places:
    """The places in the program around events.

    Attributes:
        texts: by number: ``train_step (train.py:12)``, and for a call in it ``argsort in train_step (train.py:12)``.
    """

    def __init__(self, columns: TraceColumns) -> None:
        self._columns = columns
        self._named: NDArray[np.bool_] = columns.named(is_place)
        self._numbers: dict[tuple[int, int], int] = {}
        self.texts: list[str] = []

    def around(self, rows: Column, parents: Column) -> Column:
        """Return the number of the text of the innermost place around each event of one thread, -1 outside of all."""
        names, kinds = self._columns.names[rows], self._columns.kinds[rows]
        named = self._named[names] & ((kinds == Kind.PYTHON) | (kinds == Kind.ANNOTATION))
        place = nearest(parents, named)
        # A call of the place itself.
        call = nearest(parents, (kinds == Kind.PYTHON) & (parents >= 0) & named[parents] & ~named)
        call = np.where((call >= 0) & (parents[call] == place), names[call], -1).astype(np.int64)
        count = len(self._columns.name_of)
        pairs, inverse = np.unique(
            np.where(place >= 0, names[place].astype(np.int64) * (count + 1) + call + 1, -1), return_inverse=True
        )
        numbers = [
            -1 if pair < 0 else self._number(pair // (count + 1), pair % (count + 1) - 1) for pair in pairs.tolist()
        ]
        found: Column = np.array(numbers, np.int64)[inverse.reshape(-1)]
        return found

    def _number(self, place: int, call: int) -> int:
        number = self._numbers.setdefault((place, call), len(self.texts))
        if number == len(self.texts):
            frame = parse_frame(self._columns.name_of[place])
            text = f"{frame.name} ({frame.filename}:{frame.line})" if frame else self._columns.name_of[place]
            self.texts.append(text if call < 0 else f"{_called(self._columns.name_of[call])} in {text}")
        return number


def _called(name: str) -> str:
    frame, builtin = parse_frame(name), _BUILTIN.match(name)
    return frame.name if frame else builtin[1] if builtin else name
