from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fake_runs import HEALTHY, FakeRun, add_series, make_run
from findings import ids, loader, optimizer, phases, recovery, write_rows
from lightning_memprof.artifacts.sink import RunPlace, Sink
from lightning_memprof.judge import Facts, Finding, Severity, examine
from lightning_memprof.read.run.load import load_run
from lightning_memprof.schedule import Window


def waits_for_a_core(
    tmp_path: Path,
    share: float,
    *,
    load: Mapping[str, float] | None = None,
    calls: Sequence[Mapping[str, Any]] = (),
    **fake: Any,
) -> dict[str, Finding]:
    """Return the findings of a run on all 8 cores of a machine.

    ``load`` is in percent of a core, ``calls`` are functions in fetches of workers.
    """
    wait = round(share * sum(HEALTHY.values()))
    run = make_run(tmp_path, FakeRun(phases=phases(), core_wait_ns=lambda _: wait, **fake))
    if load is not None:
        row = {"step": 2, "recorded": True, "time_ns": 1, **load}
        with closing(Sink(RunPlace(tmp_path, 1), 0)) as sink:
            sink.write_rows(Window(0, (1,), (2, 3)), "system", [row])
    if calls:
        add_series(run, "loader_calls", calls)
    return {finding.rule: finding for finding in examine(Facts.of(load_run(run)))}


OTHERS_BUSY = {"process_cpu_percent": 100.0, "machine_cpu_percent": 100.0}


def test_a_training_whose_cores_are_taken_waits_for_a_core(tmp_path: Path) -> None:
    rules = waits_for_a_core(tmp_path, 0.7, load=OTHERS_BUSY)
    finding = rules["core_wait"]
    assert next(iter(rules)) == "core_wait"
    assert finding.title == "Other processes take the cores: training waits 70% of each step for a core."
    assert "the training used 1.0 of 8 cores, other processes 7.0." in finding.why
    assert "renice" in finding.next_steps[0]
    assert finding.severity is Severity.WARNING
    assert recovery(finding).max == pytest.approx(0.7 / 3 * sum(HEALTHY.values()), rel=0.01)


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
    ("share", "severity"), [(0.09, None), (0.11, Severity.INFO), (0.29, Severity.INFO), (0.31, Severity.WARNING)]
)
def test_a_wait_that_other_programs_cause_is_a_note_from_a_tenth_and_a_warning_where_it_is_severe(
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
    assert recovery(fault).whole == Facts.of(run).ledgers[0].step_ns


def test_a_wait_of_unknown_cause_comes_before_what_a_training_is_bound_by(tmp_path: Path) -> None:
    assert next(iter(waits_for_a_core(tmp_path, 0.4))) == "core_wait"


def test_worker_processes_that_share_the_cores_are_the_training_s_own(tmp_path: Path) -> None:
    load = {"process_cpu_percent": 100.0, "workers_cpu_percent": 650.0, "machine_cpu_percent": 99.0}
    finding = waits_for_a_core(tmp_path, 0.4, load=load, training=loader(num_workers=16))["core_wait"]
    assert finding.title.startswith("16 DataLoader workers take the cores: training waits 40% of each step")
    assert "num_workers=7" in finding.next_steps[0]


@pytest.mark.parametrize(("workers", "own"), [(32, True), (4, False)])
def test_many_workers_that_compute_are_the_cause_also_beside_other_processes(
    tmp_path: Path, workers: int, own: bool
) -> None:
    load = {"process_cpu_percent": 50.0, "workers_cpu_percent": 150.0, "machine_cpu_percent": 100.0}
    finding = waits_for_a_core(tmp_path, 0.4, load=load, training=loader(num_workers=workers))["core_wait"]
    assert finding.title.startswith("32 DataLoader workers" if own else "Other processes")
    assert ("num_workers=7" in finding.next_steps[0]) == own


@pytest.mark.parametrize(
    ("process", "workers", "remedy"),
    [(400.0, 350.0, "faster_fetch"), (600.0, 180.0, "threads"), (760.0, 20.0, "threads")],
)
def test_the_function_of_workers_that_compute_more_than_further_threads_is_the_cause(
    tmp_path: Path, process: float, workers: float, remedy: str
) -> None:
    load = {"process_cpu_percent": process, "workers_cpu_percent": workers, "machine_cpu_percent": 99.0}
    fetch = {"pid": 7, "worker": 0, "dataset": "Images", "recorded": True, "count": 1, "total_ns": 100}
    calls = [{**fetch, "self_ns": 0}, {**fetch, "function": "Images.of_the_telescope.decoded", "self_ns": 90}]
    rules = waits_for_a_core(tmp_path, 0.4, load=load, calls=calls, training=loader(num_workers=1))
    finding = rules["core_wait"]
    assert finding.remedies[0].id == remedy
    assert ("decoded take the cores" in finding.title) == (remedy == "faster_fetch")
    assert finding.title.endswith("training waits 40% of each step for a core.")


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
        assert finding.title.startswith("The CPU limit is 2 of 8 cores: training waits 40%")
        assert "docker run --cpus" in finding.next_steps[0]
        assert finding.severity is Severity.WARNING
    else:
        # Others had the cores in steps that were not recorded.
        assert finding.title.startswith("The training thread waits 40%")
        assert finding.next_steps[0].startswith("Find the processes that use the cores (top)")
        assert finding.severity is Severity.WARNING


def test_a_wait_without_the_load_of_the_machine_has_no_owner(tmp_path: Path) -> None:
    finding = waits_for_a_core(tmp_path, 0.4)["core_wait"]
    assert finding.title == "The training thread waits 40% of each step for a core."
    assert finding.numbers["cores_of_others"] is None


def test_the_wait_for_cores_that_its_own_threads_take_is_theirs(tmp_path: Path) -> None:
    rules = waits_for_a_core(tmp_path, 0.6, load=OTHERS_BUSY, training={"threads": 32})
    assert "core_wait" not in rules
    finding = rules["thread_oversubscription"]
    assert recovery(finding).max > 0.6 * sum(HEALTHY.values())


@pytest.mark.parametrize(
    ("cpu_ms", "owner"), [(100, "Threads of embed take"), (20, "The training's own processes share")]
)
def test_where_no_other_program_computes_the_cores_are_shared_with_the_trainings_own_threads(
    tmp_path: Path, cpu_ms: int, owner: str
) -> None:
    run = make_run(tmp_path, FakeRun(phases=phases(), core_wait_ns=lambda _: sum(HEALTHY.values()) // 2))
    row = {"step": 2, "recorded": True, "time_ns": 1, "process_cpu_percent": 800.0, "machine_cpu_percent": 100.0}
    with closing(Sink(RunPlace(tmp_path, 1), 0)) as sink:
        sink.write_rows(Window(0, (1,), (2, 3)), "system", [row])
    thread = {"kind": "thread", "thread": "embed (net.py:4)", "elapsed_ns": 750_000_000, "cpu_ns": cpu_ms * 1_000_000}
    write_rows(run / "processes.rank00000.jsonl", thread)
    finding = next(each for each in examine(Facts.of(load_run(run))) if each.rule == "core_wait")
    assert finding.title.startswith(owner)
    assert ids(finding.remedies)[:-1] == (["thread_less", "threads"] if cpu_ms == 100 else ["threads"])
