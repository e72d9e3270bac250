"""Lightning has two distributions, ``lightning`` and ``pytorch_lightning``; the classes here are those of the first."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["LIGHTNINGS", "check_asked", "missing_lightning"]

# Classes that stand in a Trainer, and so in class paths of a CLI.
LIGHTNINGS: Final = frozenset({"ExtendedPyTorchProfiler", "MemProfiler", "MemProfilerCallback"})


def missing_lightning(what: str) -> str | None:
    """Return one line that says why ``what`` cannot be had without the package ``lightning``; None where there is."""
    if importlib.util.find_spec("lightning") is not None:
        return None
    rest = "is not installed; pytorch_lightning alone is not enough: pip install lightning"
    return f"{what} needs the package lightning, which {rest}"


def check_asked(name: str, asking: FrameType | None) -> None:
    """Look whether the code of the frame ``asking`` can use the class ``name``.

    Raises:
        ModuleNotFoundError: the package ``lightning`` is not installed.
        SystemExit: it is a class path in the CLI of ``pytorch_lightning``, which takes its own package's classes only.

    """
    if message := missing_lightning(f"lightning_memprof.{name}"):
        raise ModuleNotFoundError(message, name="lightning")
    if name in LIGHTNINGS and _of_jsonargparse(asking) and _the_other_cli():
        _refuse(name)


def _of_jsonargparse(asking: FrameType | None) -> bool:
    # `from package import name` asks by way of importlib.
    while asking is not None and (module := asking.f_globals.get("__name__", "").partition(".")[0]) == "importlib":
        asking = asking.f_back
    return asking is not None and module == "jsonargparse"


def _the_other_cli() -> bool:
    return "pytorch_lightning.cli" in sys.modules and "lightning.pytorch.cli" not in sys.modules


def _refuse(name: str) -> NoReturn:
    # An exception would end as one of many lines in jsonargparse's list of all that the value is not.
    sys.stderr.write(
        f"error: lightning_memprof.{name} is a class for lightning.pytorch, and this CLI is that of pytorch_lightning: "
        "import LightningCLI from lightning.pytorch.cli, or use what works with both, --trainer.profiler=fts_extended "
        "or LIGHTNING_MEMPROF=1\n"
    )
    raise SystemExit(2)
