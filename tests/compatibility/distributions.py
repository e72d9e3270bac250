"""Other versions of Lightning, and its other distribution: environments over the same torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
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
OTHER_CLI: Final = """
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.demos.boring_classes import BoringModel
LightningCLI(BoringModel, run=False, save_config_callback=None)
"""
OTHER_TRAINER: Final = """
import json, sys
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel
from lightning_memprof import MemProfilerCallback, Schedule
extra = {"callback": {"callbacks": [MemProfilerCallback(Schedule(wait=1, warmup=1, active=1, repeat=2))]},
         "name": {"profiler": "fts_extended"}}[sys.argv[1]]
pl.Trainer(max_steps=8, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
           default_root_dir=sys.argv[2], **extra).fit(BoringModel())
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


def distributions(directory: Path) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Give what is tried of ``pytorch_lightning``: each by its name."""
    yield "pytorch_lightning alone", partial(_alone, directory / "alone")
    for option, name in (("callbacks", "MemProfilerCallback"), ("profiler", "ExtendedPyTorchProfiler")):
        yield f"class path {name}", partial(_refused, f"--trainer.{option}=lightning_memprof.{name}")
    for how in ("callback", "name"):
        yield f"pytorch_lightning with {how}", partial(_works, how, directory / how)


def _alone(directory: Path) -> Row:
    python = differing(directory, without={"lightning"})
    done = _run(str(python), "-c", ALONE)
    lines = done.stdout.splitlines()
    refused = (
        done.returncode == 0 and bool(lines) and lines[-1].startswith("ConfigError: profiler='fts_extended' needs")
    )
    saw = f"trains as ever; `{lines[-1]}`" if refused else _last(done.stderr or done.stdout)
    return Row("`pytorch_lightning` without `lightning`", Verdict.REFUSED if refused else Verdict.RED, saw)


def _refused(given: str) -> Row:
    done = _run(sys.executable, "-c", OTHER_CLI, given)
    lines = done.stderr.splitlines()
    refused = done.returncode == 2 and len(lines) == 1 and "is for lightning.pytorch" in lines[0]
    return Row(
        f"CLI of `pytorch_lightning`: `{given}`", Verdict.REFUSED if refused else Verdict.RED, _last(done.stderr)
    )


def _works(how: str, directory: Path) -> Row:
    done = _run(sys.executable, "-c", OTHER_TRAINER, how, str(directory))
    manifests = list(directory.rglob("manifest.rank00000.jsonl"))
    rows = [json.loads(line) for path in manifests for line in path.read_text(encoding="utf-8").splitlines()]
    windows = sum(row["kind"] == "window" and row["event"] == "close" for row in rows)
    good = done.returncode == 0 and windows > 0 and not any(row["kind"] == "error" for row in rows)
    what = "our callback" if how == "callback" else '`profiler="fts_extended"`'
    saw = f"{windows} windows recorded" if good else _last(done.stderr)
    return Row(f"a Trainer of `pytorch_lightning` with {what}", Verdict.RAN if good else Verdict.RED, saw)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(command), env=clean(), capture_output=True, text=True, check=False, timeout=600)


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:400] if lines else "nothing was said"
