"""A report as data: sections of tables, bars and figures.

Values carry their unit and are never text: each printer of ``report.printers`` writes them in its own form. Sentences
are :class:`Phrase`, text around values. Only ``report.sections`` builds documents.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec
from msgspec.structs import replace

Badge = Literal["none", "info", "warning", "critical"]
Style = Literal["", "dim", "good", "warn", "bad"]
Value = str | int | float | None
WORDS: frozenset[str] = frozenset({"text", "code", "path", "command"})


class Cell(msgspec.Struct, frozen=True):
    """A value and its unit; None is a value that is not available.

    Args:
        value: bytes, nanoseconds, a share of 1, a count, a step's or rank's number (``index``), or words.
        unit: one of ``WORDS`` or of ``printers.values.NUMBERS``, a unit that takes decimal prefixes, or one of these
            and `` change``, for a difference.
        whole: the value that fills the bar behind this one; None draws no bar.
        style: how it looks.
        id: makes the cell a place to link to.
        command: the command that opens what the cell names.
        sort: what a table is sorted by instead of the value.
    """

    value: Value
    unit: str = "text"
    whole: float | None = None
    style: Style = ""
    id: str = ""
    command: str = ""
    sort: float | str | None = None

    @property
    def share(self) -> float | None:
        """The value's share of its whole, at least 0; None without a whole."""
        if not isinstance(self.value, int | float) or not self.whole:
            return None
        return max(0.0, self.value / self.whole)


class Phrase(msgspec.Struct, frozen=True):
    """A sentence with values in it."""

    parts: tuple[str | Cell, ...]


Words = str | Phrase


def phrase(template: str, *values: Words | Cell | float | None) -> Phrase:
    """Return a sentence; each ``{}`` of the template is one of the values.

    ``{ns}`` is a number and its unit; a number without a unit is a count. The template must be a literal: a path or a
    name of the program may contain braces, so it is passed as a value.
    """
    first, *pieces = re.split(r"\{([^{}]*)\}", template)
    if len(pieces) != 2 * len(values):
        raise ValueError(f"{template!r} takes {len(pieces) // 2} values, not {len(values)}")
    parts: list[str | Cell] = [first]
    for value, unit, piece in zip(values, pieces[::2], pieces[1::2], strict=True):
        parts += [*_parts(value, unit or "count"), piece]
    return Phrase(tuple(part for part in parts if part != ""))


def joined(separator: str, sentences: Sequence[Words]) -> Phrase:
    """Return sentences joined by a separator."""
    parts = [part for sentence in sentences for part in (separator, *_parts(sentence))]
    return Phrase(tuple(parts[1:]))


def _parts(value: Words | Cell | float | None, unit: str = "") -> tuple[str | Cell, ...]:
    if isinstance(value, Phrase):
        return value.parts
    return (value if isinstance(value, str | Cell) else Cell(value, unit),)


class Column(msgspec.Struct, frozen=True):
    """A column of a table.

    Args:
        heading: a noun with its unit or statistic.
        unit: the kind of its values, which aligns the column: words to the left, numbers to the right.
        hint: more about the heading, where a format has room for it.
        priority: 0 always stays; of the others the highest number is dropped first where lines are short.
        has_share: whether each value is followed by its share of the cell's whole.
    """

    heading: str
    unit: str = "text"
    hint: Words = ""
    priority: int = 0
    has_share: bool = False

    @property
    def alignment(self) -> Literal["left", "right"]:
        """The side on which its values are aligned."""
        return "left" if self.unit in WORDS else "right"


Row = Sequence[Cell]


class Table(msgspec.Struct, frozen=True):
    """Rows of cells.

    Args:
        id: a name that no other table of the document has.
        title: its heading.
        columns: its columns.
        rows: a cell for each column.
        footer: sums, below the rows whatever these are sorted by.
        notes: what a reader of the figures has to know.
        is_sortable: whether the rows have no order of their own.
        top: how many rows a text page shows; None is all of them.
        left_out: how many further rows there are, which it does not have.
    """

    part: ClassVar[str] = "table"
    id: str
    title: str
    columns: Sequence[Column] = ()
    rows: Sequence[Row] = ()
    footer: Sequence[Row] = ()
    notes: Sequence[Words] = ()
    is_sortable: bool = True
    top: int | None = 10
    left_out: int = 0

    @property
    def shown(self) -> Sequence[Row]:
        """The rows of a text page; the line that counts the others never stands for a single row."""
        return self.rows if self.top is None or len(self.rows) <= self.top + 1 else self.rows[: self.top]

    @property
    def known(self) -> list[int]:
        """The columns to show: all but those without a single value."""
        return [
            place
            for place in range(len(self.columns))
            if not place or any(row[place].value not in {None, ""} for row in (*self.rows, *self.footer))
        ]


class Facts(msgspec.Struct, frozen=True):
    """Names and values; ``is_wide`` where they need the whole width."""

    part: ClassVar[str] = "facts"
    title: str
    rows: Sequence[tuple[str, Cell | Words]]
    notes: Sequence[Words] = ()
    is_wide: bool = False


class Figure(msgspec.Struct, frozen=True):
    """A headline number; ``href`` links to its section, ``is_short`` keeps it on the short page."""

    name: str
    value: Cell
    detail: Words = ""
    href: str = ""
    is_short: bool = True


