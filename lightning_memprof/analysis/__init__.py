"""From a run directory to facts: reads artifacts only, loads neither torch nor lightning."""

from __future__ import annotations
