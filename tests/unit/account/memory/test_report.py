from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fake_memory import FakeMemory
from fake_runs import FakeRun, make_run
from known import known
from lightning_memprof.account.memory.report import CATEGORIES, CategoryPeak, MemoryReport, memory_report
from lightning_memprof.artifacts.manifest import ManifestWriter
from lightning_memprof.read.run.load import load_run
from lightning_memprof.units import KIB, MIB

FAKE = FakeMemory()


def report(root: Path, memory: FakeMemory | None = FAKE, **options: Any) -> MemoryReport:
    return memory_report(load_run(make_run(root, FakeRun(memory=memory, **options))))


def peak(found: MemoryReport) -> CategoryPeak:
    assert found.lead.peak is not None
    return found.lead.peak


def rewrite(directory: Path, collector: str, change: Any, window: int = 0) -> None:
    """Change the rows of a series; ``change`` gets each row and returns the rows that take its place."""
    path = directory / f"window{window:03d}" / f"rank00000.{collector}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(new) + "\n" for row in rows for new in change(row)))


def test_without_a_tracker_the_peak_is_what_backward_found_kept_and_what_was_held(tmp_path: Path) -> None:
    found = peak(report(tmp_path))
    assert found.source == "saved_tensors"
    assert found.categories == {
        "parameter": FAKE.parameter_bytes,
        "gradient": FAKE.parameter_bytes,
        "optimizer_state": 2 * FAKE.parameter_bytes,
        "activation": FAKE.activation_bytes,
        "input": 64 * KIB,
        "buffer": 0,
        "temporary": None,
    }
    assert found.total_bytes == 4 * FAKE.parameter_bytes + FAKE.activation_bytes + 64 * KIB
    assert set(found.unknown) == {"temporary"}
    assert "ModuleMemory" in found.unknown["temporary"]


def test_a_trackers_peak_is_the_peak(tmp_path: Path) -> None:
    found = peak(report(tmp_path, FakeMemory(temporary_bytes=3 * MIB)))
    assert (found.source, found.device, found.step) == ("module_memory", "cpu", 2)
    assert found.categories["temporary"] == 3 * MIB
    assert found.unknown == {}


def test_what_a_tracker_counted_and_did_not_name_is_other(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(memory=FakeMemory(temporary_bytes=MIB)))
    rewrite(directory, "module_memory", lambda row: [{**row, "total_bytes": row["total_bytes"] + 700}])
    found = peak(memory_report(load_run(directory)))
    assert found.categories["other"] == 700
    assert list(found.categories)[-1] == "other"
    assert sum(size or 0 for size in found.categories.values()) == found.total_bytes


def test_a_category_that_a_tracker_leaves_out_is_unknown_and_not_zero(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(memory=FakeMemory(temporary_bytes=MIB)))
    only = {"total_bytes": 10, "categories": {"parameter": 6, "all_gather": 4}}
    rewrite(directory, "module_memory", lambda row: [{**row, **only}])
    found = peak(memory_report(load_run(directory)))
    assert found.categories == {**dict.fromkeys(CATEGORIES), "parameter": 6, "all_gather": 4}
    assert set(found.unknown) == set(CATEGORIES) - {"parameter"}


def test_of_several_devices_the_models_own_comes_first(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(memory=FakeMemory(temporary_bytes=MIB)))
    rewrite(directory, "module_memory", lambda row: [row, {**row, "device": "cuda:1", "total_bytes": 10**9}])
    found = peak(memory_report(load_run(directory)))
    assert found.device == "cpu"
    assert [(peak.device, peak.total_bytes) for peak in found.others] == [("cuda:1", 10**9)]


def test_the_largest_of_all_windows_is_the_peak(tmp_path: Path) -> None:
    memory = FakeMemory(temporary_bytes=MIB)
    directory = make_run(tmp_path, FakeRun(memory=memory, windows=((2, 3), (8, 9), (14, 15))))
    rewrite(directory, "module_memory", lambda row: [{**row, "total_bytes": 10**9}], window=1)
    found = peak(memory_report(load_run(directory)))
    assert (found.window, found.step, found.total_bytes) == (1, 8, 10**9)


