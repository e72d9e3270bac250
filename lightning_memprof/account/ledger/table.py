"""Sums of owners, a few numbers for each, grouped before the next thread is taken, and lines of a ledger from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_memprof.account.ledger.model import TimeLine
from lightning_memprof.account.parts import PARTS

NODE: Final = "autograd::engine::evaluate_function: "
"""The beginning of the names of autograd's calls of backward functions."""
_SUMS: Final = ("ns", "count", "called", "inside")
Table: TypeAlias = NDArray[np.int64]
"""``(c, k)``: numbers of part, label, module and operator; then what is summed, ns first; then the longest call."""


def summed(*columns: NDArray[np.generic]) -> Table:
    """Return the sums of each owner, and the longest of its calls.

    Args:
        columns: ``(m,)`` each, in the order of a table. Small integers save memory.
    """
    keys, sums, longest = columns[:4], columns[4:-1], columns[-1]
    order = np.lexsort(keys[::-1])
    is_new = np.zeros(len(order), np.bool_)
    is_new[:1] = True
    for key in keys:
        ordered = key[order]
        is_new[1:] |= ordered[1:] != ordered[:-1]
    begins = np.flatnonzero(is_new)
    if not len(begins):
        return np.empty((len(columns), 0), np.int64)
    return np.stack(
        [
            *(key[order[begins]].astype(np.int64) for key in keys),
            *(np.add.reduceat(column[order].astype(np.int64), begins) for column in sums),
            np.maximum.reduceat(longest[order], begins).astype(np.int64),
        ]
    )


def joined(tables: list[Table]) -> Table:
    """Return the sum of tables, of which there is at least one."""
    return summed(*np.concatenate(tables, axis=1))


def time_lines(
    table: Table,
    steps: int,
    texts: Sequence[str],
    path: Callable[[int], str | None],
    *,
    outside: str | None = None,
    label: Callable[[str], str] = str,
) -> list[TimeLine]:
    """Return the owners of a table of times as lines per step.

    Args:
        table: whose sums are ns, count and, where they are known, calls and events inside.
        steps: number of steps.
        texts: of labels and operators by number.
        path: path of a module's number.
        outside: the operator of a negative number.
        label: name of a label's text.
    """
    keys, sums, longest = table[:4].T.tolist(), table[4:-1].T / steps, table[-1].tolist()
    return [
        TimeLine(
            part=PARTS[part],
            name="" if name < 0 else label(texts[name]),
            module=path(module),
            operator=outside if operator < 0 else texts[operator].removeprefix(NODE),
            longest_ns=most,
            **dict(zip(_SUMS, spent, strict=False)),
        )
        for (part, name, module, operator), spent, most in zip(keys, sums.tolist(), longest, strict=True)
    ]
