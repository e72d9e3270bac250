"""The pytest plugin: budgets for the memory and the operators of the training runs in a test.

pytest imports this module in every session: it loads neither torch nor Lightning before the first marked test.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import pytest

if TYPE_CHECKING:
    from lightning_memprof.capture.observe import Link
    from lightning_memprof.testing.budgets import Budget
    from lightning_memprof.testing.figures import Figures


_MARK: Final = "memprof"
_MARK_HELP: Final = (
    "memprof(baseline=None, tolerance=None, **limits): record each Trainer of the test; fail the test if a training "
    "run exceeds a limit, as in peak='600 MiB', saved_activations='112 MiB', operators=2_400, collectives=4, syncs=0"
)
# With accumulation over 2, 4 or 8 batches the last of them has an optimizer step.
_STEPS: Final = (0, 1, 3, 7)
_SHOWN: Final = ("peak", "saved_activations", "operators", "kernels", "collectives", "syncs", "graph_breaks")
_LONGEST_NAME: Final = 120


@dataclass(kw_only=True)
class _MarkedTest:
    """The recording of one test, from its setup to its teardown."""

    budget: Budget
    directory: Path
    undo: ExitStack = field(default_factory=ExitStack)
    trainers: int = 0
    breaks_before: Counter[str] = field(default_factory=Counter)


_MARKED: Final = pytest.StashKey[_MarkedTest]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("memprof", "lightning-memprof: budgets for training runs")
    group.addoption("--memprof-update", action="store_true", help="write the baselines of the marked tests that pass")
    group.addoption(
        "--memprof-report", metavar="DIR", help="keep the run of each marked test in DIR, with its HTML page"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line("markers", _MARK_HELP)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check the marks and attach to the Trainers of the test, before its fixtures make any."""
    marks = list(item.iter_markers(_MARK))
    if not marks:
        return
    from lightning_memprof.errors import MemprofError
    from lightning_memprof.testing.budgets import budget_of, read_baseline

    try:
        for value in (value for mark in marks for value in mark.args):
            _fail(f"{value!r}: name the quantity, as in peak={value!r}")
        budget = budget_of([mark.kwargs for mark in marks], item.config.rootpath)
        if budget.baseline is not None and not item.config.getoption("memprof_update"):
            read_baseline(budget.baseline, _key(item))
        recording = _MarkedTest(budget=budget, directory=_directory(item))
    except MemprofError as error:
        _fail(str(error))
    item.stash[_MARKED] = recording
    if item.config.getoption("memprof_report") is None:
        recording.undo.callback(shutil.rmtree, recording.directory, ignore_errors=True)
    recording.undo.enter_context(_attached(recording))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Check the trainings of a test that has passed otherwise."""
    result = yield
    if (recording := item.stash.get(_MARKED, None)) is not None and not _is_other_rank():
        from lightning_memprof.errors import MemprofError

        try:
            _check(item, recording)
        except MemprofError as error:
            _fail(str(error))
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Detach after the fixtures have ended; write the pages."""
    try:
        return (yield)
    finally:
        if (recording := item.stash.get(_MARKED, None)) is not None:
            del item.stash[_MARKED]
            with recording.undo:
                if item.config.getoption("memprof_report") is not None and not _is_other_rank():
                    _write_pages(recording.directory)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the figures of each marked test."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    calls = [report for report in reports if isinstance(report, pytest.TestReport) and report.when == "call"]
    lines = {report.nodeid: line for report in calls if (line := _line(dict(report.user_properties)))}
    if lines:
        terminalreporter.section("memprof")
        for nodeid, line in sorted(lines.items()):
            terminalreporter.line(f"{nodeid}: {line}")


def _line(properties: dict[str, Any]) -> str:
    known = [(name, properties[key]) for name in _SHOWN if (key := f"memprof.{name}") in properties]
    if not known:
        return ""
    from lightning_memprof.testing.budgets import amount

    note = properties.get("memprof.note")
    return ", ".join(f"{name} {amount(name, value)}" for name, value in known) + (f" ({note})" if note else "")


def _fail(message: str) -> NoReturn:
    pytest.fail(f"memprof: {message}", pytrace=False)


def _is_other_rank() -> bool:
    """Return whether Lightning has started this session for another rank, whose files are with those of rank 0."""
    return os.environ.get("LOCAL_RANK", "0") != "0"


def _key(item: pytest.Item) -> str:
    """Return the name of a test in a baseline: it does not change with the directory that pytest starts in."""
    return f"{item.path.name}::{item.nodeid.partition('::')[2]}"


