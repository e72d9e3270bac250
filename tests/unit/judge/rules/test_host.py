from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from fake_runs import HEALTHY, FakeRun, make_run, set_epochs
from lightning_memprof.account.ledger.growth import Growth, left_by_windows, steady_growth
from lightning_memprof.artifacts.sink import RunPlace, Sink
from lightning_memprof.judge import Facts, Finding, Severity, examine, verdict_of
from lightning_memprof.judge.rhythm import rhythm
from lightning_memprof.read.run.load import load_run
from lightning_memprof.schedule import Window
from lightning_memprof.units import GIB, MIB, format_ns, percent


def found(tmp_path: Path, fake: FakeRun) -> dict[str, Finding]:
    return {finding.rule: finding for finding in examine(Facts.of(load_run(make_run(tmp_path, fake))))}


def phases(**changes: int) -> Callable[[int, int], Mapping[str, int]]:
    return lambda _rank, _step: {**HEALTHY, **changes}


def loader(**settings: Any) -> dict[str, Any]:
    usual = {"num_workers": 0, "batch_size": 8, "pin_memory": False, "prefetch_factor": None}
    return {"dataloaders": [{**usual, "persistent_workers": False, **settings}]}


def optimizer(**settings: Any) -> dict[str, Any]:
    usual = {"name": "AdamW", "foreach": None, "fused": None, "parameters": 1000, "device": "cpu"}
    return {"optimizers": [{**usual, **settings}]}


def test_without_a_trace_the_next_step_is_to_record_one(tmp_path: Path) -> None:
    said = verdict_of(load_run(make_run(tmp_path, FakeRun(trace=False))))
    assert 'profiler="memprof"' in said.next


def test_a_run_without_steps_says_so(tmp_path: Path) -> None:
    said = verdict_of(load_run(make_run(tmp_path, FakeRun(steps=0, windows=()))))
    assert said.title == "No step was measured."
    assert [remedy.id for remedy in said.remedies] == ["more_steps", "more_epochs"]


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_up_to_10_steps_outside_windows_are_too_few_to_judge_step_time(tmp_path: Path, steps: int) -> None:
    slow = phases(data_wait=10**9, callbacks=10**8)
    (few,) = examine(Facts.of(load_run(make_run(tmp_path / "few", FakeRun(steps=steps, windows=(), phases=slow)))))
    assert (few.rule, few.severity) == ("nothing_found", Severity.INFO)
    assert few.title == "Too few steps to judge."
    judged = verdict_of(load_run(make_run(tmp_path / "judged", FakeRun(steps=11, windows=(), phases=slow))))
    assert judged.rule == "input_bound"


def test_steps_of_windows_are_no_steps_outside_windows(tmp_path: Path) -> None:
    fake = FakeRun(steps=14, windows=((2, 3, 4, 5),), phases=phases(data_wait=10**9))
    assert verdict_of(load_run(make_run(tmp_path, fake))).rule == "nothing_found"


def test_a_rank_of_few_steps_is_not_judged_beside_one_of_many(tmp_path: Path) -> None:
    fake = FakeRun(world_size=2, windows=(), phases=lambda rank, _: {**HEALTHY, "data_wait": rank * 10**9})
    run = make_run(tmp_path, fake)
    pulse = run / "pulse.rank00001.csv"
    pulse.write_text("".join(pulse.read_text().splitlines(keepends=True)[:6]))
    assert "input_bound" not in {finding.rule for finding in examine(Facts.of(load_run(run)))}


def test_waiting_for_data_is_found_with_the_present_settings(tmp_path: Path) -> None:
    fake = FakeRun(phases=phases(data_wait=20_000_000), training=loader())
    finding = found(tmp_path, fake)["input_bound"]
    assert finding.severity is Severity.CRITICAL
    assert "num_workers=0, persistent_workers=False, pin_memory=False, prefetch_factor=None" in finding.why
    assert "DataLoader(num_workers=4, persistent_workers=True)" in finding.next_steps[0]
    assert finding.numbers["data_wait_share"] == pytest.approx(20 / 37.8)


