"""A row of the table: what was tried, and what became of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))


HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class Verdict(Enum):
    """What became of a row; only RED makes the command fail."""

    RAN = "ran"
    REFUSED = "refused in one line"
    IN_PART = "ran in part"
    UNTESTED = "untested"
    RED = "**RED**"


@dataclass(frozen=True)
class Row:
    """What was tried, what became of it, and what was seen."""

    what: str
    verdict: Verdict
    saw: str
