"""Faults of the storage: a full disk, a quota, rights that are gone, a directory that is gone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import fault
import moments
import storage


def _delete(cell: fault.Cell) -> None:
    shutil.rmtree(cell.log_dir, ignore_errors=True)


def _deleted(directory: Path, moment: moments.Moment) -> str | None:
    return "somebody has deleted it"


def _no_disk() -> dict[str, str]:
    reason = storage.why_no_disk()
    return {} if reason is None else {moment.name: reason for moment in moments.MOMENTS}


FAULTS: Final = (
    fault.Fault(
        name="disk full",
        says="`log_dir` is a tmpfs of 6 MiB, and another program fills it to the last byte",
        place=fault.ANYWHERE,
        strike=storage.fill,
        prepare=storage.small_disk,
        tidy=storage.give_back,
        absent=_no_disk(),
        harms=True,
        silences=True,
    ),
    fault.Fault(
        name="quota exceeded",
        says="by injection: what Python opens for writing below `log_dir`, and each `os.write` there, ends with EDQUOT",
        place=fault.ANYWHERE,
        strike=storage.no_room_for_more,
        prepare=storage.put_back,
        victims=range,
        harms=True,
        silences=True,
    ),
    fault.Fault(
        name="log_dir becomes read-only",
        says="its files and directories lose the right to be written, and root its right to do it all the same",
        place=fault.ANYWHERE,
        strike=storage.forbid,
        prepare=storage.ordinary_user,
        harms=True,
    ),
    fault.Fault(
        name="log_dir is deleted",
        says="another program removes it with everything in it",
        place=fault.ANYWHERE,
        strike=_delete,
        harms=True,
        excuse=_deleted,
    ),
)
