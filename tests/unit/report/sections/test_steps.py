from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fake_runs import FakeRun, make_run
from lightning_memprof.account.ledger.model import TimeLine
from lightning_memprof.account.parts import PHASE_PARTS, Part
from lightning_memprof.artifacts.naming import system_name
from lightning_memprof.artifacts.sink import RunPlace, Sink
from lightning_memprof.read.run.load import load_run
from lightning_memprof.report.document import Stack
from lightning_memprof.report.printers.json import to_json
from lightning_memprof.report.printers.values import amount, words_text
from lightning_memprof.report.sections import run_document
from lightning_memprof.report.sections.overview import overview_section
from lightning_memprof.report.sections.steps import steps_section
from lightning_memprof.report.view import View, run_view
from lightning_memprof.schedule import Window
from lightning_memprof.units import GIB
from pages import full, short, table_of, words

WINDOW = Window(0, (1,), (2, 3))
# A step of each rank takes 20 ms.
STEADY = FakeRun(phases=lambda *_: {"data_wait": 0, "forward": 20_000_000, "backward": 0, "optimizer": 0,
                                    "callbacks": 0, "other": 0})  # fmt: skip


def batches(**values: Any) -> list[dict[str, Any]]:
    place = {"global_step": 2, "point": "step_end", "recorded": True, "time_ns": 1, "duration_ns": 40_000_000}
    row = {"samples": 8, "tokens": None, "flops": None, "peak_flops": None, **values}
    return [{"step": step, **place, **row} for step in (2, 3)]


def sample(**values: Any) -> dict[str, Any]:
    figures = {
        "process_cpu_percent": 40.0, "machine_cpu_percent": 10.0, "load_1m": 1.5, "memory_used_bytes": 3 * GIB,
        "memory_available_bytes": 5 * GIB, "swap_used_bytes": 0, "memory_limit_bytes": None,
    }  # fmt: skip
    return {"step": 2, "global_step": 2, "recorded": True, "time_ns": 1, **figures, **values}


def view(directory: Path, fake: FakeRun = STEADY, **series: list[dict[str, Any]]) -> View:
    run = make_run(directory, fake)
    with closing(Sink(RunPlace(directory, 1), 0)) as sink:
        for name, rows in series.items():
            sink.write_rows(WINDOW, name, rows)
    return run_view(load_run(run))


def document(shown: View) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(to_json(shown), allow_nan=False))
    return read


def test_the_rate_is_the_batch_over_the_steps_outside_of_windows(tmp_path: Path) -> None:
    shown = view(tmp_path, throughput=batches(tokens=4096))
    (rate,) = document(shown)["throughput"]
    assert rate["samples_per_s"] == {"mean": 400.0, "p10": 400.0, "p90": 400.0}
    assert rate["tokens_per_s"]["mean"] == 4096 * 50
    assert rate["batches_per_s"]["mean"] == 50
    assert "without the first and those in windows" in rate["basis"]
    rates = {row["quantity"]: row["mean"] for row in table_of(shown, "rates")}
    assert rates == {"samples": "400 samples/s", "tokens": "205 k tokens/s", "batches": "50.0 batches/s"}
    assert "throughput 205 k tokens/s p10 205 k tokens/s" in words(short(shown))


def test_the_spread_is_that_of_the_steps(tmp_path: Path) -> None:
    def phases(_: int, step: int) -> dict[str, int]:
        other = dict.fromkeys(("data_wait", "backward", "optimizer", "callbacks", "other"), 0)
        return {"forward": 10_000_000 if step % 2 else 40_000_000, **other}

    (rate,) = document(view(tmp_path, FakeRun(phases=phases), throughput=batches()))["throughput"]
    assert rate["samples_per_s"]["p10"] == 8 / 0.04
    assert rate["samples_per_s"]["p90"] == 8 / 0.01
    assert rate["samples_per_s"]["p10"] < rate["samples_per_s"]["mean"] < rate["samples_per_s"]["p90"]


def test_the_devices_utilization_is_the_operations_over_its_peak(tmp_path: Path) -> None:
    shown = view(tmp_path, throughput=batches(flops=2 * 10**12, peak_flops=1e15))
    (rate,) = document(shown)["throughput"]
    assert rate["flops_per_s"] == pytest.approx(1e14)
    assert rate["utilization"] == pytest.approx(0.1)
    (row,) = [row for row in table_of(shown, "rates") if row["quantity"] == "operations"]
    assert (row["per step"], row["mean"]) == ("2.00 TFLOP", "100 TFLOP/s")
    assert "utilization: 10% of the device's 1.00 PFLOP/s" in full(shown)


def test_operations_that_a_later_window_did_not_count_again_hold(tmp_path: Path) -> None:
    rows = batches(flops=None)
    rows[1]["flops"] = 500
    (rate,) = document(view(tmp_path, throughput=rows))["throughput"]
    assert rate["flops"] == 500
    assert rate["utilization"] is None


