"""The run directory: all ranks agree on it once; a working copy is removed after the upload."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from lightning_memprof.artifacts.files import open_plain
from lightning_memprof.artifacts.manifest import ManifestWriter
from lightning_memprof.artifacts.naming import parse_manifest_name
from lightning_memprof.artifacts.remote import claim_url, local_path
from lightning_memprof.artifacts.secrets import has_password
from lightning_memprof.artifacts.sink import RunPlace, Sink, claim_run_place
from lightning_memprof.artifacts.upload import PATIENCE_S
from lightning_memprof.errors import MemprofError
from lightning_memprof.logs import logger_of
from lightning_memprof.packages import lightning_class
from lightning_memprof.units import format_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import Trainer

log = logger_of(__name__)

WORKING_COPIES: Final = "memprofiler-uploads"
# Rank 0 may load data first. The collectives of the training wait longer.
_PATIENCE: Final = timedelta(minutes=5)
_Agreed = tuple[str, int, str | None]
# The last row of a manifest has about a hundred bytes.
_TAIL: Final = 4096


def claim_place(trainer: Trainer, stage: str, dirpath: str | Path | None) -> RunPlace | None:
    """Agree on the run directory with the other ranks, once in ``setup``.

    Returns:
        The place, or None if rank 0 cannot write there or does not record, or for a ``Tuner`` search or
        ``fast_dev_run``; training continues without recording.
    """
    if is_tuner(trainer) or _is_fast_dev_run(trainer, dirpath):
        return None
    wanted = ""
    if trainer.is_global_zero:
        # The directory of a logger may be any object.
        wanted = os.fspath(dirpath or str(_log_dir(trainer) or trainer.default_root_dir))
    if stage != "fit":
        wanted = f"{wanted.rstrip('/')}/{stage}"
    return agreed_place(wanted, trainer.global_rank, trainer.default_root_dir, trainer.strategy.broadcast)


def agreed_place(
    wanted: str, rank: int, home: str, broadcast: Callable[[_Agreed | None], _Agreed | None] = lambda found: found
) -> RunPlace | None:
    """Agree on the run directory of a run with the other ranks.

    Args:
        wanted: its parent, a path or a URL, on rank 0.
        rank: the global rank.
        home: where the working copy of a run at a URL goes.
        broadcast: returns the value of rank 0, for process groups without a store.

    Returns:
        The place, or None if rank 0 cannot write there or does not record.
    """
    found: _Agreed | None = None
    if rank == 0:
        place = _claim(wanted, home)
        found = None if place is None else (str(place.root), place.number, place.url)
    agreed = _from_rank_0(rank, found, broadcast)
    return None if agreed is None else RunPlace(Path(agreed[0]), agreed[1], agreed[2])


def is_tuner(trainer: Trainer) -> bool:
    """Return whether this run ends with the search of a ``Tuner``, which replaces all callbacks while it trains."""
    return any(
        getattr(callback, "__dict__", {}).get("_early_exit") is True
        for callback in trainer.callbacks  # type: ignore[attr-defined]
    )


def _is_fast_dev_run(trainer: Trainer, dirpath: str | Path | None) -> bool:
    """Return whether this run must not leave files: it has no ``log_dir``, and the user has set no other directory."""
    if not trainer.fast_dev_run or dirpath:  # type: ignore[attr-defined]
        return False
    if trainer.is_global_zero:
        log.warning("fast_dev_run is not recorded; to record it, set a directory: OutputOptions(dirpath=...)")
    return True


def _log_dir(trainer: Trainer) -> Any:
    """Return the Trainer's ``log_dir``, which itself is a collective."""
    if not trainer.loggers:
        return trainer.default_root_dir
    logger = trainer.loggers[0]
    return logger.log_dir if lightning_class(logger, "TensorBoardLogger", "CSVLogger") else logger.save_dir