def test_own_bytes_of_modules_and_what_no_module_owns_are_all_that_was_kept(tmp_path: Path) -> None:
    kept = known(report(tmp_path).lead.activations)
    assert kept.total_bytes == FAKE.activation_bytes
    assert sum(module.own_activation_bytes for module in kept.modules) + kept.unattributed_bytes == kept.total_bytes
    assert kept.unattributed_bytes == FAKE.unattributed_bytes
    first = kept.modules[0]
    assert (first.name, first.calls) == ("net", 1)
    assert first.inclusive_activation_bytes == FAKE.activation_bytes - FAKE.unattributed_bytes
    assert first.parameter_bytes == first.gradient_bytes == FAKE.parameter_bytes


def test_where_nothing_is_attributed_the_reason_is_there(tmp_path: Path) -> None:
    lead = report(tmp_path, FakeMemory(attribution="a part of the model is compiled")).lead
    assert lead.activations is not None
    assert lead.activations.modules == ()
    assert lead.activations.unattributed_bytes == lead.activations.total_bytes == FAKE.activation_bytes
    assert lead.reasons["modules"] == "a part of the model is compiled"
    assert lead.checkpointing == ()


def test_parameters_that_no_row_has_are_unknown(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun())
    rewrite(directory, "saved_tensors", lambda row: [row] if row["point"] == "before_backward" else [])
    lead = memory_report(load_run(directory)).lead
    assert lead.activations is not None
    assert {module.parameter_bytes for module in lead.activations.modules} == {None}
    found = known(lead.peak)
    assert found.categories == {**dict.fromkeys(CATEGORIES), "activation": FAKE.activation_bytes}


def test_without_a_backward_what_was_held_is_known_and_the_rest_says_why(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun())
    note = "no backward of this step went through Lightning"
    rewrite(directory, "saved_tensors", lambda row: [{**row, "note": note}] if row["point"] == "step_end" else [])
    lead = memory_report(load_run(directory)).lead
    assert lead.peak is not None
    assert (lead.peak.categories["activation"], lead.peak.unknown["activation"]) == (None, note)
    assert lead.peak.total_bytes == 4 * FAKE.parameter_bytes + 64 * KIB
    assert lead.peak.moment == "end of the step"
    assert (lead.activations, lead.reasons["modules"]) == (None, note)
    assert {(step.activation_bytes, step.held_bytes) for step in lead.steps} == {(None, lead.peak.total_bytes)}


def test_of_several_backwards_in_a_step_the_largest_counts(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(windows=((2,),)))

    def twice(row: dict[str, Any]) -> list[dict[str, Any]]:
        if row["point"] != "before_backward":
            return [row]
        return [row, {**row, "activation_bytes": row["activation_bytes"] + 5}, row]

    rewrite(directory, "saved_tensors", twice)
    lead = memory_report(load_run(directory)).lead
    assert [step.activation_bytes for step in lead.steps] == [FAKE.activation_bytes + 5]
    assert lead.activations is not None
    assert lead.activations.unattributed_bytes == FAKE.unattributed_bytes + 5


def test_steps_have_what_was_kept_and_what_was_held(tmp_path: Path) -> None:
    steps = report(tmp_path, windows=((2, 3), (8,))).lead.steps
    assert [(step.window, step.step) for step in steps] == [(0, 2), (0, 3), (1, 8)]
    assert {step.activation_bytes for step in steps} == {FAKE.activation_bytes}
    assert {step.held_bytes for step in steps} == {4 * FAKE.parameter_bytes + 64 * KIB}


def test_rows_of_warmup_steps_do_not_count(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun())
    rewrite(directory, "saved_tensors", lambda row: [row, {**row, "recorded": False, "activation_bytes": 10**9}])
    lead = memory_report(load_run(directory)).lead
    assert lead.activations is not None
    assert lead.activations.total_bytes == FAKE.activation_bytes