def test_what_is_not_known_is_null_and_never_zero(tmp_path: Path) -> None:
    shown = view(tmp_path, throughput=batches(samples=None))
    (rate,) = document(shown)["throughput"]
    unknown = ("samples", "samples_per_s", "tokens", "tokens_per_s", "flops", "flops_per_s", "peak_flops")
    assert {rate[name] for name in unknown} == {None}
    assert [row["quantity"] for row in table_of(shown, "rates")] == ["batches"]


def test_without_a_pulse_the_windows_steps_are_the_basis(tmp_path: Path) -> None:
    run = make_run(tmp_path, STEADY)
    with closing(Sink(RunPlace(tmp_path, 1), 0)) as sink:
        sink.write_rows(WINDOW, "throughput", batches())
    (run / "pulse.rank00000.csv").unlink()
    (rate,) = to_json(run_view(load_run(run)))["throughput"]
    assert rate["samples_per_s"]["mean"] == 200
    assert "cost of recording" in rate["basis"]


@pytest.mark.parametrize("wrong", ["8", -1, 1e400, True, 10**400, [8]])
def test_damaged_counts_are_not_counted(wrong: Any, tmp_path: Path) -> None:
    values = {"samples": wrong, "tokens": wrong, "flops": wrong, "peak_flops": wrong if wrong is not True else None}
    shown = view(tmp_path, throughput=batches(**values), system=[sample(load_1m=wrong)])
    assert document(shown)["throughput"][0]["samples"] is None
    assert "Throughput" in full(shown)


def test_a_run_without_the_collectors_has_neither_section(tmp_path: Path) -> None:
    shown = view(tmp_path)
    assert document(shown)["throughput"] == document(shown)["system"] == []
    text = full(shown)
    assert "Throughput" not in text
    assert "\nSystem" not in text


def test_the_machines_extremes_are_shown(tmp_path: Path) -> None:
    busy = sample(process_cpu_percent=380.0, machine_cpu_percent=90.0, memory_available_bytes=GIB, load_1m=7.0)
    shown = view(tmp_path, system=[sample(), busy])
    (samples,) = document(shown)["system"]
    assert samples["samples"] == 2
    assert samples["figures"]["process_cpu_percent"] == {"mean": 210.0, "min": 40.0, "max": 380.0}
    assert samples["figures"]["memory_available_bytes"]["min"] == GIB
    assert "memory_limit_bytes" not in samples["figures"]
    load = {row.pop("quantity"): row for row in table_of(shown, "system-figures")}
    assert load["process cpu"] == {"mean": "210%", "min": "40%", "max": "380%"}
    assert (load["memory used"]["max"], load["memory available"]["min"]) == ("3.00 GiB", "1.00 GiB")
    assert load["load 1m"]["max"] == "7.00"


def test_a_gpu_has_rows_of_its_own(tmp_path: Path) -> None:
    gpu = {"gpu3_utilization_percent": 87, "gpu3_memory_used_bytes": 40 * GIB, "gpu3_power_w": 310.5}
    shown = view(tmp_path, system=[sample(**gpu, gpu3_temperature_c=None)] * 10)
    load = {row["quantity"]: row["mean"] for row in table_of(shown, "system-figures")}
    assert (load["gpu3 utilization"], load["gpu3 memory used"]) == ("87%", "40.0 GiB")
    assert load["gpu3 power"] == "310 W"


def test_samples_of_the_whole_run_count_also_where_it_was_killed(tmp_path: Path) -> None:
    run = make_run(tmp_path, STEADY)
    lines = [json.dumps(sample(load_1m=value)) for value in (1.0, 9.0)]
    (run / system_name(0)).write_text("\n".join([*lines, '{"load_1m": 99']))
    (samples,) = to_json(run_view(load_run(run)))["system"]
    assert (samples["samples"], samples["figures"]["load_1m"]["max"]) == (2, 9.0)


@pytest.mark.parametrize(("samples", "lead"), [(1, "1 sample."), (9, "9 samples."), (10, "10 samples.")])
def test_utilization_of_a_few_seconds_is_not_that_of_the_run(samples: int, lead: str, tmp_path: Path) -> None:
    shown = view(tmp_path, system=[sample(gpu0_utilization_percent=0, gpu0_power_w=310.5)] * samples)
    load = {row["quantity"]: row["mean"] for row in table_of(shown, "system-figures")}
    assert load.get("gpu0 utilization") == ("0%" if samples == 10 else None)
    assert "gpu0 power" in load
    assert ("gpu0 utilization: not available" in full(shown)) == (samples < 10)
    assert f"System counters: {lead}" in full(shown)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0.00"), (4, "4.00"), (45.61, "45.6"), (999, "999"), (1234, "1.23 k"), (2.5e9, "2.50 G"), (1e15, "1.00 P")],
)
def test_numbers_have_three_figures_and_a_prefix(value: float, expected: str) -> None:
    assert amount(value) == expected


def test_parameters_are_counted_in_billions() -> None:
    assert amount(6.7e9, "parameters") == "6.70 B parameters"
    assert amount(6.7e9, "FLOP/s") == "6.70 GFLOP/s"