def test_a_little_waiting_is_no_finding(tmp_path: Path) -> None:
    assert "input_bound" not in found(tmp_path, FakeRun(phases=phases(data_wait=1_000_000), training=loader()))


@pytest.mark.parametrize(
    ("settings", "device", "said", "unsaid"),
    [
        ({"num_workers": 2, "prefetch_factor": 2}, "cpu", "DataLoader(num_workers=4)", "pin_memory=True"),
        ({"num_workers": 2, "prefetch_factor": 2}, "cpu", "persistent_workers=True", "pin_memory=True"),
        ({"num_workers": 2, "prefetch_factor": 2}, "cuda", "pin_memory=True", "num_workers is 0"),
        ({"num_workers": 8, "persistent_workers": True}, "cpu", "DataLoader(num_workers=16)", "persist"),
        ({"num_workers": 32, "prefetch_factor": 4}, "cpu", "Make __getitem__ faster", "num_workers="),
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


def test_waiting_at_the_start_of_epochs_asks_for_persistent_workers_first(tmp_path: Path) -> None:
    fake = FakeRun(
        steps=40,
        windows=(),
        phases=lambda _, step: {**HEALTHY, "data_wait": 200_000_000 if step % 10 == 0 else 100_000},
        training=loader(num_workers=2, prefetch_factor=2),
    )
    directory = make_run(tmp_path, fake)
    set_epochs(directory, 10)
    finding = examine(Facts.of(load_run(directory)))[0]
    assert finding.rule == "input_bound"
    assert "at the start of epochs" in finding.why
    assert "persistent_workers=True" in finding.next_steps[0]


@pytest.mark.parametrize("prefetch", [2, 4, 8])
def test_workers_that_cannot_keep_up_are_not_told_to_prefetch(tmp_path: Path, prefetch: int) -> None:
    # Two workers that began together: every second step waits for both.
    fake = FakeRun(
        steps=60,
        phases=lambda _, step: {**HEALTHY, "data_wait": 100_000_000 if step % 2 else 400_000},
        training=loader(num_workers=2, prefetch_factor=prefetch, persistent_workers=True),
    )
    finding = found(tmp_path, fake)["input_bound"]
    assert "prefetch" not in " ".join(finding.next_steps)
    assert "a few steps" not in finding.why
    assert "2 workers cannot keep up" in finding.why
    assert "DataLoader(num_workers=4)" in finding.next_steps[0]


def test_as_many_workers_as_cores_are_told_to_do_less_or_to_be_more(tmp_path: Path) -> None:
    fake = FakeRun(phases=phases(data_wait=100_000_000), training=loader(num_workers=8, persistent_workers=True))
    faster, more = found(tmp_path, fake)["input_bound"].next_steps
    assert "__getitem__ faster" in faster
    assert "DataLoader(num_workers=16)" in more


def test_waits_in_few_steps_are_told_to_prefetch(tmp_path: Path) -> None:
    fake = FakeRun(
        steps=60,
        phases=lambda _, step: {**HEALTHY, "data_wait": 200_000_000 if step in (20, 37, 51) else 400_000},
        training=loader(num_workers=2, prefetch_factor=2, persistent_workers=True),
    )
    finding = found(tmp_path, fake)["input_bound"]
    assert "mostly in a few steps" in finding.why
    assert "prefetch_factor=4" in finding.next_steps[0]


TINY = {"forward": 300_000, "backward": 400_000, "callbacks": 100_000, "other": 200_000}


@pytest.mark.parametrize(
    ("costly", "rule"), [({"optimizer": 800_000}, "optimizer_bound"), ({"data_wait": 900_000}, "input_bound")]
)
def test_the_overhead_of_tiny_steps_is_no_finding(tmp_path: Path, costly: dict[str, int], rule: str) -> None:
    training = {**optimizer(), **loader()}
    tiny = {"data_wait": 100_000, "optimizer": 100_000, **TINY, **costly}
    assert rule not in found(tmp_path / "tiny", FakeRun(phases=lambda *_: tiny, training=training))
    scaled = {phase: 20 * ns for phase, ns in tiny.items()}
    assert rule in found(tmp_path / "large", FakeRun(phases=lambda *_: scaled, training=training))


def with_callback(directory: Path, key: str, share: float = 1.0) -> Path:
    """Give the window's callback this key, and this part of the time."""
    series = directory / "window000" / "rank00000.hooks.jsonl"
    rows = [json.loads(line) for line in series.read_text().splitlines()]
    for row in rows:
        if row["action"].startswith("[Callback]"):
            row["action"] = f"[Callback]{key}.on_train_batch_end"
            row["duration_ns"] = round(row["duration_ns"] * share)
    series.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


@pytest.mark.parametrize("other", [500_000, 3_000_000])
def test_what_the_trainer_does_between_phases_is_no_finding(tmp_path: Path, other: int) -> None:
    assert list(found(tmp_path, FakeRun(phases=phases(other=other)))) == ["nothing_found"]


@pytest.mark.parametrize("around", [{"callbacks": 1_500_000}, {"other": 1_500_000}])
def test_the_verdict_is_never_green_where_much_of_the_step_is_not_the_models(
    tmp_path: Path, around: dict[str, int]
) -> None:
    tiny = {"data_wait": 100_000, "optimizer": 200_000, **TINY, **around}
    said = verdict_of(load_run(make_run(tmp_path, FakeRun(phases=lambda *_: tiny))))
    assert (said.rule, said.severity) == ("nothing_found", Severity.INFO)
    assert said.title.startswith("Host-bound: callbacks, hooks and untracked time take 6")


@pytest.mark.parametrize(
    ("steps", "subject"),
    [
        ((9, 19, 29), "Every 10th step"),
        ((2, 5, 8, 11), "Every 3rd step"),
        ((1, 23, 45), "Every 22nd step"),
        ((9, 12, 31), "3 of 59 steps"),
        ((9, 19), "2 of 59 steps"),
        ((30,), "1 of 59 steps (step 30)"),
        ((59,), "The last step of the epoch"),
    ],
)
def test_few_steps_are_named_by_their_rhythm(tmp_path: Path, steps: tuple[int, ...], subject: str) -> None:
    slow = {**HEALTHY, "other": 9 * 10**9}
    fake = FakeRun(steps=60, windows=(), phases=lambda _, step: slow if step in steps else HEALTHY)
    few = rhythm(load_run(make_run(tmp_path, fake)).lead, "other")
    assert few is not None
    assert few.subject == subject
    assert few.steps == steps


def test_steps_of_one_number_have_no_distance(tmp_path: Path) -> None:
    slow = {**HEALTHY, "other": 9 * 10**9}
    directory = make_run(tmp_path, FakeRun(steps=60, windows=(), phases=lambda _, step: slow if step == 9 else HEALTHY))
    lead = load_run(directory).lead
    (row,) = (row for row in lead.pulse if row["step"] == 9)
    few = rhythm(structs.replace(lead, pulse=(*lead.pulse, row, row)), "other")
    assert few is not None
    assert few.period is None


def test_a_phase_that_is_slow_in_each_step_has_no_rhythm(tmp_path: Path) -> None:
    assert rhythm(load_run(make_run(tmp_path, FakeRun(phases=phases(other=10**9)))).lead, "other") is None


def test_sentence_and_table_agree_where_median_and_mean_differ(tmp_path: Path) -> None:
    def uneven(_: int, step: int) -> Mapping[str, int]:
        return {**HEALTHY, "optimizer": (6_000_000, 12_000_000)[step % 3 == 0]}

    run = load_run(make_run(tmp_path, FakeRun(phases=uneven, training=optimizer())))
    found, ledger = verdict_of(run), Facts.of(run).ledgers[0]
    assert found.title == f"AdamW updates 1,000 tensors one by one: {percent(ledger.share('optimizer'))} of each step."
    assert format_ns(ledger.step_ns) in found.why


def test_a_looping_optimizer_is_found_and_fused_is_named(tmp_path: Path) -> None:
    finding = found(tmp_path, FakeRun(phases=phases(optimizer=6_000_000), training=optimizer()))["optimizer_bound"]
    assert "torch.optim.AdamW(..., fused=True)" in finding.next_steps[0]
    assert "on cpu with foreach=None, fused=None" in finding.why


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({"fused": True}, "Step less often"),
        ({"foreach": True}, "Step less often"),
        ({"device": "cuda:0"}, "Step less often"),
        ({"name": "SparseAdam"}, "Step less often"),
        ({"parameters": 4}, "Step less often"),
        ({"name": "Lion"}, "Step less often"),
    ],
)
def test_an_optimizer_without_a_faster_way_is_to_step_less_often_if_it_bounds_the_step(
    tmp_path: Path, settings: dict[str, Any], first: str
) -> None:
    much = FakeRun(phases=phases(optimizer=20_000_000), training=optimizer(**settings))
    finding = found(tmp_path / "much", much)["optimizer_bound"]
    assert finding.title.startswith("Optimizer-bound: ")
    assert finding.next_steps[0].startswith(first)
    assert finding.recovers is not None
    assert finding.recovers.max == pytest.approx(0.75 * 20_000_000, rel=0.1)
    less = FakeRun(phases=phases(optimizer=12_000_000), training=optimizer(**settings))
    assert "optimizer_bound" not in found(tmp_path / "less", less)


