"""``lightning-memprof doctor``: installed versions, this machine, and the collectors available here."""

from __future__ import annotations

import importlib
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

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
# A package, its module, and the state where that cannot be imported.
_MODULES: Final[tuple[tuple[str, str, State], ...]] = (
    ("torch", "torch", "broken"),
    ("lightning", "lightning.pytorch", "broken"),
    ("tensorboard", "tensorboard", "no"),
    ("torch-tb-profiler", "torch_tb_profiler.plugin", "no"),
)
_STYLES: Final[dict[State, str]] = {"ok": "green", "no": "bright_black", "broken": "bold red"}


@dataclass(frozen=True)
class Check:
    """A line of the page: ``no`` is a property of this machine, ``broken`` stops the package from working."""

    name: str
    state: State
    text: str


def _execute(options: Namespace) -> int:  # noqa: ARG001 it has no options
    """Check this machine and print the result; exit code 1 where a requirement does not work."""
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


COMMAND: Final = Command(
    summary="check this machine: versions and available collectors",
    description="Check this machine: installed versions, and the collectors available here.",
    execute=_execute,
)


def diagnose() -> dict[str, list[Check]]:
    """Return the checks by group; imports torch and Lightning where they are installed."""
    return {
        "Versions": list(_versions()),
        "This machine": [_accelerator()],
        "Lightning": list(_lightning()),
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
    for package, module, failed in _MODULES:
        try:
            importlib.import_module(module)
            yield Check(package, "ok", metadata.version(package))
        except Exception as error:  # noqa: BLE001 a broken package can raise anything when it is imported
            yield Check(package, failed, _one_line(error))


def _accelerator() -> Check:
    try:
        torch = importlib.import_module("torch")
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is None:
            return Check("accelerator", "no", f"none for torch {torch.__version__}; models train on the CPU")
        text = f"{torch.accelerator.device_count()} x {device.type}"
        if device.type == "cuda":
            memory = format_bytes(torch.cuda.get_device_properties(0).total_memory)
            text = f"{torch.accelerator.device_count()} x {torch.cuda.get_device_name(0)}, {memory}"
    except Exception as error:  # noqa: BLE001 a broken driver or a broken torch is a result
        return Check("accelerator", "no", f"unknown: {_one_line(error)}")
    return Check("accelerator", "ok", text)


def _lightning() -> Iterator[Check]:
    found = {package: _profiler_of(package) for package in _PACKAGES}
    wrong = [f"{package}: {text}" for package, text in found.items() if not text.startswith("lightning_memprof.")]
    text = wrong[0] if wrong else f"with {' and '.join(_PACKAGES)}"
    yield Check(f'profiler="{NAME}"', "broken" if wrong else "ok", text)


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
        training=TensorFeed(lambda: False, tuple),
        sink=sink,
        faults=Faults(sink.manifest, "warn"),
    )


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
