"""Files that are copied to a URL; fsspec's memory file system is a real one without a network."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_memprof.artifacts import upload
from lightning_memprof.artifacts.upload import Uploads

URL = "memory://bucket/exp"
MANIFEST = "memprofiler/manifest.rank00000.jsonl"


@pytest.fixture(autouse=True)
def empty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])


class Files:
    """A run whose files are uploaded."""

    def __init__(self, root: Path, url: str = URL) -> None:
        self.root = root
        (root / MANIFEST).parent.mkdir(parents=True)
        self.paths = [root / MANIFEST]
        self.uploads = Uploads(root, url, self.paths)

    def write(self, *names: str, content: bytes = b"x") -> None:
        for name in names:
            path = self.root / name
            path.write_bytes(content)
            self.paths = list(dict.fromkeys([*self.paths, path]))

    def settle(self, patience_s: float = 60) -> Mapping[str, str]:
        return self.uploads.settle(self.paths, time.monotonic() + patience_s)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    made = Files(tmp_path / "run")
    yield made
    made.uploads.close()


def stored() -> dict[str, bytes]:
    """The files at the URL."""
    system = fsspec.filesystem("memory")
    return {name.removeprefix("/bucket/exp/"): system.cat_file(name) for name in system.find("/bucket/exp")}


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


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no copy end before this is set."""
    opened = threading.Event()
    original = MemoryFileSystem.put_file

    def put_file(*given: Any, **options: Any) -> None:
        opened.wait(700)
        original(*given, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    return opened


def test_files_have_their_names_below_the_url(files: Files, tmp_path: Path) -> None:
    files.write("fit-0[Strategy]DDP*.json.gz", MANIFEST, content=b"rows")
    files.write("../elsewhere", str(tmp_path / "other"))
    assert files.settle() == {}
    assert stored() == {"fit-0[Strategy]DDP*.json.gz": b"rows", MANIFEST: b"rows"}


def test_a_file_is_copied_again_only_if_it_has_changed(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = fails(monkeypatch, times=0)
    files.write("a", "b")
    files.settle()
    (files.root / "a").write_bytes(b"newer")
    files.settle()
    assert [name.rpartition("/")[2] for name in attempts] == ["a", "b", "a"]
    assert stored() == {"a": b"newer", "b": b"x"}


def test_growing_files_follow_the_others_and_leave_no_copy(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = fails(monkeypatch, times=0)
    files.write(MANIFEST, "a")
    files.settle()
    assert [name.rpartition("/")[2] for name in attempts] == ["a", "manifest.rank00000.jsonl"]
    assert sorted(path.name for path in files.root.rglob("*") if path.is_file()) == ["a", "manifest.rank00000.jsonl"]


def test_a_file_that_the_run_removes_is_removed_at_the_url(files: Files) -> None:
    files.write("a", "b")
    files.settle()
    (files.paths.pop()).unlink()
    assert files.settle() == {}
    assert stored() == {"a": b"x"}


def test_a_failed_copy_holds_back_no_other_and_is_tried_again_at_the_end(
    files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = fails(monkeypatch, times=2, name="exp/a")
    files.write("a", "b")
    with caplog.at_level(logging.WARNING):
        assert files.settle() == files.settle() == {"a": "cut"}
    assert list(stored()) == ["b"]
    assert files.settle() == {}
    assert len(attempts) == 3
    assert [record.message for record in caplog.records] == [
        f"memory://bucket/exp/a cannot be written (cut); its file is kept in {files.root}"
    ]


def test_the_error_of_a_file_system_is_its_reason(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"a file and no directory")
    files = Files(tmp_path / "run", f"file://{tmp_path}/there")
    files.write("a")
    assert "there" in files.settle()["a"]
    files.uploads.close()


def test_a_copy_does_not_keep_the_training_waiting(files: Files, gate: threading.Event) -> None:
    files.write("a")
    files.uploads.copy(files.paths)
    assert stored() == {}
    gate.set()
    assert files.settle() == {}


def test_the_end_of_a_run_waits_a_limited_time_and_says_so(
    files: Files, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upload, "_NOTICEABLE_S", 0)
    files.write("a")
    with caplog.at_level(logging.INFO):
        assert files.settle(0.3) == {"a": "no answer"}
    assert [record.message for record in caplog.records] == [f"copying the last files to {URL}, for at most 0 s"]
    gate.set()
    assert files.settle() == {}


def test_ctrl_c_ends_the_wait(files: Files, gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write("a")
    with monkeypatch.context() as waiting:
        waiting.setattr(time, "sleep", lambda _: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            files.settle()
    gate.set()
    assert files.settle() == {}


def test_the_thread_ends_after_its_last_copy(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    files = Files(tmp_path / "run")
    (thread,) = set(threading.enumerate()) - before
    files.write("a")
    files.uploads.copy(files.paths)
    files.uploads.close()
    thread.join(60)
    assert not thread.is_alive()
    assert stored() == {"a": b"x"}