def test_a_few_slow_optimizer_steps_are_no_finding(tmp_path: Path) -> None:
    fake = FakeRun(
        phases=lambda _, step: {**HEALTHY, "optimizer": 500_000_000 if step == 20 else 1_200_000}, training=optimizer()
    )
    assert "optimizer_bound" not in found(tmp_path, fake)


def test_stalls_of_other_phases_and_waits_for_a_core_are_not_the_optimizer(tmp_path: Path) -> None:
    def shared(_: int, step: int) -> Mapping[str, int]:
        waits = 8_000_000 if step % 5 else 0
        return {**HEALTHY, "forward": 90_000_000 if step % 10 == 5 else 6_000_000, "optimizer": 1_000_000 + waits}

    waits = FakeRun(steps=60, phases=shared, core_wait_ns=lambda step: 8_000_000 if step % 5 else 0)
    rules = found(tmp_path, replace(waits, training=optimizer(parameters=1000)))
    assert "core_wait" in rules
    assert "optimizer_bound" not in rules


def test_an_optimizer_that_steps_every_fourth_batch_counts_with_its_share_of_all_steps(tmp_path: Path) -> None:
    def every_fourth(_: int, step: int) -> Mapping[str, int]:
        return {**HEALTHY, "optimizer": 40_000_000 if step % 4 == 3 else 0}

    training = {**optimizer(), "accumulate_grad_batches": 4}
    finding = found(tmp_path, FakeRun(phases=every_fourth, training=training))["optimizer_bound"]
    assert finding.weight == pytest.approx(0.5 * 10 / 27, rel=0.2)


