"""Traces and snapshots that other people recorded on GPUs, and reference figures of them.

Where they are missing, their tests are skipped. MEMPROF_CORPUS says where they are; they are not in this repository.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import pytest

CORPUS: Final = Path(os.environ.get("MEMPROF_CORPUS") or Path(__file__).parents[2].parent / "shared" / "corpus")
TRACES: Final = sorted((CORPUS / "traces").glob("*/*.json.gz"))
SNAPSHOTS: Final = sorted((CORPUS / "snapshots").glob("*/*.pickle.gz"))
MISSING: Final = f"no recorded files in {CORPUS}; set MEMPROF_CORPUS to where they are"
needs_corpus = pytest.mark.skipif(not CORPUS.is_dir(), reason=MISSING)


def recorded_file(pattern: str) -> Path:
    """Return the first file of the corpus that a glob pattern finds."""
    found = sorted(CORPUS.glob(pattern))
    if not found:
        pytest.skip(f"{MISSING}: {pattern}")
    return found[0]


def reference_figures(kind: str) -> dict[str, Any]:
    """Return the reference figures of all ``traces`` or ``snapshots``, by the files' names."""
    figures: dict[str, Any] = json.loads(recorded_file(f"references/{kind}.json").read_text(encoding="utf-8"))
    return figures
