"""Fragments of the documentation that a command measures and writes: ``docs/measured/NAME.md``.

A page includes them, so that prose is written by people and figures are not.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


ROOT: Final = Path(__file__).resolve().parents[2]
MEASURED: Final = ROOT / "docs" / "measured"
ALWAYS: Final = ("torch", "lightning", "lightning-memprof")


def write_fragment(name: str, command: str, body: str, *, packages: Sequence[str] = (), is_dated: bool = True) -> Path:
    """Write ``docs/measured/NAME.md``: where the figures come from, and the figures. Give its path.

    Args:
        name: of the fragment, without its ending.
        command: what makes it again, as it is typed in the repository's root.
        body: Markdown below the origin; headings, if any, begin at the third level.
        packages: further distributions whose versions matter; ``NAME VERSION`` for one of another environment.
        is_dated: whether the page has the day.

    """
    MEASURED.mkdir(exist_ok=True)
    path = MEASURED / f"{name}.md"
    # The name of the process: two commands may write at once.
    fresh = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    fresh.write_text(f"{origin(command, packages, is_dated=is_dated)}\n\n{body.strip()}\n", encoding="utf-8")
    fresh.replace(path)
    return path


def origin(command: str, packages: Sequence[str] = (), *, is_dated: bool = True) -> str:
    """Say what made the figures: command, day, machine and versions, one line of Markdown each."""
    found = ", ".join([f"Python {platform.python_version()}", *(_versioned(each) for each in (*ALWAYS, *packages))])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    day = time.strftime(" on %Y-%m-%d", time.gmtime()) if is_dated else ""
    lines = (
        f"Made by `{command}`{day}{_commit()}",
        f"{cores} core{'s' * (cores != 1)}, {processor()}, {platform.system()}",
        f"{found}",
    )
    return "  \n".join(lines)


def processor() -> str:
    """Give the processor's name, or its architecture where the system does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return named[1].strip() if named else platform.machine()


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Give a table in Markdown; ``|`` and line ends in a cell stay in it."""
    lines = [headings, ["---"] * len(headings), *rows]
    if any(len(line) != len(headings) for line in lines):
        msg = f"every row needs {len(headings)} cells, one for each of {', '.join(headings)}"
        raise ValueError(msg)
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _commit() -> str:
    """Say which sources were measured, where git tells: a version that is not released yet is many."""
    sources = ("lightning_memprof", "tests")
    asked = ("rev-parse --short=10 HEAD", f"status --porcelain -- {' '.join(sources)}")
    answers = []
    for arguments in asked:
        try:
            done = subprocess.run(["git", "-C", ROOT, *arguments.split()], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return ""
        answers.append(done.stdout.strip())
    commit, changed = answers
    return f", at commit {commit}{' and changes' if changed else ''}"


def _versioned(package: str) -> str:
    if " " in package:
        return package
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} not installed"


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


def progress() -> Progress:
    """Return a bar that is drawn when something was done: drawing by a thread would take time from what is measured."""
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), auto_refresh=False)
