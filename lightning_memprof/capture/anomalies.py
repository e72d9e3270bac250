"""What may open a window by itself."""

from __future__ import annotations

from abc import ABC

__all__ = ["Anomaly"]


class Anomaly(ABC):
    """Something unusual in a step that opens a window at the next one."""