def test_a_stall_in_an_optimizer_is_not_the_optimizers_time(tmp_path: Path) -> None:
    def stalls_once(_: int, step: int) -> Mapping[str, int]:
        return {**HEALTHY, "optimizer": 500_000_000 if step == 20 else 10_000_000}

    finding = found(tmp_path, FakeRun(phases=stalls_once, training=optimizer()))["optimizer_bound"]
    assert finding.numbers["ns"] == pytest.approx(10_000_000, rel=0.05)


def test_waiting_in_few_steps_is_told_from_waiting_in_each(tmp_path: Path) -> None:
    slow = {**HEALTHY, "data_wait": 500_000_000}
    fake = FakeRun(phases=lambda _, step: slow if step == 20 else HEALTHY)
    assert "mostly in a few steps" in found(tmp_path / "few", fake)["input_bound"].why
    fake = FakeRun(phases=phases(data_wait=20_000_000))
    assert "a few steps" not in found(tmp_path / "each", fake)["input_bound"].why


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
    assert finding.title == "Host memory grows by 2.00 MiB per step."
    assert finding.numbers["bytes_per_step"] == 2 * MIB
    assert ".item()" in finding.next_steps[0]
    assert "detach()" in finding.next_steps[0]


def test_device_memory_that_grows_is_found(tmp_path: Path) -> None:
    fake = FakeRun(steps=60, device_bytes=lambda step: GIB + step * 8 * MIB)
    assert found(tmp_path, fake)["memory_growth"].title.startswith("Device memory grows by 8.00 MiB")


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


