"""Replaces the package ``pytorch_lightning``."""

from lightning_memprof.estimation.aliases import replace_package

replace_package(__name__)
