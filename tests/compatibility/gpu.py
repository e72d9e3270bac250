"""``make test-gpu``: the tests of tests/gpu, and a fragment of the documentation that says on which device they ran.

    python tests/compatibility/gpu.py [ARGUMENTS OF PYTEST]

Writes ``docs/measured/gpu.md``, or ``cuda.md`` for a simulated device (``make test-cuda``). Without an accelerator
nothing runs; the fragment says so where it says nothing yet, and what another machine's accelerator has measured stays.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Final

import torch
from row import ROOT

import measured

DEVICE: Final = "Device: "
SIMULATED: Final = "FAKE"
NONE: Final = "No GPU was at hand. The tests of `tests/gpu` are there, and were not run."


def main() -> None:
    """Run the tests; write down the outcome of each if all ran."""
    asked = parse()
    if not torch.accelerator.is_available():
        none_at_hand()
        return
    with tempfile.TemporaryDirectory() as directory:
        said = Path(directory) / "said.xml"
        command = [sys.executable, "-m", "pytest", str(ROOT / "tests" / "gpu"), f"--junitxml={said}", *asked]
        code = subprocess.run(command, cwd=directory, check=False).returncode
        # A table of a selection would look like one of all tests.
        if said.exists() and not asked:
            name = device()
            kind = "cuda" if SIMULATED in name else "gpu"
            measured.write_fragment(kind, f"make test-{kind}", f"{DEVICE}{name}.\n\n{results(said, kind)}")
    sys.exit(code)


def parse() -> list[str]:
    """Give the arguments that pytest is to have."""
    parser = argparse.ArgumentParser(
        description="Run the tests that need a GPU; without arguments, write docs/measured/gpu.md or cuda.md.",
        usage="%(prog)s [-h] [ARGUMENTS OF PYTEST]",
        allow_abbrev=False,
    )
    return parser.parse_known_args()[1]


def none_at_hand() -> None:
    """Say that nothing ran; write it down only where nothing is written that is as true."""
    path = measured.MEASURED / "gpu.md"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    kept = NONE in text or f"\n{DEVICE}" in text
    if not kept:
        measured.write_fragment("gpu", "make test-gpu", NONE)
    print(f"No GPU was at hand: nothing was run. docs/measured/gpu.md {'is left as it is' if kept else 'says so'}.")


def device() -> str:
    """Give the device's name."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return str(torch.accelerator.current_accelerator())


def results(path: Path, kind: str) -> str:
    """Give the tests as a table: outcome, and the figures that a test has measured, unless the device is simulated."""
    rows = []
    for case in ET.parse(path).getroot().iter("testcase"):  # noqa: S314 pytest has just written it
        bad = [kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None]
        rows.append([f"`{case.get('name')}`", bad[0] if bad else "passed"])
        if kind == "gpu":
            rows[-1].append(", ".join(f"{found.get('name')} {found.get('value')}" for found in case.iter("property")))
    return measured.table(["test", "outcome", *(["measured"] if kind == "gpu" else [])], rows)


if __name__ == "__main__":
    main()
