"""Functions in front of methods of torch for a time; contexts may end in any order."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["in_front_of"]

_FOLLOWING: Final = "_memprof_following"


@contextmanager
def in_front_of(
    owner: type, name: str, wrap: Callable[[list[Callable[..., Any]]], Callable[..., Any]]
) -> Iterator[None]:
    """Put ``wrap(following)`` in place of ``owner``'s method ``name`` while the context is open.

    ``following`` is a list whose one item is what comes next. Who ends takes itself out of the chain of those in front
    of it; where somebody else's function hides the chain, it stays in it. A method that the class has only inherited
    is not left on it.
    """
    following: list[Callable[..., Any]] = [getattr(owner, name)]
    mine = wrap(following)
    mine.__dict__[_FOLLOWING] = following
    setattr(owner, name, mine)
    try:
        yield
    finally:
        if (there := getattr(owner, name)) is mine:
            inherited = next((vars(base)[name] for base in owner.__mro__[1:] if name in vars(base)), None)
            if following[0] is inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, following[0])
        else:
            link = getattr(there, _FOLLOWING, None)
            while link is not None and link[0] is not mine:
                link = getattr(link[0], _FOLLOWING, None)
            if link is not None:
                link[0] = following[0]
