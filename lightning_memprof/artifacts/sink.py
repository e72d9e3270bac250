"""The files of a rank: each appears complete, by ``os.replace``, and has a line in the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from lightning_memprof.artifacts.files import own_temporary
from lightning_memprof.artifacts.manifest import ArtifactRow, ManifestWriter, RemovedRow
from lightning_memprof.artifacts.naming import (
    RUN_DIRECTORY,
    actions_name,
    manifest_name,
    numbered,
    pulse_name,
    series_path,
)
from lightning_memprof.artifacts.series import SeriesRow, columns_of, encode_rows
from lightning_memprof.artifacts.upload import Uploads

if TYPE_CHECKING:
    from lightning_memprof.schedule import Mark, Window

ArtifactType = Literal["series", "trace", "table", "snapshot", "blob", "pulse"]

_DIGEST_CHUNK: Final = 1 << 16
# Windows whose files are still being written: with more, they fill the disk faster than the writer works.
_MOST_WAITING: Final = 2


@dataclass(frozen=True)
class RunPlace:
    """A run's directory below its root; ``number`` counts the runs of one root from 1.

    ``url`` is the URL whose working copy the root is; None if the files stay in the root.
    """

    root: Path
    number: int
    url: str | None = None

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.root / numbered(RUN_DIRECTORY, self.number)

    @property
    def location(self) -> str:
        """The argument for ``lightning-memprof show``: the run directory, or its URL."""
        if self.url is None:
            return str(self.directory)
        return f"{self.url}/{numbered(RUN_DIRECTORY, self.number)}"


def claim_run_place(root: Path) -> RunPlace:
    """Create the next free run directory below ``root``.

    Raises:
        OSError: ``root`` cannot be written.
    """
    root.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        number += 1
        place = RunPlace(root, number)
        with suppress(FileExistsError):
            place.directory.mkdir()
            return place


@dataclass(frozen=True)
class ArtifactSpec:
    """A file and its entry in the manifest, without size and digest."""

    path: Path
    type: ArtifactType
    collector: str
    window: int | None = None


class SeriesWriter(Protocol):
    """Add a row: the mark's step, global_step, point, recorded and time_ns, the columns of ``row``, and ``values``."""

    def __call__(self, mark: Mark, row: SeriesRow | None = None, /, **values: Any) -> None:
        """Add one row; ``row`` belongs to the series from now on."""


