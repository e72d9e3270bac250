from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fake_memory import FakeMemory
from fake_runs import FakeRun, make_run
from findings import HISTORY, found_in_run, limited, recovery, write_rows
from lightning_memprof.account.memory.report import memory_report
from lightning_memprof.judge import Facts, Finding, Severity, examine, verdict_of
from lightning_memprof.read.run.load import load_run
from lightning_memprof.units import GIB, MIB

FAKE = FakeRun(device_bytes=lambda _step: 70 * GIB, windows=((2, 3), (12, 13)), world_size=2)


def found(tmp_path: Path, retries: dict[int, list[int]]) -> dict[str, Finding]:
    """Return the findings of a run in whose windows, by index, rank 1 had these counts one after the other."""
    directory = make_run(tmp_path, FAKE)
    for window, counts in retries.items():
        path = directory / f"window{window:03d}" / "rank00001.allocator.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for place, row in enumerate(rows):
            row["num_alloc_retries"] = counts[min(place, len(counts) - 1)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found_in_run(directory)


@pytest.mark.parametrize(
    ("retries", "severity", "says"),
    [
        pytest.param({}, None, "", id="memory to spare"),
        pytest.param({1: [1, 1, 2, 3]}, Severity.WARNING, "emptied its cache 2 times in 3 steps", id="some steps"),
        pytest.param({0: [0, 2, 5, 9]}, Severity.CRITICAL, "cuda:0 of rank 1 is nearly full", id="each step"),
        pytest.param({0: [4], 1: [4]}, Severity.INFO, "was full 4 times before the recorded steps", id="earlier"),
    ],
)
def test_retries_in_recorded_steps_say_that_memory_is_nearly_full(
    tmp_path: Path, retries: dict[int, list[int]], severity: Severity | None, says: str
) -> None:
    finding = found(tmp_path, retries).get("allocator_retries")
    assert (finding.severity if finding else None) is severity
    if finding is not None:
        assert says in finding.title
        assert "70.1 GiB reserved" in finding.why
        assert finding.numbers["retries_in_all"] == max(map(max, retries.values()))
        window = min(retries)
        assert finding.evidence[0].artifact == f"memprofiler/window{window:03d}/rank00001.allocator.jsonl"
        assert "expandable_segments" in finding.next_steps[1]


def test_damaged_rows_are_no_retries(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FAKE)
    path = directory / "window000" / "rank00000.allocator.jsonl"
    path.write_text('{"num_alloc_retries": "many"}\nnot json\n{"num_alloc_retries": 3}\n')
    assert not [finding for finding in examine(Facts.of(load_run(directory))) if finding.rule == "allocator_retries"]


@pytest.mark.parametrize(
    ("size", "dtype", "device", "first"),
    [
        (512 * MIB, "float32", False, "smaller_dtype"),
        (512 * MIB, "float32", True, "smaller_dtype"),
        (512 * MIB, "uint8", False, "map_file"),
        (100 * MIB, "float32", False, None),
        (0, None, False, None),
    ],
)
def test_a_data_set_of_a_quarter_of_the_memory_is_a_note(
    tmp_path: Path, size: int, dtype: str | None, device: bool, first: str | None
) -> None:
    loader = {"num_workers": 0, "data_bytes": size, "data_largest": dtype and "Clips.clips", "data_dtype": dtype}
    fake = FakeRun(
        rss_bytes=lambda _: GIB,
        device_bytes=(lambda _: GIB) if device else None,
        memory=FakeMemory(kept_bytes=MIB),
        training={"dataloaders": [loader]},
    )
    facts = Facts.of(load_run(make_run(tmp_path, fake)))
    finding = next((finding for finding in examine(facts) if finding.rule == "data_memory"), None)
    assert (finding is not None) == (first is not None)
    if finding is not None and first is not None:
        assert finding.severity is Severity.INFO
        assert (finding.numbers["bytes"], finding.numbers["owner"]) == (512 * MIB, "Clips.clips")
        assert finding.remedies[0].id == first
        assert (recovery(finding).min, recovery(finding).max) == (256 * MIB, 512 * MIB)


def test_what_is_info_comes_behind_what_says_that_nothing_is_wrong(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path, FakeRun(memory=FakeMemory(kept_bytes=64 * MIB))))
    findings = examine(Facts.of(run, memory=memory_report(run)))
    assert [finding.rule for finding in findings] == ["nothing_found", "activation_peak"]
    assert verdict_of(run).rule == "nothing_found"


def test_what_activations_hold_names_the_blocks_to_checkpoint(tmp_path: Path) -> None:
    finding = found_in_run(make_run(tmp_path, FakeRun(memory=FakeMemory(kept_bytes=64 * MIB))))["activation_peak"]
    assert finding.numbers["checkpointed"] == "net.blocks.0-3"
    assert "checkpointing net.blocks.0-3 (4 blocks) would save" in finding.why
    assert finding.evidence[0].artifact.endswith("window000/rank00000.saved_tensors.jsonl")


@pytest.mark.parametrize(("precision", "is_advised"), [("32-true", True), ("bf16-mixed", False), ("16-true", False)])
def test_half_precision_is_not_advised_to_those_who_train_in_it(
    tmp_path: Path, precision: str, is_advised: bool
) -> None:
    memory = FakeMemory(kept_bytes=64 * MIB)
    fake = FakeRun(memory=memory, device_bytes=lambda _: 1024 * MIB, training={"precision": precision})
    steps = found_in_run(make_run(tmp_path, fake))["activation_peak"].next_steps
    assert any("bf16-mixed" in step for step in steps) == is_advised
    assert not any("FSDP" in step for step in steps)