def left(tmp_path: Path, rss: Callable[[int], int], windows: tuple[tuple[int, ...], ...] = ((20, 21),)) -> int | None:
    fake = FakeRun(steps=60, windows=windows, trace=False, rss_bytes=rss)
    return left_by_windows(load_run(make_run(tmp_path, fake)).lead.pulse, "rss_bytes")


@pytest.mark.parametrize("slope", [0, 9 * MIB])
def test_memory_that_a_window_leaves_is_told_from_growth(tmp_path: Path, slope: int) -> None:
    jump = left(tmp_path / "jump", lambda step: 500 * MIB + slope * step + (112 * MIB if step >= 20 else 0))
    assert jump == pytest.approx(112 * MIB, rel=0.01)
    assert left(tmp_path / "none", lambda step: 500 * MIB + slope * step) == 0


def test_memory_that_windows_close_together_leave_is_compared_around_all_of_them(tmp_path: Path) -> None:
    windows = tuple((start, start + 1) for start in range(6, 44, 8))
    size = left(tmp_path, lambda step: (500 + min(max(step - 5, 0), 40)) * MIB, windows)
    assert size == pytest.approx(40 * MIB, rel=0.1)


def test_noise_around_a_window_is_not_what_it_left(tmp_path: Path) -> None:
    assert left(tmp_path, noisy) == 0


def test_a_window_at_the_start_cannot_say_what_it_left(tmp_path: Path) -> None:
    assert left(tmp_path, lambda step: (500 + 100 * (step > 1)) * MIB, ((2, 3),)) is None


def test_few_steps_cannot_show_growth(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path, FakeRun(steps=18, rss_bytes=lambda step: (100 + 50 * step) * MIB)))
    assert steady_growth(run.lead.pulse, "rss_bytes") is None


def up_and_down(tmp_path: Path, text: str, leak: int = 0) -> Growth | None:
    levels = [int(level) for level in text.split()]
    fake = FakeRun(
        steps=len(levels),
        rss_bytes=lambda step: (levels[step] + leak * step) * MIB,
        windows=((11, 12), (24, 25)),
    )
    return steady_growth(load_run(make_run(tmp_path, fake)).lead.pulse, "rss_bytes")


# Two recorded healthy trainings: the allocator's pools move, and windows leave memory behind.
POOLS = (
    """533 533 540 545 548 548 553 546 553 555 555 600 613 600 590 580 570 568 568 568
    571 585 576 590 600 637 620 571 575 580 585 590 570 581 584 589 583 593 593 573""",
    """457 557 570 554 553 570 551 572 575 581 572 602 679 600 603 603 603 607 598 598
    612 603 606 606 615 682 615 605 605 616 616 603 603 603 611 598 601 615 615 615""",
)


@pytest.mark.parametrize("levels", POOLS)
def test_memory_that_goes_up_and_down_between_windows_does_not_grow(tmp_path: Path, levels: str) -> None:
    assert up_and_down(tmp_path, levels) is None


@pytest.mark.parametrize("levels", POOLS)
def test_a_leak_shows_through_pools_that_go_up_and_down(tmp_path: Path, levels: str) -> None:
    growth = up_and_down(tmp_path, levels, leak=8)
    assert growth is not None
    assert growth.bytes_per_step == pytest.approx(8 * MIB, rel=0.4)


def test_the_most_severe_finding_makes_the_verdict_and_the_others_stay(tmp_path: Path) -> None:
    fake = FakeRun(
        steps=60,
        phases=phases(optimizer=6_000_000, data_wait=100_000_000),
        training={**optimizer(), **loader()},
        rss_bytes=lambda step: 500 * MIB + step * 2 * MIB,
    )
    run = load_run(make_run(tmp_path, fake))
    assert [finding.rule for finding in examine(Facts.of(run))] == ["input_bound", "memory_growth"]
    assert verdict_of(run).rule == "input_bound"


