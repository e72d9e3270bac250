from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fake_runs import HEALTHY, FakeRun, add_series, make_run
from findings import STEPS, ids, write_rows
from lightning_memprof.account.steps.lines import action_spot
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.judge import Facts, Finding, examine
from lightning_memprof.read.run.load import load_run

MS = 1_000_000
LOADER = {"num_workers": 0, "dataset": "Images", "persistent_workers": False}


def findings_of(directory: Path, *traces: TraceReport) -> dict[str, Finding]:
    return {finding.rule: finding for finding in examine(Facts.of(load_run(directory), traces))}


def line(functions: list[str], place: str, source: str, **of: Any) -> dict[str, Any]:
    return {"functions": functions, "place": place, "source": source, "looks": 40, "ns": 60 * MS, **of}


@pytest.mark.parametrize(
    ("called", "asleep", "remedy"),
    [
        ("deepcopy", 0, "copy_less"),
        ("dump", 0, "write_less"),
        (None, 0, "less_often"),
        ("urlopen", 50 * MS, "wait_outside"),
    ],
)
def test_a_callback_is_named_with_its_line_and_a_remedy_that_fits_what_it_calls(
    tmp_path: Path, called: str | None, asleep: int, remedy: str
) -> None:
    source = "result = work(module)"
    directory = make_run(tmp_path, FakeRun(phases=lambda *_: {**HEALTHY, "callbacks": 9 * MS}))
    name = "[Callback]Keeper.on_train_batch_end"
    row = {
        "kind": "total", "action": name, "phase": "callbacks", "in_window": False, "steps": STEPS, "count": STEPS,
        "total_ns": 8 * MS * STEPS, "max_ns": 8 * MS, "max_step": 3,
    }  # fmt: skip
    write_rows(directory / "actions.rank00000.jsonl", row)
    # Another callback has the same hook.
    other = line(["Other.on_train_batch_end"], "other.py:1", "print(loss)")
    mine = line(["Keeper.on_train_batch_end"], "keep.py:7", source, called=called, asleep_ns=asleep)
    add_series(directory, "lines", [mine, other])
    found = findings_of(directory)["callback_bound"]
    assert found.why.endswith(f"ostly keep.py:7: `{source}`.")
    assert ids(found.remedies)[0] == remedy


@pytest.mark.parametrize(
    ("part", "functions", "named"),
    [
        ("fetch", ["Images.__getitem__", "decode"], "decode (read.py:3)"),
        ("fetch", ["Images.__getitem__"], "Images.__getitem__ (read.py:3)"),
        ("collate", ["joined"], "joined (read.py:3)"),
        ("sampler", ["joined"], ""),
    ],
)
def test_loading_in_the_training_process_is_named_with_its_line(
    tmp_path: Path, part: str, functions: list[str], named: str
) -> None:
    waits = {**HEALTHY, "data_wait": 60 * MS}
    fake = FakeRun(phases=lambda *_: waits, training={"dataloaders": [LOADER]}, loading=(f"Images.{part}",))
    directory = make_run(tmp_path, fake)
    add_series(directory, "lines", [line(functions, "read.py:3", "np.load(self.path)")])
    found = findings_of(directory)["input_bound"]
    assert (f"{named} has 100% of this time: `np.load(self.path)`." in found.why) == bool(named)
    assert any("(read.py:3) faster" in step for step in found.next_steps) == bool(named)


def test_a_hook_that_a_module_calls_has_its_line(tmp_path: Path) -> None:
    functions = ["Net.training_step", "()", "Net.publish"]
    rows = [
        {"functions": functions, "place": "net.py:9", "source": "sleep(1)", "looks": 40, "ns": 9 * MS},
        {"functions": functions[:1], "place": "net.py:3", "looks": 40, "ns": 90 * MS},
    ]
    directory = make_run(tmp_path, FakeRun(trace=False, memory=None))
    add_series(directory, "lines", [{**row, "asleep_ns": row["ns"]} for row in rows])
    spot = action_spot(load_run(directory).lead, "Net.publish (net.py:7)")
    assert spot is not None
    assert (spot.place, spot.share, spot.waits) == ("net.py:9", 1.0, True)
