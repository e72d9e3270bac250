"""The hooks of finetuning-scheduler's ``memprofiler_cfg``: dotted names to functions, its own names to what we do."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.capture.sources.saved_hooks import checked_unpack
from lightning_memprof.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

__all__ = [
    "HOOK_ATTRIBUTES",
    "NPP_HOOK",
    "POST_FORWARD",
    "PRE_FORWARD",
    "RESET_STATE",
    "BuiltIn",
    "identity",
    "reset_attributes",
    "resolve",
    "saved_tensors_pair",
]

_HOME: Final = "fts_examples"
PRE_FORWARD: Final = f"{_HOME}.profiling.npp_hooks._hook_npp_pre_forward"
POST_FORWARD: Final = f"{_HOME}.profiling.npp_hooks._hook_npp_post_forward"
RESET_STATE: Final = f"{_HOME}.profiling.npp_hooks._reset_memory_hooks_state"
NPP_HOOK: Final = f"{_HOME}.profiling.npp_hooks._npp_hook"
HOOK_ATTRIBUTES: Final = (
    "rss_pre_forward", "rss_post_forward", "rss_diff", "npp_pre_forward", "npp_post_forward", "npp_diff",
)  # fmt: skip


class BuiltIn(Enum):
    """What ours do without a function of the user's, by the name of finetuning-scheduler's function."""

    PRE_FORWARD = "_hook_npp_pre_forward"
    POST_FORWARD = "_hook_npp_post_forward"
    RESET_STATE = "_reset_memory_hooks_state"
    NPP_PACK = "_npp_hook"
    IDENTITY = "identity_lambda"


def resolve(hook: str | Callable[..., Any]) -> Callable[..., Any] | BuiltIn:
    """Return the function that a dotted name means, or which of ours stands for it.

    Raises:
        ConfigError: the name cannot be imported, or is nothing that can be called.

    """
    name = hook if isinstance(hook, str) else f"{getattr(hook, '__module__', '')}.{getattr(hook, '__name__', '')}"
    last = name.rpartition(".")[2]
    if name == BuiltIn.IDENTITY.value or (
        name.startswith(f"{_HOME}.") and last in {hook_name.value for hook_name in BuiltIn}
    ):
        return BuiltIn(last)
    found = _imported(hook) if isinstance(hook, str) else hook
    if not callable(found):
        msg = f"memprofiler_cfg names {hook!r}: it is {type(found).__name__}, and must be a function"
        raise ConfigError(msg)
    return found


def _imported(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        msg = (
            f"memprofiler_cfg names {name!r}, which cannot be imported ({type(error).__name__}: {error}); "
            "give the dotted name of a function, as in 'package.module.function'"
        )
        raise ConfigError(msg) from error


def reset_attributes(model: nn.Module, names: Sequence[str]) -> None:
    """Set the attributes to 0 on every module, as a user's hooks that add to them expect it."""
    for module in model.modules():
        for name in names:
            setattr(module, name, 0)


def identity(value: Any) -> Any:
    """Return ``value``."""
    return value


def saved_tensors_pair(
    funcs: Sequence[str | Callable[..., Any]],
) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the user's pack and unpack function, or None where neither is the user's.

    Raises:
        ConfigError: there are not two, or one does not resolve.

    """
    if isinstance(funcs, str) or len(funcs) != 2:
        msg = f"saved_tensors_funcs={funcs!r}: must be two, a pack and an unpack function"
        raise ConfigError(msg)
    pack, unpack = (resolve(function) for function in funcs)
    if isinstance(pack, BuiltIn) and isinstance(unpack, BuiltIn):
        return None
    return (
        identity if isinstance(pack, BuiltIn) else pack,
        checked_unpack if isinstance(unpack, BuiltIn) else unpack,
    )