def waits_for_a_core(
    tmp_path: Path, share: float, *, load: Mapping[str, float] | None = None, **fake: Any
) -> dict[str, Finding]:
    """Return the findings of a run on all 8 cores of a machine; ``load`` is in percent of a core."""
    wait = round(share * sum(HEALTHY.values()))
    run = make_run(tmp_path, FakeRun(phases=phases(), core_wait_ns=lambda _: wait, **fake))
    if load is not None:
        row = {"step": 2, "recorded": True, "time_ns": 1, **load}
        with closing(Sink(RunPlace(tmp_path, 1), 0)) as sink:
            sink.write_rows(Window(0, (1,), (2, 3)), "system", [row])
    return {finding.rule: finding for finding in examine(Facts.of(load_run(run)))}


OTHERS_BUSY = {"process_cpu_percent": 100.0, "machine_cpu_percent": 100.0}


def test_a_training_whose_cores_are_taken_waits_for_a_core(tmp_path: Path) -> None:
    rules = waits_for_a_core(tmp_path, 0.7, load=OTHERS_BUSY)
    finding = rules["core_wait"]
    assert next(iter(rules)) == "core_wait"
    assert finding.title == "Other processes take the cores: the training thread waits 70% of each step for a core."
    assert "the training used 1.0 of 8 cores, other processes 7.0." in finding.why
    assert "renice" in finding.next_steps[0]
    assert finding.severity is Severity.WARNING
    assert finding.recovers is not None
    assert finding.recovers.max == pytest.approx(0.7 / 3 * sum(HEALTHY.values()), rel=0.01)


@pytest.mark.parametrize(("threads", "machine", "fewer"), [(8, 100.0, 1), (8, 93.75, 1), (2, 81.25, None)])
def test_where_others_take_the_cores_fewer_threads_come_first(
    tmp_path: Path, threads: int, machine: float, fewer: int | None
) -> None:
    load = {"process_cpu_percent": 100.0, "machine_cpu_percent": machine}
    finding = waits_for_a_core(tmp_path, 0.7, load=load, training={"threads": threads})["core_wait"]
    changes = [remedy.change for remedy in finding.remedies]
    assert changes == ([f"threads={fewer}", ""] if fewer else [""])
    assert "renice" in finding.next_steps[-1]


def test_a_training_uses_at_most_all_cores(tmp_path: Path) -> None:
    late = {"process_cpu_percent": 2900.0, "machine_cpu_percent": 100.0}
    assert "the training used 8.0 of 8 cores" in waits_for_a_core(tmp_path, 0.7, load=late)["core_wait"].why


@pytest.mark.parametrize(
    ("share", "severity"), [(0.09, None), (0.11, Severity.INFO), (0.49, Severity.INFO), (0.61, Severity.WARNING)]
)
def test_a_wait_that_other_programs_cause_is_a_note_from_a_tenth_and_a_warning_from_what_fewer_threads_recover(
    tmp_path: Path, share: float, severity: Severity | None
) -> None:
    finding = waits_for_a_core(tmp_path, share, load=OTHERS_BUSY).get("core_wait")
    assert (finding.severity if finding else None) is severity


@pytest.mark.parametrize(("waits_ns", "is_first"), [(9_000_000, True), (200_000_000, False)])
def test_a_fault_of_the_training_and_cores_that_others_take_come_by_their_share_of_the_step(
    tmp_path: Path, waits_ns: int, is_first: bool
) -> None:
    def shared(_: int, step: int) -> Mapping[str, int]:
        return {**HEALTHY, "optimizer": 30_000_000, "backward": HEALTHY["backward"] + (waits_ns if step % 5 else 0)}

    core_wait = lambda step: waits_ns if step % 5 else 0  # noqa: E731 as short as in the other tests
    waits = FakeRun(phases=shared, core_wait_ns=core_wait, training=optimizer(parameters=1000))
    run = load_run(make_run(tmp_path, waits))
    found = examine(Facts.of(run))
    assert (found[0].rule == "optimizer_bound") == is_first
    fault = next(finding for finding in found if finding.rule == "optimizer_bound")
    assert fault.recovers is not None
    assert fault.recovers.whole == Facts.of(run).ledgers[0].step_ns


