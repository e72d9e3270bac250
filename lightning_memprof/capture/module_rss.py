"""What each module's forward adds to the resident size of this process."""

from __future__ import annotations

from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from lightning_memprof.capture.base import Collector, OnMark
from lightning_memprof.capture.host import ResidentSize
from lightning_memprof.capture.module_calls import COMPILED, is_compiled, module_calls
from lightning_memprof.schedule import Point

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning_memprof.capture.base import RunContext
    from lightning_memprof.schedule import Mark, Window

__all__ = ["ModuleRss"]

_graph_task = torch._C._current_graph_task_id  # noqa: SLF001 torch has no public one


class ModuleRss(Collector):
    """Growth of the resident size over each module's forwards: a series of one row a step.

    A row's ``modules`` maps a path to ``[rss_diff_bytes, calls]``: the sum over the step's forwards of the resident
    size at the end less that at the start, what happened in sub-modules included. A forward that a checkpoint runs
    again does not count. The size is read from one open file, twice a forward, some 4 us each.
    """

    name: ClassVar[str] = "module_rss"

    def unavailable(self, run: RunContext) -> str | None:
        """Forwards are not told of a compiled model."""
        return COMPILED if is_compiled(run.model) else None

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Read at every forward, and write at the end of each step."""
        guard = partial(run.guarded, collector=self.name, window=window)
        with closing(ResidentSize()) as resident, run.sink.series(window, self.name) as write:
            growth = _Growth(resident)

            def at_mark(mark: Mark) -> None:
                if mark.point is Point.STEP_START:
                    growth.modules = {}
                elif mark.point is Point.STEP_END:
                    write(mark, modules=growth.modules)

            with module_calls(run.model, guard(growth.before), guard(growth.after)):
                yield at_mark


class _Growth:
    """The present step's ``[rss_diff_bytes, calls]`` by module."""

    def __init__(self, resident: ResidentSize) -> None:
        self.modules: dict[str, list[int]] = {}
        self._read = resident.read
        self._started: list[int | None] = []

    def before(self, path: str, args: tuple[Any, ...]) -> None:  # noqa: ARG002 told where it ends
        self._started.append(None if _graph_task() != -1 else self._read())

    def after(self, path: str) -> None:
        started = self._started.pop()
        if started is not None:
            found = self.modules.setdefault(path, [0, 0])
            found[0] += self._read() - started
            found[1] += 1
