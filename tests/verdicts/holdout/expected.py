"""What a fair page says about each training of this folder."""

from __future__ import annotations

from typing import Final

from scoring import Expected

EXPECTED: Final[tuple[Expected, ...]] = ()
