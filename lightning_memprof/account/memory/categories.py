"""The categories of the blocks of a snapshot's recorded history.

Snapshots do not have categories. The category of a block is derived from the phase in which its stack allocates, and
from whether it outlives that phase; see ``OUTLIVING``. One that is freed in its phase is ``temporary``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lightning_memprof.account.snapshot.frames import phase_of
from lightning_memprof.account.snapshot.replay import Replay

BEFORE: Final = "before"
OUTLIVING: Final = {
    "data_wait": "input",
    "loading": "parameter",
    "forward": "activation",
    "backward": "gradient",
    "optimizer": "optimizer_state",
}
"""Category by phase of a block that outlives it; ``other`` between phases."""


def categories(ring: Replay) -> list[str]:
    """Return the category of each block of a history, in the order of ``lives``.

    ``before`` is allocated before the history, without a stack.
    """
    events, stacks = ring.snapshot.events, ring.snapshot.stacks
    # Without any stack, an empty one does not mean a thread of backward.
    known = [phase_of(stack) if any(stacks) else None for stack in stacks]
    ends = _phase_ends([known[event.stack] if event.action == "alloc" else None for event in events])
    found = []
    for life in ring.lives:
        if life.born < 0 and not stacks[life.stack]:
            found.append(BEFORE)
        elif life.born >= 0 and life.died <= ends[life.born] and life.died < len(events):
            found.append("temporary")
        else:
            found.append(OUTLIVING.get(known[life.stack] or "", "other"))
    return found


def _phase_ends(phases: Sequence[str | None]) -> list[int]:
    """Return for each event the next event of another phase; events of unknown phase end none."""
    ends = [len(phases)] * len(phases)
    current, until = None, len(phases)
    starts = until
    for i in range(len(phases) - 1, -1, -1):
        if phases[i] is not None and phases[i] != current:
            current, until = phases[i], starts
        if phases[i] is not None:
            starts = i
        ends[i] = until
    return ends
