"""Other versions of Python: what needs no torch runs for real, the rest is compiled.

PyTorch is not fetched here; ``torches.py`` trains on the newest of them. What is tried is what a person does on a
laptop with a run directory that was recorded elsewhere, and the tests of the parts that read.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from environments import clean, environment
from row import ROOT, Row, Verdict

OTHERS: Final = ("3.10", "3.12", "3.13")
# What reading and its tests need; torch and all that depends on it are left out.
NEEDED: Final = (
    "bokeh", "fsspec", "isal", "jinja2", "jsonargparse[signatures]", "markupsafe", "msgspec", "numpy", "psutil",
    "pyyaml", "s3fs", "tensorboard", "hypothesis", "pytest", "pytest-timeout",
)  # fmt: skip
# Tests of parts that know no torch.
TESTS: Final = (
    "tests/unit/account",
    "tests/unit/artifacts",
    "tests/unit/compare",
    "tests/unit/judge",
    "tests/unit/read",
    "tests/unit/timeline",
    "tests/unit/test_schedule.py",
    "tests/unit/test_units.py",
)
NEEDS_TORCH: Final = re.compile(
    r"No module named .(torch|lightning)\b|needs the package (torch|lightning), which is not"
)


def on_path(version: str) -> str | None:
    """Give the interpreter of a version, from PATH or among pyenv's; None where there is none."""
    installed = sorted(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")), reverse=True)
    # What pyenv puts on PATH is there for every version, and fails for those that are not switched on.
    return next((found for found in (shutil.which(f"python{version}"), *installed) if found and _works(found)), None)


def other_python(version: str, python: str, run: Path, directory: Path) -> Iterator[Row]:
    """Try one version; ``run`` is a run directory that this Python's torch has recorded."""
    what = f"Python {version}"
    made = environment(directory, python)
    pip = [str(made), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), *NEEDED]
    done = subprocess.run(pip, env=clean(), capture_output=True, text=True, check=False, timeout=600)
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.splitlines() if "requested" in line or "ERROR" in line]
        yield Row(what, Verdict.RED, f"what reading needs cannot be installed: {'; '.join(said)[:600]}")
        return
    (site,) = directory.glob("lib/python*/site-packages")
    shutil.copytree(
        ROOT / "lightning_memprof", site / "lightning_memprof", ignore=shutil.ignore_patterns("__pycache__")
    )
    yield _step(
        f"{what}: every file compiles", made, "-W", "error", "-m", "compileall", "-q", str(site / "lightning_memprof")
    )
    for words in (("show", str(run)), ("show", str(run), "--format", "json"), ("report", str(run))):
        saw = f"`lightning-memprof {' '.join(word for word in words if word != str(run))} RUN`"
        yield _step(f"{what}: {saw}", made, "-m", "lightning_memprof", *words)
    yield _tests(what, made)
    if version != OTHERS[-1]:
        yield Row(f"{what}: training", Verdict.UNTESTED, "PyTorch was not installed for this version of Python")


def _works(python: str) -> bool:
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def _step(what: str, python: Path, *arguments: str) -> Row:
    done = subprocess.run(
        [str(python), *arguments], env=clean(), capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode == 0:
        return Row(what, Verdict.RAN, "exit code 0")
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return Row(what, Verdict.RED, f"exit code {done.returncode}: {lines[-1] if lines else ''}")


def _tests(what: str, python: Path) -> Row:
    said = python.parent / "said.xml"
    paths = [str(ROOT / path) for path in TESTS]
    command = [str(python), "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    # They are those of this repository: what needs torch among them is left out by what it says.
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--continue-on-collection-errors", f"--junitxml={said}", *paths],
        cwd=python.parent, env=clean(), capture_output=True, text=True, check=False, timeout=1200,
    )  # fmt: skip
    if not said.exists():
        return Row(f"{what}: unit tests of what reads", Verdict.RED, f"pytest said: {done.stdout.strip()[-300:]}")
    return Row(f"{what}: unit tests of what reads", *outcome(said))


def outcome(said: Path) -> tuple[Verdict, str]:
    """Judge what pytest has written; a test or a module that asks for torch, or for Lightning, says so itself."""
    # pytest has just written it.
    cases = list(ET.parse(said).getroot().iter("testcase"))  # noqa: S314
    bad = [(case, element) for case in cases for element in case if element.tag in {"failure", "error"}]
    ours = [(case, _reason(element)) for case, element in bad if not NEEDS_TORCH.search(_reason(element))]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - skipped - len({case for case, _ in bad})
    saw = f"{passed} passed, {skipped} skipped"
    saw += f", {len(bad) - len(ours)} need torch" if len(bad) > len(ours) else ""
    if ours:
        case, reason = ours[0]
        saw += f", {len(ours)} failed: {case.get('classname')} {case.get('name')}: {reason}"
    verdict = Verdict.RED if ours or not passed else Verdict.IN_PART if bad else Verdict.RAN
    return verdict, saw


def _reason(bad: ET.Element) -> str:
    """Give the last line of the error: of a module that cannot be imported pytest has no other."""
    errors = re.findall(r"^E +(\S.*)", bad.text or "", re.MULTILINE)
    return errors[-1] if errors else (bad.get("message") or "").partition("\n")[0]
