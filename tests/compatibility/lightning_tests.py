"""Lightning's own tests of its PyTorchProfiler, run as they are with our subclass in its place.

The tests are in Lightning's repository, ``tests/tests_pytorch/profilers/test_profiler.py``; nothing of them is here.
Each runs twice, with Lightning's class and with ours: what fails with both says nothing about ours.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from environments import clean
from row import HERE, Row, Verdict

# Why a test may differ, and why that is right: numbered below the table, as several tests share one.
WHY: Final[Mapping[str, str]] = MappingProxyType(
    {
        "expected": "A defect of Lightning's class, which its own test expects: outside of a Trainer nothing is "
        "recorded under the default schedule. Ours records.",
        "compressed": "The test looks for files named `*.json`; ours are `*.pt.trace.json.gz`, which TensorBoard, "
        "Perfetto and `chrome://tracing` open. What the test checks before that passes: events and table.",
        "validation": "A defect of Lightning's class: validation inside a fit counts as steps of its schedule. In ours "
        "it is part of the trace only while a window is open, which with 5 batches it is not.",
        "schedule": "A defect of Lightning's class: fewer than 5 batches of any kind end the schedule of all of them. "
        "The default schedule of ours needs 3 steps, which these runs have; a shorter run records every step, and says "
        "so.",
        "path": "A defect of Lightning's class up to 2.6.6: a `dirpath` that is neither text nor a `Path` names "
        "another directory. Ours takes it.",
    }
)
REASONS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "test_pytorch_profiler_describe": ("expected",),
        "test_pytorch_profiler_trainer_fit": ("compressed", "validation"),
        "test_pytorch_profiler_trainer": ("compressed",),
        "test_pytorch_profiler_raises_warning_for_limited_steps": ("schedule",),
        "test_pytorch_profiler_chrome_export_with_pathlike_dirpath": ("path",),
    }
)


def compare(path: Path) -> list[Row]:
    """Run the tests of ``path`` with both classes; give a row for each test."""
    lightnings, ours = _run(path, "lightning"), _run(path, "ours")
    return [_row(name, lightnings.get(name, []), ours[name]) for name in ours]


def reasons() -> str:
    """Give the reasons that rows refer to, numbered, as Markdown."""
    return "\n".join(f"{number}. {why}" for number, why in enumerate(WHY.values(), 1))


def _run(path: Path, tested: str) -> dict[str, list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as directory:
        said = Path(directory) / "said.jsonl"
        variables = clean(MEMPROF_TESTED_CLASS=tested, MEMPROF_TESTS_SAID=str(said), PYTHONPATH=str(HERE))
        options = ["-p", "as_ours", "-q", "-c", "/dev/null", "--rootdir", str(path.parent), "--import-mode=importlib"]
        # A plug-in that the tests were not written for would run them otherwise.
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *options, str(path)]
        done = subprocess.run(
            command, cwd=directory, env=variables, capture_output=True, text=True, check=False, timeout=900
        )
        if not said.exists():
            msg = f"no test of {path} ran: {done.stdout.strip()[-300:]}"
            raise RuntimeError(msg)
        rows = [json.loads(line) for line in said.read_text(encoding="utf-8").splitlines()]
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["test"].partition("[")[0], []).append(row)
    return found


def _row(name: str, lightnings: list[dict[str, Any]], ours: list[dict[str, Any]]) -> Row:
    said, own = _outcome(ours), _outcome(lightnings)
    known = REASONS.get(name)
    same = said == own
    if same and "failed" not in own:
        stale = "; the reason that is given for a difference is out of date" if known else ""
        skipped = f": {ours[0]['said'].removeprefix('Skipped: ')}" if set(own) == {"skipped"} else " with each"
        verdict = Verdict.RED if stale else Verdict.UNTESTED if set(own) == {"skipped"} else Verdict.RAN
        return Row(f"`{name}`", verdict, f"{_counts(own)}{skipped}{stale}")
    counts = f"{_counts(own)} with each" if same else f"Lightning's {_counts(own)}, ours {_counts(said)}"
    why = _numbers(known) if known else ours[0]["said"] if ours else "not there"
    return Row(f"`{name}`", _difference(own, said) if known or same else Verdict.RED, f"{counts}: {why}")


def _difference(own: dict[str, int], said: dict[str, int]) -> Verdict:
    """Say what becomes of a test that differs: wholly, in part, or because it works with neither class."""
    if not own.get("passed"):
        return Verdict.FAILS if not said.get("passed") else Verdict.RAN if set(said) == {"passed"} else Verdict.IN_PART
    return Verdict.IN_PART if said.get("passed") else Verdict.DIFFERS


def _numbers(known: Collection[str]) -> str:
    numbers = [str(number) for number, why in enumerate(WHY, 1) if why in known]
    return f"reason{'s' * (len(numbers) > 1)} {' and '.join(numbers)}"


def _outcome(rows: list[dict[str, Any]]) -> dict[str, int]:
    counted: dict[str, int] = {}
    for row in rows:
        counted[row["outcome"]] = counted.get(row["outcome"], 0) + 1
    return counted


def _counts(outcome: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(outcome.items())) or "not there"
