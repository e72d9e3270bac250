from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from device_traces import BASE_NS, KERNELS, Recording, training
from fake_runs import HEALTHY, FakeRun, add_series, make_run, set_epochs
from findings import found, found_in_run, found_in_trace, ids, loader, phases, recovery, write_rows
from lightning_memprof.account.ledger.model import TimeLine
from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.workers import calls
from lightning_memprof.artifacts.sink import RunPlace, Sink
from lightning_memprof.judge import Facts, Finding, Severity, examine, examine_files
from lightning_memprof.judge.loading import wanted_workers
from lightning_memprof.judge.rules import data
from lightning_memprof.read.run.load import load_run
from lightning_memprof.schedule import Window
from lightning_memprof.units import MIB
from trace_reports import MS, found_in, idle, trace


def changes(finding: Finding) -> list[str]:
    return [remedy.change for remedy in finding.remedies]


@pytest.mark.parametrize(
    ("padded", "beyond", "remedy"),
    [
        (0, 0, None),
        (150, 0, None),
        (250, 0, "group_by_length"),
        (500, 400, "pad_to_longest"),
        (900, 0, "group_by_length"),
    ],
)
def test_batches_of_which_a_fifth_is_padding_cost_its_share_of_forward_and_backward(
    tmp_path: Path, padded: int, beyond: int, remedy: str | None
) -> None:
    finding = found(tmp_path, FakeRun(padding=(1000, padded, beyond))).get("padding")
    assert (ids(finding.remedies)[0] if finding else None) == remedy
    if finding is not None:
        assert recovery(finding).max == pytest.approx((6e6 + 10e6) * padded / 1000, rel=0.05)
        assert recovery(finding).min == pytest.approx(recovery(finding).max * 0.4)


def test_loading_in_a_recorded_window_is_not_the_runs_whose_pulse_has_every_step(tmp_path: Path) -> None:
    window = trace(2, loading_ns=80 * MS, causes=(idle(Part.IDLE_DATA, 80 * MS),))
    assert "input_bound" in {finding.rule for finding in examine_files([window], [])}
    facts = Facts.of(load_run(make_run(tmp_path, FakeRun(trace=False))), traces=(window,))
    assert "input_bound" not in {finding.rule for finding in examine(facts)}


NO_WORKERS = {"dataloaders": [{"num_workers": 0}]}


def waits(_: int, step: int) -> Mapping[str, int]:
    """A wait of 40 ms, in the recorded steps of 4 ms."""
    return {**HEALTHY, "data_wait": 4_000_000 if step in {2, 3} else 40_000_000}


@pytest.mark.parametrize(
    ("part", "place", "remedies"),
    [
        ("Images.fetch", "Images.__getitem__", ["workers", "faster_fetch"]),
        ("Images.collate", "collate_fn", ["workers", "faster_collate"]),
        # It runs in the training process, whatever the workers are.
        ("Images.sampler", "the sampler", ["faster_sampler"]),
    ],
)
def test_the_part_of_loading_is_named_also_where_the_recorded_steps_wait_less(
    tmp_path: Path, part: str, place: str, remedies: list[str]
) -> None:
    finding = found(tmp_path, FakeRun(phases=waits, training=NO_WORKERS, loading=(part,)))["input_bound"]
    assert place in finding.title
    assert finding.numbers["action"] == place
    assert "num_workers=0" in finding.why
    assert ids(finding.remedies) == remedies


def test_a_slow_sampler_is_named_for_workers_which_do_not_run_it(tmp_path: Path) -> None:
    loaders = {"dataloaders": [{"num_workers": 2}]}
    finding = found(tmp_path, FakeRun(phases=waits, training=loaders, loading=("Images.sampler",)))["input_bound"]
    assert "the sampler" in finding.title
    assert ids(finding.remedies) == ["faster_sampler"]


