"""Ask for known vulnerabilities in what constraints.txt pins; behind ``make audit``.

make audit                             0: audited, none is known; 1: one is known; 3: not audited, or not everything
make audit ARGS=--allow-unaudited      0 instead of 3

What was not audited is said, with the reason.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

PINNED: Final = Path(__file__).resolve().parents[2] / "constraints.txt"
SECONDS: Final = 600
UNAUDITED: Final = 3
# pip-audit's words for a package that the index has no record of.
MISSING: Final = "not found on PyPI"


def main() -> int:
    """Audit."""
    parser = argparse.ArgumentParser(description="Ask for known vulnerabilities in what constraints.txt pins.")
    parser.add_argument(
        "--allow-unaudited", action="store_true", help=f"exit code 0 instead of {UNAUDITED} where nothing was audited"
    )
    allowed = parser.parse_args().allow_unaudited
    code = audited()
    return 0 if code == UNAUDITED and allowed else code


def audited() -> int:
    """Ask pip-audit, and say what it said."""
    command = [
        sys.executable, "-m", "pip_audit", "--requirement", str(PINNED), "--no-deps", "--disable-pip",
        "--progress-spinner", "off", "--format", "json",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return unaudited(f"pip-audit had no answer after {SECONDS} s")
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return unaudited(f"pip-audit says: {(done.stderr.strip().splitlines() or ['nothing'])[-1]}")
    return told(answer["dependencies"])


def unaudited(reason: str) -> int:
    """Say that something was not audited."""
    print(f"NOT AUDITED: {reason}")
    return UNAUDITED


def told(packages: list[dict[str, Any]]) -> int:
    """Say what was found."""
    skipped = [package for package in packages if "skip_reason" in package]
    if len(skipped) == len(packages):
        return unaudited(nothing(skipped))
    found = [(package, vulnerability) for package in packages for vulnerability in package.get("vulns", ())]
    for package, vulnerability in found:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
        print(f"{package['name']} {package['version']}: {vulnerability['id']}, mended in {fixed}")
    print(f"{len(packages) - len(skipped)} packages were audited, {len(found)} vulnerabilities")
    code = unaudited(f"{len(skipped)} packages: {', '.join(package['name'] for package in skipped)}") if skipped else 0
    return 1 if found else code


def nothing(skipped: list[dict[str, Any]]) -> str:
    """Say why no package at all was audited; to find none of them is no lack of a network."""
    if not skipped:
        return f"{PINNED.name} pins no packages"
    first = skipped[0]["skip_reason"]
    if all(MISSING in package["skip_reason"] for package in skipped):
        return (
            f"the index answers, but has vulnerability records of none of the {len(skipped)} packages, as a mirror of "
            f"packages alone; of the first pip-audit says: {first}"
        )
    return f"pip-audit skipped all {len(skipped)} packages, the first because: {first}"


if __name__ == "__main__":
    sys.exit(main())
