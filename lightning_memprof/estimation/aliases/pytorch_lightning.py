"""Replaces the package ``pytorch_lightning``."""

from __future__ import annotations

from lightning_memprof.estimation.aliases import replace_package

replace_package(__name__)
