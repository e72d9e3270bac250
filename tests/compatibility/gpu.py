"""``make test-gpu``: the tests of tests/gpu, and a fragment of the documentation that says on which device they ran.

    python tests/compatibility/gpu.py [ARGUMENTS OF PYTEST]

Writes ``docs/measured/gpu.md``. Without an accelerator nothing runs, and the fragment says so.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from tests.compatibility.row import ROOT
else:
    from row import ROOT

from measured import table, write_fragment

NONE: Final = "No GPU was at hand. The tests of `tests/gpu` are there, and were not run."


def main() -> None:
    """Run the tests, and write down what became of each."""
    if not torch.accelerator.is_available():
        write_fragment("gpu", "make test-gpu", NONE)
        print("No GPU was at hand: nothing was run.")
        return
    with tempfile.TemporaryDirectory() as directory:
        said = Path(directory) / "said.xml"
        command = [sys.executable, "-m", "pytest", str(ROOT / "tests" / "gpu"), f"--junitxml={said}", *sys.argv[1:]]
        code = subprocess.run(command, cwd=directory, check=False).returncode
        if said.exists():
            write_fragment("gpu", "make test-gpu", f"Device: {device()}.\n\n{results(said)}")
    sys.exit(code)


def device() -> str:
    """Give the device's name."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return str(torch.accelerator.current_accelerator())


def results(path: Path) -> str:
    """Give the tests as a table: outcome, and the figures that a test has measured."""
    rows = []
    for case in ET.parse(path).getroot().iter("testcase"):  # noqa: S314 pytest has just written it
        bad = [kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None]
        figures = ", ".join(f"{found.get('name')} {found.get('value')}" for found in case.iter("property"))
        rows.append([f"`{case.get('name')}`", bad[0] if bad else "passed", figures])
    return table(["test", "outcome", "measured"], rows)


if __name__ == "__main__":
    main()
