"""What the page's template gets: plain data, every text of it still to be escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

__all__ = [
    "Badge",
    "Bar",
    "Cell",
    "ChartPlace",
    "Evidence",
    "Facts",
    "Figure",
    "Figures",
    "FindingCard",
    "Findings",
    "Head",
    "Lines",
    "Page",
    "Part",
    "Section",
    "Stack",
    "Table",
    "Words",
]

Badge = Literal["none", "info", "warning", "critical"]


@dataclass(frozen=True)
class Cell:
    """One cell. ``sort`` is what it is sorted by, ``share`` (0 to 1) the length of a bar behind it, ``href`` a link.

    ``style`` is ``""``, ``"dim"``, ``"bad"``, ``"good"`` or ``"warn"``; ``id`` makes it a place to link to.
    ``command`` opens what the cell names.
    """

    text: str
    sort: float | str | None = None
    share: float | None = None
    href: str | None = None
    style: str = ""
    id: str | None = None
    command: str = ""


@dataclass(frozen=True)
class Head:
    """The head of a column: ``kind`` is ``text``, ``number``, ``code`` or ``command``; ``hint`` says more."""

    name: str
    kind: Literal["text", "number", "code", "command"] = "text"
    hint: str = ""


@dataclass(frozen=True)
class Table:
    """Rows that can be sorted and, where there are many, searched; ``footer`` rows stay where they are."""

    part: ClassVar[str] = "table"
    id: str
    title: str
    heads: Sequence[Head]
    rows: Sequence[Sequence[Cell]]
    footer: Sequence[Sequence[Cell]] = ()
    notes: Sequence[str] = ()
    is_sortable: bool = True

    @property
    def columns(self) -> list[int]:
        """The columns to show: all but those in which nothing is known of any row."""
        return [
            place
            for place in range(len(self.heads))
            if not place or not self.is_sortable or any(row[place].text not in {"", "-"} for row in self.rows)
        ]

    @property
    def has_search(self) -> bool:
        """Whether there are enough rows to search in."""
        return self.is_sortable and len(self.rows) > 12


@dataclass(frozen=True)
class Facts:
    """Names and values; ``is_wide`` where they stand alone."""

    part: ClassVar[str] = "facts"
    title: str
    rows: Sequence[tuple[str, str]]
    notes: Sequence[str] = ()
    is_wide: bool = False


@dataclass(frozen=True)
class Figure:
    """One number that is seen from afar."""

    name: str
    value: str
    detail: str = ""
    href: str | None = None


@dataclass(frozen=True)
class Figures:
    """Numbers in a row."""

    part: ClassVar[str] = "figures"
    items: Sequence[Figure]


@dataclass(frozen=True)
class Bar:
    """One part of a whole: ``share`` of it (0 to 1), ``colour`` a class of the style sheet."""

    name: str
    value: str
    share: float
    percent: str
    colour: str


@dataclass(frozen=True)
class Stack:
    """A whole and its parts; ``unknown`` are parts without a number, each with its reason."""

    part: ClassVar[str] = "stack"
    title: str
    total: str
    bars: Sequence[Bar]
    unknown: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Evidence:
    """A link to where a finding is seen on this page."""

    text: str
    href: str


@dataclass(frozen=True)
class FindingCard:
    """One finding; ``means`` and ``when`` it fires are the paragraphs of its rule."""

    id: str
    rule: str
    badge: Badge
    sentence: str
    why: str
    next_steps: Sequence[str]
    evidence: Sequence[Evidence]
    means: Sequence[str] = ()
    when: Sequence[str] = ()


@dataclass(frozen=True)
class Findings:
    """All findings, the most severe first."""

    part: ClassVar[str] = "findings"
    cards: Sequence[FindingCard]


@dataclass(frozen=True)
class Lines:
    """Labelled lines; the label's ``style`` as a cell's."""

    part: ClassVar[str] = "lines"
    title: str
    rows: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Words:
    """A paragraph; dim."""

    part: ClassVar[str] = "words"
    text: str


@dataclass(frozen=True)
class ChartPlace:
    """Where the chart of this id stands, if there is one; ids are those of ``report.charts``."""

    part: ClassVar[str] = "chart"
    id: str


Part = Table | Facts | Figures | Stack | Findings | Lines | Words | ChartPlace


@dataclass(frozen=True)
class Section:
    """One section of the page; ``lead`` is its one sentence."""

    id: str
    title: str
    lead: str = ""
    parts: Sequence[Part] = ()


@dataclass(frozen=True)
class Page:
    """A whole page.

    ``verdict`` is ``(sentence, why, next)``; ``about`` what ran, ``status`` how it ended, ``status_style`` as a cell's.
    ``incomplete`` says what of the run was not there yet, None where nothing is known to be missing.
    """

    title: str
    kind: str
    about: str
    status: str
    status_style: str
    exception: str | None
    badge: Badge
    verdict: tuple[str, str, str]
    sections: Sequence[Section]
    made: str
    incomplete: str | None = None
