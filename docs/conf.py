"""Sphinx: the pages are MyST Markdown and name no outside host."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

project = "lightning-memprof"
author = "The lightning-memprof developers"
copyright = author
release = re.findall(
    r'^__version__ = "(.+)"$',
    (ROOT / "lightning_memprof" / "__init__.py").read_text(encoding="utf-8"),
    re.MULTILINE,
)[0]
version = release

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
# Measured figures are included by pages.
exclude_patterns = ["_build", "examples", "measured"]
nitpicky = True

html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False
html_show_sphinx = False
