"""Replaces the package ``lightning_fabric``."""

from __future__ import annotations

from lightning_memprof.estimation.aliases import replace_package

replace_package(__name__)
