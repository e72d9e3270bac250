from __future__ import annotations

from pathlib import Path

from fake_runs import FakeRun, make_run
from lightning_memprof.account.steps.statistics import mean_parts
from lightning_memprof.artifacts.manifest import ManifestWriter
from lightning_memprof.read.run.following import MOST_POINTS, RECENT_STEPS, Curve, Follower, Tail, total_steps


def test_only_what_is_new_is_read_and_a_torn_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    tail = Tail(path)
    assert tail.lines() == []
    path.write_bytes(b"one\ntwo\nthr")
    assert tail.lines() == [b"one", b"two"]
    assert tail.lines() == []
    with path.open("ab") as stream:
        stream.write(b"ee\nfour\n")
    path.write_bytes(b"XXXXXXXXXXX" + path.read_bytes()[11:])
    assert tail.lines() == [b"three", b"four"]


def test_a_run_grows_from_look_to_look(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(steps=30))
    pulse = directory / "pulse.rank00000.csv"
    whole = pulse.read_bytes()
    half = whole[: len(whole) // 2]
    pulse.write_bytes(half)
    follower = Follower(directory)
    follower.look()
    seen = follower.lead.counted
    assert seen == half.count(b"\n") - 1
    pulse.write_bytes(whole)
    follower.look()
    assert follower.lead.recent[-1]["step"] == 29
    assert len(follower.lead.recent) == 30
    assert follower.has_ended
    assert [(window.steps, window.event) for window in follower.lead.windows.values()] == [([2, 3], "close")]
    assert sum(mean_parts(follower.lead).values()) > 0


def test_a_rank_that_comes_late_is_found_and_the_lead_is_the_lowest_with_a_step(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(steps=5, world_size=2))
    late = directory / "manifest.rank00001.jsonl"
    rows, pulse = late.read_bytes(), (directory / "pulse.rank00001.csv").read_bytes()
    late.unlink()
    (directory / "pulse.rank00001.csv").unlink()
    follower = Follower(directory)
    follower.look()
    assert (list(follower.ranks), follower.found, follower.world_size) == ([0], 1, 2)
    late.write_bytes(rows)
    (directory / "pulse.rank00001.csv").write_bytes(pulse)
    follower.look()
    assert list(follower.ranks) == [0, 1]
    assert follower.ranks[1].steps == 5
    assert follower.lead.rank == 0


def test_damage_is_left_out(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(steps=5))
    for name, damage in (("pulse.rank00000.csv", b"1,2\n\xff\n"), ("manifest.rank00000.jsonl", b"{\n[1]\n\xff\n")):
        with (directory / name).open("ab") as stream:
            stream.write(damage)
    follower = Follower(directory)
    follower.look()
    assert follower.lead.steps == 5


def test_a_curve_keeps_its_peaks_however_long_the_run_is() -> None:
    curve = Curve()
    for value in range(10 * MOST_POINTS):
        curve.add(10**9 if value == 777 else value)
    assert len(curve.values) <= MOST_POINTS
    assert max(curve.values) == 10**9
    assert curve.values[-1] == 10 * MOST_POINTS - 1


def test_only_recent_steps_are_kept(tmp_path: Path) -> None:
    follower = Follower(make_run(tmp_path, FakeRun(steps=3 * RECENT_STEPS, windows=())))
    follower.look()
    assert len(follower.lead.recent) == RECENT_STEPS
    assert follower.lead.steps == 3 * RECENT_STEPS


def test_how_many_steps_there_will_be_is_what_the_trainer_was_told(tmp_path: Path) -> None:
    training = {"num_batches": 50, "max_epochs": 3, "max_steps": 20, "accumulate_grad_batches": 2}
    follower = Follower(make_run(tmp_path, FakeRun(steps=5, training=training)))
    follower.look()
    assert total_steps(follower.lead) == 40


def test_errors_of_collectors_are_kept(tmp_path: Path) -> None:
    directory = make_run(tmp_path, FakeRun(steps=5))
    writer = ManifestWriter(directory / "manifest.rank00000.jsonl")
    writer.append("error", collector="host", message="ValueError: odd")
    writer.close()
    follower = Follower(directory)
    follower.look()
    assert follower.lead.errors == ["host: ValueError: odd"]
