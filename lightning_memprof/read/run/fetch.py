"""Runs at a URL, copied into a temporary directory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from lightning_memprof.artifacts.manifest import read_manifest
from lightning_memprof.artifacts.naming import RUN_DIRECTORY, manifest_name, parse_manifest_name, parse_numbered
from lightning_memprof.artifacts.remote import Remote, is_url, url_path
from lightning_memprof.errors import ArtifactError, MemprofError
from lightning_memprof.read.run.locate import MAX_DEPTH, find_run, ranks_in

# Each waits for the network most of the time.
_CONNECTIONS: Final = 8


class LocalRun(msgspec.Struct, frozen=True):
    """A path that can be read here; ``url`` is that of the run's root where the path is a copy."""

    path: Path
    url: str | None = None


@contextmanager
def local_run(path: str) -> Iterator[LocalRun]:
    """Give a local path of a run: a path as it is, a run at a URL as a copy for this context.

    Among several runs at a URL, :func:`lightning_memprof.read.run.locate.find_run` chooses; only the files of that
    run are copied.

    Args:
        path: a path, or an fsspec URL of a run directory, of a log directory, or of a parent of log directories.

    Raises:
        ArtifactError: the URL cannot be read, or no run is there.
        ConfigError: fsspec does not know the URL's protocol, or its package is not installed.
    """
    if not is_url(path):
        yield LocalRun(Path(path))
    elif (local := url_path(path)) is not None:
        yield LocalRun(Path(local))
    else:
        with tempfile.TemporaryDirectory(prefix="lightning-memprof-") as folder:
            try:
                fetched = _fetch(path.rstrip("/"), Path(folder))
            except MemprofError:
                raise
            except Exception as error:
                raise ArtifactError(
                    f"{path}: cannot be read ({type(error).__name__}: {error}); look at the URL and its credentials"
                ) from error
            yield fetched


def _fetch(url: str, folder: Path) -> LocalRun:
    """Copy one run into ``folder``, in place of the log directory or a directory above it."""
    head, _, tail = url.rpartition("/")
    inside = parse_numbered(tail)[0] == RUN_DIRECTORY
    remote = Remote(head if inside else url)
    start = folder / tail if inside else folder
    below = remote.at(tail) if inside else remote.path
    found = remote.filesystem.find(below, maxdepth=MAX_DEPTH + 2)
    names = [str(name)[len(remote.path) :].lstrip("/") for name in found]
    # For the newest run: the first manifest of each run has its start.
    _copy(remote, folder, _first_manifests(names))
    try:
        run = find_run(start).directory.relative_to(folder.absolute()).as_posix()
    except ArtifactError as error:
        raise ArtifactError(str(error).replace(str(start), url).replace(str(folder), remote.url)) from error
    _copy(remote, folder, [name for name in names if name.startswith(f"{run}/")])
    root = "" if run == PurePosixPath(run).name else run.rpartition("/")[0] + "/"
    _copy(remote, folder, [f"{root}{name}" for name in sorted(_beside(folder / run))])
    return LocalRun(folder / run, f"{remote.url}/{root}".rstrip("/"))


def _first_manifests(names: Iterable[str]) -> Iterable[str]:
    """Return the manifest of the lowest rank in each run directory."""
    found: dict[PurePosixPath, str] = {}
    for path in map(PurePosixPath, sorted(names)):
        if parse_manifest_name(path.name) is not None:
            found.setdefault(path.parent, path.as_posix())
    return found.values()


def _beside(directory: Path) -> Iterator[str]:
    """Yield the names of listed files in the root of a run, outside its directory."""
    for rank in ranks_in(directory):
        for path in read_manifest(directory / manifest_name(rank)).artifacts:
            name = PurePosixPath(path)
            outside = name.is_absolute() or ".." in name.parts or not name.parts
            if not outside and parse_numbered(name.parts[0])[0] != RUN_DIRECTORY:
                yield name.as_posix()


def _copy(remote: Remote, folder: Path, names: Iterable[str]) -> None:
    def copy(name: str) -> None:
        if ".." in PurePosixPath(name).parts:
            return
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            remote.filesystem.get_file(remote.at(name), str(target))
        except FileNotFoundError:
            target.unlink(missing_ok=True)  # the page reports it as missing

    with ThreadPoolExecutor(max_workers=_CONNECTIONS) as pool:
        list(pool.map(copy, names))
