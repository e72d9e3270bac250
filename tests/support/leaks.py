"""What a test may leave behind: nothing. Photographs of the process before and after, and what differs between them.

Nothing here imports torch: what is not loaded has no profiler and no hooks.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import psutil

# Third parties' leavings, each with the reason why it is not a fault of ours.
ALLOWED_THREADS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "TMonitor": "tqdm starts one monitor for the process with its first bar and never ends it",
        "fsspecIO": "fsspec starts one event loop for the process and never ends it",
        "asyncio_0": "that event loop looks up names in a thread of its own",
        "InductorSubproc": "torch's compiler starts one pool of workers for the process and keeps it",
        "InductorSubprocHealth": "a thread of that pool",
        "subproc_worker_timer": "a thread of that pool",
        "_DummyThread": "a native thread of torch that called Python once; `threading` keeps its name for ever",
    }
)
ALLOWED_COMMANDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "multiprocessing.resource_tracker": "Python starts one tracker for the process and ends it at exit",
        "multiprocessing.forkserver": "Python starts one fork server for the process and ends it at exit",
        "torch/_inductor/compile_worker/": "torch's compiler keeps its workers until the process exits",
        "orted --hnp": "Open MPI's daemon: Lightning's search for MPI starts it where mpi4py is installed",
        "chromium --type=": "a module's browser starts helpers when it needs them; the browser itself is looked for",
    }
)
ALLOWED_VARIABLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "CUDA_DEVICE_ORDER": "lightning sets it when a Trainer uses a CUDA device",
        "PYTEST_CURRENT_TEST": "pytest says where it is",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "lightning sets it when it is imported",
        "TORCHINDUCTOR_CACHE_DIR": "torch sets it when its compiler is imported",
        "TRITON_CACHE_DIR": "torch sets it when its compiler makes kernels for a GPU",
    }
)
ALLOWED_SIGNALS: Final[Mapping[int, str]] = MappingProxyType(
    {
        signal.SIGALRM: "pytest-timeout sets its own alarm for each test",
        signal.SIGCHLD: "torch's data loader keeps the handler that it sets with its first worker",
    }
)
OUR_TEMPORARY_NAMES: Final = ("lightning_memprof", "lightning-memprof")
# Methods of torch that we stand in front of for the time of a window.
PATCHED: Final = (("torch.nn.Module", "_call_impl"), ("torch.UntypedStorage", "resize_"))
HOOK_MODULES: Final = ("torch.nn.modules.module", "torch.optim.optimizer")


@dataclass(frozen=True)
class State:
    """What of this process and its surroundings a test could have changed."""

    threads: frozenset[threading.Thread]
    children: Mapping[tuple[int, float], str]
    environment: Mapping[str, str]
    directory: str
    signals: Mapping[int, Any]
    excepthooks: Mapping[str, Any]
    profiling: bool
    collecting: bool
    hooks: Mapping[tuple[str, Any], str]
    files: frozenset[Path]


def state(directory: Path | None = None) -> State:
    """Photograph the process; unfinished files are looked for below ``directory``."""
    return State(
        threads=frozenset(threading.enumerate()),
        children=_children(),
        environment=dict(os.environ),
        directory=_working_directory(),
        signals={number: signal.getsignal(number) for number in signal.valid_signals() - set(ALLOWED_SIGNALS)},
        excepthooks={"sys.excepthook": sys.excepthook, "threading.excepthook": threading.excepthook},
        profiling=_profiling(),
        collecting=gc.isenabled(),
        hooks=dict(_hooks()),
        files=frozenset(_files(directory)),
    )


def differences(before: State, after: State) -> list[str]:
    """One line for each thing that ``after`` has and ``before`` had not, naming it."""
    return [
        *_new_threads(before, after),
        *(f"child process still there: {text}" for key, text in after.children.items() if key not in before.children),
        *_changed_environment(before.environment, after.environment),
        *_changed("working directory", {"": before.directory}, {"": after.directory}, str),
        *_changed("signal handler", before.signals, after.signals, _describe),
        *_changed("hook", before.excepthooks, after.excepthooks, _describe),
        *(["torch profiler still running"] if after.profiling and not before.profiling else []),
        *(["automatic garbage collection still disabled"] if before.collecting and not after.collecting else []),
        *(f"global hook still there: {text}" for key, text in after.hooks.items() if key not in before.hooks),
        *(f"file still there: {path}" for path in sorted(after.files - before.files)),
    ]


def leftovers(before: State, directory: Path | None = None, patience: float = 30.0) -> list[str]:
    """The differences between ``before`` and now, after up to ``patience`` seconds for what is already ending."""
    found = differences(before, state(directory))
    if not found:
        return []
    gc.collect()  # a data loader's workers live as long as the last reference cycle that holds it
    deadline = time.monotonic() + patience
    while (found := differences(before, state(directory))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def restore(before: State) -> None:
    """Put back what one test must not hand to the next: variables, directory, handlers, garbage collection."""
    if before.collecting:
        gc.enable()
    for name in set(os.environ) - set(before.environment) - set(ALLOWED_VARIABLES):
        del os.environ[name]
    for name, value in before.environment.items():
        if name not in ALLOWED_VARIABLES:
            os.environ[name] = value
    os.chdir(before.directory)
    for number, handler in before.signals.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    sys.excepthook = before.excepthooks["sys.excepthook"]
    threading.excepthook = before.excepthooks["threading.excepthook"]


def _new_threads(before: State, after: State) -> Iterator[str]:
    for thread in after.threads - before.threads:
        kind = type(thread).__name__
        if kind not in ALLOWED_THREADS and thread.name not in ALLOWED_THREADS:
            target = getattr(thread, "_target", None)
            yield f"thread still running: {thread.name} ({kind}{', ' + _describe(target) if target else ''})"


def _changed_environment(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    # Names only: a variable's value may be nobody's business.
    for name in sorted((set(before) | set(after)) - set(ALLOWED_VARIABLES)):
        if before.get(name) != after.get(name):
            how = "set" if name not in before else "removed" if name not in after else "changed"
            yield f"environment variable {how}: {name}"


def _changed(
    what: str, before: Mapping[Any, Any], after: Mapping[Any, Any], describe: Callable[[Any], str]
) -> Iterator[str]:
    for key, value in before.items():
        if after[key] != value:
            name = getattr(key, "name", key)
            yield f"{what} changed: {name + ': ' if name else ''}{describe(value)} -> {describe(after[key])}"


def _describe(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}" if name else str(value)


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "a directory that is gone"


def _children() -> dict[tuple[int, float], str]:
    found = {}
    for process in _processes_below(os.getpid()):
        try:
            command = _command(process)
            if not any(allowed in command for allowed in ALLOWED_COMMANDS):
                found[process.pid, process.create_time()] = f"{process.pid}: {command}"
        except psutil.NoSuchProcess:
            continue
    return found


def _processes_below(pid: int) -> Iterator[psutil.Process]:
    """Give children and their children; the kernel's lists of them take microseconds, a look at all processes 5 ms."""
    if not Path(f"/proc/{pid}/task/{pid}/children").exists():
        with suppress(psutil.NoSuchProcess):
            yield from psutil.Process(pid).children(recursive=True)
        return
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                with suppress(psutil.NoSuchProcess):
                    yield psutil.Process(child)
                yield from _processes_below(child)