@pytest.mark.parametrize(
    ("threads", "busy", "least", "most"),
    [
        # Sleeps: workers take the whole wait away, but for what they cannot.
        (8, 1.0, 1, 40),
        # Computes, and operators use all cores: workers may save nothing, faster code up to the whole wait.
        (8, 4.0, 0, 40),
        (8, 8.0, 0, 40),
        # Computes, and cores are left.
        (2, 1.3, 1, 40),
    ],
)
def test_workers_need_cores_for_a_loader_that_computes(
    tmp_path: Path, threads: int, busy: float, least: int, most: int
) -> None:
    run = make_run(tmp_path, FakeRun(phases=slow_loading, training={**NO_WORKERS, "threads": threads}))
    row = {"step": 2, "recorded": True, "time_ns": 1, "process_cpu_percent": 100 * busy, "machine_cpu_percent": 90.0}
    with closing(Sink(RunPlace(tmp_path, 1), 0)) as sink:
        sink.write_rows(Window(0, (1,), (2, 3)), "system", [row])
    (finding,) = (of for of in examine(Facts.of(load_run(run))) if of.rule == "input_bound")
    assert recovery(finding).max == pytest.approx(most * 1e6, rel=0.05)
    assert (recovery(finding).min > 0) == bool(least)
    assert ids(finding.remedies)[0] == ("workers" if least else "faster_fetch")


def waiting(directory: Path) -> Finding:
    return next(each for each in examine(Facts.of(load_run(directory))) if each.rule == "input_bound")


def slow_loading(_: int, step: int) -> Mapping[str, int]:
    """Steps of 60 ms, of which 40 are a wait."""
    return {**dict.fromkeys(HEALTHY, 0), "forward": 20_000_000, "data_wait": 40_000_000}


@pytest.mark.parametrize("workers", [0, 1, 64])
def test_an_iterable_data_set_has_no_getitem_and_shares_its_samples_among_workers(tmp_path: Path, workers: int) -> None:
    loaders = {"dataloaders": [{"num_workers": workers, "is_iterable": True}]}
    finding = found(tmp_path, FakeRun(phases=waits, training=loaders, loading=("Stream.fetch",)))["input_bound"]
    said = " ".join((finding.title, *finding.next_steps))
    assert "__iter__" in said
    assert "__getitem__" not in said
    # A worker that is the only one has all samples.
    assert "share_samples" in ids(finding.remedies)


def test_no_part_is_named_where_two_take_less_than_half_each(tmp_path: Path) -> None:
    fake = FakeRun(phases=waits, training=NO_WORKERS, loading=("A.sampler", "A.fetch", "A.collate"))
    assert "waits for data" in (sentence := found(tmp_path, fake)["input_bound"].title)
    assert "mostly" not in sentence


@pytest.mark.parametrize("restart", [True, False])
def test_a_short_loader_that_begins_again_within_an_epoch_keeps_its_workers(tmp_path: Path, *, restart: bool) -> None:
    def every_fifth(_: int, step: int) -> Mapping[str, int]:
        return {**HEALTHY, "data_wait": 80_000_000 if step % 5 == 0 else 1_000_000}

    loader = {"num_workers": 1, "persistent_workers": False, "prefetch_factor": 2}
    fake = FakeRun(steps=60, phases=every_fifth, training={"dataloaders": [loader, loader]}, trace=False)
    directory = make_run(tmp_path, fake)
    rows = [{"kind": "worker", "step": step, "pid": 7 + restart * step, "worker": 0} for step in range(0, 60, 5)]
    path = directory / "processes.rank00000.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (finding,) = (each for each in examine(Facts.of(load_run(directory))) if each.rule == "input_bound")
    assert ("start again" in finding.title) == restart
    assert "Every 5th step waits 80.0 ms" in finding.why
    assert ids(finding.remedies)[0] == ("persistent_workers" if restart else "prefetch")


def test_a_wait_in_every_tenth_step_is_told_with_its_length(tmp_path: Path) -> None:
    def shards(_: int, step: int) -> Mapping[str, int]:
        return {**HEALTHY, "data_wait": 400_000_000 if step % 10 == 9 else 100_000}

    fake = FakeRun(steps=100, phases=shards, training=NO_WORKERS, loading=("Shards.fetch",))
    finding = found(tmp_path, fake)["input_bound"]
    assert finding.title.endswith("Shards.")
    assert "Every 10th step waits 400 ms." in finding.why


