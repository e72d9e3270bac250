"""Files of a run, and of anybody, as typed tables."""

from __future__ import annotations