def _directory(item: pytest.Item) -> Path:
    """Create an empty directory for the runs of a test."""
    kept: str | None = item.config.getoption("memprof_report")
    if kept is None:
        return Path(tempfile.mkdtemp(prefix="memprof-"))
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", item.nodeid).strip("-.")
    if name != item.nodeid.replace("::", "-").replace("/", "-") or len(name) > _LONGEST_NAME:
        name = f"{name[:_LONGEST_NAME]}-{sha256(item.nodeid.encode()).hexdigest()[:8]}"
    directory = item.config.invocation_params.dir / kept / name
    if _runs(directory) and not _is_other_rank():
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@contextmanager
def _attached(recording: _MarkedTest) -> Iterator[None]:
    """Attach a callback to every Trainer that is created in the context."""
    from lightning_memprof.capture.collectors.operator_trace import OperatorTrace
    from lightning_memprof.capture.collectors.pulse import Pulse
    from lightning_memprof.capture.collectors.saved_tensors import SavedTensors
    from lightning_memprof.capture.observe import wrapped
    from lightning_memprof.capture.sources.compiled import forget_compiled, graph_breaks
    from lightning_memprof.capture.tracker.collectors import ModuleMemory
    from lightning_memprof.integration import registration
    from lightning_memprof.integration.callback import AttachedCallback
    from lightning_memprof.integration.settings import OutputOptions
    from lightning_memprof.schedule import Schedule
    from lightning_memprof.testing.collectors import Lines, WaitsForFiles

    def callbacks() -> list[AttachedCallback]:
        recording.trainers += 1
        return [
            AttachedCallback(
                Schedule(steps=_STEPS, active=1, warmup=0),
                [Pulse(), SavedTensors(), ModuleMemory(), OperatorTrace(profile_memory=True), Lines(), WaitsForFiles()],
                output=OutputOptions(dirpath=recording.directory, summary=False),
            )
        ]

    def not_required(link: Link) -> Any:
        # A collector that a user requires and that is not available ends the training.
        def settings(callback: AttachedCallback, trainer: Any) -> Any:
            found = link.call(callback, trainer)
            return replace(found, collectors=[(collector, False) for collector, _ in found.collectors])

        return settings

    forget_compiled()
    recording.breaks_before = graph_breaks()
    attaching = wrapped(registration, "_attached_callbacks", lambda _: callbacks)
    with attaching, wrapped(AttachedCallback, "settings", not_required):
        yield


def _check(item: pytest.Item, recording: _MarkedTest) -> None:
    from lightning_memprof.testing.budgets import excesses, read_baseline, reductions, write_baseline

    budget, trainings = recording.budget, _trainings(recording)
    notes = []
    baseline = None
    if budget.baseline is not None and not item.config.getoption("memprof_update"):
        baseline = read_baseline(budget.baseline, _key(item))
        if less := reductions(trainings, baseline):
            notes.append(f"below its baseline: {', '.join(less)}")
    for number, figures in enumerate(trainings, 1):
        prefix = "memprof" if number == 1 else f"memprof.{number}"
        item.user_properties += [(f"{prefix}.{name}", value) for name, value in figures.values.items()]
    found = excesses(budget, trainings, baseline)
    if budget.baseline is not None and baseline is None and not found:
        write_baseline(budget.baseline, _key(item), trainings)
        notes.append(f"baseline written: {budget.baseline}")
    if notes:
        item.user_properties.append(("memprof.note", "; ".join(notes)))
    if found:
        _fail("\n".join(found))


def _runs(directory: Path) -> list[Path]:
    """Return the runs of a test in their order: the fits, or the other stages if there is no fit."""
    from lightning_memprof.artifacts.naming import RUN_DIRECTORY, parse_numbered

    for places in ([directory], [directory / stage for stage in ("validate", "test", "predict")]):
        found = [run for place in places for run in place.glob(f"{RUN_DIRECTORY}*") if run.is_dir()]
        if found:
            return sorted(found, key=lambda run: (run.parent != directory, parse_numbered(run.name)[1]))
    return []


def _trainings(recording: _MarkedTest) -> list[Figures]:
    from lightning_memprof.capture.sources.compiled import graph_breaks
    from lightning_memprof.read.run.load import load_run
    from lightning_memprof.testing.figures import figures_of

    runs = _runs(recording.directory)
    if not recording.trainers:
        _fail("the test creates no Trainer; one that exists before the test, as in a session fixture, is not recorded")
    if not runs:
        _fail("no Trainer of the test was recorded: none runs fit, or each has a MemProfilerCallback of its own")
    *others, last = [figures_of(load_run(run)) for run in runs]
    # Of all training runs of the test: a later one uses what an earlier one has compiled.
    return [*others, last.with_count("graph_breaks", graph_breaks() - recording.breaks_before)]


def _write_pages(directory: Path) -> None:
    from lightning_memprof.errors import MemprofError
    from lightning_memprof.report.opened import opened
    from lightning_memprof.report.written import own_page, write_page

    try:
        for run in _runs(directory):
            with opened([str(run)]) as view:
                write_page(view, own_page(run))
    except MemprofError as error:
        _fail(str(error))
