"""Helpers for tests of collectors."""

from __future__ import annotations

from lightning_memprof.testing.collectors import FakeCollector

__all__ = ["FakeCollector"]
