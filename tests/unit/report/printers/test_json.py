from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fake_memory import FakeMemory
from fake_runs import FakeRun, make_run
from lightning_memprof.account.memory.allocations import run_allocations
from lightning_memprof.artifacts.series import PHASES
from lightning_memprof.read.run.load import load_run
from lightning_memprof.report.printers.json import to_json
from lightning_memprof.report.view import run_view
from lightning_memprof.units import MIB


def document(tmp_path: Path, fake: FakeRun | None = None) -> dict[str, Any]:
    shown = to_json(run_view(load_run(make_run(tmp_path, fake))))
    read: dict[str, Any] = json.loads(json.dumps(shown, allow_nan=False))
    return read


def test_the_document_has_the_promised_keys(tmp_path: Path) -> None:
    shown = document(tmp_path)
    promised = {
        "schema_version",
        "run",
        "verdict",
        "pulse",
        "ranks",
        "windows",
        "artifacts",
        "errors",
        "unavailable",
        "overhead",
        "memory",
        "holders",
        "workers",
        "hangs",
    }
    assert promised <= shown.keys()
    assert shown["schema_version"] == 1
    assert {"title", "why", "next"} <= shown["verdict"].keys()
    assert {"steps", "duration_ns", "breakdown_ns", "clock"} <= shown["pulse"].keys()
    assert {"median", "p90", "max"} <= shown["pulse"]["duration_ns"].keys()
    assert tuple(shown["pulse"]["breakdown_ns"]) == PHASES
    (window,) = shown["windows"]
    assert window["index"] == 0
    assert [step["step"] for step in window["steps"]] == [2, 3]
    for step in window["steps"]:
        assert {"duration_ns", "breakdown_ns", "host", "device"} <= step.keys()
        assert sum(step["breakdown_ns"].values()) == step["duration_ns"]
        assert step["device"] is None
        assert isinstance(step["host"]["rss_bytes"], int)
    assert shown["overhead"]["pulse_ns"] == 9_000 * 30
    assert shown["unavailable"] == [{"rank": 0, "collector": "allocator", "reason": "no accelerator"}]
    assert shown["run"]["directory"] == str(tmp_path / "memprofiler")


