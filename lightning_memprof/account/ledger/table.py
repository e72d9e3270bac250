"""Sums of owners: a few numbers for each, grouped before the next thread is taken, so that a table stays small."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

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
