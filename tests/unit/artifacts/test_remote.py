"""URLs, and the claim of a run directory; fsspec's memory file system is a real one without a network."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_memprof.artifacts.remote import Remote, check_url, claim_remote, claim_url, is_url, local_path, url_path
from lightning_memprof.errors import ArtifactError, ConfigError

URL = "memory://bucket/exp"


@pytest.fixture(autouse=True)
def empty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])


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


def test_a_store_that_does_not_answer_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    before, gate = set(threading.enumerate()), threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "exists", lambda *_: not gate.wait(700))
    started = time.monotonic()
    with pytest.raises(ArtifactError, match=r"memory://bucket/exp: cannot be written \(no answer in 0.2 s\)"):
        claim_url(URL, 0.2)
    assert time.monotonic() - started < 300
    (abandoned,) = set(threading.enumerate()) - before
    gate.set()
    abandoned.join(60)


def test_a_claim_has_the_next_number_or_the_reason_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("Access Denied")

    assert [claim_url(f"file://{tmp_path}/there") for _ in range(2)] == [1, 2]
    with pytest.raises(ConfigError, match=r"nowhere://x.*install"):
        claim_url("nowhere://x")
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    with pytest.raises(ArtifactError, match=r"memory://bucket/exp: cannot be written \(PermissionError: Access Denied"):
        claim_url(URL)


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


def test_a_copy_to_s3_that_fails_draws_no_random_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    # Nothing listens there.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "3")
    remote, before = Remote("s3://bucket/exp"), random.getstate()
    (tmp_path / "a").write_text("a")
    with pytest.raises(Exception, match=r"127\.0\.0\.1"):
        remote.put(tmp_path / "a", "a")
    assert random.getstate() == before
