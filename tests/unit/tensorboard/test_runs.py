from __future__ import annotations

import json
import os
import shutil
import time

import pytest

from fake_runs import FakeRun, make_run
from lightning_memprof.artifacts.naming import manifest_name, pulse_name
from lightning_memprof.tensorboard.runs import RunList, revision

PLAIN = FakeRun(trace=False, memory=None)


def listed(top):
    return RunList({"": top}).document()["runs"]


def test_runs_are_found_from_their_parent_from_lightning_logs_and_from_several_levels_up(tmp_path):
    log_dir = tmp_path / "project" / "lightning_logs" / "version_0"
    make_run(log_dir, PLAIN)
    make_run(log_dir / "validate", FakeRun(stage="validate", trace=False, memory=None))
    names = {top: [run["label"] for run in listed(top)] for top in (log_dir, log_dir.parent, tmp_path)}
    assert sorted(names[log_dir]) == ["validate", "version_0"]
    assert sorted(names[log_dir.parent]) == ["version_0", "version_0/validate"]
    prefix = "project/lightning_logs/version_0"
    assert sorted(names[tmp_path]) == [prefix, f"{prefix}/validate"]


def test_a_second_run_in_one_log_directory_has_its_own_name(tmp_path):
    make_run(tmp_path / "version_0", PLAIN)
    make_run(tmp_path / "version_0", PLAIN)
    assert sorted(run["label"] for run in listed(tmp_path)) == ["version_0", "version_0/memprofiler-2"]


def test_a_row_has_the_values_of_the_manifests(tmp_path):
    make_run(tmp_path / "good", FakeRun(steps=12, world_size=2, windows=((2, 3), (7,)), trace=False, memory=None))
    make_run(tmp_path / "bad", FakeRun(endings={1: "ValueError: no"}, world_size=2, trace=False, memory=None))
    good, bad = sorted(listed(tmp_path), key=lambda run: run["label"], reverse=True)
    assert (good["state"], good["steps"], good["ranks"], good["model"]) == ("finished", 12, [0, 1], "LitGPT")
    assert good["windows"] == [
        {"index": 0, "steps": [2, 3], "closed": True},
        {"index": 1, "steps": [7], "closed": True},
    ]
    # A run ends as the worst of its ranks.
    assert (bad["state"], bad["words"]) == ("exception", "ValueError: no")


def test_a_running_run_counts_its_steps_and_a_silent_run_says_for_how_long(tmp_path):
    run = make_run(tmp_path, FakeRun(steps=9, endings={0: None}, trace=False, memory=None))
    (row,) = listed(tmp_path)
    assert (row["state"], row["steps"]) == ("running", 9)
    earlier = time.time() - 600
    for name in (manifest_name(0), pulse_name(0)):
        os.utime(run / name, (earlier, earlier))
    (row,) = listed(tmp_path)
    assert row["state"] == "silent"
    assert "10 min" in row["words"]


def test_the_revision_changes_when_a_manifest_grows_or_a_pulse_grows_by_half(tmp_path):
    run = make_run(tmp_path, PLAIN)
    (found,) = RunList({"": tmp_path}).scan()
    before = revision(found)
    assert revision(found) == before
    with (run / manifest_name(0)).open("a") as stream:
        stream.write(json.dumps({"kind": "window", "window": 9, "event": "open"}) + "\n")
    after = revision(found)
    assert after != before
    with (run / pulse_name(0)).open("a") as stream:
        stream.write("1\n")
    assert revision(found) == after
    (run / pulse_name(0)).write_bytes((run / pulse_name(0)).read_bytes() * 2)
    assert revision(found) != after


def test_a_symlink_to_outside_the_log_directory_is_not_a_run(tmp_path):
    elsewhere = make_run(tmp_path / "elsewhere", PLAIN)
    logs = tmp_path / "logs"
    (logs / "borrowed").mkdir(parents=True)
    (logs / "whole").symlink_to(elsewhere.parent)
    (logs / "borrowed" / "memprofiler").symlink_to(elsewhere)
    only_names = logs / "names" / "memprofiler"
    only_names.mkdir(parents=True)
    (only_names / manifest_name(0)).symlink_to(elsewhere / manifest_name(0))
    assert listed(logs) == []


def test_an_id_is_a_lookup_key_and_never_part_of_a_path(tmp_path):
    make_run(tmp_path / "logs", PLAIN)
    make_run(tmp_path / "other", PLAIN)
    runs = RunList({"": tmp_path / "logs"})
    (found,) = runs.scan()
    assert runs.find(found.id) is not None
    for name in ("", ".", "../other/memprofiler", str(tmp_path / "other" / "memprofiler"), "\x00"):
        assert runs.find(name) is None


@pytest.mark.parametrize("name", ["<img src=x onerror=alert(1)>", "\u202etxt", os.fsdecode(b"bytes-\xff")])
def test_a_hostile_name_has_an_id_of_letters_and_digits(tmp_path, name):
    make_run(tmp_path / name, PLAIN)
    runs = RunList({"": tmp_path})
    (row,) = runs.document()["runs"]
    assert row["id"].isalnum()
    assert runs.find(row["id"]).directory.parent.name == name
    json.dumps(row)


def test_fifty_runs_are_listed_from_their_manifests_only(tmp_path):
    first = make_run(tmp_path / "runs" / "version_0", FakeRun(steps=2000, memory=None))
    for index in range(1, 50):
        shutil.copytree(first.parent, tmp_path / "runs" / f"version_{index}")
    for trace in tmp_path.rglob("*.pt.trace.json.gz"):
        trace.unlink()
        os.mkfifo(trace)  # opening it blocks
    assert len(listed(tmp_path)) == 50


def test_a_damaged_manifest_hides_only_itself(tmp_path):
    run = make_run(tmp_path / "damaged", PLAIN)
    make_run(tmp_path / "whole", PLAIN)
    (run / manifest_name(0)).write_bytes(b"\x00\xff{]\n" * 3)
    rows = {run["label"]: run for run in listed(tmp_path)}
    assert rows["whole"]["state"] == "finished"
    assert rows["damaged"]["model"] is None