@pytest.mark.parametrize(("collate_ms", "method"), [(20, "__getitem__"), (280, "collate_fn")])
def test_the_slow_part_of_workers_is_named_by_their_counters(tmp_path: Path, collate_ms: int, method: str) -> None:
    loader = {"num_workers": 2, "dataset": "Images", "persistent_workers": True}
    fake = FakeRun(phases=lambda *_: {**HEALTHY, "data_wait": 60 * MS}, training={"dataloaders": [loader]})
    directory = make_run(tmp_path, fake)
    rows = [
        {"kind": "worker", "pid": 7, "worker": 0, "step": n, "time_ns": n * 10**9, "batches": 10 * n,
         "fetch_ns": 4000 * MS * n, "fetch_cpu_ns": 3990 * MS * n, "collate_ns": 10 * collate_ms * MS * n}
        for n in (1, 3)
    ]  # fmt: skip
    write_rows(directory / "processes.rank00000.jsonl", *rows)
    facts = Facts.of(load_run(directory))
    assert wanted_workers(facts, facts.run.lead, facts.ledgers[0]) is None
    finding = next(finding for finding in examine(facts) if finding.rule == "input_bound")
    assert method in finding.title
    assert "400 ms per batch, mostly computing" in finding.why
    assert ids(finding.remedies) == ["faster_collate" if method == "collate_fn" else "faster_fetch"]
    # More workers compute no faster on these cores.
    assert recovery(finding).min == 0


@pytest.mark.parametrize(("lock_waits", "remedy"), [(60, "without_lock"), (20, "workers")])
def test_workers_that_take_turns_at_a_lock_need_no_more_workers(tmp_path: Path, lock_waits: int, remedy: str) -> None:
    loader = {"num_workers": 3, "dataset": "Images", "persistent_workers": True}
    usual = sum(HEALTHY.values()) - HEALTHY["data_wait"]
    fake = FakeRun(phases=lambda *_: {**HEALTHY, "data_wait": 60 * MS}, training={"dataloaders": [loader]})
    directory = make_run(tmp_path, fake)
    rows = [
        {"kind": "worker", "pid": 7, "worker": 0, "step": n, "time_ns": n * 10**9, "batches": 10 * n,
         "fetch_ns": 4000 * MS * n, "fetch_cpu_ns": 10 * MS * n, "collate_ns": 0, "looks": 100,
         "lock_waits": lock_waits, "lock": "read (data.py:7)"}
        for n in (1, 3)
    ]  # fmt: skip
    write_rows(directory / "processes.rank00000.jsonl", *rows)
    finding = waiting(directory)
    assert ids(finding.remedies)[0] == remedy
    assert (f"workers={-(-400 * MS // usual)}" in changes(finding)) == (lock_waits == 20)
    assert ("3 workers take turns at a lock in read (data.py:7)" in finding.why) == (lock_waits == 60)
    assert recovery(finding).max <= 60 * MS


@pytest.mark.parametrize(("share", "is_named"), [(0.71, True), (0.45, False)])
def test_a_function_with_most_of_a_fetch_is_the_cause(tmp_path: Path, share: float, is_named: bool) -> None:
    loader = {"num_workers": 2, "dataset": "Images", "persistent_workers": True}
    fake = FakeRun(phases=lambda *_: {**HEALTHY, "data_wait": 60 * MS}, training={"dataloaders": [loader]})
    directory = make_run(tmp_path, fake)
    decode, whole = round(800 * MS * share), {"pid": 7, "worker": 0, "dataset": "Images", "recorded": True}
    rows = [
        {**whole, "count": 2, "self_ns": 0, "total_ns": 800 * MS},
        {**whole, "function": "Decode.__call__", "count": 16, "self_ns": decode, "total_ns": decode},
        {**whole, "function": "Flip.forward", "count": 16, "self_ns": 40 * MS, "total_ns": 40 * MS},
        {**whole, "function": "Images.__getitem__", "count": 16, "self_ns": 760 * MS - decode, "total_ns": 800 * MS},
    ]
    add_series(directory, "loader_calls", rows)
    run = load_run(directory)
    (first, *_) = calls(run.lead)
    assert (first.function, first.count) == (("Decode.__call__", 8) if is_named else ("Images.__getitem__", 8))
    # The rest is the data set's own.
    named, percent = ("Decode.__call__", "71%") if is_named else ("Images.__getitem__", "50%")
    finding = waiting(directory)
    assert finding.numbers["action"] == named
    assert finding.title.endswith(f"{named}.")
    assert f"{percent} of a fetch" in finding.why
    assert any(named in step for step in finding.next_steps)


