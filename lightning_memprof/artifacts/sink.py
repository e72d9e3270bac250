"""The files of a rank: each appears complete, by ``os.replace``, and has a line in the manifest."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from lightning_memprof.artifacts.files import own_temporary
from lightning_memprof.artifacts.manifest import ManifestWriter
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
    number = 1
    while True:
        place = RunPlace(root, number)
        try:
            place.directory.mkdir()
        except FileExistsError:
            number += 1
        else:
            return place


@dataclass(frozen=True)
class ArtifactSpec:
    """A file and its entry in the manifest, without size and digest."""

    path: Path
    type: ArtifactType
    collector: str
    window: int | None = None


OnSeries = Callable[[int, str, "Sequence[Mapping[str, Any]]"], None]
"""Called with window, collector and rows of each written series; must not raise."""


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
        self.on_series: OnSeries | None = None
        # A file that every window writes again has one entry.
        self._artifacts: dict[Path, ArtifactSpec] = {}
        place.directory.mkdir(parents=True, exist_ok=True)
        self.manifest = ManifestWriter(place.directory / manifest_name(rank))
        self.uploads: Uploads | None = None
        if place.url is not None:
            live = tuple(place.directory / name(rank) for name in (manifest_name, pulse_name, actions_name))
            self.uploads = Uploads(place.root, place.url, live)
        self._background: ThreadPoolExecutor | None = None
        # By window, the number of its pending jobs.
        self._waiting: Counter[int] = Counter()
        self._waiting_lock = threading.Lock()

    @property
    def artifacts(self) -> list[ArtifactSpec]:
        """The listed files that were not removed, each with its last entry."""
        return list(self._artifacts.values())

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
        self._listed(artifact)

    def write_text(self, artifact: ArtifactSpec, text: str) -> None:
        """Write a file as UTF-8; see :meth:`file`."""
        with self.file(artifact) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def list_artifact(self, artifact: ArtifactSpec, *, columns: list[str] | None = None) -> None:
        """Write the manifest line of a complete file."""
        self._append(artifact, artifact.path, columns)
        self._listed(artifact)

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
            if rows:
                self.write_rows(window, collector, rows)

    def write_rows(self, window: Window, collector: str, rows: Sequence[SeriesRow | Mapping[str, Any]]) -> None:
        """Write rows as the collector's series of this window, and pass their columns to ``on_series``."""
        columns = [columns_of(row) if isinstance(row, SeriesRow) else row for row in rows]
        path = self.place.directory / series_path(window.index, self.rank, collector)
        artifact = ArtifactSpec(path=path, type="series", collector=collector, window=window.index)
        self.write_text(artifact, encode_rows(columns))
        if self.on_series is not None:
            self.on_series(window.index, collector, columns)

    def in_background(self, job: Callable[[], None], *, window: int | None = None) -> None:
        """Run ``job`` after all jobs before it, without the training waiting; :meth:`drain` waits for it.

        An exception of the job is lost: it handles its own failures.

        Args:
            job: the work.
            window: the window whose files it writes; see :meth:`behind`.
        """
        if self._background is None:
            self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="memprof-writer")
        if window is not None:
            with self._waiting_lock:
                self._waiting[window] += 1
        self._background.submit(self._work, job, window)

    def behind(self) -> str | None:
        """Return why the next window should be a small one: too many before it are still being written.

        Each of them has an uncompressed trace on disk. Accepted work is still done, and nobody waits.
        """
        with self._waiting_lock:
            waiting = sorted(window for window, jobs in self._waiting.items() if jobs)
        if len(waiting) < _MOST_WAITING:
            return None
        return f"the writer is behind: windows {', '.join(map(str, waiting))} are still being written"

    def remove_window(self, window: int, reason: str) -> None:
        """Remove every listed file of one window, after a row in the manifest.

        A file of several windows stays if a later one has listed it; one that cannot be removed is listed as removed.
        """
        gone = [artifact.path for artifact in self.artifacts if artifact.window == window]
        paths = [self._manifest_path(path) for path in gone]
        self.manifest.append("removed", window=window, paths=paths, reason=reason)
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

    def close(self) -> None:
        """Wait for the background work and release the manifest."""
        try:
            self.drain()
            if self.uploads is not None and (left := self.uploads.settle(self._artifacts)):
                place, error = self.place, self.uploads.error or "no answer"
                count = "1 file is" if len(left) == 1 else f"{len(left)} files are"
                text = f"{count} not at {place.url}: {error}; they are in {place.root}"
                self.manifest.append(
                    "error", collector="upload", where="write", window=None, message=text, traceback=""
                )
        finally:
            self.manifest.close()

    def _append(self, artifact: ArtifactSpec, content: Path, columns: list[str] | None = None) -> None:
        self.manifest.append(
            "artifact",
            collector=artifact.collector,
            type=artifact.type,
            path=self._manifest_path(artifact.path),
            size_bytes=content.stat().st_size,
            sha256=_digest(content),
            window=artifact.window,
            columns=columns,
        )

    def _listed(self, artifact: ArtifactSpec) -> None:
        self._artifacts[artifact.path] = artifact

    def _work(self, job: Callable[[], None], window: int | None) -> None:
        try:
            job()
        finally:
            if window is not None:
                with self._waiting_lock:
                    self._waiting[window] -= 1
                    if not self._waiting[window]:
                        del self._waiting[window]

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
