"""Other versions of Lightning, and its other distribution: environments over the same torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from environments import clean, differing, fetch
from row import HERE, Row, Verdict

VERSIONS: Final = ("2.5.0.post0", "2.5.6", "newest")
# Of another version not everything again: what depends on Lightning's loops and hooks.
TRIED: Final = ("plain", "accumulate", "manual", "stages")
ALONE: Final = """
import sys
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel
assert "lightning" not in sys.modules
pl.Trainer(max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
           limit_val_batches=0).fit(BoringModel())
try:
    pl.Trainer(profiler="fts_extended")
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def feature(name: str, directory: Path, python: str = sys.executable, **more: str) -> tuple[Verdict, str]:
    """Run one of ``features.py`` in a process of its own, with ``more`` variables; give the verdict, what was seen."""
    command = [python, str(HERE / "features.py"), name, str(directory)]
    done = subprocess.run(command, env=clean(**more), capture_output=True, text=True, check=False, timeout=900)
    if done.returncode != 0:
        return Verdict.RED, f"the program failed: {_last(done.stderr)}"
    return judged(json.loads(done.stdout.splitlines()[-1]))


def judged(found: dict[str, Any]) -> tuple[Verdict, str]:
    """Say what became of a fit that was run bare and with us."""
    if not found["same"]:
        return Verdict.RED, "the training is another than without us"
    if found["errors"]:
        return Verdict.RED, f"errors: {'; '.join(found['errors'])}"
    if not found["windows"] or not found["pages"]:
        return Verdict.RED, f"{found['windows']} windows recorded, {found['pages']} pages"
    left_out = [reason for reason in found["unavailable"] if not reason.startswith("allocator")]
    rest = f"; not recorded: {'; '.join(left_out)}" if left_out else ""
    return Verdict.RAN, f"bit-identical; {found['windows']} windows, {found['pages']} pages{rest}"


def of_version(version: str, directory: Path, names: tuple[str, ...] = TRIED) -> Iterator[Row]:
    """Try some of the features with another version of ``lightning``, over the same torch."""
    added = directory / "packages"
    try:
        fetch("lightning" if version == "newest" else f"lightning=={version}", added)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        yield Row(f"lightning {version}", Verdict.UNTESTED, f"could not be installed: {error}")
        return
    python = differing(directory / "env", without={"lightning"}, added=added)
    asked = [str(python), "-c", "import lightning; print(lightning.__version__)"]
    found = subprocess.run(asked, env=clean(), capture_output=True, text=True, check=True).stdout.strip()
    for name in names:
        verdict, saw = feature(name, directory / name, str(python))
        yield Row(f"lightning {version}{f' ({found})' if found != version else ''}: {name}", verdict, saw)


def alone(directory: Path) -> Row:
    """Try ``pytorch_lightning`` without ``lightning``."""
    python = differing(directory, without={"lightning"})
    done = subprocess.run(
        [str(python), "-c", ALONE], env=clean(), capture_output=True, text=True, timeout=600, check=False
    )
    lines = done.stdout.splitlines()
    refused = (
        done.returncode == 0 and bool(lines) and lines[-1].startswith("ConfigError: profiler='fts_extended' needs")
    )
    saw = f"trains as ever; `{lines[-1]}`" if refused else _last(done.stderr or done.stdout)
    return Row("`pytorch_lightning` without `lightning`", Verdict.REFUSED if refused else Verdict.RED, saw)


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:400] if lines else "nothing was said"
