"""``lightning-memprof doctor``: installed versions, this machine, and the collectors available here."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import psutil
from jsonargparse import Namespace

from lightning_memprof import __version__
from lightning_memprof.cli.command import Command
from lightning_memprof.cli.terminal import quiet_lightning
from lightning_memprof.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from lightning_memprof.capture.base import RunContext

__all__ = ["COMMAND", "Check", "diagnose", "doctor", "memory_limit_bytes"]

State = Literal["ok", "no", "broken"]

_FACTORIES: Final = "lightning.pytorch.callbacks_factory"
_PROFILER: Final = "fts_extended"
_STYLES: Final[dict[State, str]] = {"ok": "green", "no": "dim", "broken": "bold red"}
_UNLIMITED_BYTES: Final = 1 << 60
"""Version 1 of control groups reports a number near 2**63 where there is no limit."""


def _execute(options: Namespace) -> int:  # noqa: ARG001 it has no options
    return doctor()


COMMAND: Final = Command(
    summary="check this machine: versions and available collectors",
    description="Check this machine: installed versions, and the collectors available here.",
    execute=_execute,
)


@dataclass(frozen=True)
class Check:
    """One line of the page: ``no`` is a property of this machine, ``broken`` stops the package from working."""

    group: str
    name: str
    state: State
    text: str


def doctor() -> int:
    """Check this machine and print the result.

    Returns:
        0, or 1 where a requirement does not work.

    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    with console.status("checking this machine"):
        checks = list(diagnose())
    for group in dict.fromkeys(check.group for check in checks):
        console.print(Text(group, style="bold"))
        console.print(_table([check for check in checks if check.group == group]))
        console.print()
    broken = [check.name for check in checks if check.state == "broken"]
    if broken:
        console.print(f"Not ready: {', '.join(broken)}; see the reasons above.")
        return 1
    console.print("Ready. Next: lightning-memprof demo")
    return 0


def diagnose() -> Iterator[Check]:
    """Yield the checks, group by group; imports torch and Lightning where they are installed."""
    yield from _versions()
    yield from _machine()
    yield from _lightning()
    yield from _tensorboard()
    yield from _collectors()


