"""Lightning's own tests of its PyTorchProfiler, run as they are with our subclass in its place.

The tests are in Lightning's repository, ``tests/tests_pytorch/profilers/test_profiler.py``; nothing of them is here.
Each runs twice, with Lightning's class and with ours: what fails with both says nothing about ours.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.compatibility.environments import clean
    from tests.compatibility.row import HERE, Row, Verdict
else:
    from environments import clean
    from row import HERE, Row, Verdict

__all__ = ["compare"]

_EVENTS: Final = (
    "it reads `function_events`, which ours does not keep: torch takes seconds and hundreds of megabytes for them at "
    "the end of the training; the same events are in the trace and the table that ours has written"
)
_OUTSIDE: Final = (
    "it calls `profile()` without a Trainer, which ours does not record: its windows are those of a run's steps"
)
# What differs, and why that is right: by the name of the test.
REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "test_pytorch_profiler_describe": f"{_OUTSIDE}; Lightning's own fails here too, as Lightning expects",
        "test_pytorch_profiler_trainer_fit": f"{_EVENTS}; validation inside a fit is no step of it and comes into its "
        "trace only where a window is open",
        "test_pytorch_profiler_trainer": _EVENTS,
        "test_pytorch_profiler_nested": f"{_OUTSIDE}; and {_EVENTS}",
        "test_register_record_function": f"{_OUTSIDE}; and {_EVENTS}",
        "test_pytorch_profiler_raises_warning_for_limited_steps": "Lightning's drops the schedule in a short run, and "
        "warns that it records every step; ours keeps to the schedule, and where it reaches no step says so in one "
        "line of the log and in the run directory",
        "test_profile_callbacks": _EVENTS,
        "test_profiler_table_kwargs_summary_length": f"{_OUTSIDE}; in a run the table has the width that was asked for",
    }
)


def compare(path: Path) -> list[Row]:
    """Run the tests of ``path`` with both classes; give a row for each test."""
    lightnings, ours = _run(path, "lightning"), _run(path, "ours")
    return [_row(name, lightnings.get(name, []), ours[name]) for name in ours]


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
    reason = REASONS.get(name)
    if said == own:
        stale = "; the reason that is given for a difference is out of date" if reason else ""
        what = "the same with both" if set(own) != {"skipped"} else ours[0]["said"].removeprefix("Skipped: ")
        verdict = Verdict.RED if stale else Verdict.UNTESTED if set(own) == {"skipped"} else Verdict.RAN
        return Row(f"`{name}`", verdict, f"{_counts(own)}: {what}{stale}")
    if reason is None:
        return Row(f"`{name}`", Verdict.RED, f"Lightning's {_counts(own)}, ours {_counts(said)}: {ours[0]['said']}")
    return Row(f"`{name}`", Verdict.IN_PART, f"Lightning's {_counts(own)}, ours {_counts(said)}: {reason}")


def _outcome(rows: list[dict[str, Any]]) -> dict[str, int]:
    counted: dict[str, int] = {}
    for row in rows:
        counted[row["outcome"]] = counted.get(row["outcome"], 0) + 1
    return counted


def _counts(outcome: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(outcome.items())) or "not there"