def _from_rank_0(
    rank: int, found: _Agreed | None, broadcast: Callable[[_Agreed | None], _Agreed | None]
) -> _Agreed | None:
    """Return what rank 0 passes.

    In a collective, ranks with the callback would wait for ever for those without it. In the process group's store rank
    0 waits for nobody, and the others for a limited time.
    """
    world = torch.distributed.group.WORLD if torch.distributed.is_available() else None
    if world is None or not hasattr(world, "get_group_store"):
        return broadcast(found)
    store = world.get_group_store()
    key = f"memprof/place/{store.add(f'memprof/runs/{rank}', 1)}"
    if rank == 0:
        store.set(key, json.dumps(found))
        return found
    try:
        store.wait([key], _PATIENCE)
    except RuntimeError:
        log.warning(
            "rank %d records nothing: rank 0 has claimed no run directory in %d s; every rank needs the callback",
            rank, _PATIENCE.total_seconds(),
        )  # fmt: skip
        return None
    return cast("_Agreed | None", json.loads(store.get(key)))


def release_place(sink: Sink, patience_s: float = PATIENCE_S) -> None:
    """Wait until the last files are at the URL, and remove the working copy when the files of every rank are.

    Args:
        sink: the files of this rank.
        patience_s: limit of the wait.
    """
    uploads, place = sink.uploads, sink.place
    if uploads is None:
        return
    until = time.monotonic() + patience_s
    missing = uploads.settle(sink.files, until)
    if missing:
        names, reason = ", ".join(missing), next(iter(missing.values()))
        count = format_count(len(missing), "file")
        text = f"{count} could not be copied to {place.url} ({reason}): {names}; kept in {place.root}"
        log.warning("%s", text)
        with suppress(OSError):
            _append(sink, "error", collector="upload", where="write", window=None, message=text, traceback="")
        # The manifest at the URL names them too.
        uploads.settle(sink.files, until)
    uploads.close()
    if not missing:
        try:
            _append(sink, "uploaded", url=place.url)
            _remove_working_copy(place)
        except FileNotFoundError:  # another rank has removed the working copy meanwhile
            pass
        except OSError as error:
            log.warning("the working copy %s cannot be removed (%s); its files are at %s", place.root, error, place.url)


def _append(sink: Sink, kind: str, **facts: Any) -> None:
    """Append a row to the closed manifest of a rank."""
    manifest = ManifestWriter(sink.manifest.path)
    manifest.append(kind, **facts)
    manifest.close()


def _remove_working_copy(place: RunPlace) -> None:
    """Remove the working copy, which the ranks of a machine share, if this rank is the last of them."""
    manifests = [path for path in place.directory.iterdir() if parse_manifest_name(path.name) is not None]
    if all(map(_is_uploaded, manifests)):
        shutil.rmtree(place.root, ignore_errors=True)
        for parent in place.root.parents:
            with suppress(OSError):  # another run uses it
                parent.rmdir()
            if parent.name == WORKING_COPIES or WORKING_COPIES not in parent.parts:
                break


def _claim(wanted: str, home: str) -> RunPlace | None:
    try:
        root = local_path(wanted)
        return _claim_url(wanted.rstrip("/"), home) if root is None else claim_run_place(root)
    except (OSError, ValueError) as error:
        log.warning("%s cannot be written (%s): this run is not recorded; training continues", wanted, error)
        return None


def _claim_url(url: str, home: str) -> RunPlace | None:
    try:
        root = _working_copy(url, home)
    except OSError as error:
        log.warning("no working copy of %s can be made (%s): this run is not recorded; training continues", url, error)
        return None
    try:
        number = claim_url(url)
    except MemprofError as error:
        log.warning("%s; recording into %s instead", error, root)
        return claim_run_place(root)
    return RunPlace(root, number, url)


def _working_copy(url: str, home: str) -> Path:
    """Create a directory for this run in ``home``, next to the other files of the program, or a temporary one."""
    place = "refused" if has_password(url) else url.partition("://")[2].rpartition("@")[2]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", place).strip("-.")[-60:]
    try:
        copies = (local_path(home) or Path.cwd()) / WORKING_COPIES
        copies.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=copies))
    except OSError:
        return Path(tempfile.mkdtemp(prefix=f"memprofiler-{name}-"))


def _is_uploaded(manifest: Path) -> bool:
    """Return whether the manifest of a rank ends with the row that all its files are at the URL."""
    try:
        with open_plain(manifest) as file:
            file.seek(max(0, manifest.stat().st_size - _TAIL))
            last = file.read().splitlines()[-1]
        return bool(json.loads(last).get("kind") == "uploaded")
    except (OSError, ValueError, IndexError, AttributeError):
        return False
