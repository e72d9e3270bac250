"""Runs whose files go to a URL: fsspec's memory and file systems here, a real S3 server on loopback."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from lightning.pytorch import Callback

from fake_runs import make_run
from lightning_memprof import ConfigError, ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions
from lightning_memprof.artifacts import remote
from lightning_memprof.cli.main import main
from lightning_memprof.collectors import HostMemory
from lightning_memprof.errors import ArtifactError
from lightning_memprof.integration import live_run
from lightning_memprof.read.run.fetch import local_run
from lightning_memprof.read.run.load import load_run
from ranks import launch
from s3 import BUCKET, S3Server, s3_server
from training import Perceptron, Raises, loader, only_run, rows_of, trainer

URL = "memory://bucket/exp"


@pytest.fixture(autouse=True)
def empty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    # botocore would draw its waits from Python's random numbers.
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "5")
    with s3_server(monkeypatch.setenv) as running:
        yield running


def fit(directory: Path, url: str, **output: Any) -> MemProfilerCallback:
    callback = MemProfilerCallback(output=OutputOptions(dirpath=url, summary=False, on_error="raise", **output))
    trainer(directory, callback, default_root_dir=str(directory)).fit(Perceptron(), loader(6))
    return callback


def ranks(directory: Path, url: str, world: int) -> list[int]:
    """Fit ranks that record two windows at a URL; give their exit codes."""
    output = f"schedule=Schedule(repeat=2), output=OutputOptions(dirpath={url!r}, summary=False, on_error='raise')"
    return launch("fitted_ranks.py", directory / "ranks", "ddp", output, world=world)


def stored() -> list[str]:
    return [name.removeprefix("/bucket/") for name in fsspec.filesystem("memory").find("/bucket")]


def working_copies(directory: Path) -> list[Path]:
    return list((directory / "memprofiler-uploads").rglob("*"))


def test_a_run_goes_to_its_url_whole_and_leaves_nothing_here(tmp_path: Path) -> None:
    callback = fit(tmp_path, URL)
    assert callback.run_location == f"{URL}/memprofiler"
    assert working_copies(tmp_path) == []
    with local_run(URL) as found:
        run = load_run(found.path)
        assert run.status == "finished"
        assert run.problems == ()
        assert {artifact.type for artifact in run.artifacts} >= {"trace", "pulse", "series"}
        assert all(artifact.state == "present" for artifact in run.artifacts)
        assert found.url == URL
        assert run.lead.facts.fields["root"] == URL


def test_a_stage_other_than_fit_has_its_own_place(tmp_path: Path) -> None:
    callback = MemProfilerCallback(output=OutputOptions(dirpath=URL, summary=False, on_error="raise"))
    trainer(tmp_path, callback, default_root_dir=str(tmp_path)).test(Perceptron(), loader(6), verbose=False)
    assert callback.run_location == f"{URL}/test/memprofiler"
    with local_run(URL) as found:
        assert found.url == f"{URL}/test"
        assert load_run(found.path).problems == ()


def test_a_run_that_fails_is_at_its_url_too(tmp_path: Path) -> None:
    callback = MemProfilerCallback(output=OutputOptions(dirpath=URL, summary=False))
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer(tmp_path, callback, default_root_dir=str(tmp_path)).fit(
            Raises(RuntimeError("on purpose"), 5), loader(8)
        )
    with local_run(URL) as found:
        assert load_run(found.path).lead.exception == "RuntimeError: on purpose"
    assert working_copies(tmp_path) == []


def test_a_file_url_is_a_directory_of_this_machine(tmp_path: Path) -> None:
    callback = fit(tmp_path, f"file://{tmp_path}/there")
    assert callback.run_directory == tmp_path / "there/memprofiler"
    assert callback.run_location == str(tmp_path / "there/memprofiler")
    assert load_run(tmp_path / "there").problems == ()
    with local_run(f"file://{tmp_path}/there") as found:
        assert found.path == tmp_path / "there"


def test_the_summary_and_show_name_the_url_and_no_path_of_a_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = MemProfilerCallback(output=OutputOptions(dirpath=URL, on_error="raise"))
    trainer(tmp_path, callback, default_root_dir=str(tmp_path)).fit(Perceptron(), loader(6))
    pages = [capsys.readouterr().out]
    assert main(["show", URL]) == 0
    pages.append(capsys.readouterr().out)
    for page in pages:
        assert f"lightning-memprof show {URL} --format json" in page
        assert f"lightning-memprof report {URL}" in page
        assert "uploads" not in page
        assert "/tmp/" not in page
    assert main(["show", URL, "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["run"]["directory"] == f"{URL}/memprofiler"
    assert {artifact["file"].startswith(URL) for artifact in document["artifacts"]} == {True}


def test_a_place_without_a_run_is_said_with_its_url(tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe_file("/bucket/exp/other.txt", b"")
    with pytest.raises(ArtifactError, match=f"{URL}: no run is in it"), local_run(URL):
        pass


def test_of_several_runs_at_a_url_the_one_that_started_last_is_copied(tmp_path: Path) -> None:
    for name in ("b", "a"):
        make_run(tmp_path / name)
    fsspec.filesystem("memory").put(str(tmp_path), "/bucket/exp", recursive=True)
    with local_run(URL) as found:
        assert found.url == f"{URL}/a"
        assert load_run(found.path).lead.steps == load_run(tmp_path / "a").lead.steps > 0


def test_a_place_that_cannot_be_written_is_recorded_here_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    with caplog.at_level(logging.WARNING):
        callback = fit(tmp_path, URL)
    assert callback.run_directory is not None
    assert load_run(callback.run_directory).status == "finished"
    assert "memory://bucket/exp: cannot be written (PermissionError: Access Denied)" in caplog.text
    assert str(callback.run_directory.parent) in caplog.text


def test_files_that_cannot_be_copied_are_kept_and_the_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("quota exceeded")

    monkeypatch.setattr(MemoryFileSystem, "put_file", refuse)
    with caplog.at_level(logging.WARNING):
        fit(tmp_path, URL)
    run = only_run(tmp_path)
    assert load_run(run).problems == ()
    (row,) = rows_of(run, "error")
    assert row["collector"] == "upload"
    assert f"files could not be copied to {URL} (quota exceeded): " in row["message"]
    assert "memprofiler/pulse.rank00000.csv" in row["message"]
    assert f"kept in {run.parent}" in row["message"]
    assert row["message"] in caplog.text


def test_ctrl_c_ends_a_program_whose_place_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda *_, **__: gate.wait(700))
    monkeypatch.setattr(live_run, "HURRY_S", 0.2)
    callback = MemProfilerCallback(output=OutputOptions(dirpath=URL, summary=False), collectors=[HostMemory()])
    started = time.monotonic()
    # Lightning ends the program, and ignores any further Ctrl-C before that.
    with pytest.raises(SystemExit):
        trainer(tmp_path, callback, default_root_dir=str(tmp_path)).fit(Raises(KeyboardInterrupt(), 5), loader(8))
    gate.set()
    assert time.monotonic() - started < 300
    (row,) = rows_of(only_run(tmp_path), "error")
    assert re.match(rf"\d+ files? could not be copied to {URL} \(no answer\)", row["message"])


def test_a_trainers_url_with_a_password_is_recorded_here_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    callback = MemProfilerCallback(
        collectors=[HostMemory()], output=OutputOptions(summary=False, curves=False, report=False)
    )
    url = "memory://me:hid/HIDDEN@host/x?sig=HIDDEN"
    trainer(tmp_path, callback, default_root_dir=url, logger=False).fit(Perceptron(), loader(6))
    assert "memory://me:***@host/x?sig=***" in caplog.text
    copies = working_copies(tmp_path)
    assert [path.name for path in copies if path.suffix == ".jsonl" and "manifest" in path.name]
    for path in copies:
        assert "HIDDEN" not in str(path)
        assert path.is_dir() or b"HIDDEN" not in path.read_bytes()


def test_traces_of_a_profiler_with_a_url_are_at_the_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    profiler = ExtendedPyTorchProfiler(dirpath=URL)
    trainer(tmp_path / "log", profiler=profiler, default_root_dir=str(tmp_path)).fit(Perceptron(), loader(6))
    assert [name for name in stored() if name.endswith(".pt.trace.json.gz")]
    assert [path.name for path in tmp_path.rglob("*") if "memory:" in path.name] == []


@pytest.mark.slow
def test_a_program_that_changes_its_working_directory_uploads_from_the_relative_one(
    tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Away(Callback):
        def on_train_start(self, *_: Any) -> None:
            (tmp_path / "away").mkdir()
            monkeypatch.chdir(tmp_path / "away")

    monkeypatch.chdir(tmp_path)
    url = f"s3://{BUCKET}/away"
    callback = MemProfilerCallback(output=OutputOptions(dirpath=url, summary=False, on_error="raise"))
    trainer(tmp_path / "log", callback, Away(), default_root_dir="here").fit(Perceptron(), loader(6))
    assert list((tmp_path / "away").iterdir()) == []
    assert working_copies(tmp_path / "here") == []
    with local_run(url) as found:
        run = load_run(found.path)
        assert (run.status, run.problems) == ("finished", ())
        assert all(artifact.state == "present" for artifact in run.artifacts)


def test_a_refused_setup_leaves_no_working_copy(tmp_path: Path) -> None:
    from lightning_memprof.collectors import AllocatorHistory

    callback = MemProfilerCallback(collectors=[AllocatorHistory()], output=OutputOptions(dirpath=URL))
    with pytest.raises(ConfigError, match="AllocatorHistory"):
        trainer(tmp_path, callback, default_root_dir=str(tmp_path)).fit(Perceptron(), loader(6))
    assert working_copies(tmp_path) == []


def test_two_ranks_write_to_s3_through_errors_and_cut_connections(
    server: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = ["cut", "500", "cut", "500"]
    server.fault = lambda method, path: faults.pop() if faults and method == "PUT" and "window" in path else None
    url = f"s3://{BUCKET}/exp"
    assert ranks(tmp_path, url, world=2) == [0, 0]
    assert {wanted for wanted, _, _ in server.failed} == {"500", "cut"}
    assert faults == []
    assert working_copies(tmp_path / "ranks") == []
    with local_run(url) as found:
        run = load_run(found.path)
        assert [(rank.rank, rank.status, len(rank.windows)) for rank in run.ranks] == [
            (0, "finished", 2), (1, "finished", 2),
        ]  # fmt: skip
        assert run.problems == ()
        assert run.errors == ()
    assert main(["show", url]) == 0
    assert f"lightning-memprof show {url} --format json" in capsys.readouterr().out


def test_an_s3_server_that_dies_in_the_run_costs_neither_the_training_nor_the_files(
    server: S3Server, tmp_path: Path
) -> None:
    server.fault = lambda method, path: "500" if method == "PUT" and "claim" not in path else None
    assert ranks(tmp_path, f"s3://{BUCKET}/exp", world=1) == [0]
    run = only_run(tmp_path / "ranks")
    assert load_run(run).status == "finished"
    (row,) = rows_of(run, "error")
    assert "could not be copied to s3://runs/exp" in row["message"]
    assert f"kept in {run.parent}" in (tmp_path / "ranks/out0").read_text()


def test_runs_on_s3_are_numbered_also_where_two_claim_at_once(server: S3Server) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(3) as pool:
        numbers = pool.map(lambda _: remote.claim_remote(remote.Remote(f"s3://{BUCKET}/exp")), range(3))
        assert sorted(numbers) == [1, 2, 3]
