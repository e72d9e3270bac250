"""Parts of a model that ``torch.compile`` has compiled, and code of ours that must not be compiled with them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from lightning_memprof.capture.observe import discard, original_of, put

COMPILED: Final = "a part of the model is compiled: torch would recompile it when hooks come or go"
# The attribute of torch.compile's wrapper that has the compiled module, and that of a module's own compile().
WRAPPED: Final = "_orig_mod"
COMPILED_CALL: Final = "_compiled_call_impl"


def is_compiled(model: nn.Module) -> bool:
    """Return whether the model or a part of it is compiled."""
    return bool(compiled_modules(model))


def compiled_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the compiled modules by path: torch's wrappers, those with a compiled call, and Lightning's model."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    optimized: type | tuple[()] = getattr(dynamo, "OptimizedModule", ())
    return {
        path: module
        for path, module in module_paths(model).items()
        if isinstance(module, optimized)
        or vars(module).get(COMPILED_CALL) is not None
        or getattr(module, "_compiler_ctx", None) is not None
    }


def is_redirected() -> bool:
    """Return whether a strategy may call the model for a step, as DDP and FSDP1 do: its forward is the step then.

    The compiled code of a model whose ``compile()`` was called contains the step then, and the model's call in it.
    """
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def forget_compiled() -> None:
    """Have torch compile everything again, so that what is compiled does not depend on what ran before."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def graph_breaks() -> Counter[str]:
    """Return the number of graph breaks of this process by reason, as torch counts them: in each compilation."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    found: Counter[str] = Counter()
    for reason, count in counters.get("graph_break", {}).items():
        found[reason.partition("\n")[0]] += count
    return found


def module_paths(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by path; one that ``torch.compile`` has wrapped is its wrapper, and has one path."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        found.setdefault(plain_path(path), module)
    return found


def plain_path(path: str) -> str:
    """Return the path of a module or a parameter without the names of wrappers that ``torch.compile`` added."""
    return ".".join(part for part in path.split(".") if part != WRAPPED) if WRAPPED in path else path


@contextmanager
def outside_of_compilers(functions: Sequence[Callable[..., Any]], *places: tuple[Any, str]) -> Iterator[None]:
    """Keep wrappers out of ``torch.compile`` while the context is open.

    A compiler that met a wrapper would compile it, and compile the program again when the wrapper comes or goes.

    Args:
        functions: neither they nor anything that they call is compiled.
        places: a class or an instance, and its attribute that is wrapped: unwrapped while torch compiles. The wrapper
            is not compiled; what it calls is.
    """
    if "torch._dynamo.eval_frame" not in sys.modules:
        yield
        return
    from lightning_memprof.capture.torch_internals import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    wrappers = [vars(place)[name] for place, name in places]
    for found, within in ((wrappers, _FrameAction.DEFAULT), (functions, _FrameAction.SKIP)):
        for code in (getattr(function, "__code__", None) for function in found):
            if code is not None:
                set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, within))
    hidden: list[tuple[Any, str, Any]] = []

    def start(_: Any) -> None:
        for place, name in places:
            top = vars(place).get(name)
            if (below := original_of(top)) is not top:
                hidden.append((place, name, top))
                put(place, name, below)

    def end(_: Any) -> None:
        while hidden:
            put(*hidden.pop())

    with around_compilations(start, end):
        yield


@contextmanager
def around_compilations(start: Callable[[Any], None], end: Callable[[Any], None]) -> Iterator[None]:
    """Call functions, which must not raise, at the start and end of each compilation while the context is open.

    ``torch.compiler.reset()`` ends this.
    """
    # Nothing is compiled before it is loaded; loading it takes a second.
    if "torch._dynamo.callback" not in sys.modules:
        yield
        return
    from lightning_memprof.capture.torch_internals import callback_handler

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        for callbacks, callback in ((callback_handler.start_callbacks, start), (callback_handler.end_callbacks, end)):
            discard(callbacks, callback)
