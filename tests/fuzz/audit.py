"""Ask for known vulnerabilities in what constraints.txt pins; behind ``make audit``.

Ends with 1 where there is one, and with 0 where there is none, or where the database cannot be reached: then it says
that nothing was audited.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

PINNED: Final = Path(__file__).resolve().parents[2] / "constraints.txt"
SECONDS: Final = 600


def main() -> int:
    """Audit."""
    command = [
        sys.executable, "-m", "pip_audit", "--requirement", str(PINNED), "--no-deps", "--disable-pip",
        "--progress-spinner", "off", "--format", "json",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return unreachable(f"no answer in {SECONDS} s")
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return unreachable((done.stderr.strip().splitlines() or ["no answer"])[-1])
    return told(answer["dependencies"])


def unreachable(reason: str) -> int:
    """Say that nothing was audited."""
    print(f"NOT AUDITED: the database of vulnerabilities cannot be reached ({reason})")
    return 0


def told(packages: list[dict[str, Any]]) -> int:
    """Say what was found."""
    skipped = [one for one in packages if "skip_reason" in one]
    if len(skipped) == len(packages):
        return unreachable(skipped[0]["skip_reason"] if skipped else "no packages")
    found = [(one, vulnerability) for one in packages for vulnerability in one.get("vulns", ())]
    for one, vulnerability in found:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
        print(f"{one['name']} {one['version']}: {vulnerability['id']}, mended in {fixed}")
    unknown = f", {len(skipped)} are not in the database" if skipped else ""
    print(f"{len(packages) - len(skipped)} packages were audited, {len(found)} vulnerabilities{unknown}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
