"""What the parts of ``make bench`` share: their command as it is typed, verdicts, and figures with units."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from measured import table, write_fragment

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MB: Final = 1_000_000
NOT_JUDGED: Final = "not judged"
WORDS: Final = {True: "met", False: "**missed**", None: NOT_JUDGED}


@dataclass(frozen=True)
class Target:
    """A target, what was measured, and whether it is met.

    Attributes:
        target: what was set out.
        measured: with its unit.
        met: None where that is not what the target speaks of, or cannot be said.
        otherwise: what is said then.

    """

    target: str
    measured: str
    met: bool | None
    otherwise: str = field(default=NOT_JUDGED, kw_only=True)

    @property
    def verdict(self) -> str:
        return self.otherwise if self.met is None else WORDS[self.met]


Some = TypeVar("Some", bound=Target)


def judged(found: Iterable[Some], *, trial: bool) -> list[Some]:
    """Give targets as they are; of a trial, which is too small for them, without a verdict."""
    return [replace(each, met=None) if trial else each for each in found]


def targets(found: Sequence[Target]) -> str:
    """Give targets as a table."""
    return table(["target", "measured", ""], [[each.target, each.measured, each.verdict] for each in found])


def publish(fragments: Mapping[str, str], *, trial: bool, packages: Sequence[str] = ()) -> None:
    """Print Markdown by name of its fragment, and write the fragments unless this was a trial."""
    print("\n\n".join(fragments.values()))
    if trial:
        print("\nA trial: nothing was written.")
        return
    for name, body in fragments.items():
        print(write_fragment(name, typed(), body, packages=packages))


def typed() -> str:
    """Give this process's command as it is typed in the repository's root; of a path, its last part."""
    program = f"python tests/benchmarks/{Path(sys.argv[0]).name}"
    return " ".join([program, *(Path(word).name if "/" in word else word for word in sys.argv[1:])])


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Give the median and half of the range."""
    if len(values) < 2:
        return format(median(values), form)
    return f"{median(values):{form}} ± {(max(values) - min(values)) / 2:{form}}"
