"""The rules, by domain."""

from __future__ import annotations
