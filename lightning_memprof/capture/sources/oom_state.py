"""State of the process when memory ran out: the requesting code, the host's limits, the live tensors and their holders.

Nothing here allocates on a device, synchronizes, or keeps a reference to a frame, a tensor or an exception.
"""

from __future__ import annotations

import gc
import heapq
import inspect
import resource
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, dropwhile, islice
from operator import itemgetter
from traceback import walk_stack, walk_tb
from types import CellType, CodeType, FrameType, FunctionType, GeneratorType
from typing import Any, Final, NamedTuple

import psutil
import torch
from torch import nn

from lightning_memprof.capture.observe import without_torch_function
from lightning_memprof.capture.sources.holders import HolderSearch
from lightning_memprof.capture.sources.memory import cgroup_memory, peak_rss_bytes
from lightning_memprof.capture.sources.objects import referents_of_tuples, tracked_objects
from lightning_memprof.capture.sources.tensors import local_storage

_MAX_FRAMES: Final = 400
_MAX_TENSORS: Final = 30
# A whole program has millions of objects, and the list of what they refer to is several times as long.
_AT_ONCE: Final = 10_000
_OPTIMIZED: Final = inspect.CO_OPTIMIZED
# Innermost first; the first match is the phase. The frames of backward are the autograd engine's callers.
_CALLERS: Final = (
    ("backward", ("torch.autograd", "torch._tensor"), ("backward", "grad", "_engine_run_backward")),
    ("optimizer", ("torch.optim",), ()),
    ("data_wait", ("torch.utils.data", "lightning.pytorch.loops.fetchers", "pytorch_lightning.loops.fetchers"), ()),
)
_STEPS: Final = ("training_step", "validation_step", "test_step", "predict_step")
_STRATEGIES: Final = (".strategies.", ".overrides.", ".plugins.")


class Frame(NamedTuple):
    """One Python frame as text, without a reference to it."""

    filename: str
    line: int
    name: str
    module: str


def running_frames() -> list[Frame]:
    """Return the frames of this thread, innermost first, without those of the caller's file and without locals.

    Reading the locals of a running frame would keep its tensors alive until it returns.
    """
    caller = sys._getframe(1)  # noqa: SLF001 the documented way to the current stack
    above = dropwhile(lambda entry: entry[0].f_globals is caller.f_globals, walk_stack(caller))
    return [_text(frame, line) for frame, line in islice(above, _MAX_FRAMES)]


def frames_of(error: BaseException, ended_as: BaseException | None = None) -> list[Frame]:
    """Return the frames that an exception propagated through, innermost first.

    Args:
        error: the original exception.
        ended_as: the final exception, raised from it; None if that is the same.
    """
    chain = [error] if ended_as is None or ended_as is error else [error, ended_as]
    # The frame that caught the first and raised the last is in both.
    entries = {id(entry[0]): entry for part in chain for entry in reversed(list(walk_tb(part.__traceback__)))}
    return [_text(frame, line) for frame, line in entries.values()][:_MAX_FRAMES]


def module_of(error: BaseException, model: nn.Module) -> tuple[str, str] | None:
    """Return path and class of the innermost module of ``model`` in whose method an exception was raised, or None.

    ``self`` is the first local among the referents of the finished frame, which lists them in order.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    for frame, _ in reversed(list(walk_tb(error.__traceback__))):
        code = frame.f_code
        if not (code.co_flags & _OPTIMIZED and code.co_argcount and code.co_varnames[0] == "self"):
            continue
        itself = _first_local(frame)
        path = paths.get(id(itself))
        if path is not None and issubclass(type(itself), torch.nn.Module):
            return path, type(itself).__name__
    return None


def _first_local(frame: FrameType) -> Any:
    """Return a finished frame's first local; ``f_locals`` would create a dictionary that keeps all of them alive."""
    for value in gc.get_referents(frame):
        if type(value) is CellType:
            return value.cell_contents
        if type(value) not in (FrameType, FunctionType, CodeType, dict):
            return value
    return None