def _command(process: psutil.Process) -> str:
    if process.status() == psutil.STATUS_ZOMBIE:
        return f"{process.name()}, ended but never waited for"
    return " ".join(process.cmdline())[:400] or process.name()


def _profiling() -> bool:
    autograd = sys.modules.get("torch.autograd")
    running = getattr(autograd, "_profiler_enabled", None)
    return bool(running and running())


def _hooks() -> Iterator[tuple[tuple[str, Any], str]]:
    for module_name in HOOK_MODULES:
        module = sys.modules.get(module_name)
        for name, registry in list(vars(module).items()) if module else []:
            if name.startswith("_global_") and isinstance(registry, dict):
                for key, hook in registry.items():
                    yield (name, key), f"{name}[{key}]: {_describe(hook)}"
    for owner, name in PATCHED:
        method = getattr(_found(owner), name, None)
        if str(getattr(method, "__module__", "")).startswith("lightning_memprof"):
            yield (f"{owner}.{name}", id(method)), f"{owner}.{name}: {_describe(method)}"
    for what, value in _torch_stacks():
        yield (what, id(value)), f"{what}: {_describe(value)}"


def _found(path: str) -> Any:
    """Give an attribute of a module that is loaded, or None."""
    module_name, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module_name), name, None)


def _torch_stacks() -> Iterator[tuple[str, Any]]:
    dispatch = sys.modules.get("torch.utils._python_dispatch")
    if dispatch is not None:
        for mode in dispatch._get_current_dispatch_mode_stack():
            yield "dispatch mode", type(mode)
    torch = sys.modules.get("torch")
    top = getattr(getattr(getattr(torch, "_C", None), "_autograd", None), "_top_saved_tensors_default_hooks", None)
    if top is not None and (pair := top(True)) is not None:
        yield "saved-tensor hooks", pair[0]


def _files(directory: Path | None) -> Iterator[Path]:
    for path in Path(tempfile.gettempdir()).iterdir():
        if path.name.startswith(OUR_TEMPORARY_NAMES):
            yield path
    if directory is not None:
        yield from directory.rglob("*.partial*")