class Sink:
    """Write one rank's artifacts.

    Files are written under a temporary name and renamed when they are complete. Slow work runs in one background
    thread; the training does not wait for it.

    Args:
        place: where the files of the run go; its directory is created if it is missing.
        rank: global rank of this process.
    """

    def __init__(self, place: RunPlace, rank: int) -> None:
        self.place = place
        self.rank = rank
        # A file that every window writes again has one entry.
        self._artifacts: dict[Path, ArtifactSpec] = {}
        self._growing = [place.directory / name(rank) for name in (manifest_name, pulse_name, actions_name)]
        place.directory.mkdir(parents=True, exist_ok=True)
        self.manifest = ManifestWriter(place.directory / manifest_name(rank))
        self.uploads: Uploads | None = None
        if place.url is not None:
            self.uploads = Uploads(place.root, place.url, self._growing)
        self._background: ThreadPoolExecutor | None = None
        # Pending jobs with their windows; added by the training's thread alone.
        self._waiting: list[tuple[int, Future[None]]] = []

    @property
    def artifacts(self) -> list[ArtifactSpec]:
        """The listed files that were not removed, each with its last entry."""
        return list(self._artifacts.values())

    @property
    def files(self) -> list[Path]:
        """The listed files, and those that grow during the run."""
        return list(dict.fromkeys([*self._artifacts, *self._growing]))

    @contextmanager
    def file(self, artifact: ArtifactSpec) -> Iterator[Path]:
        """Yield a temporary path to write to; afterwards the file gets its name and its manifest line.

        A file that replaces an earlier one is listed before: at any time one of its manifest lines is right. If the
        body raises, the temporary file is removed and nothing is listed.
        """
        artifact.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = own_temporary(artifact.path)
        try:
            yield temporary
            if again := artifact.path.is_file():
                self._append(artifact, temporary)
            temporary.replace(artifact.path)
        except BaseException:
            with suppress(FileNotFoundError):
                temporary.unlink()
            raise
        if not again:
            self._append(artifact, artifact.path)
        self._artifacts[artifact.path] = artifact

    def write_text(self, artifact: ArtifactSpec, text: str) -> None:
        """Write a file as UTF-8; see :meth:`file`."""
        with self.file(artifact) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def list_artifact(self, artifact: ArtifactSpec) -> None:
        """Write the manifest line of a complete file."""
        self._append(artifact, artifact.path)
        self._artifacts[artifact.path] = artifact

    @contextmanager
    def series(self, window: Window, collector: str) -> Iterator[SeriesWriter]:
        """Collect rows and write them as the collector's series of this window when the body ends or raises."""
        rows: list[SeriesRow | dict[str, Any]] = []

        def write(mark: Mark, row: SeriesRow | None = None, /, **values: Any) -> None:
            row = row or SeriesRow()
            row.step, row.global_step, row.point = mark.step, mark.global_step, mark.point.value
            row.recorded, row.time_ns = mark.recorded, mark.time_ns
            rows.append(columns_of(row) | values if values else row)

        try:
            yield write
        finally:
            self.write_rows(window, collector, rows)

    def write_rows(self, window: Window, collector: str, rows: Sequence[SeriesRow | Mapping[str, Any]]) -> None:
        """Write rows as the collector's series of this window, if any."""
        if not rows:
            return
        path = self.place.directory / series_path(window.index, self.rank, collector)
        artifact = ArtifactSpec(path=path, type="series", collector=collector, window=window.index)
        self.write_text(artifact, encode_rows(columns_of(row) if isinstance(row, SeriesRow) else row for row in rows))

    def in_background(self, job: Callable[[], None], *, window: int | None = None) -> None:
        """Run ``job`` after all jobs before it, without the training waiting; :meth:`drain` waits for it.

        An exception of the job is lost: it handles its own failures.

        Args:
            job: the work.
            window: the window whose files it writes; see :meth:`behind`.
        """
        if self._background is None:
            self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="memprof-writer")
        pending = self._background.submit(job)
        if window is not None:
            self._waiting = [*self._pending(), (window, pending)]

    def behind(self) -> str | None:
        """Return why the next window should be a small one: too many before it are still being written.

        Each of them has an uncompressed trace on disk. Accepted work is still done, and nobody waits.
        """
        waiting = sorted({window for window, _ in self._pending()})
        if len(waiting) < _MOST_WAITING:
            return None
        return f"the writer is behind: windows {', '.join(map(str, waiting))} are still being written"

    def remove_window(self, window: int, reason: str) -> None:
        """Remove every listed file of one window, after a row in the manifest.

        A file of several windows stays if a later one has listed it; one that cannot be removed is listed as removed.
        """
        gone = [artifact.path for artifact in self.artifacts if artifact.window == window]
        paths = [self._manifest_path(path) for path in gone]
        self.manifest.append(RemovedRow(window=window, paths=paths, reason=reason))
        for path in gone:
            del self._artifacts[path]
            with suppress(OSError):
                path.unlink()
        # Empty once the last rank's files are gone.
        with suppress(OSError):
            (self.place.directory / series_path(window, self.rank, "any")).parent.rmdir()

    def drain(self) -> None:
        """Wait until all background work is done and end its thread."""
        if self._background is not None:
            self._background.shutdown(wait=True)
            self._background = None
            self._waiting = []

    def close(self) -> None:
        """Wait for the background work and release the manifest."""
        try:
            self.drain()
        finally:
            self.manifest.close()

    def _append(self, artifact: ArtifactSpec, content: Path) -> None:
        row = ArtifactRow(path=self._manifest_path(artifact.path), type=artifact.type, collector=artifact.collector)
        row.window, row.size_bytes, row.sha256 = artifact.window, content.stat().st_size, _digest(content)
        self.manifest.append(row)

    def _pending(self) -> list[tuple[int, Future[None]]]:
        return [(window, job) for window, job in self._waiting if not job.done()]

    def _manifest_path(self, path: Path) -> str:
        if path.is_relative_to(self.place.root):
            relative = path.relative_to(self.place.root)
            if ".." not in relative.parts:
                return relative.as_posix()
        return (path.resolve() if ".." in path.parts else path.absolute()).as_posix()


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    # A read allocates as much as it may return. A large buffer gets new pages every time, which stay resident.
    chunk = memoryview(bytearray(_DIGEST_CHUNK))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(chunk):
            digest.update(chunk[:size])
    return digest.hexdigest()
