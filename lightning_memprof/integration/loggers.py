"""The Trainer's loggers: the report files, and the rows that a ``CSVLogger`` buffers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from lightning_memprof.artifacts.sink import ArtifactSpec, Sink
from lightning_memprof.logs import logger_of
from lightning_memprof.packages import lightning_class
from lightning_memprof.read.run.load import load_run
from lightning_memprof.report.printers.json import to_json
from lightning_memprof.report.printers.terminal import print_document
from lightning_memprof.report.sections import run_document
from lightning_memprof.report.summary import MAX_MEMORY_BYTES, MAX_PULSE_BYTES
from lightning_memprof.report.view import run_view

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

log = logger_of(__name__)

REPORT_NAMES: Final = ("report.json", "report.txt")
_FOLDER: Final = "memprofiler"


def send_report(trainer: Trainer, sink: Sink) -> None:
    """Write ``report.json`` and ``report.txt`` into the run directory and send them to the Trainer's loggers.

    TensorBoard gets the page as text, MLflow and W&B get both files; other loggers accept no files. A logger that fails
    is logged, and nothing is raised into the training. Called on rank 0 after the run.
    """
    try:
        files = _write_report(sink)
    except Exception:
        log.warning("the report files cannot be written; loggers get none", exc_info=True)
        return
    for logger in trainer.loggers:
        try:
            accepted = _send(logger, files, trainer.global_step)
        except Exception:
            log.warning("%s did not accept the report files", type(logger).__name__, exc_info=True)
        else:
            if not accepted:
                log.info("%s accepts no files; the report is in %s", type(logger).__name__, sink.place.location)


def _write_report(sink: Sink) -> tuple[Path, Path]:
    run = replace(load_run(sink.place.directory, max_pulse_bytes=MAX_PULSE_BYTES), url=sink.place.url)
    view = run_view(run, max_memory_bytes=MAX_MEMORY_BYTES)
    page = io.StringIO()
    print_document(run_document(view), page, is_full=True)
    document = json.dumps(to_json(view), indent=2, allow_nan=False) + "\n"
    machine, text = (sink.place.directory / name for name in REPORT_NAMES)
    for path, content in ((machine, document), (text, page.getvalue())):
        sink.write_text(ArtifactSpec(path=path, type="blob", collector="report"), content)
    return machine, text


def _send(logger: Any, files: tuple[Path, Path], step: int) -> bool:
    """Send the files to one logger; False where it accepts none."""
    machine, text = files
    if lightning_class(logger, "TensorBoardLogger"):
        # Markdown: an indented block keeps the columns aligned.
        page = "\n".join(f"    {line}" for line in text.read_text(encoding="utf-8").splitlines())
        logger.experiment.add_text(_FOLDER, page, step)
        logger.experiment.flush()
    elif lightning_class(logger, "MLFlowLogger"):
        for path in files:
            logger.experiment.log_artifact(logger.run_id, str(path), _FOLDER)
    elif lightning_class(logger, "WandbLogger"):
        for path in (machine, text):
            name = f"{_FOLDER}-{path.suffix.removeprefix('.')}-{logger.version or 'run'}"
            logger.experiment.log_artifact(str(path), name=name, type=_FOLDER)
    else:
        return False
    return True


def save_rows(logger: Any) -> None:
    """Save the rows that a ``CSVLogger`` buffers; other loggers buffer none.

    Lightning saves them when the fit is torn down, and an exception there ends the fit: our curves may not cause one.

    Raises:
        Exception: the exception of ``CSVLogger.save``; the rows stay in the buffer.
    """
    if lightning_class(logger, "CSVLogger") and getattr(logger.experiment, "metrics", None):
        logger.save()


def remove_rows(logger: Any, prefix: str) -> None:
    """Remove the rows of our curves from the buffer of a ``CSVLogger``; rows of the program stay."""
    rows = getattr(logger.experiment, "metrics", None) if lightning_class(logger, "CSVLogger") else None
    if isinstance(rows, list):
        rows[:] = [row for row in rows if not any(prefix in name for name in row)]
