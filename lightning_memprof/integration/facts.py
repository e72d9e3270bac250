"""Facts of a run for its manifest: process, Trainer, configuration.

An allow-list: nothing is dumped whole.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import warnings
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import psutil
import torch
from torch.utils.data import Dataset, IterableDataset

import lightning_memprof
from lightning_memprof.artifacts.manifest import SCHEMA_VERSION
from lightning_memprof.capture.faults import describe
from lightning_memprof.capture.observe import without_torch_function
from lightning_memprof.capture.sources.compiled import compiled_modules
from lightning_memprof.capture.sources.memory import cgroup_cores, cgroup_memory, mapped_files, usable_cpus
from lightning_memprof.capture.sources.tensors import PLAIN_TENSORS, local_storage
from lightning_memprof.packages import lightning_class, overrides
from lightning_memprof.schedule import Schedule, no_window
from lightning_memprof.units import MIB

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_memprof.capture.base import Collector, RunContext

# One embedding or head dominates; a few rows show it.
_LARGEST: Final = 5
# Of the objects that a data set refers to: a list of as many takes some ms.
_MOST_OBJECTS: Final = 1000
# A checkpoint takes 10 ms to pickle as many.
_MANY_OBJECTS: Final = 10_000
_MANY_BYTES: Final = MIB // _MANY_OBJECTS
# Of a group of parameters, what is not a setting.
_NAMES: Final = frozenset({"params", "param_names", "name"})
# Types of settings that are compared by value.
_PLAIN: Final = frozenset({bool, int, float, complex, str, type(None)})
_DTYPES: Final = (
    ("bf16", torch.bfloat16),
    ("16", torch.float16),
    ("32", torch.float32),
)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a rank was started.

    Attributes:
        local_rank: number of the rank on its node.
        node_rank: number of the node.
        accelerator: class of Lightning's accelerator; None without one.
        lightning: version of the package of the Trainer; None without one.
    """

    local_rank: int
    node_rank: int
    accelerator: str | None = None
    lightning: str | None = None


def launch_of(trainer: Trainer) -> Launch:
    """Return how a Trainer's rank was started."""
    own = lightning_class(trainer, "Trainer")
    package = "lightning" if own is None else own.__module__.partition(".")[0]
    return Launch(
        local_rank=trainer.local_rank,
        node_rank=trainer.node_rank,
        accelerator=type(trainer.accelerator).__name__,
        lightning=str(sys.modules[package].__version__),
    )


