"""The entry points that Lightning calls in every ``Trainer()``, and checks before Lightning is imported.

The entry points register ``profiler="memprof"`` and ``profiler="fts_extended"``, and attach the callback if the
environment variable ``LIGHTNING_MEMPROF`` requests it. Lightning calls them before it resolves the profiler.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Final

from lightning_memprof.logs import logger_of

log = logger_of(__name__)

NAME: Final = "memprof"
"""On a Trainer: the callback and the profiler, with their defaults."""
PROFILER_NAME: Final = "fts_extended"
"""On a Trainer: the profiler alone."""
ENVIRONMENT_VARIABLE: Final = "LIGHTNING_MEMPROF"
# The parameters of MemProfilerCallback, which cannot be imported here: that takes seconds.
OPTIONS: Final = ("schedule", "collectors", "ranks", "triggers", "budget", "output")
_OFF: Final = ("", "0", "false", "no", "off")
_ON: Final = ("1", "true", "yes", "on")
_MAX_MESSAGE: Final = 300


def lightning_callbacks() -> list[Any]:
    """Register with ``lightning.pytorch``; return the callbacks that the environment requests."""
    return _register("lightning.pytorch.trainer.setup")


def pytorch_lightning_callbacks() -> list[Any]:
    """Register with ``pytorch_lightning``; return the callbacks that the environment requests."""
    return _register("pytorch_lightning.trainer.setup")


def _register(module_name: str) -> list[Any]:
    # An exception in an entry point would break every Trainer of the program.
    try:
        # Importing it takes seconds; if it is not loaded, there is no run.
        if (attachment := sys.modules.get("lightning_memprof.integration.attachment")) is not None:
            attachment.end_abandoned()
        _wrap_init_profiler(sys.modules.get(module_name))
        return _attached_callbacks()
    except Exception:
        from lightning_memprof.errors import ConfigError

        if isinstance(sys.exc_info()[1], ConfigError):
            raise
        log.warning("lightning-memprof cannot be registered; training continues without it", exc_info=True)
        return []


def _wrap_init_profiler(module: Any) -> None:
    original = getattr(module, "_init_profiler", None)
    if original is None or getattr(original, "memprof_profiler_name", None) == NAME:
        return
    unknown_name = getattr(module, "MisconfigurationException", ())

    @functools.wraps(original)
    def init_profiler(trainer: Any, profiler: Any) -> None:
        try:
            original(trainer, _profiler_for(trainer, profiler))
        except unknown_name as error:
            if isinstance(profiler, str):
                error.args = (f"{error}, or one of lightning-memprof's {[NAME, PROFILER_NAME]}",)
            raise

    init_profiler.memprof_profiler_name = NAME  # type: ignore[attr-defined]
    module._init_profiler = init_profiler


def _profiler_for(trainer: Any, profiler: Any) -> Any:
    name = profiler.lower() if isinstance(profiler, str) else None
    is_named = name in {NAME, PROFILER_NAME}
    if is_named or (profiler is None and requested() is not None):
        _check_installed(f"profiler='{name}'" if is_named else ENVIRONMENT_VARIABLE)
        from lightning_memprof.integration.profiler import ExtendedPyTorchProfiler

        if name == NAME:
            _attach(trainer)
        # The name stands for the complete report; the class has the defaults of torch's profiler.
        return ExtendedPyTorchProfiler(profile_memory=True)
    return profiler


def _attach(trainer: Any) -> None:
    from lightning_memprof.integration.callback import AttachedCallback, MemProfilerCallback

    callbacks = [callback for callback in trainer.callbacks if isinstance(callback, MemProfilerCallback)]
    if all(callback.steps_aside(trainer) for callback in callbacks):
        # The callbacks that save checkpoints stay the last.
        trainer.callbacks.insert(len(trainer.callbacks) - len(trainer.checkpoint_callbacks), AttachedCallback())


def requested() -> str | None:
    """Return what the environment requests: a file of options, or a value that turns the callback on; None if off."""
    value = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
    return None if value.lower() in _OFF else value


def _attached_callbacks() -> list[Any]:
    value = requested()
    if value is None:
        return []
    _check_installed(f"{ENVIRONMENT_VARIABLE}={value}")
    from lightning_memprof.integration.callback import AttachedCallback, load_options

    options = {} if value.lower() in _ON else load_options(Path(value))
    return [AttachedCallback(**options)]


def missing_lightning(name: str) -> str | None:
    """Return one line that says that ``name`` needs the package ``lightning``; None where it is installed."""
    if importlib.util.find_spec("lightning") is not None:
        return None
    return (
        f"{name} needs the package lightning, which is not installed; "
        "pytorch_lightning alone is not enough: pip install lightning"
    )


def _check_installed(name: str) -> None:
    if message := missing_lightning(name):
        from lightning_memprof.errors import ConfigError

        raise ConfigError(message)


def check_lightning(name: str, caller: FrameType | None) -> None:
    """Check that the code of the frame ``caller`` can use ``name``, a class or a module for ``lightning.pytorch``.

    Raises:
        ModuleNotFoundError: the package ``lightning`` is not installed.
        SystemExit: a CLI of ``pytorch_lightning`` resolves a class path; it accepts classes of its own package only.
    """
    if message := missing_lightning(name):
        raise ModuleNotFoundError(message, name="lightning")
    is_other_cli = "pytorch_lightning.cli" in sys.modules and "lightning.pytorch.cli" not in sys.modules
    if is_other_cli and _is_jsonargparse(caller):
        # An exception would become one of many lines in jsonargparse's list of reasons.
        sys.stderr.write(
            f"error: {name} is for lightning.pytorch, but this CLI is from pytorch_lightning: import LightningCLI from "
            f"lightning.pytorch.cli, or use --trainer.profiler={NAME} or {ENVIRONMENT_VARIABLE}=1, which work "
            "with both\n"
        )
        raise SystemExit(2)


def _is_jsonargparse(frame: FrameType | None) -> bool:
    # `from package import name` and `import_module` have frames of importlib in between.
    while frame is not None and (module := frame.f_globals.get("__name__", "").partition(".")[0]) == "importlib":
        frame = frame.f_back
    return frame is not None and module == "jsonargparse"


def options_fault(path: Path) -> str | None:
    """Return in one line why a file cannot contain options, or None where it is YAML with names of options.

    Raises:
        OSError: the file is unreadable, or is not a regular file.
    """
    import yaml

    from lightning_memprof.artifacts.files import read_plain
    from lightning_memprof.units import MIB

    try:
        text = read_plain(path, MIB).decode()
        # A few lines of aliases of aliases can expand to more than the memory of a machine.
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            return "it has an alias; repeat the value instead"
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # A date in a 13th month is a ValueError.
        return " ".join(str(error).split())[:_MAX_MESSAGE]
    unknown = [str(name) for name in data if name not in OPTIONS] if isinstance(data, dict) else []
    if not unknown:
        return None
    near = difflib.get_close_matches(unknown[0], OPTIONS, 1) or OPTIONS
    return f"there is no option {unknown[0]!r}; did you mean {', '.join(near)}?"