def test_a_wait_of_unknown_cause_comes_before_what_a_training_is_bound_by(tmp_path: Path) -> None:
    assert next(iter(waits_for_a_core(tmp_path, 0.4))) == "core_wait"


def test_worker_processes_that_share_the_cores_are_the_training_s_own(tmp_path: Path) -> None:
    load = {"process_cpu_percent": 100.0, "workers_cpu_percent": 650.0, "machine_cpu_percent": 99.0}
    finding = waits_for_a_core(tmp_path, 0.4, load=load, training=loader(num_workers=16))["core_wait"]
    assert finding.title.startswith("16 DataLoader workers take the cores: the training thread waits 40% of each step")
    assert "num_workers=7" in finding.next_steps[0]


@pytest.mark.parametrize(("workers", "own"), [(32, True), (4, False)])
def test_many_workers_that_compute_are_the_cause_also_beside_other_processes(
    tmp_path: Path, workers: int, own: bool
) -> None:
    load = {"process_cpu_percent": 50.0, "workers_cpu_percent": 150.0, "machine_cpu_percent": 100.0}
    finding = waits_for_a_core(tmp_path, 0.4, load=load, training=loader(num_workers=workers))["core_wait"]
    assert finding.title.startswith("32 DataLoader workers" if own else "Other processes")
    assert ("num_workers=7" in finding.next_steps[0]) == own


def test_workers_that_sleep_do_not_take_the_cores(tmp_path: Path) -> None:
    load = {"process_cpu_percent": 640.0, "workers_cpu_percent": 90.0, "machine_cpu_percent": 99.0}
    finding = waits_for_a_core(tmp_path, 0.4, load=load, training=loader(num_workers=16))["core_wait"]
    assert finding.title.startswith("The training's own processes share the cores: ")
    assert "num_workers" not in finding.next_steps[0]


@pytest.mark.parametrize(
    ("quota", "used", "is_cause"),
    [(2.0, 190.0, True), (6.0, 190.0, False), (8.0, 500.0, False), (None, 190.0, False)],
    ids=["used up", "not used up", "all cores", "none"],
)
def test_on_a_machine_with_free_cores_a_cpu_limit_that_is_used_up_is_the_cause(
    tmp_path: Path, quota: float | None, used: float, is_cause: bool
) -> None:
    load = {"process_cpu_percent": used, "machine_cpu_percent": 65.0}
    finding = waits_for_a_core(tmp_path, 0.4, load=load, environment={"cpu_quota": quota})["core_wait"]
    if is_cause:
        assert finding.title.startswith("The CPU limit is 2 of 8 cores: the training thread waits 40%")
        assert finding.next_steps[0].startswith("Give the container or job more than its 2 of 8 cores")
        assert finding.severity is Severity.WARNING
    else:
        # Others had the cores in steps that were not recorded.
        assert finding.title.startswith("The training thread waits 40%")
        assert finding.next_steps[0].startswith("Find the processes that use the cores (top)")
        assert finding.severity is Severity.INFO


def test_a_wait_without_the_load_of_the_machine_has_no_owner(tmp_path: Path) -> None:
    finding = waits_for_a_core(tmp_path, 0.4)["core_wait"]
    assert finding.title == "The training thread waits 40% of each step for a core."
    assert finding.numbers["cores_of_others"] is None


def test_the_wait_for_cores_that_its_own_threads_take_is_theirs(tmp_path: Path) -> None:
    rules = waits_for_a_core(tmp_path, 0.6, load=OTHERS_BUSY, training={"threads": 32})
    assert "core_wait" not in rules
    finding = rules["thread_oversubscription"]
    assert finding.recovers is not None
    assert finding.recovers.max > 0.6 * sum(HEALTHY.values())
