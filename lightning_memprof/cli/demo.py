"""``lightning-memprof demo``: train the small model, quietly, and say where the recording lies."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from lightning_memprof.cli.quiet import quiet_lightning
from lightning_memprof.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["demo"]

_NATIVE_LOG_LEVELS: Final = MappingProxyType({"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"})
"""Read once, when torch is loaded. Kineto ranks the announcement that it starts above its errors: 6 is silence."""


def demo(out: Path, steps: int = 40) -> int:
    """Train, record and show.

    Args:
        out: where the run goes, in a new directory ``version_N``.
        steps: batches to train on, at least 6.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: ``out`` cannot be made, or there are too few steps.

    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"demo: --out {str(out)!r}: {error.strerror}; name a directory that can be written"
        ) from error
    print("Training a small GPT on the source files of Python's standard library.", flush=True)
    for name, level in _NATIVE_LOG_LEVELS.items():
        os.environ.setdefault(name, level)
    from lightning_memprof.demo.train import train_demo

    with quiet_lightning(), _our_log_lines():
        log_dir = train_demo(out, steps)
    print(f"Recorded in {log_dir}")
    if shutil.which("lightning-memprof") is None:
        scripts = Path(os.path.relpath(Path(sys.executable).parent))
        print(f"These commands lie in {scripts}; to type them as they stand: source {scripts / 'activate'}")
    return 0


class _AboveTheBar(logging.Handler):
    """Prints a line; the progress bar, which owns the terminal's last line, moves down."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message of ``record`` to whatever is stdout at this moment."""
        print(self.format(record))


@contextmanager
def _our_log_lines() -> Iterator[None]:
    """Show what the recording does while it does it."""
    root, ours = logging.getLogger(), logging.getLogger("lightning_memprof")
    before = ours.level
    handler = _AboveTheBar()
    root.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        ours.setLevel(before)
