"""Collectors for tests: one records its calls and fails on request, the other waits for files."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lightning_memprof.capture.base import Collector, SkipWindow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from lightning_memprof.capture.base import OnMark, OnStep, RunContext, StepRecord
    from lightning_memprof.schedule import Mark, Window


Occasion = Literal["enter", "mark", "exit", "follow", "step", "unfollow"]


class FakeCollector(Collector):
    """Records its calls in memory, in order, also those that it fails; writes no files.

    Args:
        name: the collector's name.
        fails: by occasion, the exception to raise each time.
        unavailable_reason: why it is not available in any run; None if it is available.
        skip_reason: why it skips every window; None if it records them.
        follows: whether it follows the whole run.
        journal: calls as ``(name, occasion, value)``; several collectors may share one to record their order.
    """

    def __init__(
        self,
        name: str = "fake",
        *,
        fails: Mapping[Occasion, Exception] | None = None,
        unavailable_reason: str | None = None,
        skip_reason: str | None = None,
        follows: bool = False,
        journal: list[tuple[str, Occasion, Any]] | None = None,
    ) -> None:
        self.name = name  # type: ignore[misc]  # each instance is another collector
        self._fails = fails or {}
        self._unavailable_reason = unavailable_reason
        self._skip_reason = skip_reason
        self._follows = follows
        self._journal = [] if journal is None else journal

    @property
    def calls(self) -> list[tuple[Occasion, Any]]:
        """The calls: with a window (``enter``), a mark, a step, or the exception that ended the window (``exit``)."""
        return [(occasion, value) for name, occasion, value in self._journal if name == self.name]

    @property
    def marks(self) -> list[Mark]:
        """The marks of all windows."""
        return [value for occasion, value in self.calls if occasion == "mark"]

    @property
    def steps(self) -> list[StepRecord]:
        """The steps of the run, if it follows the run."""
        return [value for occasion, value in self.calls if occasion == "step"]

    def unavailable(self, run: RunContext) -> str | None:  # noqa: ARG002 overriding
        """Return the reason of the test."""
        return self._unavailable_reason

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:  # noqa: ARG002 overriding
        """Record the calls of one window."""
        self._call("enter", window)
        if self._skip_reason is not None:
            raise SkipWindow(self._skip_reason)
        error: BaseException | None = None
        try:
            yield lambda mark: self._call("mark", mark)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._call("exit", error)

    @contextmanager
    def follow(self, run: RunContext) -> Iterator[OnStep | None]:  # noqa: ARG002 overriding
        """Record every step, if it follows the run."""
        if not self._follows:
            yield None
            return
        self._call("follow", None)
        try:
            yield lambda record: self._call("step", record)
        finally:
            self._call("unfollow", None)

    def _call(self, occasion: Occasion, value: Any) -> None:
        self._journal.append((self.name, occasion, value))
        if (error := self._fails.get(occasion)) is not None:
            raise error


class WaitsForFiles(Collector):
    """Waits after each step until the files of its window are written: behind two of them a window has no trace."""

    name: ClassVar[str] = "waits_for_files"

    def record(self, run: RunContext, window: Window) -> AbstractContextManager[OnMark | None]:  # noqa: ARG002 overriding
        """Windows add nothing."""
        return nullcontext(None)

    @contextmanager
    def follow(self, run: RunContext) -> Iterator[OnStep | None]:
        """Wait after each step."""
        yield lambda _: run.sink.drain()
