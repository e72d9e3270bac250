"""Replaces the package ``lightning_fabric``."""

from lightning_memprof.estimation.aliases import replace_package

replace_package(__name__)