def test_holders_workers_and_hangs_have_the_rows_of_each_rank(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    rows: dict[str, list[dict[str, Any]]] = {
        "holders": [
            {"step": 9, "kind": "attribute", "place": "Net.old[...]", "added_bytes": MIB},
            {"step": 20, "kind": "attribute", "place": "Net.history[...]", "added_bytes": 2 * MIB},
        ],
        "processes": [{"step": 3, "kind": "worker", "pid": 7, "worker": 0, "dataset": "Images", "private_bytes": MIB}],
        "hangs": [{"step": 29, "kind": "hang", "phase": "forward", "place": "train.py:12 in forward"}],
    }
    for name, written in rows.items():
        (directory / f"{name}.rank00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    shown = to_json(run_view(load_run(directory)))
    assert [(row["rank"], row["place"]) for row in shown["holders"]] == [(0, "Net.history[...]")]
    assert [(row["rank"], row["dataset"], row["private_bytes"]) for row in shown["workers"]] == [(0, "Images", MIB)]
    assert [(row["rank"], row["step"], row["place"]) for row in shown["hangs"]] == [(0, 29, "train.py:12 in forward")]


def test_the_breakdown_of_the_pulse_sums_to_its_mean(tmp_path: Path) -> None:
    pulse = document(tmp_path)["pulse"]
    assert sum(pulse["breakdown_ns"].values()) == pulse["duration_ns"]["mean"]
    assert pulse["duration_ns"]["mean"] == pytest.approx(pulse["duration_ns"]["median"], rel=0.01)


def test_a_device_has_figures_in_bytes(tmp_path: Path) -> None:
    shown = document(tmp_path, FakeRun(device_bytes=lambda _: 300 * MIB))
    device = shown["windows"][0]["steps"][0]["device"]
    assert device["allocated_bytes"] == 300 * MIB
    assert shown["pulse"]["clock"] == "device"


def test_without_a_pulse_figures_are_null_and_never_zero(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    (directory / "pulse.rank00000.csv").unlink()
    shown = to_json(run_view(load_run(directory)))
    assert shown["pulse"]["duration_ns"] == {"median": None, "p90": None, "max": None, "mean": None}
    assert shown["pulse"]["clock"] is None
    assert len(shown["windows"][0]["steps"]) == 2


def test_every_rank_has_its_own_figures(tmp_path: Path) -> None:
    shown = document(tmp_path, FakeRun(world_size=2, endings={1: None}))
    assert [rank["rank"] for rank in shown["ranks"]] == [0, 1]
    assert [rank["status"] for rank in shown["ranks"]] == ["finished", "running or killed"]
    assert shown["ranks"][1]["overhead"] is None
    assert len(shown["ranks"][1]["windows"][0]["steps"]) == 2
    assert len(shown["windows"]) == 1


def test_values_that_json_has_no_word_for_become_null(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(training={"model": "A\ud800\x1b[31m"}))
    manifest = directory / "manifest.rank00000.jsonl"
    manifest.write_text(manifest.read_text().replace('"max_epochs":1', '"max_epochs":NaN'))
    shown = to_json(run_view(load_run(directory)))
    read = json.loads(json.dumps(shown, allow_nan=False))
    assert read["run"]["max_epochs"] is None
    assert read["run"]["model"] == "A\ud800\x1b[31m"


def test_a_truncated_window_says_so_with_its_reason(tmp_path: Path) -> None:
    (window,) = document(tmp_path, FakeRun(steps=3))["windows"]
    assert window["truncated"] is True
    assert window["reason"] == "the run ended"
    assert [step["step"] for step in window["steps"]] == [2]
    assert window["planned_steps"] == [2, 3]


def test_without_named_moments_the_list_is_empty(tmp_path: Path) -> None:
    assert document(tmp_path)["named"] == []


def test_other_runs_in_the_log_directory_are_listed(tmp_path: Path) -> None:
    make_run(tmp_path)
    assert document(tmp_path)["run"]["other_runs"] == [str(tmp_path / "memprofiler")]


def memory_of(tmp_path: Path, fake: FakeRun | None = None, *, traces: bool = True) -> dict[str, Any]:
    run = load_run(make_run(tmp_path, fake))
    shown = to_json(run_view(run, run_allocations(run) if traces else ()))["memory"]
    read: dict[str, Any] = json.loads(json.dumps(shown, allow_nan=False))
    return read


def test_memory_has_the_promised_keys(tmp_path: Path) -> None:
    memory = memory_of(tmp_path, FakeRun(memory=FakeMemory(temporary_bytes=MIB)))
    promised = {"peak_bytes", "modules", "sites", "functions", "unattributed_bytes"}
    assert promised | {"source", "moment", "curve", "checkpointing"} <= memory.keys()
    categories = {"parameter", "gradient", "optimizer_state", "activation", "input", "temporary"}
    assert categories <= memory["peak_bytes"].keys()
    assert {tuple(module) for module in memory["modules"]} == {
        ("name", "own_activation_bytes", "inclusive_activation_bytes", "parameter_bytes", "gradient_bytes", "calls",
         "forward_ns")
    }  # fmt: skip
    assert (memory["source"], memory["moment"]) == ("module_memory", "peak of the step")


@pytest.mark.parametrize("memory", [FakeMemory(), FakeMemory(temporary_bytes=MIB), FakeMemory(attribution="compiled")])
def test_figures_of_memory_add_up(tmp_path: Path, memory: FakeMemory) -> None:
    shown = memory_of(tmp_path, FakeRun(memory=memory))
    assert sum(size for size in shown["peak_bytes"].values() if size is not None) == shown["total_bytes"]
    own = sum(module["own_activation_bytes"] for module in shown["modules"])
    assert own + shown["unattributed_bytes"] == shown["activations"]["total_bytes"] == memory.activation_bytes
    (window,) = shown["allocations"]
    sites = sum(site["bytes"] for site in shown["sites"]) + shown["more_sites"]["bytes"]
    assert sites + window["unattributed_bytes"] == window["peak_bytes"] + window["freed_outside_bytes"]
    (group,) = shown["checkpointing"] or [{"blocks": [], "saved_bytes": 0}]
    assert sum(block["saved_bytes"] for block in group["blocks"]) == group["saved_bytes"]


def test_memory_that_was_not_recorded_is_null_with_a_reason_and_never_zero(tmp_path: Path) -> None:
    memory = memory_of(tmp_path, FakeRun(memory=None, trace=False))
    assert set(memory["peak_bytes"].values()) == {None}
    assert (memory["total_bytes"], memory["unattributed_bytes"], memory["activations"]) == (None, None, None)
    assert (memory["modules"], memory["sites"], memory["functions"]) == ([], [], {})
    assert memory["reasons"].keys() == {"peak", "modules", "functions", "sites"}
    assert memory_of(tmp_path / "held")["unknown"] == {"temporary": "only ModuleMemory and FSDPMemory measure it"}


def test_sites_that_were_not_looked_for_say_where_they_are(tmp_path: Path) -> None:
    memory = memory_of(tmp_path, traces=False)
    assert memory["sites"] == memory["allocations"] == []
    assert memory["reasons"]["sites"] == "the operator trace was not read: run lightning-memprof show"


def test_functions_have_their_changes_and_each_call(tmp_path: Path) -> None:
    (function,) = memory_of(tmp_path)["functions"].values()
    assert (function["calls"], function["unfinished"], function["raised"]) == (2, 0, 0)
    assert function["changes"]["rss_bytes"] == {"mean": 3 * MIB, "max": 3 * MIB}
    assert function["each"][0]["start"]["rss_bytes"] == 500 * MIB
    assert function["each"][0]["end"]["rss_bytes"] == 503 * MIB


def test_every_rank_has_its_own_memory(tmp_path: Path) -> None:
    memory = memory_of(tmp_path, FakeRun(world_size=2))
    assert [rank["rank"] for rank in memory["ranks"]] == [0, 1]
    assert memory["ranks"][1]["peak_bytes"] == memory["peak_bytes"]
    assert memory["rank"] == 0
