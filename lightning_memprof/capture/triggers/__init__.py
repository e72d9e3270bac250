"""Triggers: requests for windows outside the schedule."""

from __future__ import annotations