class Figures(msgspec.Struct, frozen=True):
    """Numbers beside each other."""

    part: ClassVar[str] = "figures"
    items: Sequence[Figure]


class Bar(msgspec.Struct, frozen=True):
    """A part of a whole; ``key`` names its colour, grey where a format has none for it."""

    name: str
    key: str
    value: Cell


class Stack(msgspec.Struct, frozen=True):
    """A whole and its parts; ``unknown`` are parts without a value, each with the reason."""

    part: ClassVar[str] = "stack"
    title: str
    total: Cell
    bars: Sequence[Bar]
    unknown: Sequence[tuple[str, str]] = ()
    notes: Sequence[Words] = ()


class Link(msgspec.Struct, frozen=True):
    """Where the evidence of a finding is: the id of a section or of a cell."""

    words: Words
    href: str


class RuleHelp(msgspec.Struct, frozen=True):
    """The documentation of a rule, on ``page``; a string per paragraph."""

    page: str
    means: Sequence[str]
    when: Sequence[str]


class Card(msgspec.Struct, frozen=True):
    """A finding; a rule of the user's own has no ``help``.

    ``file`` is the name of the file that shows it, where a document has files of several programs.
    """

    id: str
    rule: str
    badge: Badge
    title: str
    why: str
    next_steps: Sequence[str]
    saves: str = ""
    evidence: Sequence[Link] = ()
    help: RuleHelp | None = None
    file: str = ""

    @property
    def heading(self) -> str:
        """The title, after its file."""
        return f"{self.file}: {self.title}" if self.file else self.title


class Findings(msgspec.Struct, frozen=True):
    """All findings, the most severe first; the first one made the verdict if the document has a badge."""

    part: ClassVar[str] = "findings"
    cards: Sequence[Card]


class Line(msgspec.Struct, frozen=True):
    """A labelled line; a path is never broken, so that it can be copied."""

    label: str
    words: Words | Cell
    style: Style = ""


class Lines(msgspec.Struct, frozen=True):
    """Labelled lines; those that are not ``is_short`` are not on the short page."""

    part: ClassVar[str] = "lines"
    title: str
    rows: Sequence[Line]
    is_short: bool = True


class Paragraph(msgspec.Struct, frozen=True):
    """A paragraph below a table or a chart."""

    part: ClassVar[str] = "paragraph"
    words: Words


class Chart(msgspec.Struct, frozen=True):
    """The place of a chart of ``report.charts``; text pages draw ``values`` as one line, from 0 to the largest."""

    part: ClassVar[str] = "chart"
    id: str
    title: str = ""
    values: Sequence[int] = ()
    words: Words = ""


Item = Table | Facts | Figures | Stack | Findings | Lines | Paragraph | Chart


class Section(msgspec.Struct, frozen=True):
    """A section; ``lead`` is its one sentence, ``summary`` whether the short page has it."""

    id: str
    title: str
    lead: Words = ""
    parts: Sequence[Item] = ()
    summary: bool = False


class Command(msgspec.Struct, frozen=True):
    """A command to run next, in two parts between which a line may be broken."""

    program: str
    arguments: str

    def __str__(self) -> str:
        """Return the command on one line."""
        return f"{self.program} {self.arguments}"


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A report.

    Args:
        title: its name.
        kind: ``run``, ``files``, ``comparison``, ``live``, ``estimate`` or ``trial``.
        about: what ran.
        status: how it ended.
        status_style: how the status looks.
        exception: what ended it.
        badge: how severe the verdict is.
        rule: the rule that made the verdict, empty where none did.
        verdict: what is wrong.
        why: the evidence.
        next: what to do.
        saves: what that would save, empty where nobody can tell.
        sections: its sections.
        location: where the files are.
        commands: what to run next, the two most useful ones first.
        incomplete: the ranks that had not ended or had written nothing, empty where there are none.
        update: how to make it again, empty where nothing is missing.
    """

    title: str
    kind: Literal["run", "files", "comparison", "live", "estimate", "trial"]
    about: Words = ""
    status: str = ""
    status_style: Style = ""
    exception: str | None = None
    badge: Badge = "none"
    rule: str = ""
    verdict: Words = ""
    why: Words = ""
    next: str = ""
    saves: str = ""
    sections: Sequence[Section] = ()
    location: str = ""
    commands: Sequence[Command] = ()
    incomplete: str = ""
    update: str = ""

    def __repr__(self) -> str:
        return f"Document({self.title!r}, sections={[section.id for section in self.sections]})"

    def section(self, section_id: str) -> Section | None:
        """Return the section of an id."""
        return next((section for section in self.sections if section.id == section_id), None)

    def summary(self) -> Document:
        """Return the document of the short page."""
        return replace(self, sections=[section for section in self.sections if section.summary])

    def only(self, section_ids: Sequence[str]) -> Document:
        """Return the document with some of its sections."""
        return replace(self, sections=[section for section in self.sections if section.id in section_ids])

    def further_findings(self) -> list[Card]:
        """Return the findings without the one that made the verdict, where one did."""
        parts = (part for section in self.sections for part in section.parts)
        made = self.badge != "none"
        return [card for part in parts if isinstance(part, Findings) for card in part.cards[made:]]
