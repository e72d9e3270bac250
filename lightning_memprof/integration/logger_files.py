"""The report's files, handed to loggers that take files."""

from __future__ import annotations

import io
import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from lightning_memprof.analysis.run.load import load_run
from lightning_memprof.artifacts.sink import Artifact
from lightning_memprof.report.machine import to_json
from lightning_memprof.report.summary import MAX_MEMORY_BYTES, MAX_PULSE_BYTES
from lightning_memprof.report.terminal import print_view
from lightning_memprof.report.view import run_view

if TYPE_CHECKING:
    from pathlib import Path

    from lightning.pytorch import Trainer

    from lightning_memprof.artifacts.sink import Sink

__all__ = ["REPORT_NAMES", "hand_over"]

log = logging.getLogger(__name__)

REPORT_NAMES: Final = ("report.json", "report.txt")
_FOLDER: Final = "memprofiler"


def hand_over(trainer: Trainer, sink: Sink) -> None:
    """Write ``report.json`` and ``report.txt`` into the run directory and give them to the Trainer's loggers.

    TensorBoard gets the page as text, MLflow and W&B get both files; other loggers take no files. A logger that fails
    is told of in the log; nothing is raised into the training. Called on rank 0 when the run has ended.
    """
    try:
        files = _write_report(sink)
    except Exception:
        log.warning("the report's files cannot be written; loggers get none", exc_info=True)
        return
    for logger in trainer.loggers:
        try:
            taken = _give(logger, files, trainer.global_step)
        except Exception:
            log.warning("%s did not take the report's files", type(logger).__name__, exc_info=True)
        else:
            if not taken:
                log.info("%s takes no files; the report lies in %s", type(logger).__name__, sink.place.location)


def _write_report(sink: Sink) -> tuple[Path, Path]:
    run = replace(load_run(sink.place.directory, max_pulse_bytes=MAX_PULSE_BYTES), url=sink.place.url)
    view = run_view(run, max_memory_bytes=MAX_MEMORY_BYTES)
    page = io.StringIO()
    print_view(view, page)
    document = json.dumps(to_json(view), indent=2, allow_nan=False) + "\n"
    machine, text = (sink.place.directory / name for name in REPORT_NAMES)
    for path, content in ((machine, document), (text, page.getvalue())):
        with sink.file(Artifact(path, "blob", "report")) as temporary:
            temporary.write_text(content, encoding="utf-8")
    return machine, text


def _give(logger: Any, files: tuple[Path, Path], step: int) -> bool:
    """Give the files to one logger; False where it takes none. Loggers are known by name: none has to be installed."""
    machine, text = files
    kinds = {base.__name__ for base in type(logger).__mro__}
    if "TensorBoardLogger" in kinds:
        # Markdown: an indented block keeps its columns.
        page = "\n".join(f"    {line}" for line in text.read_text(encoding="utf-8").splitlines())
        logger.experiment.add_text(_FOLDER, page, step)
        logger.experiment.flush()
    elif "MLFlowLogger" in kinds:
        for path in files:
            logger.experiment.log_artifact(logger.run_id, str(path), _FOLDER)
    elif "WandbLogger" in kinds:
        for path in (machine, text):
            name = f"{_FOLDER}-{path.suffix.removeprefix('.')}-{logger.version or 'run'}"
            logger.experiment.log_artifact(str(path), name=name, type=_FOLDER)
    else:
        return False
    return True
