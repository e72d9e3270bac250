"""Files that are copied to a URL; fsspec's memory file system is a real one without a network."""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_memprof.artifacts import upload
from lightning_memprof.artifacts.remote import (
    Remote,
    Retries,
    UploadWorker,
    check_url,
    claim_remote,
    claim_url,
    is_url,
    url_path,
)
from lightning_memprof.artifacts.upload import Uploads
from lightning_memprof.errors import ArtifactError, ConfigError

URL = "memory://bucket/exp"
QUICK = Retries(attempts=2, first_wait_s=0.01, pause_s=60)


@pytest.fixture(autouse=True)
def empty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "memprofiler").mkdir()
    return tmp_path


def stored() -> dict[str, bytes]:
    system = fsspec.filesystem("memory")
    return {name.removeprefix("/bucket/exp/"): system.cat_file(name) for name in system.find("/bucket/exp")}


def written(path: Path, content: bytes = b"x") -> Path:
    path.write_bytes(content)
    return path


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


def test_a_file_goes_up_under_its_name_whatever_is_in_it(root: Path) -> None:
    uploads = Uploads(root, URL)
    uploads.add(written(root / "fit-0[Strategy]DDP*.json.gz", b"trace"))
    uploads.add(written(root / "memprofiler/a.jsonl", b"rows"))
    assert uploads.settle() == []
    assert stored() == {"fit-0[Strategy]DDP*.json.gz": b"trace", "memprofiler/a.jsonl": b"rows"}
    assert uploads.finish() == []


