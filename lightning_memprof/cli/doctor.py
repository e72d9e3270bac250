"""``lightning-memprof doctor``: installed versions, this machine, and the collectors available here."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Literal

import psutil
from jsonargparse import Namespace

from lightning_memprof import __version__
from lightning_memprof.cli.command import Command, quiet_lightning
from lightning_memprof.cli.progress import counting
from lightning_memprof.integration.registration import NAME
from lightning_memprof.units import format_bytes

if TYPE_CHECKING:
    from lightning_memprof.capture.base import RunContext
    from lightning_memprof.report.printers.layout import Line

State = Literal["ok", "no", "broken"]

_PACKAGES: Final = ("lightning.pytorch", "pytorch_lightning")
_STYLES: Final[dict[State, str]] = {"ok": "green", "no": "bright_black", "broken": "bold red"}


def _execute(options: Namespace) -> int:  # noqa: ARG001 it has no options
    return doctor()


COMMAND: Final = Command(
    summary="check this machine: versions and available collectors",
    description="Check this machine: installed versions, and the collectors available here.",
    execute=_execute,
)


@dataclass(frozen=True)
class Check:
    """A line of the page: ``no`` is a property of this machine, ``broken`` stops the package from working."""

    name: str
    state: State
    text: str


def doctor() -> int:
    """Check this machine and print the result.

    Returns:
        0, or 1 where a requirement does not work.
    """
    from lightning_memprof.report.printers.terminal import print_lines

    with counting("checking this machine"):
        groups = diagnose()
    for title, checks in groups.items():
        print_lines([((title, "bold"),), *(line for check in checks for line in _lines(check)), ()])
    if broken := [check.name for checks in groups.values() for check in checks if check.state == "broken"]:
        print(f"Not ready: {', '.join(broken)}; see the reasons above.")
        return 1
    print("Ready. Next: lightning-memprof demo")
    return 0


def diagnose() -> dict[str, list[Check]]:
    """Return the checks by group; imports torch and Lightning where they are installed."""
    return {
        "Versions": list(_versions()),
        "This machine": list(_machine()),
        "Lightning": list(_lightning()),
        "TensorBoard": [_profiler_tab()],
        "Collectors": list(_collectors()),
    }


def _lines(check: Check) -> list[Line]:
    from lightning_memprof.report.printers.layout import pad, wrap
    from lightning_memprof.report.printers.terminal import page_width

    state, name = pad(check.state, 8), pad(check.name, 25)
    first, *rest = wrap(check.text, page_width(sys.stdout) - len(state + name))
    head = ((state, _STYLES[check.state]), (name, ""), (first, ""))
    return [head, *(((pad("", len(state + name)), ""), (line, "")) for line in rest)]


def _versions() -> Iterator[Check]:
    yield Check("lightning-memprof", "ok", __version__)
    yield Check("python", "ok", f"{platform.python_version()}  {sys.executable}")
    for package, module in (("torch", "torch"), ("lightning", "lightning.pytorch")):
        failure = _failure(partial(importlib.import_module, module))
        yield Check(package, "broken" if failure else "ok", failure or _version(package))
    for package in ("tensorboard", "torch-tb-profiler", "psutil"):
        found = _version(package)
        yield Check(package, "ok" if found else "no", found or f"not installed: pip install {package}")


def _machine() -> Iterator[Check]:
    try:
        yield Check("accelerator", *_accelerator(importlib.import_module("torch")))
    except Exception as error:  # noqa: BLE001 a broken driver or a broken torch is a result
        yield Check("accelerator", "no", f"unknown: {_one_line(error)}")
    yield Check("processors", "ok", f"{_processors()} of {os.cpu_count()} for this process")
    yield Check("memory", "ok", f"{format_bytes(psutil.virtual_memory().total)}; {_memory_limit()}")
    try:
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"\0")
            file.flush()
            folder = Path(file.name).parent
        yield Check("temporary files", "ok", f"{folder}, {format_bytes(shutil.disk_usage(folder).free)} free")
    except OSError as error:
        yield Check("temporary files", "broken", f"{error}; set TMPDIR to a writable directory")


def _accelerator(torch: Any) -> tuple[State, str]:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return "no", f"none for torch {torch.__version__}; models train on the CPU"
    count = torch.accelerator.device_count()
    if device.type != "cuda":
        return "ok", f"{count} x {device.type}"
    memory = format_bytes(torch.cuda.get_device_properties(0).total_memory)
    return "ok", f"{count} x {torch.cuda.get_device_name(0)}, {memory}"


def _processors() -> str:
    try:
        from lightning_memprof.capture.sources.memory import usable_cpus
    except Exception as error:  # noqa: BLE001 a broken torch can raise anything when it is imported
        return f"unknown: {_one_line(error)}"
    return str(usable_cpus())


def _memory_limit() -> str:
    try:
        from lightning_memprof.capture.sources.memory import cgroup_memory

        limit, _ = cgroup_memory()
    except Exception as error:  # noqa: BLE001 a broken torch can raise anything when it is imported
        return f"control group limit unknown: {_one_line(error)}"
    return "no control group limit" if limit is None else f"control group limit {format_bytes(limit)}"


def _lightning() -> Iterator[Check]:
    groups = [f"{package}.callbacks_factory" for package in _PACKAGES]
    missing = [group for group in groups if not any(map(_is_own, metadata.entry_points(group=group)))]
    if missing:
        yield Check("entry point", "broken", f"missing from {missing[0]}: install the package with pip")
    else:
        yield Check("entry point", "ok", "registered")
    found = {package: _profiler_of(package) for package in _PACKAGES}
    wrong = [f"{package}: {text}" for package, text in found.items() if not text.startswith("lightning_memprof.")]
    text = wrong[0] if wrong else f"with {' and '.join(_PACKAGES)}"
    yield Check(f'profiler="{NAME}"', "broken" if wrong else "ok", text)


def _is_own(point: metadata.EntryPoint) -> bool:
    return point.value.startswith("lightning_memprof.")


def _profiler_of(package: str) -> str:
    """Return the profiler class that a Lightning package creates for the name, or the error."""
    try:
        lightning = importlib.import_module(package)
        with quiet_lightning():
            trainer = lightning.Trainer(profiler=NAME, accelerator="cpu", logger=False, enable_checkpointing=False)
    except Exception as error:  # noqa: BLE001 the reason why no Trainer can be made is the result
        return _one_line(error)
    profiler = type(trainer.profiler)
    return f"{profiler.__module__}.{profiler.__qualname__}"


def _profiler_tab() -> Check:
    points = [point for point in metadata.entry_points(group="tensorboard_plugins") if point.name == "torch_profiler"]
    if not points:
        return Check("profiler plug-in", "no", "not installed: pip install torch-tb-profiler")
    failure = _failure(points[0].load)
    return Check("profiler plug-in", "no" if failure else "ok", failure or points[0].value)


def _collectors() -> Iterator[Check]:
    try:
        from lightning_memprof.integration.settings import default_collectors

        torch = importlib.import_module("torch")
    except Exception as error:  # noqa: BLE001 a broken package can raise anything when it is imported
        yield Check("collectors", "broken", _one_line(error))
        return
    kineto = torch.profiler.kineto_available()
    yield Check("kineto", "ok" if kineto else "no", f"{'' if kineto else 'not '}in this build of torch")
    yield from _internals(torch.__version__)
    with ExitStack() as stack:
        run = _imagined_run(stack, torch)
        for collector in default_collectors():
            reason = collector.unavailable(run)
            text = reason or (type(collector).__doc__ or "").strip().partition("\n")[0]
            yield Check(collector.name, "no" if reason else "ok", text)


def _internals(version: str) -> Iterator[Check]:
    """Check the private APIs of torch that this package uses: a line for each that is missing, with what it costs."""
    from lightning_memprof.capture.torch_internals import expected, missing

    for path, cost in (gone := missing()).items():
        yield Check("torch internals", "no", f"{path} is missing from torch {version}: {cost}")
    if not gone:
        yield Check("torch internals", "ok", f"all {len(list(expected()))} private APIs of torch are there")


def _imagined_run(stack: ExitStack, torch: Any) -> RunContext:
    """Make a run context on the first device of this machine; its files are removed when ``stack`` closes."""
    from lightning_memprof.artifacts.sink import Sink, claim_run_place
    from lightning_memprof.capture.base import RunContext
    from lightning_memprof.capture.faults import Faults
    from lightning_memprof.integration.feeds import ActionTap, TensorFeed

    trainer: Any = SimpleNamespace(optimizers=())
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
        actions=ActionTap(None, print),
        training=TensorFeed(trainer),
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
