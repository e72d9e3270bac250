from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from lightning_memprof.analysis.findings import Evidence, Finding, Severity, examine, verdict
from lightning_memprof.analysis.findings.memory_growth import steady_growth
from lightning_memprof.analysis.run import load_run
from lightning_memprof.testing import HEALTHY, FakeRun, make_run
from lightning_memprof.units import GIB, MIB


def found(tmp_path: Path, fake: FakeRun) -> dict[str, Finding]:
    return {one.rule: one for one in examine(Evidence.of(load_run(make_run(tmp_path, fake))))}


def phases(**changes: int) -> Callable[[int, int], Mapping[str, int]]:
    return lambda _rank, _step: {**HEALTHY, **changes}


def loader(**settings: Any) -> dict[str, Any]:
    usual = {"num_workers": 0, "batch_size": 8, "pin_memory": False, "prefetch_factor": None}
    return {"dataloaders": [{**usual, "persistent_workers": False, **settings}]}


def optimizer(**settings: Any) -> dict[str, Any]:
    usual = {"name": "AdamW", "foreach": None, "fused": None, "parameters": 1000, "device": "cpu"}
    return {"optimizers": [{**usual, **settings}]}


def test_a_healthy_run_has_no_findings_and_a_command_to_look_further(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path))
    said = verdict(run)
    assert said.rule == "nothing_found"
    assert said.sentence == "No bottleneck found: the backward pass takes 55 % of a step."
    assert "tensorboard --logdir" in said.next


def test_without_a_trace_the_next_step_is_to_record_one(tmp_path: Path) -> None:
    said = verdict(load_run(make_run(tmp_path, FakeRun(trace=False))))
    assert 'profiler="fts_extended"' in said.next


def test_a_run_without_steps_says_so(tmp_path: Path) -> None:
    said = verdict(load_run(make_run(tmp_path, FakeRun(steps=0, windows=()))))
    assert said.sentence == "No step was measured."
    assert "MemProfilerCallback" in said.next


def test_few_steps_are_too_few_to_judge(tmp_path: Path) -> None:
    said = verdict(load_run(make_run(tmp_path, FakeRun(steps=2, windows=(), phases=phases(data_wait=10**9)))))
    assert said.rule == "nothing_found"
    assert "Only 2 steps were seen: too few to judge." in said.why


def test_an_early_end_is_said(tmp_path: Path) -> None:
    said = verdict(load_run(make_run(tmp_path, FakeRun(endings={0: "RuntimeError: boom"}))))
    assert said.why.startswith("The run ended early with RuntimeError: boom. ")


def test_waiting_for_data_is_found_with_the_present_settings(tmp_path: Path) -> None:
    fake = FakeRun(phases=phases(data_wait=20_000_000), training=loader())
    finding = found(tmp_path, fake)["input_bound"]
    assert finding.severity is Severity.CRITICAL
    assert "num_workers=0, persistent_workers=False, pin_memory=False, prefetch_factor=None" in finding.evidence
    assert "DataLoader(num_workers=4, persistent_workers=True)" in finding.next_steps[0]
    assert finding.numbers["data_wait_share"] == pytest.approx(20 / 37.8)


def test_a_little_waiting_is_no_finding(tmp_path: Path) -> None:
    assert "input_bound" not in found(tmp_path, FakeRun(phases=phases(data_wait=1_000_000), training=loader()))


@pytest.mark.parametrize(
    ("settings", "device", "said", "unsaid"),
    [
        ({"num_workers": 2, "prefetch_factor": 2}, "cpu", "num_workers=4); it is 2", "pin_memory=True"),
        ({"num_workers": 2, "prefetch_factor": 2}, "cpu", "persistent_workers=True", "pin_memory=True"),
        ({"num_workers": 2, "prefetch_factor": 2}, "cuda", "pin_memory=True", "num_workers is 0"),
        ({"num_workers": 8, "prefetch_factor": 4, "persistent_workers": True}, "cpu", "prefetch_factor=8", "persist"),
        ({"num_workers": 8, "prefetch_factor": 4}, "cpu", "prefetch_factor=8", "num_workers="),
    ],
)
def test_next_steps_leave_out_what_is_already_set(
    tmp_path: Path, settings: dict[str, Any], device: str, said: str, unsaid: str
) -> None:
    fake = FakeRun(
        phases=phases(data_wait=20_000_000),
        training=loader(**settings),
        device_bytes=(lambda _: MIB) if device == "cuda" else None,
    )
    steps = " ".join(found(tmp_path, fake)["input_bound"].next_steps)
    assert said in steps
    assert unsaid not in steps