def run_facts(run: RunContext, schedule: Any, collectors: Sequence[Collector], launch: Launch) -> dict[str, Any]:
    """Return the manifest's ``run`` row."""
    place = run.sink.place
    return {
        "schema_version": SCHEMA_VERSION,
        "stage": run.stage,
        "rank": run.rank,
        "local_rank": launch.local_rank,
        "node_rank": launch.node_rank,
        "world_size": run.world_size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "strategy": run.strategy,
        "accelerator": launch.accelerator,
        "device": str(run.device),
        "root": place.url or str(place.root),
        "schedule": _schedule_facts(schedule),
        "collectors": [collector.name for collector in collectors],
        "environment": _environment(run.device, launch.lightning),
    }


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return floating-point operations per second of a device in a precision of Lightning's, such as ``bf16-mixed``.

    None where Lightning does not know the device (every CPU) or the precision. Source:
    ``lightning.fabric.utilities.throughput.get_available_flops``, the vendors' figures for dense matrices.
    """
    dtype = next((dtype for prefix, dtype in _DTYPES if precision.startswith(prefix)), None)
    if dtype is None or device.type != "cuda":
        return None
    try:
        # Late: a loop of the program's own needs no Lightning.
        from lightning.fabric.utilities.throughput import get_available_flops

        with warnings.catch_warnings():
            # It warns about an unknown device, which the report shows.
            warnings.simplefilter("ignore")
            peak = get_available_flops(device, dtype)
    except Exception:  # noqa: BLE001 a missing precision raises various errors, and the run continues without the figure
        return None
    return None if peak is None else float(peak)


def _environment(device: torch.device, lightning: str | None) -> dict[str, Any]:
    """Return versions, cores and memory; those that the system does not tell are missing."""
    is_cuda = device.type == "cuda"
    readers: dict[str, Callable[[], Any]] = {
        "python": platform.python_version,
        "torch": lambda: torch.__version__,
        "lightning": lambda: lightning,
        "lightning_memprof": lambda: lightning_memprof.__version__,
        "platform": platform.platform,
        "cpu_count": os.cpu_count,
        "usable_cpus": usable_cpus,
        "cpu_quota": cgroup_cores,
        "physical_cpus": lambda: psutil.cpu_count(logical=False),
        "torch_threads": torch.get_num_threads,
        "memory_bytes": lambda: psutil.virtual_memory().total,
        "rss_at_start_bytes": lambda: psutil.Process().memory_info().rss,
        "memory_limit_bytes": lambda: cgroup_memory()[0],
        "device_memory_bytes": lambda: torch.cuda.get_device_properties(device).total_memory if is_cuda else None,
        "device_name": lambda: torch.cuda.get_device_name(device) if is_cuda else None,
    }
    return _read(readers, {})


def _schedule_facts(schedule: Any) -> dict[str, Any] | None:
    if schedule is no_window:
        return None
    return asdict(schedule) if isinstance(schedule, Schedule) else {"callable": _name(schedule)}


def _name(schedule: Any) -> str:
    # Not `repr`: it has the arguments of a `functools.partial`.
    called = schedule if hasattr(schedule, "__qualname__") else type(schedule)
    return f"{called.__module__}.{called.__qualname__}"


@without_torch_function
def training_facts(trainer: Trainer) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the manifest's ``training`` row: the Trainer's configuration, as far as findings use it.

    Returns:
        The facts, and the error of each one that cannot be read: many values are the program's.
    """
    module, missing = trainer.lightning_module, dict[str, str]()
    readers: dict[str, Callable[[], Any]] = {
        "num_batches": lambda: _finite(trainer.num_training_batches),
        "max_steps": lambda: trainer.max_steps,
        "max_epochs": lambda: trainer.max_epochs,
        "accumulate_grad_batches": lambda: trainer.accumulate_grad_batches,
        "precision": lambda: str(trainer.precision),
        "clips_itself": lambda: overrides(module, "LightningModule", "configure_gradient_clipping"),
        "profiler": lambda: type(trainer.profiler).__name__,  # type: ignore[attr-defined]
        "large_hyperparameters": lambda: [*_large_hyperparameters(module), *_large_hyperparameters(trainer.datamodule)],  # type: ignore[attr-defined]
    }
    found = _read(readers, missing)
    return found | model_facts(module, lambda: trainer.optimizers, lambda: _loaders(trainer), missing), missing


@without_torch_function
def model_facts(
    module: torch.nn.Module,
    optimizers: Callable[[], Sequence[torch.optim.Optimizer]],
    loaders: Callable[[], Sequence[Any]],
    missing: dict[str, str],
) -> dict[str, Any]:
    """Return the facts of a model, its optimizers and loaders; the errors of those that fail go into ``missing``."""

    def parameters() -> list[torch.nn.Parameter] | None:
        found = list(module.parameters())
        return None if any(map(torch.nn.parameter.is_lazy, found)) else found

    def known(read: Callable[[list[torch.nn.Parameter]], Any], otherwise: Any) -> Callable[[], Any]:
        return lambda: otherwise if (found := parameters()) is None else read(found)

    readers: dict[str, Callable[[], Any]] = {
        "model": lambda: type(module).__name__,
        "parameters": known(lambda found: sum(parameter.numel() for parameter in found), None),
        "parameter_bytes": known(lambda found: sum(_bytes_by_dtype(found).values()), None),
        "optimizers": lambda: [
            _read(_optimizer_facts(optimizer, module), missing, f"optimizers[{number}].")
            for number, optimizer in enumerate(optimizers())
        ],
        "not_optimized": known(lambda _: _not_optimized(module, optimizers()), []),
        "zero_lr": known(lambda _: _zero_lr(module, optimizers()), []),
        "dataloaders": lambda: [
            _loader_facts(loader, missing, f"dataloaders[{number}].") for number, loader in enumerate(loaders())
        ],
        "parameter_dtypes": known(_bytes_by_dtype, {}),
        "largest_parameters": known(lambda _: _largest_parameters(module), []),
        "detect_anomaly": torch.is_anomaly_enabled,
        "matmul_precision": torch.get_float32_matmul_precision,
        "threads": torch.get_num_threads,
        "cudnn_benchmark": lambda: torch.backends.cudnn.benchmark,
        "compiled": lambda: sorted(compiled_modules(module)),
    }
    return _read(readers, missing)


