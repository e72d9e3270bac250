"""Files that are copied to a URL; fsspec's memory file system is a real one without a network."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_memprof.artifacts import remote, upload
from lightning_memprof.artifacts.remote import Remote, check_url, claim_remote, claim_url, is_url, local_path, url_path
from lightning_memprof.artifacts.upload import Mirror, Pace, Uploads
from lightning_memprof.errors import ArtifactError, ConfigError

URL = "memory://bucket/exp"
QUICK = Pace(first_pause_s=0.01, longest_pause_s=0.02, attempts=2)


@pytest.fixture(autouse=True)
def empty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(upload, "POLL_S", 0.01)
    (tmp_path / "run/memprofiler").mkdir(parents=True)
    return tmp_path / "run"


class Files:
    """A run whose files are uploaded: writes and removes them, with their manifest rows."""

    def __init__(self, root: Path, url: str = URL, pace: Pace | None = None) -> None:
        self.root = root
        self.manifest = root / "memprofiler/manifest.rank00000.jsonl"
        self.manifest.touch()
        self.listed: dict[Path, None] = {}
        self.uploads = Uploads(root, url, (self.manifest,), pace)

    def write(self, name: str, content: bytes = b"x") -> Path:
        path = self.root / name
        path.write_bytes(content)
        self.listed[path] = None
        self._append(kind="artifact", path=name)
        return path

    def remove(self, name: str) -> None:
        self._append(kind="removed", paths=[name])
        del self.listed[self.root / name]
        (self.root / name).unlink()

    def settle(self) -> list[str]:
        return self.uploads.settle(self.listed)

    def finish(self) -> list[str]:
        return self.uploads.finish(self.listed)

    def _append(self, **row: Any) -> None:
        with self.manifest.open("a") as file:
            file.write(json.dumps(row) + "\n")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def stored() -> dict[str, bytes]:
    """The files at the URL, without the manifest."""
    system = fsspec.filesystem("memory")
    found = {name.removeprefix("/bucket/exp/"): system.cat_file(name) for name in system.find("/bucket/exp")}
    return {name: content for name, content in found.items() if "manifest" not in name}


def fails(monkeypatch: pytest.MonkeyPatch, times: float, name: str = "") -> list[str]:
    """Let the next copies of files with this name fail; give the list of attempts."""
    attempts: list[str] = []
    original = MemoryFileSystem.put_file

    def put_file(self: Any, local: str, remote: str, **options: Any) -> None:
        if name in remote:
            attempts.append(remote)
            if len(attempts) <= times:
                raise ConnectionResetError("cut")
        original(self, local, remote, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    return attempts


def test_a_url_is_known_by_its_protocol() -> None:
    assert is_url("s3://bucket/runs")
    assert not is_url("/tmp/s3:/runs")
    assert url_path("file:///tmp/runs") == "/tmp/runs"
    assert url_path("s3://bucket/runs") is None


def test_a_directory_is_absolute_with_its_home_and_a_url_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    given = ("runs", Path("runs"), "~/runs", "file://runs", "/a/../b", "~no-user/x", "s3://bucket/runs")
    runs = tmp_path / "runs"
    expected = [runs, runs, tmp_path / "home/runs", runs, Path("/a/../b"), tmp_path / "~no-user/x", None]
    assert [local_path(directory) for directory in given] == expected


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nowhere://bucket/x", "nowhere://bucket/x: Protocol not known: nowhere; install fsspec's package"),
        ("memory://", "memory://: has no path; add one, as in memory://bucket/runs"),
        ("sftp://me:hidden@host/runs", r"sftp://me:\*\*\*@host/runs: has a password, .* give it by the environment"),
        ("memory://me:hid/den@host/runs", r"memory://me:\*\*\*@host/runs: has a password, "),
        ("memory://me%3Ahidden@host/runs", r"memory://\*\*\*: has a password, "),
        ("memory://host/runs?sig=hidden", r"memory://host/runs\?sig=\*\*\*: has a password, a key or a token, "),
    ],
)
def test_a_url_that_nothing_can_write_to_is_refused_with_the_way_out(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_url(url)


def test_listed_files_are_uploaded_under_their_names(root: Path) -> None:
    files = Files(root)
    files.write("fit-0[Strategy]DDP*.json.gz", b"trace")
    files.write("memprofiler/a.jsonl", b"rows")
    assert files.settle() == []
    assert stored() == {"fit-0[Strategy]DDP*.json.gz": b"trace", "memprofiler/a.jsonl": b"rows"}
    assert files.finish() == []


def test_a_file_that_the_user_sent_elsewhere_stays_there(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    files = Files(root)
    other = tmp_path_factory.mktemp("other") / "x"
    for name in (other.as_posix(), "../x"):
        files.write(name)
    del files.listed[root / "../x"]
    assert files.finish() == []
    assert stored() == {}


def test_a_file_that_fails_is_uploaded_after_a_pause(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = fails(monkeypatch, times=2, name="exp/a")
    files = Files(root, pace=QUICK)
    files.write("a")
    until(lambda: list(stored()) == ["a"])
    assert len(attempts) == 3
    assert files.finish() == []


def test_a_store_that_is_down_is_reported_once_and_paused_until_the_end(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = fails(monkeypatch, times=float("inf"))
    files = Files(root, pace=Pace(first_pause_s=60, attempts=1))
    with caplog.at_level(logging.WARNING):
        for name in "abcdef":
            files.write(name)
        until(lambda: bool(attempts))
        time.sleep(0.1)
        during = len(attempts)
        left = files.finish()
    assert set(left) == {*"abcdef", "memprofiler/manifest.rank00000.jsonl"}
    assert during == 1
    assert len(attempts) == during + upload.MAX_FAILURES
    assert files.uploads.error == "cut"
    assert [record.message for record in caplog.records] == [
        f"memory://bucket/exp/a cannot be written (cut); its file is kept in {root}"
    ]
    assert all((root / name).exists() for name in "abcdef")


def test_pauses_double_up_to_the_longest(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, times=float("inf"))
    pauses: list[float] = []
    mirror = Mirror(root, URL, ("manifest",), Pace(first_pause_s=0.5, longest_pause_s=3), lambda **_: None)
    (root / "manifest").write_text('{"kind": "artifact", "path": "manifest"}\n')
    mirror.look()
    for _ in range(5):
        mirror._resume = 0
        mirror.copy_pending()
        pauses.append(mirror._pause_s)
    assert pauses == [0.5, 1, 2, 3, 3]


def test_files_that_failed_during_training_are_uploaded_at_the_end(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = fails(monkeypatch, times=1)
    files = Files(root, pace=Pace(first_pause_s=60))
    for name in "abc":
        files.write(name)
    until(lambda: bool(attempts))
    assert files.finish() == []
    assert sorted(stored()) == ["a", "b", "c"]


def test_a_file_that_the_store_refuses_holds_back_no_other(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, times=float("inf"), name="huge")
    files = Files(root, pace=QUICK)
    for name in ("huge", "a", "b"):
        files.write(name)
    assert files.finish() == ["huge"]
    assert sorted(stored()) == ["a", "b"]


def test_a_file_without_a_manifest_row_is_not_reported_as_uploaded(root: Path) -> None:
    files = Files(root)
    (root / "unlisted").touch()
    assert files.uploads.finish([root / "unlisted"]) == ["unlisted"]


def test_a_file_that_is_written_again_is_uploaded_again(root: Path) -> None:
    files = Files(root)
    files.write("a", b"old")
    until(lambda: stored() == {"a": b"old"})
    # Its manifest row comes before the new content: without a further row, the end of the run notices.
    (root / "a").write_bytes(b"newer")
    assert files.finish() == []
    assert stored() == {"a": b"newer"}


def test_growing_files_follow_finished_ones_and_are_uploaded_at_the_end(root: Path) -> None:
    system = fsspec.filesystem("memory")
    name = "/bucket/exp/memprofiler/manifest.rank00000.jsonl"
    files = Files(root)
    files.write("a")
    until(lambda: bool(system.exists(name)) and system.cat_file(name) == files.manifest.read_bytes())
    files.write("b")
    assert files.finish() == []
    assert system.cat_file(name) == files.manifest.read_bytes()
    assert sorted(path.name for path in root.rglob("*") if path.is_file()) == ["a", "b", files.manifest.name]


def test_a_file_that_the_run_removes_is_removed_at_the_url(root: Path) -> None:
    files = Files(root)
    files.write("a")
    assert files.settle() == []
    files.remove("a")
    assert files.finish() == []
    assert stored() == {}


def test_the_end_of_a_run_waits_a_limited_time_for_a_store_that_does_not_answer(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda *_, **__: gate.wait(700))
    monkeypatch.setattr(upload, "LAST_LOOK_S", 60)
    files = Files(root, pace=Pace(patience_s=0.1))
    files.write("a")
    assert set(files.settle()) == {"a", "memprofiler/manifest.rank00000.jsonl"}
    assert "does not answer" in caplog.text
    gate.set()
    assert files.finish() == []


def test_a_store_that_did_not_answer_gets_only_a_moment_more(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda *_, **__: gate.wait(700))
    files = Files(root, pace=Pace(patience_s=0.1))
    files.write("a")
    files.settle()
    files.uploads._patience_s = 600
    started = time.monotonic()
    assert "a" in files.finish()
    gate.set()
    assert time.monotonic() - started < 300


@pytest.mark.slow
def test_ctrl_c_ends_the_wait_for_a_store_that_does_not_answer(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda *_, **__: gate.wait(700))
    files = Files(root, pace=Pace(patience_s=600))
    files.write("a")
    started = time.monotonic()
    with monkeypatch.context() as waiting:
        # It asks for the sizes of files that it waits for.
        waiting.setattr(upload, "_size", lambda _: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            files.settle()
    assert "a" in files.finish()
    gate.set()
    assert time.monotonic() - started < 300


def test_a_host_that_does_not_answer_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{mute.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(ArtifactError, match=r"s3://runs/exp: cannot be written \(no answer in 0.5 s\)"):
            claim_url("s3://runs/exp", 0.5)
        assert time.monotonic() - started < 300


@pytest.mark.slow
def test_a_place_is_claimed_by_another_process_which_says_why_not(tmp_path: Path) -> None:
    assert claim_url(f"file://{tmp_path}/there") == 1
    assert claim_url(f"file://{tmp_path}/there") == 2
    with pytest.raises(ArtifactError, match=r"nowhere://x.*install"):
        claim_url("nowhere://x")


def test_runs_of_one_place_are_numbered_also_where_two_claim_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.filesystem("memory").pipe_file("/bucket/exp/memprofiler/manifest.rank00000.jsonl", b"")
    assert claim_remote(Remote(URL)) == 2
    barrier, opened, lock = threading.Barrier(4), MemoryFileSystem._open, threading.Lock()

    def one_at_a_time(*given: Any, **named: Any) -> Any:
        """As a store does, and this one in memory does not, which looks for the file first."""
        with lock:
            return opened(*given, **named)

    monkeypatch.setattr(MemoryFileSystem, "_open", one_at_a_time)

    def claim(_: int) -> int:
        barrier.wait()
        return claim_remote(Remote(URL))

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(claim, range(4))) == [3, 4, 5, 6]


def test_a_place_that_cannot_be_written_is_said_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    monkeypatch.setattr(remote, "CLAIM_WAITS_S", (0.01, None))
    with pytest.raises(ArtifactError, match=r"memory://bucket/exp: cannot be written \(PermissionError: Access Denied"):
        claim_remote(Remote(URL))


def test_a_claim_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    original, attempts = MemoryFileSystem.pipe_file, []

    def cut_once(*given: Any, **named: Any) -> None:
        attempts.append(given)
        if len(attempts) == 1:
            raise ConnectionResetError("cut")
        original(*given, **named)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", cut_once)
    monkeypatch.setattr(remote, "CLAIM_WAITS_S", (0.01, None))
    assert claim_remote(Remote(URL)) == 1


def test_a_file_system_without_whole_objects_never_shows_half_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Remote(f"file://{tmp_path}/there")
    seen: list[str] = []
    original = there.filesystem.put_file

    def put_file(local: str, name: str) -> None:
        seen.append(Path(name).name)
        original(local, name)

    monkeypatch.setattr(there.filesystem, "put_file", put_file)
    assert there.create("memprofiler/claim.json", b"{}")
    assert not there.create("memprofiler/claim.json", b"{}")
    (tmp_path / "a").write_bytes(b"rows")
    there.put(tmp_path / "a", "memprofiler/a")
    assert seen == ["a.partial"]
    assert sorted(path.name for path in (tmp_path / "there/memprofiler").iterdir()) == ["a", "claim.json"]


def process_of(files: Files) -> subprocess.Popen[str]:
    assert files.uploads._process is not None
    return files.uploads._process


def test_another_process_copies_the_files_and_ends_with_the_run(root: Path, tmp_path: Path) -> None:
    files = Files(root, f"file://{tmp_path}/there")
    files.write("fit[Strategy].gz", b"trace")
    assert files.settle() == []
    process = process_of(files)
    assert (tmp_path / "there/fit[Strategy].gz").read_bytes() == b"trace"
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGTERM)
    files.remove("fit[Strategy].gz")
    assert files.finish() == []
    assert not (tmp_path / "there/fit[Strategy].gz").exists()
    assert process.poll() == 0


@pytest.mark.slow
def test_a_process_that_was_killed_is_started_again(root: Path, tmp_path: Path) -> None:
    files = Files(root, f"file://{tmp_path}/there")
    files.write("a")
    assert files.settle() == []
    process_of(files).kill()
    process_of(files).wait()
    files.uploads._thread.join(10)
    files.write("b")
    assert files.finish() == []
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["a", "b", "memprofiler"]


def test_a_process_that_cannot_be_started_leaves_the_files_here(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "own_program", lambda *_: ["/nowhere/python"])
    files = Files(root, f"file://{tmp_path}/there")
    files.write("a")
    assert "a" in files.finish()
    assert "/nowhere/python" in str(files.uploads.error)


def test_a_frozen_program_is_not_started_again_for_its_uploads(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("started"))
    files = Files(root, f"file://{tmp_path}/there")
    files.write("a")
    assert "a" in files.finish()
    assert "no Python interpreter" in str(files.uploads.error)
    with pytest.raises(ArtifactError, match="no Python interpreter"):
        claim_url(f"file://{tmp_path}/there")


def test_a_process_that_no_signal_ends_is_left_alone(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As one that waits for a disk: the kernel does not deliver SIGKILL.
    for name in ("_CLOSE_S", "_KILL_S"):
        monkeypatch.setattr(upload, name, 0.01)
    files = Files(root, f"file://{tmp_path}/there")
    assert files.settle() == []
    process, kill = process_of(files), subprocess.Popen.kill
    monkeypatch.setattr(subprocess.Popen, "kill", lambda _: None)
    monkeypatch.setattr(files.uploads, "settle", lambda _: [])
    os.kill(process.pid, signal.SIGSTOP)
    assert files.finish() == []
    assert process.poll() is None
    kill(process)
    files.uploads._thread.join(10)
    with process:
        pass


def test_a_process_ends_though_a_fork_of_this_one_holds_its_pipe(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "_CLOSE_S", 60)
    files = Files(root, f"file://{tmp_path}/there")
    process = process_of(files)
    assert process.stdin is not None
    held = os.dup(process.stdin.fileno())
    files.finish()
    os.close(held)
    # It has ended by itself.
    assert process.returncode == 0


@pytest.mark.slow
def test_the_files_of_a_killed_training_are_uploaded(root: Path, tmp_path: Path, run_python: Any) -> None:
    done = run_python(
        "-c",
        "import os, sys; from pathlib import Path; from lightning_memprof.artifacts.upload import Uploads\n"
        f"root = Path({str(root)!r}); manifest = root / 'memprofiler/manifest.rank00000.jsonl'; manifest.touch()\n"
        f"Uploads(root, 'file://{tmp_path}/there', (manifest,)); (root / 'a').touch()\n"
        'manifest.write_text(\'{"kind": "artifact", "path": "a"}\\n\'); os.kill(os.getpid(), 9)',
    )
    assert done.returncode == -signal.SIGKILL
    until((tmp_path / "there/a").exists)
    until((tmp_path / "there/memprofiler/manifest.rank00000.jsonl").exists)


def test_a_failure_of_the_other_process_is_reported_with_its_reason(root: Path, tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"a file and no directory")
    files = Files(root, f"file://{tmp_path}/there", QUICK)
    files.write("a")
    assert "a" in files.finish()
    assert "there" in str(files.uploads.error)
