"""A collector for the tests of collectors, and the pytest plugin."""

from __future__ import annotations

# For type checkers, as in the root package: pytest imports this in every session.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from lightning_memprof.testing.collectors import FakeCollector as FakeCollector
    from lightning_memprof.testing.collectors import Occasion as Occasion

__all__ = ["FakeCollector", "Occasion"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in __all__:
            from lightning_memprof.testing import collectors

            return getattr(collectors, name)
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
