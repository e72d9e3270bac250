"""The package, its templates and its documentation speak plain English: phrases that were once removed stay out.

Only phrases that are wrong wherever they stand are listed, so that the test needs no exceptions; much of what makes a
sentence clumsy cannot be found by a pattern.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightning_memprof"

# Pattern: replacement.
PHRASES = {
    r"\d %": "53%",
    r"\bkept for backward\b|\bkeeps? for backward\b|\bautograd (?:has )?(?:keeps|kept)\b": "saved activations",
    r"\bheld for backward\b|\bbytes for backward\b": "saved activations",
    r"\bswitched off\b|\bswitches off\b|\bswitch(?:es)? (?:it|them) off\b": "disabled",
    r"\bresident size": "resident memory (RSS)",
    r"\bhost rss\b": "RSS",
    r"\bin the median\b": "median",
    r"\bthe middle one\b|\bthe middle rank\b": "median of the other ranks",
    r"\bown time\b|\btime of (?:its|their) own\b|\bwith(?:out)? what (?:lies|is) in it\b": "self time, total time",
    r"\bour(?: own)? (?:cost|overhead|marks?|work)\b|\bown marks\b": "profiler overhead",
    r"\bwhat (?:was|is) (?:asked|kept|said|told|left|held|missing|there|wanted|meant|recorded|not known)\b": "a noun",
    r"\bcould not be had\b|\bcan(?:not)? be had\b|\bto be had\b": "not available",
    r"\b(?:is|are|was|were|be|been) (?:told|heard)\b": "reported, shown, described",
    r"\bleavings\b|\btorn\b(?! down)|\buntold\b|\bunmet\b": "partial, truncated, unprofiled, pending",
    r"\bby itself\b|\bby themselves\b|\bof all of it\b|\bmost of it\b|\ball of it\b|\bin all[.,;:)]": "leave it out",
    r"\b(?:go|goes|going|went) on\b": "continues, live",
    r"\bruns? short\b": "is nearly full",
    r"(?<![Tt]here )\b(?:is|are|was|were) no (?!longer\b|more\b|such\b|\w+ (?:to|in|for|at)\b)": "is not a",
    r"\b(?:lies|lie|lay) (?:in|below|beside|between|there|on|behind|outside|above|with)\b": "is in",
    r"\bstands? (?:in|below|beside|at|there|above|behind|under|with)\b": "is in",
    r"\b(?:ns|us|µs|ms|s|B|KiB|MiB|GiB|bytes|times) a (?:step|second|window|rank|call|row|mark|minute)\b": "per step",
    r"\bthe most of (?:the|a|its)\b|\bof the most\b|\bthe one with the most\b": "maximum",
    r"\bwhoever\b|\bwhomever\b": "a noun",
    r"\bfor the sake of\b|\bas ever\b|\ball the same\b": "plain words",
    r"\bnothing is said\b|\bit is said\b|\bis said\b|\bare said\b": "reports",
    r"\brare collections?\b": "GC pauses",
    r"\bmoments? at which\b|\bmoments? in which\b": "when",
}
BANNED = re.compile("|".join(f"({pattern})" for pattern in PHRASES))
REPLACEMENTS = tuple(PHRASES.values())


def _texts_of_module(path: Path) -> Iterator[tuple[int, str]]:
    """Give strings that are neither keys nor the only word of their kind, and comments, with their lines."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _texts_of_page(path: Path) -> Iterator[tuple[int, str]]:
    yield 1, path.read_text(encoding="utf-8")


def _found(path: Path) -> list[str]:
    texts = _texts_of_module(path) if path.suffix == ".py" else _texts_of_page(path)
    found = []
    for line, text in texts:
        plain = re.sub(r"\s+", " ", text) if path.suffix == ".py" else text
        for match in BANNED.finditer(plain):
            at = line + (0 if path.suffix == ".py" else plain.count("\n", 0, match.start()))
            number = next(index for index, group in enumerate(match.groups()) if group is not None)
            found.append(f"{path.relative_to(ROOT)}:{at} {match[0]!r}: say {REPLACEMENTS[number]!r}")
    return found


def _rooms() -> dict[str, list[Path]]:
    """Give the files to read, by folder."""
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "measured" not in path.parts]
    files = [*(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile")), *pages]
    files += [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.html"), *(ROOT / "docs").rglob("*.py")]
    files += (ROOT / "configs").glob("*.yaml")
    rooms: dict[str, list[Path]] = {}
    for path in sorted(files):
        rooms.setdefault("/".join(path.relative_to(ROOT).parts[:-1]) or ".", []).append(path)
    return rooms


ROOMS = _rooms()


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_folder_speaks_plain_english(room: str) -> None:
    found = [line for path in ROOMS[room] for line in _found(path)]
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("takes 53 % of a step", True),
        ("takes 53% of each step", False),
        ("x is no directory", True),
        ("there is no directory", False),
        ("it is no longer open", False),
        ("20 ms a step", True),
        ("20 ms per step", False),
        ("the module lies below", True),
        ("gets switched off", True),
    ],
)
def test_what_counts_as_a_phrase(text: str, *, wrong: bool) -> None:
    assert (BANNED.search(text) is not None) is wrong
