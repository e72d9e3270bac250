"""Other versions of PyTorch: the oldest that is supported, the newest, and the newest on the newest Python.

The wheel is installed without the libraries that it depends on. A CUDA build gets the stand-ins of ``tests/cuda`` for
them, without a device, and trains on the CPU. About 2 GB are downloaded; all other packages have this environment's
versions.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Final

from distributions import feature
from environments import clean, differing, environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pythons import OTHERS, on_path
from row import ROOT, Row, Verdict

NEWEST_PYTHON: Final = max(OTHERS, key=lambda name: int(name.partition(".")[2]))
# What is installed, and the Python it is tried on; None is this one.
TORCHES: Final = {
    "oldest": ("torch==2.10.*", None),
    "newest": ("torch", None),
    f"newest-python{NEWEST_PYTHON}": ("torch", NEWEST_PYTHON),
}
TRIED: Final = ("plain", "checkpoint", "stages")
OURS: Final = "lightning_memprof"
# They come with the wheel of torch, or are what it is installed without.
TORCHS: Final = ("torch", "torchgen", "functorch", "triton", "nvidia")
INTERNALS: Final = re.compile(r"(\w+) +torch internals +(.*)")


def of_torch(name: str, directory: Path) -> Iterator[Row]:
    """Try one of ``TORCHES``: the demo, some kinds of training, and which private APIs ``doctor`` misses."""
    requirement, other = TORCHES[name]
    interpreter = on_path(other) if other else sys.executable
    if interpreter is None or shutil.which("gcc") is None:
        missing = f"Python {other}" if interpreter is None else "gcc, for the stand-ins,"
        yield Row(f"{name} PyTorch", Verdict.UNTESTED, f"{missing} is not on this machine")
        return
    try:
        python = with_torch(directory / "env", requirement, interpreter)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = str(error.stderr or error).strip().splitlines()[-1][:400]
        verdict = Verdict.UNTESTED if "pip" in error.cmd else Verdict.RED
        yield Row(f"{name} PyTorch", verdict, f"could not be installed: {said}")
        return
    asked = "import platform, torch; print(f'torch {torch.__version__}, Python {platform.python_version()}')"
    found = _run(python, "-c", asked).stdout.strip() or f"{name} PyTorch"
    yield Row(f"{found}: `lightning-memprof demo`", *demo(python, directory / "demo"))
    for tried in TRIED:
        yield Row(f"{found}: {tried}", *feature(tried, directory / tried, str(python), **without_device(python)))
    yield Row(f"{found}: private APIs of torch", *internals(python))


def with_torch(directory: Path, requirement: str, interpreter: str) -> Path:
    """Make an environment with this package, what it needs, and another torch; return its interpreter."""
    if interpreter == sys.executable:
        python = differing(directory, without=TORCHS)
    else:
        python = environment(directory, interpreter)
        _pip(python, *needed("lightning-memprof", NEWEST_PYTHON))
    (site,) = directory.glob("lib/python*/site-packages")
    for path in (path for entry in sys.path for path in sorted(Path(entry).glob(f"{OURS}*"))):
        if path.is_dir() and not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    _pip(python, requirement)
    if re.search(r"^cuda[^=]*= '", (site / "torch" / "version.py").read_text(encoding="utf-8"), re.MULTILINE):
        _output(sys.executable, str(ROOT / "tests" / "cuda" / "stand_ins.py"), str(directory))
    return python


def needed(name: str, python: str) -> list[str]:
    """Return what a distribution of this environment depends on under another Python, pinned; without torch itself."""
    found: dict[str, str] = {}
    pending = [name]
    while pending:
        for text in distribution(pending.pop()).requires or ():
            requirement = Requirement(text)
            each = canonicalize_name(requirement.name)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": "", "python_version": python})
            if not wanted or each in found or each.startswith(("nvidia", "cuda", "triton")):
                continue
            with suppress(PackageNotFoundError):
                found[each] = version(each)
                pending.append(each)
    return [f"{each}=={number}" for each, number in sorted(found.items()) if each != "torch"]


def demo(python: Path, out: Path) -> tuple[Verdict, str]:
    """Run the demo; it must record windows without an error and print its page."""
    done = _run(python, "-m", OURS, "demo", "--out", str(out))
    if done.returncode != 0:
        return Verdict.RED, (done.stderr.strip() or done.stdout.strip())[-400:]
    manifests = list(out.rglob("manifest.rank00000.jsonl"))
    rows = [json.loads(line) for path in manifests for line in path.read_text(encoding="utf-8").splitlines()]
    errors = [f"{row['collector']}: {row['exception']}" for row in rows if row["kind"] == "error"]
    windows = sum(row["kind"] == "window" and row["event"] == "close" for row in rows)
    if errors or not windows:
        return Verdict.RED, f"{windows} windows; {'; '.join(errors)}"
    return Verdict.RAN, f"{windows} windows, no error"


def internals(python: Path) -> tuple[Verdict, str]:
    """Return what ``doctor`` says of torch's private APIs: one line for all, or one for each that is missing."""
    found = INTERNALS.findall(_run(python, "-m", OURS, "doctor", COLUMNS="400").stdout)
    said = "; ".join(text.strip() for _, text in found) or "doctor says nothing of them"
    return (Verdict.RAN if [state for state, _ in found] == ["ok"] else Verdict.IN_PART), said


def without_device(python: Path) -> dict[str, str]:
    """Return the variables for a CUDA build over the stand-ins: where they are, and no device."""
    libraries = python.parents[1].glob("lib/python3*/site-packages/nvidia/*/lib")
    return {"LD_LIBRARY_PATH": ":".join(map(str, sorted(libraries))), "FAKE_CUDA_DEVICES": "0"}


def _pip(python: Path, *requirements: str) -> None:
    _output(str(python), "-m", "pip", "install", "--quiet", "--no-deps", *requirements)


def _output(*command: str) -> None:
    subprocess.run(command, env=clean(), check=True, capture_output=True, text=True, timeout=1800)


def _run(python: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    variables = clean(**without_device(python), **more)
    command = [str(python), *arguments]
    return subprocess.run(command, env=variables, check=False, capture_output=True, text=True, timeout=900)
