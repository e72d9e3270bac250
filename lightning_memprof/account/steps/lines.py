"""The lines of the program that the training thread runs in recorded windows, by function."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from lightning_memprof.account.steps.events import FORWARD
from lightning_memprof.artifacts.series import MODULE_CALL, LineRow
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import percent

# A function with less of the time does not explain it.
EXPLAINS: Final = 0.25
# Of a function's time: then a line stands for the function.
MOSTLY: Final = 0.5
# Fewer looks show no usual place.
MIN_LOOKS: Final = 6
BACKWARD: Final = ("backward", "manual_backward")
# What runs the closure of an optimizer step.
ENGINE: Final = "_engine_run_backward"
# Functions that the Trainer and data loaders call by their names.
NAMED: Final = re.compile(
    r"(?:^|\.)(?:on_\w+|\w+_step|configure_\w+|optimizer_\w+|lr_\w+|transfer_\w+|\w*loader\w*|"
    r"backward|forward|setup|__(?:getitem|getitems|iter|next|len)__|step|log\w*)$"
)


class Spot(msgspec.Struct, frozen=True, kw_only=True):
    """A function of the program with much of some time, and its line with the most.

    ``depth`` is the number of functions around it, ``share`` its share of the time, 0 to 1. The line, its source, the
    function of a library that it calls and the innermost one inside are None where no line has most of the time.
    ``waits``: the thread mostly sleeps in the function.
    """

    function: str
    share: float
    depth: int
    place: str | None = None
    source: str | None = None
    called: str | None = None
    inside: str | None = None
    waits: bool = False

    @property
    def is_helper(self) -> bool:
        """Whether it is neither called by the Trainer nor the forward of a module."""
        return self.depth > 0 and self.function.rpartition(".")[2] != "forward"

    @property
    def text(self) -> str:
        """The function and its line, for a sentence: ``Critic.stretch (critic.py:164)``."""
        return f"{self.function} ({self.place})" if self.place else self.function

    @property
    def at(self) -> str:
        """The source of the line, to end a sentence."""
        return f": `{self.source}`" if self.source else ""

    def share_text(self, whole: str, around: str = "") -> str:
        """Return the share of the function in a time, to end a sentence.

        Args:
            whole: the time, for people: ``the forward``.
            around: a function that the sentence names already.
        """
        if self.function != around:
            return f"; {self.text} has {percent(self.share)} of {whole}{self.at}"
        return f"; mostly {self.place}{self.at}" if self.place else ""


def lines(rank: Rank, hook: str) -> list[LineRow]:
    """Return the lines inside a method that the Trainer calls, ``training_step`` or a hook of a callback."""
    rows = rank.in_windows(LineRow)
    return [row for row in rows if row.functions and row.functions[0].rpartition(".")[2] == hook]


def forward_lines(rank: Rank) -> list[LineRow]:
    """Return the lines of the training step, or of its like, without those that run the backward pass."""
    return [row for row in lines(rank, FORWARD.get(rank.facts.stage, "")) if not is_backward(row)]


def is_backward(row: LineRow) -> bool:
    """Return whether a line of training_step runs the backward pass, with automatic optimization off."""
    return (row.called or "").rpartition(".")[2] in BACKWARD


def action_spot(rank: Rank, action: str) -> Spot | None:
    """Return where an action has most of its time in recorded windows.

    ``Histograms.on_train_batch_end``, or a hook that a module calls: ``watch (net.py:7)``.
    """
    hook, is_registered, _ = action.partition(" (")
    if is_registered:
        within = [(row, row.functions.index(hook)) for row in rank.in_windows(LineRow) if hook in row.functions]
        return main_spot([replace(row, functions=row.functions[at:]) for row, at in within])
    found = lines(rank, action.rpartition(".")[2])
    return main_spot([row for row in found if row.functions[0] == action] or found)


def optimizer_spot(rank: Rank, optimizer: str) -> Spot | None:
    """Return where an optimizer of the program, or a module's ``optimizer_step``, has most of its time."""
    found = [*lines(rank, "optimizer_step"), *lines(rank, "step")]
    owners = ("optimizer_step", f"{optimizer}.step")
    return main_spot([row for row in found if row.functions[0].endswith(owners) and row.inside != ENGINE])


def collate_spot(rank: Rank) -> Spot | None:
    """Return where the program makes batches of samples: a function that no hook and no method of a data set is."""
    rows = rank.in_windows(LineRow)
    return main_spot([row for row in rows if row.functions and not NAMED.search(row.functions[0])])


def main_spot(rows: Sequence[LineRow]) -> Spot | None:
    """Return the innermost function with much of the time of some lines.

    The time of a line that calls a module is the module's.
    """
    whole = _ns(rows)
    within: dict[tuple[int, str], list[LineRow]] = {}
    for row in rows:
        if row.functions[-1] != MODULE_CALL:
            for depth, function in enumerate(row.functions):
                if function != MODULE_CALL:
                    within.setdefault((depth, function), []).append(row)
    large = [key for key, inside in within.items() if _ns(inside) >= EXPLAINS * whole and _looks(inside) >= MIN_LOOKS]
    large.sort(key=lambda key: (-key[0], -_ns(within[key])))
    found = (_spot(key, within[key], whole) for key in large)
    # The name alone of what the Trainer calls, or of a module's forward, explains nothing.
    return next((each for each in found if each.place or each.is_helper), None)


def _spot(key: tuple[int, str], inside: Sequence[LineRow], whole: int) -> Spot:
    depth, function = key
    places = Counter[str | None]()
    for row in inside:
        places[row.place if len(row.functions) == depth + 1 else None] += row.ns or 0
    place, ns = places.most_common(1)[0]
    asleep = sum(row.asleep_ns or 0 for row in inside)
    found = Spot(
        function=function, share=_ns(inside) / whole, depth=depth, waits=asleep >= MOSTLY * max(_ns(inside), 1)
    )
    if place is None or ns < MOSTLY * _ns(inside):
        return found
    line = max((row for row in inside if row.place == place), key=lambda row: row.ns or 0)
    return replace(found, place=place, source=source_of(line) or None, called=line.called, inside=line.inside)


def source_of(row: LineRow) -> str:
    """Return the source of a line without a comment behind it."""
    return (row.source or "").partition("  #")[0].strip()


def _ns(rows: Iterable[LineRow]) -> int:
    return sum(row.ns or 0 for row in rows)


def _looks(rows: Iterable[LineRow]) -> int:
    return sum(row.looks or 0 for row in rows)