def phase_of(frames: Iterable[Frame]) -> tuple[str | None, str | None]:
    """Return the phase of a stack, and the module's step function in it; None for each that it does not show.

    Args:
        frames: innermost first.
    """
    phase: str | None = None
    for frame in frames:
        if frame.name in _STEPS and any(part in frame.module for part in _STRATEGIES):
            return phase or "forward", frame.name
        if phase is None:
            if frame.name == "closure" and ".loops.optimization." in frame.module:
                # The optimizer called it, but forward or backward runs: the clock knows which.
                return None, None
            if frame.name in ("setup", "model_to_device") and ".strategies." in frame.module:
                return "setup", None
            if frame.name == "_call_callback_hooks" and frame.module.endswith("pytorch.trainer.call"):
                phase = "callbacks"
            for caller_phase, modules, names in _CALLERS:
                if frame.module.startswith(modules) and (not names or frame.name in names):
                    phase = caller_phase
                    break
    return phase, None


def forward_sources(model: nn.Module) -> dict[str, Any]:
    """Return the source lines of the modules' forwards, to find modules in a Python stack.

    Returns:
        ``{"sources": [[file, first line, last line], ...], "modules": {path: [class, index of its source or None]}}``.
    """
    sources: dict[CodeType, int] = {}
    modules: dict[str, tuple[str, int | None]] = {}
    for path, module in model.named_modules():
        forward = vars(module).get("forward") or getattr(type(module), "forward", None)
        code = getattr(inspect.unwrap(forward), "__code__", None) if callable(forward) else None
        if forward is torch.nn.Module.forward:
            code = None
        index = sources.setdefault(code, len(sources)) if isinstance(code, CodeType) else None
        modules[path] = type(module).__name__, index
    return {
        "sources": [[code.co_filename, code.co_firstlineno, _last_line(code)] for code in sources],
        "modules": modules,
    }


def _last_line(code: CodeType) -> int:
    return max((line for _, _, line in code.co_lines() if line), default=code.co_firstlineno)


def host_memory() -> dict[str, int | None]:
    """Return this process's sizes, the machine's memory and the limits of the process, in bytes.

    A limit that is not set is None.
    """
    size = psutil.Process().memory_info()
    machine = psutil.virtual_memory()
    facts: dict[str, int | None] = {
        "rss_bytes": int(size.rss),
        "vms_bytes": int(size.vms),
        "peak_rss_bytes": peak_rss_bytes(int(size.rss)),
        "total_bytes": int(machine.total),
        "available_bytes": int(machine.available),
    }
    for name, number in (("as", resource.RLIMIT_AS), ("data", resource.RLIMIT_DATA)):
        soft, _ = resource.getrlimit(number)
        facts[f"rlimit_{name}_bytes"] = None if soft == resource.RLIM_INFINITY else soft
    facts["cgroup_limit_bytes"], facts["cgroup_used_bytes"] = cgroup_memory()
    return facts


