"""A collector that logs its calls, and fails where a test wants it to."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from lightning_memprof.capture.base import Collector, SkipWindow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from lightning_memprof.capture.base import OnMark, OnStep, RunContext, StepRecord
    from lightning_memprof.schedule import Mark, Window

__all__ = ["FakeCollector", "Occasion"]

Occasion = Literal["enter", "mark", "exit", "follow", "step", "unfollow"]


class FakeCollector(Collector):
    """Writes nothing to disk; ``told`` holds what it heard, in order, also of what it then failed on.

    Args:
        name: under which it is reported.
        fails: the exception to raise by occasion, each time.
        missing: the reason why it is not available in any run; None is available.
        not_now: the reason why it can record no window; None is none.
        follows: whether it watches the whole run.
        journal: shared by several collectors to see the order between them; entries are ``(name, occasion, what)``.

    """

    def __init__(
        self,
        name: str = "fake",
        *,
        fails: Mapping[Occasion, Exception] | None = None,
        missing: str | None = None,
        not_now: str | None = None,
        follows: bool = False,
        journal: list[tuple[str, Occasion, Any]] | None = None,
    ) -> None:
        self.name = name  # type: ignore[misc]  # each instance stands for another collector
        self._fails = fails or {}
        self._missing = missing
        self._not_now = not_now
        self._follows = follows
        self._journal = [] if journal is None else journal

    @property
    def told(self) -> list[tuple[Occasion, Any]]:
        """What it heard: a window at ``enter``, a mark, a step; at ``exit`` the exception that it was left with."""
        return [(occasion, what) for name, occasion, what in self._journal if name == self.name]

    @property
    def marks(self) -> list[Mark]:
        """The marks that it heard."""
        return [what for occasion, what in self.told if occasion == "mark"]

    @property
    def steps(self) -> list[StepRecord]:
        """The steps that it heard of while it followed."""
        return [what for occasion, what in self.told if occasion == "step"]

    def unavailable(self, run: RunContext) -> str | None:  # noqa: ARG002 overriding
        """Return what the test said."""
        return self._missing

    @contextmanager
    def record(self, run: RunContext, window: Window) -> Iterator[OnMark | None]:  # noqa: ARG002 overriding
        """Hear of one window."""
        self._hear("enter", window)
        if self._not_now is not None:
            raise SkipWindow(self._not_now)
        left_with: BaseException | None = None
        try:
            yield lambda mark: self._hear("mark", mark)
        except BaseException as error:
            left_with = error
            raise
        finally:
            self._hear("exit", left_with)

    @contextmanager
    def follow(self, run: RunContext) -> Iterator[OnStep | None]:  # noqa: ARG002 overriding
        """Hear of every step, where that is wanted."""
        if not self._follows:
            yield None
            return
        self._hear("follow", None)
        try:
            yield lambda record: self._hear("step", record)
        finally:
            self._hear("unfollow", None)

    def _hear(self, occasion: Occasion, what: Any) -> None:
        self._journal.append((self.name, occasion, what))
        if (error := self._fails.get(occasion)) is not None:
            raise error
