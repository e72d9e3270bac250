"""The host's events of a trace by thread, each with its module and operator, and the places in the program."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_memprof.account.steps.events import is_profiler
from lightning_memprof.read.stacks import is_library, parse_frame
from lightning_memprof.read.trace.columns import HOST_KINDS, STEP_NAME, Kind, TraceColumns
from lightning_memprof.read.trace.intervals import ROUNDING_NS, Column, exclusive_ends, lookup, nearest, nest

_LIGHTNING: Final = "[pl][module]"
_PYTHON: Final = "nn.Module: "
_BUILTIN: Final = re.compile(r"<built-in (?:function|method) (\S+?)(?: of .*)?>")


class Thread(NamedTuple):
    """The events of one thread, without the steps.

    Attributes:
        rows: ``(m,)`` rows of the trace.
        parents: ``(m,)`` position of the event around each, -1 for none.
        ends: ``(m,)`` ends at which each moment has one innermost event.
    """

    rows: Column
    parents: Column
    ends: Column


# Rows of the operators that make autograd's nodes, by number of the node, and numbers of their modules' names.
_Makers: TypeAlias = tuple[Column, Column]


class HostEvents:
    """The events of the host's threads, classified once: nesting takes most of the time of a ledger.

    Modules are Lightning's ranges, which have paths, else those that torch recorded with stacks.

    Attributes:
        on_host: ``(n,)`` whether an event is one of a thread of the program, and no step.
        training: lane of the training thread: of the steps, else of most operators that make autograd's nodes, else of
            most operators, else of most calls of the runtime; -1 without any of them.
        is_module: by number of a name, whether it is a module's.
        module: ``(n,)`` number of the name of the module around each event, in backward that of its forward; -1 outside
            of modules, and in threads that nobody asked for.
        operator: ``(n,)`` row of the innermost operator around each event, likewise.
    """

    def __init__(self, columns: TraceColumns) -> None:
        self._columns = columns
        steps = columns.named(STEP_NAME.match)[columns.names]
        self.on_host: NDArray[np.bool_] = np.isin(columns.kinds, HOST_KINDS)
        self.on_host &= ~steps
        self.training = self._training(np.flatnonzero(steps & (columns.kinds == Kind.ANNOTATION)))
        prefix = _LIGHTNING if any(name.startswith(_LIGHTNING) for name in columns.name_of) else _PYTHON
        self.is_module: NDArray[np.bool_] = columns.named(lambda name: name.startswith(prefix))
        self.module, self.operator = (np.full(len(columns.starts), -1, np.int32) for _ in range(2))
        self._threads: dict[int, Thread] = {}
        self._forward: _Makers | None = None

    def thread(self, lane: int) -> Thread:
        """Return the events of a lane, nested and classified; none where nothing of the host is in it."""
        if lane not in self._threads:
            if lane != self.training:
                self.thread(self.training)  # the others run the nodes that it makes
            columns = self._columns
            rows = np.flatnonzero(self.on_host & (columns.lanes == lane))
            starts = columns.starts[rows]
            nesting = nest(starts, columns.ends[rows], slack=ROUNDING_NS)
            found = self._threads[lane] = Thread(rows, nesting.parents, exclusive_ends(nesting, starts))
            operator = nearest(found.parents, columns.kinds[rows] == Kind.OPERATOR)
            self.operator[rows] = np.where(operator >= 0, rows[operator], -1)
            module = self.module[rows] = self._modules(found)
            self._forward = self._forward or self._makers(rows, module)
        return self._threads[lane]

    @cached_property
    def is_place(self) -> NDArray[np.bool_]:
        """By number of a name, whether Python of this name is a place in the program."""
        return self._columns.named(is_place)

    def outermost_operators(self, rows: Column) -> Column:
        """Return the row of the outermost operator around each event on its thread, -1 for none."""
        columns, found = self._columns, np.full(len(rows), -1, np.int64)
        for lane in np.unique(columns.lanes[rows]).tolist():
            own, parents, _ = self.thread(lane)
            is_operator = columns.kinds[own] == Kind.OPERATOR
            at = nearest(parents, is_operator & ((parents < 0) | (self.operator[own[parents]] < 0)))
            mine = np.flatnonzero(columns.lanes[rows] == lane)
            place = at[np.searchsorted(own, rows[mine])]
            found[mine] = np.where(place >= 0, own[place], -1)
        return found

    def path(self, module: int) -> str | None:
        """Return the path of a module by its number: empty outside modules, None where the trace has none."""
        if module >= 0:
            return self._columns.name_of[module].rpartition(": ")[2]
        return "" if np.any(self.is_module) else None

    def _training(self, steps: Column) -> int:
        columns = self._columns
        operators = columns.rows(Kind.OPERATOR)
        makers = operators[(columns.sequences[operators] >= 0) & ~columns.runs_node[operators]]
        found = (rows for rows in (steps, makers, operators, columns.rows(Kind.RUNTIME)) if len(rows))
        return next((int(np.argmax(np.bincount(columns.lanes[rows]))) for rows in found), -1)

    def _modules(self, thread: Thread) -> Column:
        """Return the number of the name of each event's module, -1 for none."""
        rows, parents, _ = thread
        names = self._columns.names[rows]
        at = nearest(parents, self.is_module[names])
        module: Column = np.where(at >= 0, names[at], -1).astype(np.int64)
        makers = self._forward or self._makers(rows, module)
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
        if self._forward is not None and np.any(inner):
            made = np.where(inner, self._made(rows, inner, self._makers(rows, module)), made)
        node = nearest(parents, runs)
        starts = self._columns.starts[rows]
        recomputes = (at >= 0) & (starts[at] >= starts[node])
        return np.where((node < 0) | recomputes, module, made[node])

    def _made(self, rows: Column, runs: NDArray[np.bool_], makers: _Makers) -> Column:
        """Return the module of the operator that made the node of each event that runs one, -1 for none."""
        sequences = self._columns.sequences
        return np.where(runs, lookup(sequences[makers[0]], makers[1], sequences[rows]), -1)

    def _makers(self, rows: Column, modules: Column) -> _Makers:
        """Return the operators of a thread that make nodes, with their modules."""
        makes = node_makers(self._columns, rows)
        return rows[makes], modules[makes]