def _large_hyperparameters(owner: object) -> list[str]:
    """Return the names of the saved hyper-parameters that are larger than settings: 10,000 objects or a MiB."""
    saved = vars(owner).get("_hparams") if owner is not None else None
    return [str(name) for name, value in dict.items(saved) if _is_large(value)] if isinstance(saved, dict) else []


def _is_large(value: Any) -> bool:
    left, seen = [value], 0
    while left and seen < _MANY_OBJECTS:
        at = left.pop()
        if issubclass(type(at), (torch.Tensor, np.ndarray)) and at.nbytes >= MIB:
            return True
        entries = at.values() if type(at) is dict else at if type(at) in {list, tuple, set} else ()
        seen += len(entries) + (len(at) // _MANY_BYTES if type(at) in {str, bytes} else 0)
        left += islice(entries, _MANY_OBJECTS)
    return seen >= _MANY_OBJECTS


def _read(readers: Mapping[str, Callable[[], Any]], missing: dict[str, str], within: str = "") -> dict[str, Any]:
    """Return the facts that can be read and written; the errors of the others are added to ``missing``."""
    found: dict[str, Any] = {}
    for name, read in readers.items():
        try:
            value = read()
            json.dumps(value, default=str)
        except Exception as error:  # noqa: BLE001 one fact must not lose the others, nor the recording
            missing[f"{within}{name}"] = describe(error)
        else:
            found[name] = value
    return found


def _bytes_by_dtype(parameters: Sequence[torch.nn.Parameter]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for parameter in parameters:
        sizes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel() * parameter.element_size()
    return dict(sizes)


def _largest_parameters(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Return the largest trainable parameters of a module, each with the class of the submodule that owns it."""
    found = [
        {
            "name": f"{path}.{name}" if path else name,
            "module": type(owner).__name__,
            "bytes": parameter.numel() * parameter.element_size(),
            "sparse": vars(owner).get("sparse") is True,
        }
        for path, owner in module.named_modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if parameter.requires_grad
    ]
    return sorted(found, key=lambda row: -row["bytes"])[:_LARGEST]


def _not_optimized(module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """Return the paths of submodules whose gradients no optimizer uses.

    Empty where the optimizers have none of the model's parameters, as with sharded ones.
    """
    updated = {id(parameter) for optimizer in optimizers for parameter in _parameters(optimizer)}
    known = set(map(id, module.parameters()))
    return [] if updated.isdisjoint(known) else _outermost(module, known - updated)


def _zero_lr(module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """Return the paths of submodules whose learning rate is 0.

    With ``initial_lr`` a scheduler raises it, and an optimizer without ``lr`` finds its own.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    idle = [group for group in groups if _is_zero(group.get("lr")) and _is_zero(group.get("initial_lr", 0.0))]
    return _outermost(module, {id(parameter) for group in idle for parameter in group["params"]})


def _is_zero(setting: Any) -> bool:
    """Return whether a setting is the number 0; it may also be a function, or a tensor of several numbers."""
    if isinstance(setting, torch.Tensor):
        return setting.numel() == 1 and setting.item() == 0
    return isinstance(setting, (int, float)) and setting == 0


def _outermost(module: torch.nn.Module, parameters: set[int]) -> list[str]:
    """Return the paths of the outermost submodules of which all parameters that need gradients are of these."""

    def below(owner: torch.nn.Module, path: str) -> Iterator[str]:
        for name, child in owner.named_children():
            trained = {id(parameter) for parameter in child.parameters() if parameter.requires_grad}
            if trained and trained <= parameters:
                yield f"{path}{name}"
            elif not trained.isdisjoint(parameters):
                yield from below(child, f"{path}{name}.")

    return list(islice(below(module, ""), _LARGEST))


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _optimizer_facts(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> dict[str, Callable[[], Any]]:
    """Return what reads each fact of an optimizer."""

    def setting(name: str) -> Any:
        return optimizer.param_groups[0].get(name) if optimizer.param_groups else None

    def device() -> str | None:
        return next((str(parameter.device) for parameter in _parameters(optimizer)), None)

    def modules() -> list[str]:
        updated = set(map(id, _parameters(optimizer)))
        children = module.named_children()
        return [name for name, child in children if not updated.isdisjoint(map(id, child.parameters()))]

    return {
        "name": lambda: type(optimizer).__name__,
        "foreach": lambda: setting("foreach"),
        "fused": lambda: setting("fused"),
        "parameters": lambda: len(_parameters(optimizer)),
        "device": device,
        "modules": modules,
        "groups": lambda: len(optimizer.param_groups),
        "settings": lambda: len({frozenset(_settings(group)) for group in optimizer.param_groups}),
    }


def _settings(group: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the settings of a group of parameters; values that are not plain compare by identity."""
    for key, value in group.items():
        if type(key) is not str or key not in _NAMES:
            yield key if type(key) is str else id(key), repr(value) if _is_plain(value) else id(value)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) in (tuple, list) and all(map(_is_plain, value)))


def _loaders(trainer: Trainer) -> list[Any]:
    combined = trainer.fit_loop._combined_loader
    return list(combined.flattened) if combined is not None else []


def _loader_facts(loader: Any, missing: dict[str, str], within: str = "") -> dict[str, Any]:
    names = ("num_workers", "batch_size", "pin_memory", "prefetch_factor", "persistent_workers")
    readers: dict[str, Callable[[], Any]] = {name: partial(getattr, loader, name, None) for name in names}
    readers["is_iterable"] = lambda: isinstance(getattr(loader, "dataset", None), IterableDataset)
    data = _read({"data_bytes": lambda: _data_facts(getattr(loader, "dataset", None))}, missing, within)
    return {**_read(readers, missing, within), **data.get("data_bytes", {})}


def _data_facts(dataset: Any) -> dict[str, Any]:
    """Return the bytes of the tensors and arrays in memory that a data set refers to, and the largest with its dtype.

    Read from its attributes, from lists, tuples, dicts and data sets in them, up to a number of objects; no code of the
    program runs. Memory that several share counts once, and mapped files and devices not at all.
    """
    numpy = sys.modules.get("numpy")
    arrays = (numpy.ndarray, numpy.memmap) if numpy is not None else ()
    looked, files, left = [(type(dataset).__name__, dataset)], mapped_files(), 10 * _MOST_OBJECTS
    sizes: dict[int, tuple[int, str, str]] = {}
    for name, value in looked:
        if type(value) in PLAIN_TENSORS or type(value) in arrays:
            start, size, dtype = _memory_of(value, arrays)
            before = bisect(files, start, key=lambda file: file.start)
            if size > sizes.get(start, (0,))[0] and not (before and start in files[before - 1]):
                sizes[start] = (size, name, dtype)
            continue
        with suppress(TypeError, RuntimeError):  # no __dict__; another thread adds to it
            members = list(islice(_members(name, value), min(left, _MOST_OBJECTS)))
            left -= len(members)
            kinds = (*PLAIN_TENSORS, *arrays, list, tuple, dict)
            more = [pair for pair in members if type(pair[1]) in kinds or issubclass(type(pair[1]), Dataset)]
            looked += more[: max(_MOST_OBJECTS - len(looked), 0)]
    whole = end = 0
    for start, (size, *_) in sorted(sizes.items()):
        whole += max(start + size - max(start, end), 0)
        end = max(start + size, end)
    largest = max(sizes.values(), default=(0, None, None))
    return {"data_bytes": whole, "data_largest": largest[1], "data_dtype": largest[2]}


def _members(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) in {list, tuple, dict}:
        return ((name, each) for each in (value.values() if type(value) is dict else value))
    return ((f"{type(value).__name__}.{attribute}", each) for attribute, each in vars(value).items())


def _memory_of(value: Any, arrays: tuple[Any, ...]) -> tuple[int, int, str]:
    """Return address and bytes of the memory that a tensor or an array keeps, also as a view, and its dtype."""
    if type(value) in PLAIN_TENSORS:
        storage = local_storage(value)
        if storage is None or storage.device.type != "cpu":
            return 0, 0, ""
        return storage.data_ptr(), storage.nbytes(), str(value.dtype).removeprefix("torch.")
    while type(value.base) in arrays:
        value = value.base
    return value.__array_interface__["data"][0], value.nbytes, value.dtype.name


def _finite(number: float) -> int | None:
    return None if number == float("inf") else int(number)