def test_activations_are_a_verdict_under_pressure_only(tmp_path: Path) -> None:
    fake = FakeRun(rss_bytes=lambda _: 4 * GIB, memory=FakeMemory(kept_bytes=400 * MIB), trace=False)
    for limit, severity in ((5 * GIB, Severity.CRITICAL), (64 * GIB, Severity.INFO)):
        directory = make_run(tmp_path / str(limit), fake)
        limited(directory, limit)
        finding = found_in_run(directory)["activation_peak"]
        assert finding.severity is severity
        assert ("can hold" in finding.why) == (severity is Severity.CRITICAL)
        assert recovery(finding).max <= finding.numbers["bytes"]


def test_workers_that_grow_are_found(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(memory=None, trace=False))
    sizes = enumerate((50, 100, 200, 300, 400))
    samples = [
        {"kind": "workers", "step": 5 * n, "workers": 2, "pss_bytes": size * MIB, "private_bytes": size * MIB}
        for n, size in sizes
    ]
    write_rows(directory / "processes.rank00000.jsonl", *samples)
    finding = found_in_run(directory)["worker_memory"]
    assert finding.title == "DataLoader workers grow by 20.0 MiB per step."
    assert recovery(finding).max == 300 * MIB


@pytest.mark.parametrize(("holds_gib", "severity"), [(64, Severity.INFO), (2, Severity.CRITICAL)])
def test_workers_that_copy_objects_of_the_main_process_matter_where_memory_is_nearly_full(
    tmp_path: Path, holds_gib: int, severity: Severity
) -> None:
    directory = make_run(tmp_path, FakeRun(memory=None, trace=False))
    limited(directory, holds_gib * 1024 * MIB)
    samples = [
        {
            "kind": "workers",
            "step": 5 * n,
            "workers": 2,
            "private_bytes": 4 * size * MIB,
            "shared_bytes": 4 * (900 - size) * MIB,
        }
        for n, size in enumerate((50, 100, 200, 300, 400))
    ]
    write_rows(directory / "processes.rank00000.jsonl", *samples)
    finding = found_in_run(directory)["worker_memory"]
    assert finding.title == "DataLoader workers grow by 80.0 MiB per step: they copy objects of the main process."
    assert finding.severity is severity
    assert "numpy.array" in finding.next_steps[0]


def validated(root: Path, peaks: list[dict[str, Any]], holders: list[dict[str, Any]]) -> list[Finding]:
    """Return the findings of a run whose peak RSS rose outside the training steps, with 1 GiB in these."""
    directory = make_run(root, FakeRun(memory=None, trace=False, rss_bytes=lambda _: GIB))
    write_rows(directory / "processes.rank00000.jsonl", *({"kind": "peak", "step": 9, **row} for row in peaks))
    write_rows(directory / "holders.rank00000.jsonl", *holders)
    run = load_run(directory)
    return [*examine(Facts.of(run, memory=memory_report(run)))]


MATRIX = {"action": "[LightningModule]Net.on_validation_epoch_end", "rss_bytes": [GIB, 2 * GIB]}


@pytest.mark.parametrize(
    ("row", "owner", "severity", "remedy"),
    [
        pytest.param(MATRIX, "Net.on_validation_epoch_end", Severity.WARNING, "in_parts", id="a hook"),
        pytest.param(
            {**MATRIX, "action": "run_validation"}, "a validation", Severity.INFO, "smaller_input",
            id="the batches of a validation",
        ),
        pytest.param(
            {**MATRIX, "action": "before_steps"}, "code before the first step", Severity.INFO, "start_smaller",
            id="what the program frees before it trains",
        ),
        pytest.param({**MATRIX, "rss_bytes": [GIB, GIB + 50 * MIB]}, None, None, None, id="a smaller one"),
        pytest.param({**MATRIX, "rss_bytes": [GIB // 4, GIB]}, None, None, None, id="as much as in the steps"),
    ],
)  # fmt: skip
def test_a_peak_outside_the_training_steps_is_that_of_an_action(
    tmp_path: Path, row: dict[str, Any], owner: str | None, severity: Severity | None, remedy: str | None
) -> None:
    found = [each for each in validated(tmp_path, [row], []) if each.rule == "peak_elsewhere"]
    assert bool(found) == bool(owner)
    for finding in found:
        assert (finding.numbers["owner"], finding.severity, finding.remedies[0].id) == (owner, severity, remedy)
        assert finding.numbers["peak_bytes"] == 2 * GIB
        assert recovery(finding).max == GIB


def test_of_a_validation_that_keeps_its_batches_the_variable_is_named(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(memory=None, trace=False, rss_bytes=lambda _: GIB))
    sizes = [(500 + 4 * n) * MIB for n in range(32)]
    write_rows(
        directory / "processes.rank00000.jsonl", {"kind": "validation", "step": 9, "batches": 32, "rss_bytes": sizes}
    )
    write_rows(
        directory / "holders.rank00000.jsonl", {**HISTORY, "since_step": 9, "step": 19, "grown_bytes": 128 * MIB}
    )
    finding = found_in_run(directory)["validation_memory"]
    assert finding.numbers["owner"] == "Net.history"
    assert finding.remedies[0].id == "bound_holder"
    # What one tensor in many places seems to add is not more than the growth.
    assert "128 MiB" in finding.why
