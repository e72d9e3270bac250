"""Bytes by category of one step, by torch's MemTracker."""

from __future__ import annotations
