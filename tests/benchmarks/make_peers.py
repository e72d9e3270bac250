"""Make the environment of the peers: ``python tests/benchmarks/make_peers.py DIRECTORY``.

It sees the packages of the environment of the Python that makes it, so that torch and Lightning are the same; the
peers of ``peers.txt`` come on top. One that cannot be installed is named and left out: the benchmark does without it.
"""

from __future__ import annotations

import site
import subprocess
import sys
import venv
from pathlib import Path

REQUIRED = Path(__file__).with_name("peers.txt")
# Built from its source: its wheel is without the examples, and the profilers are part of them.
FROM_SOURCE = "finetuning-scheduler"


def main(directory: Path) -> int:
    """Make the environment in ``directory``; return 1 where a peer is missing in the end."""
    venv.create(directory, with_pip=True, clear=True, symlinks=True)
    python = directory / "bin" / "python"
    place = site_packages(python)
    (place / "base.pth").write_text(
        "".join(f"import site; site.addsitedir({found!r})\n" for found in site.getsitepackages()), encoding="utf-8"
    )
    if install(python, "setuptools", "wheel") != 0:
        return 1
    wanted = [line for line in REQUIRED.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    # One by one where they cannot be had together: one that is missing takes no other with it.
    if install_alone(python, *wanted) == 0:
        return 0
    missing = [line for line in wanted if install_alone(python, line) != 0]
    if missing:
        print(f"Cannot be installed, and left out of the comparison: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


def install(python: Path, *arguments: str) -> int:
    return subprocess.run([python, "-m", "pip", "install", "-q", *arguments], check=False).returncode


def install_alone(python: Path, *wanted: str) -> int:
    return install(python, "--no-deps", "--no-build-isolation", "--no-binary", FROM_SOURCE, *wanted)


def site_packages(python: Path) -> Path:
    found = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"], check=True, capture_output=True, text=True
    )
    return Path(found.stdout.strip())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
