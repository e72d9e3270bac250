"""``lightning-memprof show``: one page, or JSON, of a run."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from lightning_memprof.analysis.fetch import LocalRun

__all__ = ["show"]

# New containers, of some hundred bytes each, until the next look.
_COLLECT_AFTER: Final = 200_000


def show(run: str, format: Literal["terminal", "json"] = "terminal") -> int:  # noqa: A002 the option's name
    """Show where the time and the memory of a recorded run went.

    Args:
        run: a log directory, its memprofiler directory, or a parent directory with one run in it; also by URL.
        format: a page for the terminal, or JSON with bytes and nanoseconds.

    Returns:
        The exit code.

    Raises:
        ArtifactError: there is no run, there are several, or it cannot be read.
        ConfigError: the protocol of the URL is not known here.

    """
    from lightning_memprof.analysis.fetch import local_run

    with local_run(run) as found, _rare_collections():
        return _show(found, format)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Let Python look for cycles rarely: of thousands of ranks it would look at millions of numbers, for nothing."""
    before = gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _show(found: LocalRun, form: Literal["terminal", "json"]) -> int:
    from lightning_memprof.analysis.allocations import run_allocations
    from lightning_memprof.analysis.run import load_run
    from lightning_memprof.analysis.tables import ensure_operator_tables
    from lightning_memprof.report.view import run_view

    loaded = ensure_operator_tables(replace(load_run(found.path), url=found.url))
    view = run_view(loaded, run_allocations(loaded))
    if form == "json":
        from lightning_memprof.report.machine import to_json

        sys.stdout.write(json.dumps(to_json(view), indent=2, allow_nan=False) + "\n")
    else:
        from lightning_memprof.report.terminal import print_view

        print_view(view)
    return 0