@without_torch_function
def live_tensors(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], device: torch.device
) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Return bytes by category and the largest tensors on ``device``, each storage once.

    Args:
        model: its parameters, gradients and buffers are named.
        optimizers: their state is named.
        device: where the tensors are.

    Returns:
        Bytes by ``parameter_bytes``, ``gradient_bytes``, ``optimizer_state_bytes``, ``buffer_bytes``, and
        ``other_bytes``: other tensors that an object of the program holds. None includes saved activations and local
        variables: these are tensors of the list whose category is None.
    """
    held = dict.fromkeys(
        ("parameter_bytes", "buffer_bytes", "gradient_bytes", "optimizer_state_bytes", "other_bytes"), 0
    )
    tracked = tracked_tensors()
    referred = referenced(tracked)
    seen: set[int] = set()
    found: list[tuple[int, str | None, str | None, torch.Tensor]] = []
    # The model's own first: a view of a parameter is then shown with the parameter's name and shape. Then those that
    # are held: a tensor that autograd has saved may share the storage of one.
    tracked.sort(key=lambda tensor: id(tensor) not in referred)
    unnamed = ((("other" if id(tensor) in referred else None, None), tensor) for tensor in tracked)
    for (category, name), tensor in chain(_named_tensors(model, optimizers), unnamed):
        storage = local_storage(tensor)
        if storage is None or storage._cdata in seen:  # noqa: SLF001 an address that needs no data
            continue
        if device not in (storage.device, torch.device(storage.device.type)):
            continue
        seen.add(storage._cdata)  # noqa: SLF001
        size = storage.nbytes()
        if category is not None:
            held[f"{category}_bytes"] += size
        found.append((size, category, name, tensor))
    largest = heapq.nlargest(_MAX_TENSORS, found, key=itemgetter(0))
    search = HolderSearch(model)
    search.ignore(tracked, found, largest, *found)
    return held, [
        {
            "bytes": size,
            "category": category,
            "name": name,
            "holder": holder.place if category == "other" and (holder := search.find(tensor)) is not None else None,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }
        for size, category, name, tensor in largest
    ]


def _text(frame: FrameType, line: int | None) -> Frame:
    code = frame.f_code
    module = frame.f_globals.get("__name__")
    return Frame(code.co_filename, line or code.co_firstlineno, code.co_name, module if isinstance(module, str) else "")


def _named_tensors(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[tuple[str, str | None], torch.Tensor]]:
    """Yield category, name and tensor of each tensor of the model and its optimizers."""
    names: dict[int, str] = {}
    entries: list[tuple[str, str | None, Any]] = []
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
        entries += [("parameter", name, parameter), ("gradient", f"{name}.grad", parameter.grad)]
    for optimizer in optimizers:
        for owner, state in list(optimizer.state.items()):
            if isinstance(state, dict):
                name = names.get(id(owner), "?")
                entries += [("optimizer_state", f"{name}.{key}", value) for key, value in state.items()]
    entries += [("buffer", name, buffer) for name, buffer in model.named_buffers()]
    for category, label, tensor in entries:
        if isinstance(tensor, torch.Tensor):
            yield (category, label), tensor


def tracked_tensors() -> list[torch.Tensor]:
    """Return the tensors that the garbage collector tracks."""
    # isinstance of a proxy may run the program's code; its type does not.
    return tracked_objects(lambda kind: issubclass(kind, torch.Tensor))


def referenced(tensors: list[torch.Tensor]) -> set[int]:
    """Return the ``id`` of each tensor that an object refers to; ``tensors`` itself and local variables do not count.

    A saved activation often has a Python wrapper that nothing in Python refers to: only autograd refers to it.
    Nor do the arguments of a running call: a tuple or a cell that only running code refers to.
    Takes about a second per million objects of the program.
    """
    ids = {id(tensor) for tensor in tensors}
    tuples = dict(referents_of_tuples(ids))
    ours = {id(tensors), id(ids), *map(id, tuples.values())}
    tracked = tracked_objects(lambda kind: kind is not FrameType)
    # A running generator holds local variables.
    objects = [
        value for value in tracked if id(value) not in ours and not (type(value) is GeneratorType and value.gi_running)
    ]
    del tracked
    wanted = ids.union(tuples)
    cells = {
        id(value): value
        for value in objects
        if type(value) is CellType and not wanted.isdisjoint(map(id, gc.get_referents(value)))
    }
    wanted.update(cells)
    objects = [value for value in objects if id(value) not in cells]
    others = referents_of_tuples(wanted)
    found = {id(value) for number, held in others if number not in tuples for value in held if id(value) in wanted}
    del others
    for start in range(0, len(objects), _AT_ONCE):
        found.update(wanted.intersection(map(id, gc.get_referents(*objects[start : start + _AT_ONCE]))))
    found.update(map(id, gc.get_referents(*(cells[number] for number in found.intersection(cells)))))
    found.update(id(value) for number in found.intersection(tuples) for value in tuples[number])
    return found & ids