@pytest.mark.parametrize("seen", [2, 0])
def test_workers_of_a_loader_that_the_run_does_not_know_are_those_that_were_seen(tmp_path: Path, seen: int) -> None:
    directory = make_run(tmp_path, FakeRun(phases=slow_loading, training={"dataloaders": None}))
    rows = [{"kind": "worker", "step": 5, "pid": 7 + worker, "worker": worker} for worker in range(seen)]
    write_rows(directory / "processes.rank00000.jsonl", *rows)
    finding = waiting(directory)
    assert ids(finding.remedies)[0] == "workers"
    # Nothing shows that a further worker has work and a core.
    assert (recovery(finding).min > 0) == (not seen)


def test_loading_that_outlasts_the_devices_work_is_input_bound(tmp_path: Path) -> None:
    def load(made: Recording) -> None:
        with made.inside("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
            made.python(15_000)

    finding = found_in_trace(training(tmp_path / "slow.pt.trace.json", before=load))["input_bound"]
    assert finding.severity is Severity.CRITICAL
    whole, longest = finding.evidence
    assert (whole.steps, whole.start_ns) == ((5, 8), BASE_NS + 1_000_000)
    assert longest.steps is not None
    assert longest.start_ns is not None
    assert longest.start_ns >= BASE_NS + 1_000_000


@pytest.mark.parametrize(
    ("iterator", "slow", "first"),
    [
        ("_SingleProcess", (15_000, 15_000), "Use worker processes: DataLoader(num_workers=4"),
        ("_MultiProcessing", (15_000, 15_000), "Use more worker processes"),
        ("_MultiProcessing", (90_000, 10), "Keep the workers from epoch to epoch"),
        ("_Other", (15_000, 15_000), "Use worker processes: DataLoader(num_workers=4"),
    ],
)
def test_the_next_step_for_loading_knows_the_workers(
    tmp_path: Path, iterator: str, slow: tuple[int, int], first: str
) -> None:
    batches = iter((10, slow[0], slow[1], slow[1]))

    def load(made: Recording) -> None:
        with made.inside(f"enumerate(DataLoader)#{iterator}DataLoaderIter.__next__"):
            made.python(next(batches))

    finding = found_in_trace(training(tmp_path / "workers.pt.trace.json", before=load))["input_bound"]
    assert finding.next_steps[0].startswith(first)
    assert not any("{" in step or "pin_memory" in step for step in finding.next_steps)


def test_loading_while_the_device_works_is_not(tmp_path: Path) -> None:
    def load(made: Recording) -> None:
        with made.inside("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"):
            made.python(4_000)

    assert not found_in_trace(training(tmp_path / "hidden.pt.trace.json", before=load))


def test_loading_is_found_without_steps(tmp_path: Path) -> None:
    made = Recording()
    for _ in range(4):
        with made.inside("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
            made.python(15_000)
        for _ in range(KERNELS):
            made.work(20, "aten::linear")
            made.launch(200)
        made.synchronize()
    findings = found_in_trace(made.write(tmp_path / "bare.pt.trace.json"))
    assert findings["input_bound"].severity is Severity.CRITICAL
    assert "of the recorded time" in findings["input_bound"].title
    assert "gpu_idle" not in findings


def test_loading_in_one_step_of_several_is_only_info() -> None:
    report = trace(loading_ns=250 * MS, causes=(idle(Part.IDLE_DATA, 240 * MS),))
    steps = [replace(step, data_loading_ns=0) for step in report.steps]
    report = replace(report, steps=(replace(steps[0], data_loading_ns=250 * MS), *steps[1:]))
    said = found_in(report)["input_bound"]
    assert said.severity is Severity.INFO
    assert "in one of 5 steps" in said.why


def test_loading_on_a_host_alone_is_input_bound_too() -> None:
    said = found_in(trace(loading_ns=200 * MS, gpu_window=None, idle=(), kernels=()))["input_bound"]
    assert "40% of each step" in said.title
    assert not any("pin_memory" in step for step in said.next_steps)


def test_fetches_of_very_short_steps_are_not_loading() -> None:
    report = trace(loading_ns=5 * 3 * MS // 10, gpu_window=None, idle=(), kernels=())
    short = tuple(replace(step, duration_ns=MS, data_loading_ns=3 * MS // 10) for step in report.steps)
    assert not found_in(replace(report, steps=short))


@pytest.mark.parametrize(("name", "is_found"), [("Replay.fetch", True), ("Loop.train_dataloader_next", False)])
def test_in_short_steps_the_data_set_counts_from_a_millisecond_on_and_the_trainer_from_two(
    tmp_path: Path, name: str, is_found: bool
) -> None:
    facts = Facts.of(load_run(make_run(tmp_path, FakeRun())))
    wait = TimeLine(part=Part.DATA_WAIT, name=name, ns=1.5 * MS, count=1.0)
    ledger = replace(facts.ledgers[0], step_ns=6 * MS, lines=(wait, TimeLine(part=Part.FORWARD, ns=4.5 * MS)))
    vars(facts)["ledgers"] = {0: ledger}
    (row,) = (row for row in data.ROWS if row.id == "input_bound")
    assert bool(list(row.findings(facts))) is is_found


def test_waiting_for_data_is_found_with_the_present_settings(tmp_path: Path) -> None:
    fake = FakeRun(phases=phases(data_wait=20_000_000), training=loader())
    finding = found(tmp_path, fake)["input_bound"]
    assert finding.severity is Severity.CRITICAL
    assert "num_workers=0, persistent_workers=False, pin_memory=False, prefetch_factor=None" in finding.why
    assert "DataLoader(num_workers=4, persistent_workers=True)" in finding.next_steps[0]
    assert finding.numbers["data_wait_share"] == pytest.approx(20 / 37.8)


@pytest.mark.parametrize(
    ("settings", "device", "said", "unsaid"),
    [
        ({"num_workers": 2, "prefetch_factor": 2}, "cpu", "DataLoader(num_workers=4,", "pin_memory=True"),
        ({"num_workers": 2, "prefetch_factor": 2}, "cpu", "persistent_workers=True", "pin_memory=True"),
        ({"num_workers": 2, "prefetch_factor": 2}, "cuda", "pin_memory=True", "num_workers is 0"),
        ({"num_workers": 8, "persistent_workers": True}, "cpu", "Make __getitem__ faster", "persist"),
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
    assert "DataLoader(num_workers=4," in finding.next_steps[0]


def test_waits_in_few_steps_are_told_to_prefetch(tmp_path: Path) -> None:
    fake = FakeRun(
        steps=60,
        phases=lambda _, step: {**HEALTHY, "data_wait": 200_000_000 if step in (20, 37, 51) else 400_000},
        training=loader(num_workers=2, prefetch_factor=2, persistent_workers=True),
    )
    finding = found(tmp_path, fake)["input_bound"]
    assert "mostly in a few steps" in finding.why
    assert "prefetch_factor=4" in finding.next_steps[0]


def test_the_rank_that_waits_most_is_named(tmp_path: Path) -> None:
    fake = FakeRun(world_size=3, phases=lambda rank, _: {**HEALTHY, "data_wait": rank * 5_000_000})
    finding = found(tmp_path, fake)["input_bound"]
    assert finding.numbers["rank"] == 2
    assert " on rank 2" in finding.title


@pytest.mark.parametrize(
    ("settings", "is_found"),
    [
        ({"num_workers": 2, "persistent_workers": False}, True),
        ({"num_workers": 2, "persistent_workers": True}, False),
        ({"num_workers": 0, "persistent_workers": False}, False),
    ],
)
def test_workers_that_restart_in_each_epoch_are_found_by_the_time_between_epochs(
    tmp_path: Path, settings: dict[str, Any], is_found: bool
) -> None:
    def between(_: int, step: int) -> Mapping[str, int]:
        return {**HEALTHY, "other": 90_000_000 if step % 5 == 4 else 500_000}

    fake = FakeRun(steps=60, phases=between, training={"dataloaders": [settings]})
    directory = make_run(tmp_path, fake)
    set_epochs(directory, 5)
    findings = found_in_run(directory)
    assert ("workers_restart" in findings) == is_found
    if is_found:
        assert "persistent_workers=True" in findings["workers_restart"].next_steps[0]
        assert "once every 5 steps" in findings["workers_restart"].why
