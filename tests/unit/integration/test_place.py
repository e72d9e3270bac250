from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_memprof.artifacts.manifest import ManifestWriter
from lightning_memprof.artifacts.sink import RunPlace, Sink
from lightning_memprof.integration.place import release_place


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Sink]:
    """Two ranks that have ended and share their working copy."""
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    place = RunPlace(tmp_path / "copy", 1, "memory://bucket/exp")
    sinks = [Sink(place, rank) for rank in (0, 1)]
    for sink in sinks:
        sink.manifest.append("run", schema_version=1)
        sink.close()
    return sinks


def after_the_last_row(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
    """Call ``then`` once, when rank 1 has written that its files are at the URL."""
    close = ManifestWriter.close

    def closed(manifest: ManifestWriter) -> None:
        close(manifest)
        if "00001" in manifest.path.name:
            monkeypatch.setattr(ManifestWriter, "close", close)
            then()

    monkeypatch.setattr(ManifestWriter, "close", closed)


def test_the_last_rank_removes_the_working_copy(ranks: list[Sink]) -> None:
    release_place(ranks[1])
    assert ranks[1].place.root.exists()
    release_place(ranks[0])
    assert not ranks[0].place.root.exists()


def test_a_working_copy_that_another_rank_removes_meanwhile_is_no_failure(
    ranks: list[Sink], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    after_the_last_row(monkeypatch, lambda: release_place(ranks[0]))
    with caplog.at_level(logging.WARNING):
        release_place(ranks[1])
    assert not ranks[1].place.root.exists()
    assert caplog.records == []


def test_a_working_copy_that_cannot_be_listed_stays_and_is_reported(
    ranks: list[Sink], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "iterdir", refuse)
    for sink in ranks:
        release_place(sink)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "cannot be removed" in caplog.text
    assert str(ranks[1].place.root) in caplog.text
    assert ranks[1].place.root.exists()