def test_events_callbacks_and_parts_of_a_recorded_step_are_there(tmp_path: Path) -> None:
    shown = run_view(load_run(make_run(tmp_path, FakeRun(windows=((2, 3),)))))
    (stack,) = [part for part in steps_section(shown).parts if isinstance(part, Stack)]
    assert [bar.name for bar in stack.bars] == [
        "data wait", "forward", "backward", "optimizer", "callbacks", "untracked time",
    ]  # fmt: skip
    owners = [(row["part"], row["owner"]) for row in table_of(shown, "ledger")]
    assert owners[:3] == [("backward", ""), ("forward", ""), ("optimizer", "")]
    assert ("callbacks", "TQDMProgressBar.on_train_batch_end") in owners
    first = table_of(shown, "events")[0]
    assert (first["event"], first["part"], first["count/step"]) == ("SingleDeviceStrategy.backward", "backward", "1")


def test_a_run_without_hook_timings_has_no_events_and_null_in_json(tmp_path: Path) -> None:
    shown = run_view(load_run(make_run(tmp_path, FakeRun(windows=()))))
    assert table_of(shown, "events") == []
    events = document(shown)["events"]
    assert (events["mean_ns"], events["steps"], events["actions"]) == (None, [], [])
    assert set(events["parts_ns"].values()) == {None}


def test_the_document_has_every_step_and_the_order_of_its_events(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(windows=(tuple(range(2, 25)),)))
    run = load_run(directory)
    events = document(run_view(run))["events"]
    assert [step["step"] for step in events["steps"]] == list(range(2, 25))
    first = events["steps"][0]
    assert sum(first["parts_ns"].values()) == first["duration_ns"] == run.lead.pulse[2]["duration_ns"]
    assert [event["action"].rpartition(".")[2] for event in first["events"]] == [
        "train_dataloader_next", "run_training_batch", "optimizer_step", "training_step", "backward",
        "on_train_batch_end",
    ]  # fmt: skip
    assert events["steps"][20]["events"] is None
    pulse = run.lead.pulse
    for phase, part in PHASE_PARTS.items():
        assert events["parts_ns"][part] == round(sum(pulse[step][f"{phase}_ns"] or 0 for step in range(2, 25)) / 23)
    assert list(events["callbacks_ns"]) == ["TQDMProgressBar"]


def test_the_bar_of_a_step_has_the_parts_of_its_ledger_and_sums_to_the_step(tmp_path: Path) -> None:
    shown = run_view(load_run(make_run(tmp_path)))
    assert shown.ledger is not None
    third = shown.ledger.step_ns / 3
    lines = (
        TimeLine(part=Part.FORWARD, ns=3 * third),
        TimeLine(part=Part.CORE_WAIT, ns=third),
        TimeLine(part=Part.GC_PAUSES, ns=third / 1000),
        TimeLine(part=Part.METRIC, ns=third / 1000),
    )
    ledger = replace(shown.ledger, lines=lines, step_ns=sum(line.ns for line in lines))
    section = overview_section(replace(shown, ledger=ledger), {}, [])
    stack = next(part for part in section.parts if isinstance(part, Stack))
    assert [bar.key for bar in stack.bars] == ["forward", "core_wait", "other"]
    assert sum(bar.value.share or 0 for bar in stack.bars) == pytest.approx(1)
    assert any("25%" in words_text(note) for note in stack.notes)


def test_the_table_by_phase_names_the_waits_that_its_phases_include(tmp_path: Path) -> None:
    shown = run_view(load_run(make_run(tmp_path)))
    assert shown.ledger is not None
    waits = (TimeLine(part=Part.CORE_WAIT, ns=2e6), TimeLine(part=Part.RANK_WAIT, ns=3e6))
    for lines, said in ((waits[:1], 1), (waits, 2), ((), 0)):
        ledger = replace(shown.ledger, lines=(TimeLine(part=Part.FORWARD, ns=9e6), *lines))
        page = words(full(replace(shown, ledger=ledger)).partition("Time by phase")[2])
        assert page.count("waiting for a core (2.00 ms)") == (said > 0)
        assert page.count("waiting for other ranks (3.00 ms)") == (said > 1)
        assert ("which Mean step by part shows separately" in page) == (said > 0)


def test_bars_of_several_ranks_say_whose_they_are(tmp_path: Path) -> None:
    for number, suffix in ((1, ""), (2, ", rank 0")):
        shown = run_view(load_run(make_run(tmp_path / str(number), FakeRun(world_size=number))))
        titles = [part.title for section in run_document(shown).sections for part in section.parts
                  if isinstance(part, Stack) and "Device time" not in part.title]  # fmt: skip
        assert [title.removesuffix(suffix) for title in titles] == [
            "Mean step by part", "Peak memory by owner, host", "Recorded step by part",
        ]  # fmt: skip


def test_recorded_steps_are_on_the_hosts_clock_which_differs_from_a_devices(tmp_path: Path) -> None:
    for fake, is_said in ((FakeRun(), False), (FakeRun(device_bytes=lambda _: GIB), True)):
        found = steps_section(run_view(load_run(make_run(tmp_path / str(is_said), fake))))
        (recorded,) = (part for part in found.parts if isinstance(part, Stack))
        assert ("recorded steps, host clock; " in str(recorded.notes[0])) is is_said
