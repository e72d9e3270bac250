"""Where a run's files go: agreed on by all ranks, once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_memprof.artifacts.sink import RunPlace, claim_run_place

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["claim_place"]

log = logging.getLogger(__name__)


def claim_place(trainer: Trainer, stage: str, dirpath: str | Path | None) -> RunPlace | None:
    """Agree on the run directory with all ranks; a collective, to be called once, in ``setup``, on every rank.

    Returns:
        The place, or None where rank 0 could not write there; training goes on without us.

    """
    wanted = str(dirpath or trainer.log_dir or trainer.default_root_dir)
    if "://" in wanted:
        log.warning("%s is not a local directory; recording into %s", wanted, Path.cwd())
        wanted = str(Path.cwd())
    root = Path(wanted)
    if stage != "fit":
        root = root / stage
    number: int | None = None
    if trainer.is_global_zero:
        try:
            number = claim_run_place(root).number
        except (OSError, ValueError) as error:
            log.warning("%s cannot be written (%s): this run is not recorded; training goes on", root, error)
    agreed: tuple[str, int] | None = trainer.strategy.broadcast((str(root), number) if number is not None else None)
    return None if agreed is None else RunPlace(Path(agreed[0]), agreed[1])
