"""Runs for TensorBoard's profiler tab, and its data, asked over HTTP as its page asks."""

from __future__ import annotations

import gzip
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corpus_files import CORPUS, recorded_file
from lightning_memprof import ExtendedPyTorchProfiler, MemProfilerCallback, OutputOptions, Schedule
from lightning_memprof.artifacts.trace_rewriting import tensorboard_categories
from ranks import trained
from recorded_rows import Trace
from tensorboard_server import tensorboard
from training import Perceptron, loader, trainer

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from lightning_memprof.account.trace.model import TraceStep


# Recorded on GPUs of three kinds, by torch of three years.
GPU_TRACES = ("tl_h100_bert", "hta_amd_mi250", "sidnb13_h100_transformer")

_PATIENCE_SECONDS = 120


def fit(directory: Path, *, windows: int = 1, validate: bool = False, **options: Any) -> None:
    """Train, recording two steps a window."""
    profiler = ExtendedPyTorchProfiler(record_shapes=True, profile_memory=True, **options)
    callback = MemProfilerCallback(schedule=Schedule(repeat=windows), output=OutputOptions(summary=False))
    training = trainer(directory, callback, profiler=profiler)
    training.fit(Perceptron(), loader(), loader(4))
    if validate:
        training.validate(Perceptron(), loader(6), verbose=False)


def made_runs(temporary: pytest.TempPathFactory) -> Path:
    """Return a log directory: trainings with and without stacks, one on two gloo ranks, the corpus's GPU traces.

    They are made once in a session.
    """
    logdir = temporary.getbasetemp() / "profiler-tab"
    if not logdir.exists():
        logdir.mkdir()
        fit(logdir / "plain", windows=2, validate=True)
        fit(logdir / "stacks", with_stack=True)
        trained(logdir / "ranks", "ddp", "", "profiler=yes")
        for name in GPU_TRACES if CORPUS.is_dir() else ():
            recorded = recorded_file(f"traces/{name}/*.json.gz")
            directory = logdir / "gpu" / name
            directory.mkdir(parents=True)
            with gzip.open(recorded) as source, gzip.open(directory / "worker.1.pt.trace.json.gz", "wb", 1) as target:
                tensorboard_categories(source, target)  # type: ignore[arg-type]
    return logdir


def fetches_us(trace: Path, step: TraceStep) -> float:
    """Return how long torch's data loader was asked in a step, which is what the tab counts as data loading.

    Ours counts what Lightning does around it as well.
    """
    begin, end = (step.start_ns, step.start_ns + step.duration_ns)
    opened = Trace(trace)
    fetches = [event for event in opened.events() if event.name.startswith("enumerate(DataLoader)#")]
    times = [event.duration_ns for event in fetches if begin <= event.start_ns + opened.time_origin_ns <= end]
    assert len(times) == 1
    return times[0] / 1000


@dataclass(frozen=True)
class Tab:
    """The plug-in's end points of one TensorBoard."""

    url: str

    def ask(self, route: str, **query: str) -> Any:
        """Return what an end point answers."""
        url = f"{self.url}/data/plugin/pytorch_profiler/{route}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 a TensorBoard of our own
            body = answer.read()
        return json.loads(gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body)

    def runs(self) -> list[str]:
        """Return the runs, once they are all read."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline:
            try:
                found = self.ask("runs")
            except (urllib.error.URLError, ConnectionError):
                found = {"runs": [], "loading": True}
            if found["runs"] and not found["loading"]:
                return sorted(found["runs"])
            time.sleep(0.2)
        raise TimeoutError(f"{self.url}: the profiler tab has read no run in {_PATIENCE_SECONDS} s")

    def window(self, run: str, span: str = "1", view: str = "Overview", rank: int = 0) -> dict[str, str]:
        """Return the query that names one rank's window."""
        return {"run": run, "worker": self.ask("workers", run=run, view=view)[rank], "span": span}


@contextmanager
def profiler_tab(logdir: Path) -> Iterator[Tab]:
    """Start TensorBoard and wait until its profiler tab has read every run."""
    with tensorboard(logdir) as url:
        tab = Tab(url)
        tab.runs()
        yield tab
