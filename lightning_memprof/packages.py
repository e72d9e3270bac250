"""Class checks that cover both Lightning packages, ``lightning.pytorch`` and ``pytorch_lightning``.

Each package has its own copy of the same classes, so ``isinstance`` covers only one. This module imports neither.
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
    """Return whether ``value`` overrides a method of Lightning's class ``name``, from which it derives."""
    own = getattr(lightning_class(value, name), method, None)
    return method in vars(value) or getattr(type(value), method, None) is not own
