"""RSS growth of this process over each module's forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, ClassVar

from lightning_memprof.capture.base import Collector, OnMark, RunContext
from lightning_memprof.capture.sources.memory import ResidentSize
from lightning_memprof.capture.sources.module_calls import module_calls
from lightning_memprof.capture.torch_internals import _current_graph_task_id
from lightning_memprof.schedule import Mark, Point, Window


class ModuleRss(Collector):
    """RSS growth over each module's forwards: a series with one row per step.

    A row's ``modules`` maps a path to ``[rss_diff_bytes, calls]``: the sum over the step's forwards of the RSS at the
    end minus that at the start, including sub-modules. A checkpoint's recomputation does not count. The RSS is read
    from one open file, twice per forward, about 4 µs each.
    """

    name: ClassVar[str] = "module_rss"

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:
        """Read at every forward and write at the end of each step."""
        failed = run.on_fault(self.name, window)
        with closing(ResidentSize()) as resident, run.sink.series(window, self.name) as write:
            modules: dict[str, list[int]] = {}

            def at_mark(mark: Mark) -> None:
                if mark.point is Point.STEP_START:
                    modules.clear()
                elif mark.point is Point.STEP_END:
                    write(mark, modules=dict(modules))

            with module_calls(run.model, *_hooks(modules, resident.read, failed)):
                yield at_mark


def _hooks(
    modules: dict[str, list[int]], read: Callable[[], int], failed: Callable[[Exception], None]
) -> tuple[Callable[[str, tuple[Any, ...]], None], Callable[[str, Any], None]]:
    """Return the functions for before and after a forward: closures, since every module calls them in each step."""
    started: list[int | None] = []

    def before(path: str, args: tuple[Any, ...]) -> None:  # noqa: ARG001 `after` needs the path only
        size = None
        try:
            if _current_graph_task_id() == -1:
                size = read()
        except OSError as error:
            failed(error)
        started.append(size)

    def after(path: str, output: Any) -> None:  # noqa: ARG001 the path is enough
        start = started.pop()
        if start is not None:
            try:
                grown = read() - start
            except OSError as error:
                failed(error)
                return
            if path in modules:
                row = modules[path]
                row[0] += grown
                row[1] += 1
            else:
                modules[path] = [grown, 1]

    return before, after