def test_a_run_without_the_collectors_says_so_and_has_no_figure(tmp_path: Path) -> None:
    lead = report(tmp_path, None).lead
    assert (lead.peak, lead.activations, lead.steps, lead.functions, lead.checkpointing) == (None, None, (), (), ())
    assert {name: lead.reasons[name] for name in ("peak", "modules", "functions")} == dict.fromkeys(
        ("peak", "modules", "functions"), "not recorded"
    )


def test_the_reason_of_an_empty_page_is_the_collectors_own(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(memory=None))
    writer = ManifestWriter(directory / "manifest.rank00000.jsonl")
    writer.append("unavailable", collector="saved_tensors", reason="validate has no backward")
    writer.append("error", collector="functions", where="enter", window=0, message="OSError: x", traceback="")
    writer.close()
    reasons = memory_report(load_run(directory)).lead.reasons
    assert reasons["modules"] == reasons["peak"] == "validate has no backward"
    assert reasons["functions"] == "functions failed: OSError: x"


def test_a_run_that_was_killed_in_a_window_says_why_its_memory_is_not_there(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(windows=(), memory=None, endings={0: None}))
    writer = ManifestWriter(directory / "manifest.rank00000.jsonl")
    writer.append("window", window=0, event="open", warmup_steps=[1], active_steps=[2])
    writer.close()
    reasons = memory_report(load_run(directory)).lead.reasons
    assert reasons["peak"].startswith("window 0 is not closed")
    assert reasons["functions"].startswith("window 0 is not closed")


def test_damaged_lines_hide_only_themselves(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun())
    path = directory / "window000" / "rank00000.saved_tensors.jsonl"
    path.write_text("{broken\n" + path.read_text())
    run = load_run(directory)
    found = memory_report(run)
    assert [(problem.piece, problem.rank) for problem in run.series_problems] == [("rank00000.saved_tensors.jsonl", 0)]
    assert peak(found).categories["activation"] == FAKE.activation_bytes


@pytest.mark.parametrize("odd", [None, "x", -1.5, [], {"a": 1}, True])
def test_odd_values_in_a_row_are_left_out(tmp_path: Path, odd: object) -> None:
    directory = make_run(tmp_path, FakeRun(windows=((2,), (8,)), memory=FakeMemory(temporary_bytes=MIB)))
    for collector in ("saved_tensors", "functions", "module_memory"):
        rewrite(directory, collector, lambda row: [{**dict.fromkeys(row, odd), "kind": row.get("kind")}])
        rewrite(directory, collector, lambda row: [{key: odd if key != "step" else 1 for key in row}, row], window=1)
    lead = memory_report(load_run(directory)).lead
    assert lead.activations is not None
    assert lead.activations.total_bytes == FAKE.activation_bytes


def test_every_rank_has_its_own_figures_and_the_lead_one_is_named(tmp_path: Path) -> None:
    found = report(tmp_path, world_size=3)
    assert [rank.rank for rank in found.ranks] == [0, 1, 2]
    assert found.lead is found.ranks[0]


def test_a_limit_reads_the_lead_ranks_last_windows_and_says_so(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(world_size=2, windows=((2, 3), (8, 9), (14, 15))))
    size = sum(path.stat().st_size for path in (directory / "window000").glob("rank00000.[sf]*.jsonl"))
    found = memory_report(load_run(directory), max_bytes=size + size // 2)
    assert [rank.rank for rank in found.ranks] == [0]
    assert {step.window for step in found.lead.steps} == {2}
    assert ["2 of 3 windows" in note.message for note in found.notes] == [True]
    assert {step.window for step in memory_report(load_run(directory), max_bytes=0).lead.steps} == {2}
    everything = memory_report(load_run(directory), max_bytes=10 * size)
    assert (len(everything.lead.steps), everything.notes) == (6, ())