def node_makers(columns: TraceColumns, rows: Column) -> Column:
    """Return the positions in ``rows`` of the operators that make autograd's nodes, by the number of the node.

    Operators read the next sequence number without taking it; the last operator that reads a number takes it.
    """
    sequences, starts = columns.sequences[rows], columns.starts[rows]
    makes = np.flatnonzero((sequences >= 0) & ~columns.runs_node[rows])
    makes = makes[np.lexsort((starts[makes], sequences[makes]))]
    found: Column = makes[np.append(sequences[makes][1:] != sequences[makes][:-1], True)[: len(makes)]]
    return found


def is_own_work(name: str) -> bool:
    """Return whether a range is work of this package, which explains no program's idle time."""
    return is_profiler(name.removeprefix("[pl][profile]"))


def is_place(name: str) -> bool:
    """Return whether Python of this name is a place in the program: a function of its own files, or a range."""
    frame = parse_frame(name)
    if frame is not None:
        return not is_library(frame.filename)
    return not name.startswith(("<", _PYTHON)) and not is_own_work(name)


class Places:
    """The places in the program around events; ``named`` are those of ``HostEvents.is_place``.

    Attributes:
        texts: by number: ``train_step (train.py:12)``, and for a call in it ``argsort in train_step (train.py:12)``.
    """

    def __init__(self, columns: TraceColumns, named: NDArray[np.bool_]) -> None:
        self._columns, self._named = columns, named
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