def memory_limit_bytes(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the memory limit of this process's control groups, the smallest of them, or None without a limit.

    Args:
        membership: the file that lists the groups of the process, of version 1 or 2.
        mount: where the groups are mounted.

    """
    limits: list[int] = []
    lines = membership.read_text(encoding="utf-8").splitlines() if membership.exists() else []
    for line in lines:
        hierarchy, controllers, group = line.split(":", 2)
        if hierarchy == "0":
            root, name = mount, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = root / group.lstrip("/")
        # In a container the path is often the host's, and only the top of the mount exists.
        for candidate in (folder, *folder.parents):
            if candidate.is_relative_to(root) and (candidate / name).is_file():
                value = (candidate / name).read_text(encoding="utf-8").strip()
                limits += [int(value)] if value.isdecimal() else []
    return min((limit for limit in limits if limit < _UNLIMITED_BYTES), default=None)


def _table(checks: list[Check]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=6)
    table.add_column(width=23)
    table.add_column(overflow="fold")
    for check in checks:
        table.add_row(Text(check.state, style=_STYLES[check.state]), check.name, Text(check.text))
    return table


def _versions() -> Iterator[Check]:
    group = "Versions"
    yield Check(group=group, name="lightning-memprof", state="ok", text=__version__)
    yield Check(group=group, name="python", state="ok", text=f"{platform.python_version()}  {sys.executable}")
    for package, module in (("torch", "torch"), ("lightning", "lightning.pytorch")):
        failure = _failure(partial(importlib.import_module, module))
        yield Check(group=group, name=package, state="broken" if failure else "ok", text=failure or _version(package))
    for package in ("tensorboard", "torch-tb-profiler", "psutil"):
        found = _version(package)
        yield Check(
            group=group,
            name=package,
            state="ok" if found else "no",
            text=found or f"not installed: pip install {package}",
        )


def _machine() -> Iterator[Check]:
    group = "This machine"
    try:
        yield _accelerator(group, importlib.import_module("torch"))
    except Exception as error:  # noqa: BLE001 a broken driver or a broken torch is a result
        yield Check(group=group, name="accelerator", state="no", text=f"unknown: {_one_line(error)}")
    yield Check(
        group=group, name="processors", state="ok", text=f"{_usable_processors()} of {os.cpu_count()} for this process"
    )
    total, limit = psutil.virtual_memory().total, memory_limit_bytes()
    allowed = "no control group limit" if limit is None else f"control group limit {format_bytes(limit)}"
    yield Check(group=group, name="memory", state="ok", text=f"{format_bytes(total)}; {allowed}")
    yield _temporary_files(group)


def _accelerator(group: str, torch: Any) -> Check:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return Check(
            group=group,
            name="accelerator",
            state="no",
            text=f"none for torch {torch.__version__}; models train on the CPU",
        )
    count = torch.accelerator.device_count()
    if device.type != "cuda":
        return Check(group=group, name="accelerator", state="ok", text=f"{count} x {device.type}")
    memory = format_bytes(torch.cuda.get_device_properties(0).total_memory)
    return Check(
        group=group, name="accelerator", state="ok", text=f"{count} x {torch.cuda.get_device_name(0)}, {memory}"
    )


def _usable_processors() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _temporary_files(group: str) -> Check:
    try:
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"\0")
            file.flush()
            folder = Path(file.name).parent
    except OSError as error:
        return Check(
            group=group, name="temporary files", state="broken", text=f"{error}; set TMPDIR to a writable directory"
        )
    return Check(
        group=group,
        name="temporary files",
        state="ok",
        text=f"{folder}, {format_bytes(shutil.disk_usage(folder).free)} free",
    )


def _lightning() -> Iterator[Check]:
    group = "Lightning"
    points = metadata.entry_points(group=_FACTORIES)
    registered = any(point.value.startswith("lightning_memprof.") for point in points)
    yield Check(
        group=group,
        name="entry point",
        state="ok" if registered else "broken",
        text="registered" if registered else f"missing from {_FACTORIES}: install the package with pip",
    )
    name = f'profiler="{_PROFILER}"'
    try:
        lightning = importlib.import_module("lightning.pytorch")
        with quiet_lightning():
            trainer = lightning.Trainer(profiler=_PROFILER, accelerator="cpu", logger=False, enable_checkpointing=False)
        profiler = type(trainer.profiler)
        found = f"{profiler.__module__}.{profiler.__qualname__}"
        yield Check(
            group=group, name=name, state="ok" if found.startswith("lightning_memprof.") else "broken", text=found
        )
    except Exception as error:  # noqa: BLE001 the reason why no Trainer can be made is the result
        yield Check(group=group, name=name, state="broken", text=_one_line(error))


def _tensorboard() -> Iterator[Check]:
    group = "TensorBoard"
    points = [point for point in metadata.entry_points(group="tensorboard_plugins") if point.name == "torch_profiler"]
    if not points:
        yield Check(
            group=group, name="profiler plug-in", state="no", text="not installed: pip install torch-tb-profiler"
        )
        return
    failure = _failure(points[0].load)
    yield Check(group=group, name="profiler plug-in", state="no" if failure else "ok", text=failure or points[0].value)


def _collectors() -> Iterator[Check]:
    group = "Collectors"
    try:
        from lightning_memprof.integration.settings import default_collectors

        torch = importlib.import_module("torch")
    except Exception as error:  # noqa: BLE001 a broken package can raise anything when it is imported
        yield Check(group=group, name="collectors", state="broken", text=_one_line(error))
        return
    kineto = torch.profiler.kineto_available()
    yield Check(
        group=group,
        name="kineto",
        state="ok" if kineto else "no",
        text="in this build of torch" if kineto else "not in this build of torch",
    )
    with ExitStack() as stack:
        run = _imagined_run(stack, torch)
        for collector in default_collectors():
            reason = collector.unavailable(run)
            text = reason or (type(collector).__doc__ or "").strip().partition("\n")[0]
            yield Check(group=group, name=collector.name, state="no" if reason else "ok", text=text)


class _NoActions:
    """An action feed without actions."""

    def listen(self, start: Callable[[str], None], stop: Callable[[str], None]) -> AbstractContextManager[None]:
        """Never call the listeners."""
        del start, stop
        return nullcontext()


class _NoTensors:
    """A training feed without batches, losses and optimizers."""

    def listen(self, *, batch: Any = None, loss: Any = None) -> AbstractContextManager[None]:
        """Never call the listeners."""
        del batch, loss
        return nullcontext()

    def optimizers(self) -> tuple[()]:
        """Return an empty tuple."""
        return ()


def _imagined_run(stack: ExitStack, torch: Any) -> RunContext:
    """Make a run context on the first device of this machine; its files are removed when ``stack`` closes."""
    from lightning_memprof.artifacts.sink import Sink, claim_run_place
    from lightning_memprof.capture.base import RunContext
    from lightning_memprof.capture.faults import Faults

    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lightning-memprof-doctor-"))
    sink = Sink(claim_run_place(Path(folder)), 0)
    stack.callback(sink.close)
    return RunContext(
        rank=0,
        world_size=1,
        stage="fit",
        function="training_step",
        strategy="SingleDeviceStrategy",
        device=torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu"),
        model=type("Model", (torch.nn.Module,), {"training_step": lambda _model, batch: batch})(),
        actions=_NoActions(),
        training=_NoTensors(),
        sink=sink,
        faults=Faults(sink.manifest, "warn"),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _failure(attempt: Callable[[], object]) -> str:
    """Return the error of ``attempt`` in one line, or an empty string."""
    try:
        attempt()
    except Exception as error:  # noqa: BLE001 a broken package can raise anything when it is imported
        return _one_line(error)
    return ""


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