def test_without_a_training_row_the_advice_is_general(tmp_path: Path) -> None:
    fake = FakeRun(phases=phases(data_wait=20_000_000), training={"dataloaders": None})
    assert "DataLoader(num_workers=4" in found(tmp_path, fake)["input_bound"].next_steps[0]


def test_the_rank_that_waits_most_is_named(tmp_path: Path) -> None:
    fake = FakeRun(world_size=3, phases=lambda rank, _: {**HEALTHY, "data_wait": rank * 5_000_000})
    finding = found(tmp_path, fake)["input_bound"]
    assert finding.numbers["rank"] == 2
    assert finding.sentence.endswith("on rank 2.")


def test_waiting_at_the_start_of_epochs_asks_for_persistent_workers_first(tmp_path: Path) -> None:
    fake = FakeRun(
        steps=40,
        windows=(),
        phases=lambda _, step: {**HEALTHY, "data_wait": 200_000_000 if step % 10 == 0 else 100_000},
        training=loader(num_workers=2, prefetch_factor=2),
    )
    directory = make_run(tmp_path, fake)
    pulse = directory / "pulse.rank00000.csv"
    header, *lines = pulse.read_text().splitlines()
    rows = [line.split(",") for line in lines]
    for row in rows:
        row[2] = str(int(row[0]) // 10)
    pulse.write_text("\n".join([header, *map(",".join, rows)]) + "\n")
    finding = examine(Evidence.of(load_run(directory)))[0]
    assert finding.rule == "input_bound"
    assert "at the start of epochs" in finding.evidence
    assert "persistent_workers=True" in finding.next_steps[0]


def test_a_looping_optimizer_is_found_and_fused_is_named(tmp_path: Path) -> None:
    finding = found(tmp_path, FakeRun(phases=phases(optimizer=6_000_000), training=optimizer()))["optimizer_bound"]
    assert "torch.optim.AdamW(..., fused=True)" in finding.next_steps[0]
    assert "foreach=None, fused=None on cpu" in finding.evidence


@pytest.mark.parametrize(
    "settings",
    [
        {"fused": True},
        {"foreach": True},
        {"device": "cuda:0"},
        {"name": "Lion"},
        {"name": "SparseAdam"},
    ],
)
def test_an_optimizer_that_is_fast_already_or_has_no_faster_way_is_no_finding(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    fake = FakeRun(phases=phases(optimizer=6_000_000), training=optimizer(**settings))
    assert "optimizer_bound" not in found(tmp_path, fake)


def test_a_few_slow_optimizer_steps_are_no_finding(tmp_path: Path) -> None:
    fake = FakeRun(
        phases=lambda _, step: {**HEALTHY, "optimizer": 500_000_000 if step == 20 else 1_200_000}, training=optimizer()
    )
    assert "optimizer_bound" not in found(tmp_path, fake)


def test_an_optimizer_that_steps_every_fourth_batch_counts_with_its_share_of_all_steps(tmp_path: Path) -> None:
    def every_fourth(_: int, step: int) -> Mapping[str, int]:
        return {**HEALTHY, "optimizer": 40_000_000 if step % 4 == 3 else 0}

    finding = found(tmp_path, FakeRun(phases=every_fourth, training=optimizer()))["optimizer_bound"]
    assert finding.weight == pytest.approx(10 / 27, rel=0.2)


def test_waiting_in_few_steps_is_told_from_waiting_in_each(tmp_path: Path) -> None:
    slow = {**HEALTHY, "data_wait": 500_000_000}
    fake = FakeRun(phases=lambda _, step: slow if step == 20 else HEALTHY)
    assert "most of it in few steps" in found(tmp_path / "few", fake)["input_bound"].evidence
    fake = FakeRun(phases=phases(data_wait=20_000_000))
    assert "few steps" not in found(tmp_path / "each", fake)["input_bound"].evidence


def test_foreach_switched_off_on_cuda_is_found(tmp_path: Path) -> None:
    fake = FakeRun(phases=phases(optimizer=6_000_000), training=optimizer(device="cuda:0", foreach=False))
    assert "optimizer_bound" in found(tmp_path, fake)


def test_an_optimizer_without_a_fused_kernel_gets_foreach(tmp_path: Path) -> None:
    fake = FakeRun(phases=phases(optimizer=6_000_000), training=optimizer(name="RMSprop"))
    assert found(tmp_path, fake)["optimizer_bound"].next_steps == (
        "Update the parameters in groups: torch.optim.RMSprop(..., foreach=True).",
    )


def test_a_small_share_of_a_looping_optimizer_is_no_finding(tmp_path: Path) -> None:
    assert "optimizer_bound" not in found(tmp_path, FakeRun(training=optimizer()))


def test_memory_that_grows_with_every_step_is_found_with_its_slope(tmp_path: Path) -> None:
    fake = FakeRun(steps=60, rss_bytes=lambda step: 500 * MIB + step * 2 * MIB)
    finding = found(tmp_path, fake)["memory_growth"]
    assert finding.sentence == "Host memory grows by 2.00 MiB with every step."
    assert finding.numbers["bytes_per_step"] == 2 * MIB
    assert ".item()" in finding.next_steps[0]
    assert "detach()" in finding.next_steps[0]


def test_device_memory_that_grows_is_found(tmp_path: Path) -> None:
    fake = FakeRun(steps=60, device_bytes=lambda step: GIB + step * 8 * MIB)
    assert found(tmp_path, fake)["memory_growth"].sentence.startswith("Device memory grows by 8.00 MiB")


def noisy(step: int) -> int:
    return 500 * MIB + random.Random(step).randrange(-40, 40) * MIB


@pytest.mark.parametrize(
    "rss",
    [
        pytest.param(noisy, id="noise"),
        pytest.param(lambda step: 500 * MIB + (200 * MIB if step > 30 else 0), id="one jump"),
        pytest.param(lambda step: 500 * MIB + (400 * MIB if step > 2 else 0), id="window"),
        pytest.param(lambda step: 500 * MIB + min(step, 12) * 40 * MIB, id="warm-up"),
        pytest.param(lambda step: 500 * MIB + round(400 * MIB * (1 - 0.9**step)), id="cache that fills"),
        pytest.param(lambda step: 500 * MIB + step * 4096, id="drift of the allocator"),
        pytest.param(lambda step: 900 * MIB - step * 4 * MIB, id="shrinks"),
        pytest.param(lambda step: 500 * MIB + (step % 20) * 10 * MIB, id="saw"),
    ],
)
def test_memory_that_does_not_grow_steadily_is_no_finding(tmp_path: Path, rss: Callable[[int], int]) -> None:
    assert "memory_growth" not in found(tmp_path, FakeRun(steps=60, rss_bytes=rss))


def test_what_recording_itself_takes_is_not_growth(tmp_path: Path) -> None:
    windows = tuple((start, start + 1) for start in range(8, 60, 8))
    fake = FakeRun(steps=64, windows=windows, trace=False, rss_bytes=lambda step: 500 * MIB + (step // 8) * 100 * MIB)
    assert "memory_growth" not in found(tmp_path, fake)


def test_what_settles_after_a_window_is_not_growth(tmp_path: Path) -> None:
    windows = tuple((start, start + 1) for start in range(8, 60, 12))
    rises = (0, 0, 0, 24, 40, 50, 55, 58, 60, 60, 60, 60)
    fake = FakeRun(steps=64, windows=windows, trace=False, rss_bytes=lambda step: (500 + rises[(step - 6) % 12]) * MIB)
    assert "memory_growth" not in found(tmp_path, fake)


def test_growth_is_seen_through_windows_and_noise(tmp_path: Path) -> None:
    windows = tuple((start, start + 1) for start in range(8, 100, 20))
    fake = FakeRun(steps=120, windows=windows, trace=False, rss_bytes=lambda step: noisy(step) + step * 4 * MIB)
    slope = found(tmp_path, fake)["memory_growth"].numbers["bytes_per_step"]
    assert slope == pytest.approx(4 * MIB, rel=0.5)


def test_few_steps_cannot_show_growth(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path, FakeRun(steps=18, rss_bytes=lambda step: (100 + 50 * step) * MIB)))
    assert steady_growth(run.lead.pulse, "rss_bytes") is None


def test_the_most_severe_finding_makes_the_verdict_and_the_others_stay(tmp_path: Path) -> None:
    fake = FakeRun(
        steps=60,
        phases=phases(optimizer=6_000_000, data_wait=100_000_000),
        training={**optimizer(), **loader()},
        rss_bytes=lambda step: 500 * MIB + step * 2 * MIB,
    )
    run = load_run(make_run(tmp_path, fake))
    assert [one.rule for one in examine(Evidence.of(run))] == ["input_bound", "memory_growth"]
    assert verdict(run).rule == "input_bound"
