"""A document as lines of text: the short page that fits one screen, the full page, and sections of either."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Final, TextIO

from lightning_memprof.report.document import (
    Cell,
    Chart,
    Document,
    Facts,
    Figure,
    Figures,
    Findings,
    Item,
    Lines,
    Paragraph,
    Section,
    Stack,
    Table,
    Words,
)
from lightning_memprof.report.document import Line as Row
from lightning_memprof.report.printers.layout import (
    DIM,
    LEAST_WIDTH,
    STYLES,
    Line,
    bar,
    cut,
    hang,
    pad,
    sparkline,
    table_lines,
    text_width,
    wrap,
)
from lightning_memprof.report.printers.values import NONE, cell_text, clean, words_text
from lightning_memprof.units import percent

LINES: Final = 40
"""The lines of one screen."""
LABEL: Final = 10
FIGURE_NAME: Final = 20
FIGURE_VALUE: Final = 15
SHORT_FINDINGS: Final = 3
ALSO_LINES: Final = 3
SHORT_COMMANDS: Final = 2
SHORT_ROWS: Final = 5
MAX_FINDINGS: Final = 16
BADGES: Final = {"none": "bold green", "info": "bold cyan", "warning": "bold yellow", "critical": "bold red"}
PALETTE: Final = {
    name: colour
    for colour, names in {
        "yellow": ("data_wait", "activation", "activation_and_temporary", "idle", "inactive_split"),
        "cyan": ("forward", "parameter", "compute", "requested"),
        "blue": ("backward", "gradient", "copy", "rounding"),
        "magenta": ("optimizer", "optimizer_state", "collective", "pending"),
        "green": ("callback", "validation", "input", "before_run", "workspace"),
        "red": ("temporary", "core_wait", "rank_wait", "stall", "growth", "workers", "fragmentation"),
    }.items()
    for name in names
}
# Parts differ where there are no colours, too: as many marks as a stack has parts.
BLOCKS: Final = "█▓▒░▚▌▄┼▞▖◆○"
# For encodings without these characters: punctuation, the marks above, and the levels of curves and ends of bars.
ASCII: Final = str.maketrans("·…─–µ←█▓▒░▚▌▄┼▞▖◆○▁▂▃▅▆▇▏▎▍▋▊▉", ",~--u<#=+-*o%x~:^._.:=+*...###")

Block = list[Line]


def short_page(document: Document, width: int) -> list[Line]:
    """Return the page of one screen: the verdict, the sections with a summary, and the next two commands."""
    lines: list[Line] = []
    for longest, is_dense in ((4, False), (3, True), (2, True), (1, True)):
        about = [*_about(document, width)[: longest + 1], *_incomplete(document, width)]
        blocks = [_verdict(document, width, longest), _also(document, width, longest), about]
        for section in document.summary().sections:
            blocks += [_short(part, width, longest) for part in section.parts]
        blocks.append([*_place(document), *_commands(document, width, SHORT_COMMANDS)])
        lines = _joined([block for block in blocks if block], is_dense=is_dense)
        if len(lines) <= LINES:
            break
    return lines


def full_page(document: Document, width: int) -> list[Line]:
    """Return all sections between the verdict and the commands."""
    blocks = [_verdict(document, width, None), _about(document, width)]
    if document.incomplete:
        blocks.append(hang("note", f"{document.incomplete}. {document.update}", width, LABEL))
    blocks.append(sections_page(document, width))
    blocks.append([*_place(document), *_commands(document, width, len(document.commands))])
    return _joined([block for block in blocks if block])


def sections_page(document: Document, width: int) -> list[Line]:
    """Return the sections of a document alone."""
    found = (_section(section, document, width) for section in document.sections)
    return _joined([block for block in found if block])


def plain(lines: Iterable[Line]) -> str:
    """Return lines without their styles, and without blanks at their ends."""
    return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)


def encoded(text: str, file: TextIO) -> str:
    """Return a text with the letters that the encoding of ``file`` does not have replaced."""
    encoding = getattr(file, "encoding", None) or "utf-8"
    if encoding.lower().replace("-", "").startswith("utf"):
        return text
    return text.translate(ASCII).encode(encoding, "backslashreplace").decode(encoding)


def _joined(blocks: Sequence[Block], *, is_dense: bool = False) -> list[Line]:
    """Put blocks below each other, with an empty line between two, or only before the last one."""
    lines: list[Line] = []
    for place, block in enumerate(blocks):
        if place and (not is_dense or place == len(blocks) - 1):
            lines.append(())
        lines += block
    return lines


def _verdict(document: Document, width: int, longest: int | None) -> Block:
    rule = f" ({document.rule})" if document.rule and document.badge != "none" else ""
    lines = hang("verdict", words_text(document.verdict) + rule, width, LABEL, ("bold", BADGES[document.badge]))
    for label, words in (("why", words_text(document.why)), ("next", document.next), ("saves", document.saves)):
        lines += _first(hang(label, words, width, LABEL), longest, width) if words else []
    return lines


def _first(lines: Block, longest: int | None, width: int) -> Block:
    """Return the first lines, the last of them with an ellipsis where there are more."""
    if longest is None or len(lines) <= longest:
        return lines
    *head, (last, style) = lines[longest - 1]
    room = width - sum(text_width(text) for text, _ in head)
    return [*lines[: longest - 1], (*head, (cut(f"{last} …", max(room, 1)), style))]


def _also(document: Document, width: int, longest: int) -> Block:
    """Return the further findings: where the page is too long fewer of them, rather than their beginnings."""
    # A rule has the same sentence for each snapshot that shows it.
    cards = list({card.title: card for card in document.further_findings()}.values())
    shown = cards[: min(longest, SHORT_FINDINGS)]
    lines: Block = []
    for card in shown:
        styles = "bold", BADGES[card.badge].removeprefix("bold ")
        lines += _first(hang("" if lines else "also", card.heading, width, LABEL, styles), ALSO_LINES, width)
    if more := len(cards) - len(shown):
        lines.append(((pad("", LABEL), ""), (f"{more} more: --all", DIM)))
    return lines


def _about(document: Document, width: int) -> Block:
    about = words_text(document.about)
    lines = hang("", about, width, 0, ("", DIM)) if about else []
    if document.status:
        words = document.status + (f": {document.exception}" if document.exception else "")
        style = STYLES[document.status_style]
        if lines and text_width(lines[-1][-1][0]) + 3 + text_width(words) <= width:
            lines[-1] += ((" · ", DIM), (clean(words), style))
        else:
            lines += hang("", words, width, 0, ("", style))
    return lines


def _incomplete(document: Document, width: int) -> Block:
    """Name the ranks that had not ended, in one line."""
    if not document.incomplete:
        return []
    words = cut(clean(document.incomplete), max(width - LABEL, 1))
    return [((pad("note", LABEL), "bold"), (words, STYLES["warn"]))]


def _place(document: Document) -> Block:
    return [_unbroken("files", Cell(document.location, "path"), LABEL)] if document.location else []


def _unbroken(label: str, path: Cell, indent: int) -> Line:
    return (pad(label, indent), "bold"), (clean(cell_text(path), 10_000), "")


def _commands(document: Document, width: int, number: int) -> Block:
    lines: Block = []
    for command in document.commands[:number]:
        head = pad("" if lines else "commands", LABEL)
        whole = clean(str(command), 10_000)
        if LABEL + text_width(whole) <= width:
            lines.append(((head, "bold"), (whole, "cyan")))
            continue
        # A path is never broken, so that it can be copied.
        lines.append(((head, "bold"), (f"{clean(command.program)} \\", "cyan")))
        lines.append(((pad("", LABEL + 2), ""), (clean(command.arguments, 10_000), "cyan")))
    return lines


def _short(part: Item, width: int, longest: int) -> Block:
    if isinstance(part, Figures):
        shown = (_figure(figure, width) for figure in part.items if figure.is_short)
        return [line for lines in shown for line in _first(lines, min(longest, 2), width)]
    if isinstance(part, Stack):
        return _stacked(part, width)
    if isinstance(part, Lines) and part.is_short:
        return _labelled(part.rows[:SHORT_ROWS], width, longest=2 if longest > 2 else 1)
    return []


def _figure(figure: Figure, width: int) -> Block:
    name, value = pad(clean(figure.name), FIGURE_NAME), pad(cell_text(figure.value), FIGURE_VALUE, "right")
    head = (cut(name, width), "bold"), (cut(value, max(width - FIGURE_NAME, 0)), "")
    indent = FIGURE_NAME + FIGURE_VALUE + 2
    if width < indent + LEAST_WIDTH:
        return [head]
    first, *rest = wrap(words_text(figure.detail), width - indent)
    return [(*head, (f"  {first}", DIM)), *(((" " * indent, ""), (line, DIM)) for line in rest)]


def _stacked(stack: Stack, width: int) -> Block:
    """Draw a whole as one bar, with a legend below it."""
    drawn: list[tuple[str, str]] = []
    entries: list[list[tuple[str, str]]] = []
    done, end = 0, 0.0
    for found, mark in zip(stack.bars, itertools.cycle(BLOCKS), strict=False):
        end += found.value.share or 0.0
        length = max(0, round(min(1.0, end) * width) - done)
        drawn.append((mark * length, PALETTE.get(found.key, DIM)))
        done += length
        words = f"{clean(found.name)} {percent(found.value.share or 0.0)} {cell_text(found.value)}"
        entries.append([(f"{mark} ", PALETTE.get(found.key, DIM)), (words, "")])
    return [*_title(stack, width), tuple(drawn), *_flowing(entries, width)]


def _title(stack: Stack, width: int) -> Block:
    return _titled(f"{stack.title}: {cell_text(stack.total)}", width)


def _flowing(entries: Sequence[list[tuple[str, str]]], width: int) -> Block:
    lines: list[list[tuple[str, str]]] = []
    taken = 0
    for entry in entries:
        needed = sum(text_width(text) for text, _ in entry)
        if lines and taken + 3 + needed <= width:
            lines[-1] += [("   ", ""), *entry]
            taken += 3 + needed
        else:
            lines.append(entry)
            taken = needed
    return [tuple(line) for line in lines]


def _labelled(rows: Sequence[Row], width: int, longest: int | None = None) -> Block:
    indent = max([LABEL, *(text_width(row.label) + 2 for row in rows)])
    lines: Block = []
    for row in rows:
        style = STYLES[row.style]
        styles = (f"bold {style}".strip(), style if row.style == "dim" else "")
        if isinstance(row.words, Cell) and row.words.unit == "path":
            lines.append(_unbroken(row.label, row.words, indent))
            continue
        lines += _first(hang(row.label, words_text(row.words), width, indent, styles), longest, width)
    return lines


def _section(section: Section, document: Document, width: int) -> Block:
    heading = clean(section.title)
    rule = "─" * max(0, width - text_width(heading) - 1)
    lines: Block = [((cut(heading, width), "bold"), (f" {rule}", DIM))]
    lead = words_text(section.lead)
    lines += [((line, ""),) for line in wrap(lead, width)] if lead else []
    blocks = [_part(part, document, width) for part in section.parts]
    first, *rest = [block for block in blocks if block] or [[]]
    return _joined([lines, first, *rest] if lead and first else [lines + first, *rest])


def _part(part: Item, document: Document, width: int) -> Block:
    if isinstance(part, Table):
        lines = [*_titled(part.title, width), *table_lines(part, width)] if part.rows or part.footer else []
    elif isinstance(part, Stack):
        lines = _listed(part, width)
    elif isinstance(part, Facts):
        lines = _facts(part, width)
    elif isinstance(part, Figures):
        lines = [line for figure in part.items for line in _figure(figure, width)]
    elif isinstance(part, Findings):
        lines = _findings(document, width)
    elif isinstance(part, Lines):
        lines = _labelled(part.rows, width)
    elif isinstance(part, Paragraph):
        lines = [((line, DIM),) for line in wrap(words_text(part.words), width)]
    else:
        lines = _curve(part, width)
    notes: Sequence[Words] = getattr(part, "notes", ()) if lines else ()
    return [*lines, *(line for note in notes for line in hang("", words_text(note), width, 2, ("", DIM)))]


def _titled(title: str, width: int) -> Block:
    return [((line, "bold"),) for line in wrap(title, width)] if title else []


def _facts(facts: Facts, width: int) -> Block:
    indent = min(max((text_width(name) for name, _ in facts.rows), default=0) + 4, width // 2)
    lines = _titled(facts.title, width)
    for name, value in facts.rows:
        lines += hang(cut(f"  {clean(name)}", max(indent - 1, 1)), words_text(value), width, indent, (DIM, ""))
    return lines


def _listed(stack: Stack, width: int) -> Block:
    names = [clean(found.name) for found in stack.bars] + [clean(name) for name, _ in stack.unknown]
    indent = min(max(map(text_width, names), default=0) + 4, max(width - 18, 4))
    most = max((found.value.share or 0.0 for found in stack.bars), default=0.0)
    lines = _title(stack, width)
    for found in stack.bars:
        share = found.value.share or 0.0
        words = f"{cell_text(found.value):>9}{percent(share):>6}  "
        drawn = bar(share / most if most else 0.0, max(min(width - indent - len(words), 40), 0))
        name = pad(cut(f"  {clean(found.name)}", indent - 1), indent)
        lines.append(((name, ""), (words, ""), (drawn, PALETTE.get(found.key, DIM))))
    for name, reason in stack.unknown:
        lines += hang(cut(f"  {clean(name)}", indent - 1), f"{NONE} {reason}".strip(), width, indent, ("", DIM))
    return lines


def _findings(document: Document, width: int) -> Block:
    blocks: list[Block] = []
    cards = document.further_findings()
    for card in cards[:MAX_FINDINGS]:
        lines = hang(card.badge, f"{card.heading} ({card.rule})", width, LABEL, (BADGES[card.badge], "bold"))
        lines += hang("why", card.why, width, LABEL) if card.why else []
        lines += [line for step in card.next_steps for line in hang("next", step, width, LABEL)]
        lines += hang("saves", card.saves, width, LABEL) if card.saves else []
        blocks.append(lines)
    if len(cards) > MAX_FINDINGS:
        blocks.append(hang("", f"{len(cards) - MAX_FINDINGS} more findings: --format json", width, 0, ("", DIM)))
    return _joined(blocks)


def _curve(chart: Chart, width: int) -> Block:
    if len(chart.values) < 2:
        return []
    words = words_text(chart.words)
    lines = _titled(chart.title, width)
    lines.append((("  ", ""), (sparkline(chart.values, max(width - 2, 1)), "yellow")))
    return lines + (hang("", words, width, 2, ("", DIM)) if words else [])
