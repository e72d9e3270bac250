"""``lightning-memprof demo``: train and record a small model."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Final

from jsonargparse import ArgumentParser, Namespace

from lightning_memprof.cli.command import Command, quiet_lightning, say
from lightning_memprof.errors import ConfigError


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--out", metavar="DIR", default="memprof-demo", help="parent of the run (default: %(default)s)")


def _execute(options: Namespace) -> int:
    return demo(Path(options.out))


COMMAND: Final = Command(
    summary="train a small model, record it, show the result",
    description="Train a small GPT on Python's source files, record it, and show the result.",
    add_options=_add_options,
    execute=_execute,
)


def demo(out: Path, steps: int = 40) -> int:
    """Train, record and show.

    Args:
        out: parent of the run's directory, ``version_N``.
        steps: batches to train on, at least 6.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: ``out`` cannot be made, or there are too few steps.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"demo: --out {str(out)!r}: {error.strerror}; name a writable directory") from error
    print("Training a small GPT on the source files of Python's standard library.", flush=True)
    from lightning_memprof.demo.train import train_demo

    with quiet_lightning():
        log_dir = train_demo(out, steps)
    say(f"Recorded in {log_dir}")
    if shutil.which("lightning-memprof") is None:
        scripts = Path(os.path.relpath(Path(sys.executable).parent))
        print(f"These commands are in {scripts}; to put them on your PATH: source {scripts / 'activate'}")
    return 0
