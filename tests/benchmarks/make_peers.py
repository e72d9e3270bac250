"""Make the environment of the peers: ``python tests/benchmarks/make_peers.py DIRECTORY``.

It sees the packages of the environment of the Python that makes it, so that torch and Lightning are the same; the
peers of ``peers.txt`` come on top. One that cannot be installed is named and left out: the benchmark does without it.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
import venv
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

REQUIRED = Path(__file__).with_name("peers.txt")
# Built from its source: its wheel is without the examples, and the profilers are part of them.
FROM_SOURCE = "finetuning-scheduler"
# What the tests are pinned to: peers.txt pins other versions of the same packages, and pip would refuse both.
PINS = ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")


def main(directory: Path) -> int:
    """Make the environment in ``directory``; return 1 where a peer is missing in the end."""
    venv.create(directory, with_pip=True, clear=True, symlinks=True)
    python = directory / "bin" / "python"
    place = site_packages(python)
    (place / "base.pth").write_text(
        "".join(f"import site; site.addsitedir({found!r})\n" for found in site.getsitepackages()), encoding="utf-8"
    )
    if install(python, "setuptools", "wheel") != 0:
        print("No peer can be installed: setuptools and wheel, which build them, cannot be", file=sys.stderr)
        return 1
    wanted = [line for line in REQUIRED.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    # One by one where they cannot be had together: one that is missing takes no other with it.
    if install_alone(python, *wanted) == 0:
        return 0
    missing = [line for line in wanted if install_alone(python, line) != 0]
    if missing:
        print(f"Cannot be installed, and left out of the comparison: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


def install(python: Path, *arguments: str, without: Sequence[str] = ()) -> int:
    environment = {name: value for name, value in os.environ.items() if name not in without}
    command = [str(python), "-m", "pip", "install", "-q", *arguments]
    return subprocess.run(command, check=False, env=environment).returncode


def install_alone(python: Path, *wanted: str) -> int:
    """Install just these, whatever they require: what they depend on is there, torch above all, or is not needed."""
    alone = ("--no-deps", "--no-build-isolation", "--no-binary", FROM_SOURCE)
    return install(python, *alone, *wanted, without=PINS)


def site_packages(python: Path) -> Path:
    found = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"], check=True, capture_output=True, text=True
    )
    return Path(found.stdout.strip())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