def test_what_the_user_sent_elsewhere_is_left_there(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    uploads = Uploads(root, URL)
    uploads.add(written(tmp_path_factory.mktemp("other") / "x"))
    assert uploads.finish() == []
    assert stored() == {}


def test_a_file_that_fails_is_tried_again_and_arrives(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = fails(monkeypatch, times=2)
    uploads = Uploads(root, URL, retries=Retries(attempts=3, first_wait_s=0.01))
    uploads.add(written(root / "a"))
    assert uploads.finish() == []
    assert len(attempts) == 3
    assert list(stored()) == ["a"]


def test_the_waits_between_attempts_double() -> None:
    assert list(Retries(attempts=4, first_wait_s=0.5).waits()) == [0.5, 1.0, 2.0]


def test_a_place_that_is_down_is_said_once_and_left_alone_until_the_end(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = fails(monkeypatch, times=float("inf"))
    uploads = Uploads(root, URL, retries=QUICK)
    with caplog.at_level(logging.WARNING):
        for name in "abcdef":
            uploads.add(written(root / name))
            time.sleep(0.02)
        during = len(attempts)
        left = uploads.finish()
    assert sorted(path.name for path in left) == list("abcdef")
    assert during == QUICK.attempts
    assert len(attempts) <= during + QUICK.attempts + upload.MAX_FAILURES
    assert isinstance(uploads.error, ConnectionResetError)
    assert [record.message for record in caplog.records] == [
        f"memory://bucket/exp/a cannot be written (cut); its file is kept in {root}"
    ]
    assert all((root / name).exists() for name in "abcdef")


def test_what_could_not_be_copied_meanwhile_is_copied_at_the_end(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, times=QUICK.attempts)
    uploads = Uploads(root, URL, retries=QUICK)
    for name in "abc":
        uploads.add(written(root / name))
    assert uploads.finish() == []
    assert list(stored()) == ["a", "b", "c"]


def test_one_file_that_cannot_be_copied_keeps_back_no_other(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, times=float("inf"), name="huge")
    uploads = Uploads(root, URL, retries=QUICK)
    for name in ("huge", "a", "b"):
        uploads.add(written(root / name))
    assert uploads.finish() == [root / "huge"]
    assert list(stored()) == ["a", "b"]


def test_files_that_grow_go_up_behind_finished_ones_and_once_more_at_the_end(root: Path) -> None:
    manifest = written(root / "memprofiler/manifest.rank00000.jsonl", b"1\n")
    uploads = Uploads(root, URL, live=(manifest,))
    uploads.add(written(root / "a"))
    deadline = time.monotonic() + 5
    while len(stored()) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stored()["memprofiler/manifest.rank00000.jsonl"] == b"1\n"
    written(manifest, b"1\n2\n")
    assert uploads.finish() == []
    assert stored()["memprofiler/manifest.rank00000.jsonl"] == b"1\n2\n"
    assert sorted(path.name for path in root.rglob("*") if path.is_file()) == ["a", manifest.name]


def test_a_file_that_is_taken_away_is_taken_away_there_too(root: Path) -> None:
    uploads = Uploads(root, URL)
    path = written(root / "a")
    uploads.add(path)
    uploads.settle()
    path.unlink()
    uploads.remove(path)
    assert uploads.finish() == []
    assert stored() == {}


def test_adding_a_file_never_waits(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda *_, **__: gate.wait(10))
    uploads = Uploads(root, URL)
    started = time.perf_counter()
    for name in "abcdefgh":
        uploads.add(written(root / name))
    assert time.perf_counter() - started < 1
    gate.set()
    assert uploads.finish() == []


def test_files_that_two_threads_add_at_once_go_up_on_one_thread(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[threading.Thread] = []

    class SlowThread(threading.Thread):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if self.name == "memprof-upload":
                made.append(self)
                # The other caller asks for a thread meanwhile.
                time.sleep(0.2)

    monkeypatch.setattr(upload.threading, "Thread", SlowThread)
    uploads = Uploads(root, URL, retries=Retries(patience_s=5))
    paths = [written(root / name) for name in ("training.bin", "writer.bin")]
    together = threading.Barrier(len(paths))

    def add(path: Path) -> None:
        together.wait()
        uploads.add(path)

    with ThreadPoolExecutor(len(paths)) as pool:
        list(pool.map(add, paths))
    assert uploads.finish() == []
    alive = [thread for thread in made if thread.is_alive()]
    for _ in alive:
        uploads._queue.put(None)
    assert (len(made), alive) == (1, [])
    assert stored() == {"training.bin": b"x", "writer.bin": b"x"}


def test_the_end_of_a_run_waits_for_a_mute_place_only_so_long(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda *_, **__: gate.wait(30))
    uploads = Uploads(root, URL, retries=Retries(patience_s=0.1))
    uploads.add(written(root / "a"))
    assert uploads.settle() == [root / "a"]
    assert "does not answer" in caplog.text
    gate.set()
    assert uploads.finish() == []


def test_a_place_that_was_waited_for_in_vain_is_not_waited_for_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda *_, **__: gate.wait(30))
    uploads = Uploads(root, URL, retries=Retries(patience_s=0.1))
    uploads.add(written(root / "a"))
    uploads.settle()
    uploads._patience_s = 20
    started = time.monotonic()
    assert uploads.finish() == [root / "a"]
    gate.set()
    assert time.monotonic() - started < 5


@pytest.mark.slow
def test_ctrl_c_ends_the_wait_for_a_mute_place_for_good(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda *_, **__: gate.wait(30))
    uploads = Uploads(root, URL)
    uploads.add(written(root / "a"))
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        uploads.settle()
    assert uploads.finish() == [root / "a"]
    gate.set()
    timer.join()
    assert time.monotonic() - started < 5


def test_a_host_that_does_not_answer_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{mute.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(ArtifactError, match=r"s3://runs/exp: cannot be written \(no answer in 0.5 s\)"):
            claim_url("s3://runs/exp", 0.5)
        assert time.monotonic() - started < 10


def test_a_place_is_claimed_by_another_process_which_says_why_not(tmp_path: Path) -> None:
    assert claim_url(f"file://{tmp_path}/there") == 1
    assert claim_url(f"file://{tmp_path}/there") == 2
    with pytest.raises(ArtifactError, match=r"nowhere://x.*install"):
        claim_url("nowhere://x")


def test_runs_of_one_place_are_numbered_also_where_two_claim_at_once() -> None:
    fsspec.filesystem("memory").pipe_file("/bucket/exp/memprofiler/manifest.rank00000.jsonl", b"")
    assert claim_remote(Remote(URL)) == 2
    barrier = threading.Barrier(4)

    def claim(_: int) -> int:
        barrier.wait()
        return claim_remote(Remote(URL))

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(claim, range(4))) == [3, 4, 5, 6]


def test_a_place_that_cannot_be_written_is_said_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    with pytest.raises(ArtifactError, match=r"memory://bucket/exp: cannot be written \(PermissionError: Access Denied"):
        claim_remote(Remote(URL), QUICK)


def test_a_file_system_without_whole_objects_never_shows_half_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = Remote(f"file://{tmp_path}/there")
    seen: list[str] = []
    original = remote.filesystem.put_file

    def put_file(local: str, there: str) -> None:
        seen.append(Path(there).name)
        original(local, there)

    monkeypatch.setattr(remote.filesystem, "put_file", put_file)
    assert remote.create("memprofiler/claim.json", b"{}")
    assert not remote.create("memprofiler/claim.json", b"{}")
    remote.put(written(tmp_path / "a", b"rows"), "memprofiler/a")
    assert seen == ["a.partial"]
    assert sorted(path.name for path in (tmp_path / "there/memprofiler").iterdir()) == ["a", "claim.json"]


def worker(uploads: Uploads) -> UploadWorker:
    assert isinstance(uploads._remote, UploadWorker)
    return uploads._remote


def test_files_are_copied_by_another_process_which_ends_with_the_run(root: Path, tmp_path: Path) -> None:
    uploads = Uploads(root, f"file://{tmp_path}/there", retries=QUICK)
    path = written(root / "fit[Strategy].gz", b"trace")
    uploads.add(path)
    assert uploads.settle() == []
    process = worker(uploads)._process
    assert process is not None
    assert (tmp_path / "there" / path.name).read_bytes() == b"trace"
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGTERM)
    path.unlink()
    uploads.remove(path)
    assert uploads.finish() == []
    assert not (tmp_path / "there" / path.name).exists()
    assert process.poll() == 0


def test_a_process_that_was_killed_is_started_again(root: Path, tmp_path: Path) -> None:
    uploads = Uploads(root, f"file://{tmp_path}/there", retries=QUICK)
    uploads.add(written(root / "a"))
    assert uploads.settle() == []
    process = worker(uploads)._process
    assert process is not None
    process.kill()
    uploads.add(written(root / "b"))
    assert uploads.finish() == []
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["a", "b"]


def test_a_process_that_was_ended_is_not_started_again(root: Path, tmp_path: Path) -> None:
    process = UploadWorker(f"file://{tmp_path}/there")
    process.put(written(root / "a"), "a")
    process.close(kill=True)
    with pytest.raises(OSError, match="was ended"):
        process.put(root / "a", "b")
    assert process._process is None


def test_a_process_ends_though_a_fork_of_this_one_holds_its_pipe(root: Path, tmp_path: Path) -> None:
    process = UploadWorker(f"file://{tmp_path}/there")
    process.put(written(root / "a"), "a")
    held = os.dup(process._process.stdin.fileno())
    started = time.monotonic()
    process.close()
    os.close(held)
    assert time.monotonic() - started < 5


def test_what_the_other_process_cannot_copy_is_told_with_the_reason(root: Path, tmp_path: Path) -> None:
    written(tmp_path / "there", b"a file and no directory")
    uploads = Uploads(root, f"file://{tmp_path}/there", retries=QUICK)
    uploads.add(written(root / "a"))
    assert uploads.finish() == [root / "a"]
    assert "Error" in str(uploads.error)
    assert "there" in str(uploads.error)


@pytest.mark.slow
def test_claiming_a_place_draws_no_random_numbers_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    original = MemoryFileSystem.pipe_file
    monkeypatch.setattr(
        MemoryFileSystem, "pipe_file", lambda *given, **named: (random.random(), original(*given, **named))
    )
    before = random.getstate()
    claim_remote(Remote(URL))
    assert random.getstate() == before
