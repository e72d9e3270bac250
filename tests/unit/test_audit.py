"""``make audit`` says why nothing was audited, and does not call it a success."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

AUDIT = Path(__file__).parents[1] / "fuzz" / "audit.py"
GOOD = {"name": "good", "version": "1", "vulns": []}
BAD = {"name": "bad", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
ABSENT = {"name": "absent", "skip_reason": "Dependency not found on PyPI and could not be audited: absent (4)"}
EDITABLE = {"name": "ours", "skip_reason": "requirement marked as editable"}


def audit(directory: Path, body: str, *arguments: str) -> tuple[int, list[str]]:
    """Run the program with a stand-in for pip-audit; give the exit code and what it said."""
    (directory / "pip_audit.py").write_text(body)
    done = subprocess.run(
        [sys.executable, str(AUDIT), *arguments],
        env={"PYTHONPATH": str(directory)}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def answering(*packages: dict[str, Any]) -> str:
    return f"print({json.dumps({'dependencies': packages})!r})"


def test_an_audit_of_everything_says_what_is_known(tmp_path: Path) -> None:
    assert audit(tmp_path, answering(GOOD)) == (0, ["1 packages were audited, 0 vulnerabilities"])
    assert audit(tmp_path, answering(GOOD, BAD)) == (
        1,
        ["bad 2: CVE-1, mended in 3", "2 packages were audited, 1 vulnerabilities"],
    )


def test_an_index_without_records_is_not_taken_for_one_that_cannot_be_reached(tmp_path: Path) -> None:
    code, (line,) = audit(tmp_path, answering(ABSENT, ABSENT))
    assert code == 3
    assert line.startswith("NOT AUDITED: the index answers, but has vulnerability records of none of the 2 packages")
    assert line.endswith(ABSENT["skip_reason"])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (answering(), "constraints.txt pins no packages"),
        (answering(EDITABLE), "pip-audit skipped all 1 packages, the first because: requirement marked as editable"),
        ("raise SystemExit('Could not connect')", "pip-audit says: Could not connect"),
        ("", "pip-audit says: nothing"),
    ],
)
def test_what_could_not_be_audited_has_its_reason_and_a_code_of_its_own(tmp_path: Path, body: str, said: str) -> None:
    assert audit(tmp_path, body) == (3, [f"NOT AUDITED: {said}"])
    assert audit(tmp_path, body, "--allow-unaudited") == (0, [f"NOT AUDITED: {said}"])


def test_what_was_left_out_is_named_and_hides_no_vulnerability(tmp_path: Path) -> None:
    counted, left_out = "1 packages were audited, 0 vulnerabilities", "NOT AUDITED: 1 packages: absent"
    assert audit(tmp_path, answering(GOOD, ABSENT)) == (3, [counted, left_out])
    assert audit(tmp_path, answering(GOOD, ABSENT), "--allow-unaudited") == (0, [counted, left_out])
    assert audit(tmp_path, answering(BAD, ABSENT), "--allow-unaudited")[0] == 1
