"""Lightning's two packages, ``lightning.pytorch`` and ``pytorch_lightning``: the same classes, twice, with one name.

Where a decision depends on a class of Lightning, ask here: ``isinstance`` knows one package only. Imports neither.
"""

from __future__ import annotations

from typing import Any, Final

PACKAGES: Final = frozenset({"lightning", "pytorch_lightning", "lightning_fabric"})
"""The top-level packages of Lightning's code."""

_WITH_TRAINERS: Final = ("lightning.pytorch.", "pytorch_lightning.")


def lightning_class(value: object, *names: str) -> type | None:
    """Return the first class of Lightning's with one of these names that ``value`` is an instance of, or None."""
    return next(
        (base for base in type(value).__mro__ if base.__name__ in names and base.__module__.startswith(_WITH_TRAINERS)),
        None,
    )


def overrides(value: Any, name: str, method: str) -> bool:
    """Whether a method of ``value`` is another than that of Lightning's class ``name``, which it derives from."""
    own = getattr(lightning_class(value, name), method, None)
    return method in vars(value) or getattr(type(value), method, None) is not own
