"""Ledgers of recorded files, other people's where the corpus is there: sums, tables, and what findings recover."""

from __future__ import annotations

import gzip
import json
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corpus_files import CORPUS, TRACES
from fake_runs import HEALTHY, FakeRun, make_run
from ledger_lines import out_of_bounds
from lightning_memprof.account.ledger.memory import ByteLedger, snapshot_bytes
from lightning_memprof.account.ledger.model import TimeLedger
from lightning_memprof.account.ledger.ranks import across_ranks
from lightning_memprof.account.memory.report import memory_report
from lightning_memprof.account.snapshot.report import snapshot_report
from lightning_memprof.account.steps.statistics import typical_steps
from lightning_memprof.account.trace.model import TraceReport
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.errors import ArtifactError
from lightning_memprof.judge import Facts, examine, examine_files
from lightning_memprof.read.run.load import load_run

RECORDED: Final = Path(__file__).parents[1] / "golden" / "recorded"
GOLDEN_RUNS: Final = RECORDED.parent / "runs"
FAULTS: Final = sorted(path.name.removesuffix(".tar.xz") for path in GOLDEN_RUNS.glob("*.tar.xz"))
NEAR: Final = 1e-3
TRACE_ENDINGS: Final = (".trace.json", ".json.gz")
# Of two generations of torch.
ON_DEVICE: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", "mtia_ccp_events"})
OPERATORS: Final = frozenset({"cpu_op", "operator"})
# torch writes the ranges of a program as operators where it does not know better.
RANGES: Final = ("[pl]", "enumerate(DataLoader", "Optimizer.")
FILES_ONLY: Final = ("device_traces", "snapshots")
RUNS: Final = sorted(
    name for path in RECORDED.glob("*.tar.gz") if (name := path.name.removesuffix(".tar.gz")) not in FILES_ONLY
)


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("golden")
    for path in sorted(RECORDED.glob("*.tar.gz")):
        with tarfile.open(path) as archive:
            archive.extractall(directory, filter="data")
    return directory


def existing(*roots: Path, endings: tuple[str, ...]) -> Iterator[Path]:
    for root in roots:
        yield from sorted(path for path in root.rglob("*") if path.name.endswith(endings))


def assert_sums(ledger: TimeLedger | ByteLedger, name: str) -> None:
    if isinstance(ledger, TimeLedger):
        parts, whole = [line.ns for line in ledger.lines], ledger.step_ns
    else:
        parts, whole = [float(line.bytes) for line in ledger.lines], float(ledger.peak_bytes)
    assert all(part >= 0 for part in parts), name
    assert sum(parts) == pytest.approx(whole, rel=NEAR), name


def assert_run(directory: Path) -> None:
    """Every ledger of a run sums to its whole: the mean step, the steps of each trace, the peaks of bytes."""
    run = load_run(directory)
    files = [run.directory.parent / row.path for row in run.artifacts if row.type == "trace"]
    recorded = across_ranks([trace_report(file) for file in files if file.is_file()])
    facts = Facts.of(run, recorded, memory=memory_report(run))
    ranks = {rank.rank: rank for rank in run.ranks}
    for number, ledger in facts.ledgers.items():
        assert_sums(ledger, f"{directory}: rank {number}")
        typical = typical_steps(ranks[number])
        assert typical is not None
        durations = [duration for _, duration, _ in typical.steps]
        assert ledger.step_ns == pytest.approx(sum(durations) / len(durations), rel=NEAR)
    for bytes_ledger in facts.byte_ledgers.values():
        assert_sums(bytes_ledger, str(directory))
    assert len(facts.ledgers) == len(ranks)
    # As recorded, and as they are in the steps outside windows.
    of_files = [
        of
        for trace in (*recorded, *facts.traces, *facts.steady_traces)
        for of in (trace.host_ledger, trace.device_ledger)
        if of
    ]
    for of_file in of_files:
        assert_sums(of_file, str(directory))
    assert not out_of_bounds(examine(facts), *facts.ledgers.values(), *facts.byte_ledgers.values(), *of_files)


@pytest.mark.parametrize("name", RUNS)
def test_the_ledgers_of_a_run_sum_to_its_mean_step_and_its_peak(name: str, recorded: Path) -> None:
    for directory in sorted((recorded / name).rglob("memprofiler")):
        assert_run(directory)


@pytest.mark.parametrize("name", FAULTS)
def test_the_ledgers_of_a_recorded_fault_sum_to_its_mean_step_and_its_peak(name: str, tmp_path: Path) -> None:
    with tarfile.open(GOLDEN_RUNS / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    found = sorted(tmp_path.rglob("memprofiler"))
    assert found
    for directory in found:
        assert_run(directory)


@st.composite
def runs(draw: st.DrawFn) -> FakeRun:
    """Runs of any phases, waits, padding and settings."""
    spent = st.fixed_dictionaries({phase: st.integers(0, 60_000_000) for phase in HEALTHY})
    steps = draw(st.lists(spent, min_size=6, max_size=20))
    core_wait_ns, slower = draw(st.integers(0, 40_000_000)), draw(st.integers(0, 2))
    workers = draw(st.integers(0, 4))
    return FakeRun(
        world_size=draw(st.integers(1, 2)),
        steps=len(steps),
        phases=lambda rank, step: {name: ns * (1 + rank * slower) for name, ns in steps[step].items()},
        core_wait_ns=lambda _: core_wait_ns,
        padding=(1000, draw(st.integers(0, 1000)), 0),
        training={"dataloaders": [{"num_workers": workers, "persistent_workers": False}]},
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fake=runs())
def test_no_finding_of_a_run_recovers_more_than_its_lines_hold(
    fake: FakeRun, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = load_run(make_run(tmp_path_factory.mktemp("run"), fake))
    facts = Facts.of(run, memory=memory_report(run))
    ledgers: list[TimeLedger | ByteLedger] = [*facts.ledgers.values(), *facts.byte_ledgers.values()]
    for ledger in ledgers:
        assert_sums(ledger, "run")
    assert not out_of_bounds(examine(facts), *ledgers)


def test_the_ledgers_of_a_snapshot_sum_to_what_was_reserved_at_its_peak(recorded: Path) -> None:
    count = 0
    for path in existing(recorded, CORPUS / "snapshots", endings=(".pickle", ".pickle.gz")):
        try:
            report = snapshot_report(path)
        except ArtifactError:
            assert path.name == "not_a_snapshot.pickle"
            continue
        for device in report.devices:
            ledger = snapshot_bytes(device)
            assert_sums(ledger, str(path))
            live = device.live_at(device.peak_event)
            assert ledger.peak_bytes == live.reserved_bytes
            assert ledger.bytes("requested") == pytest.approx(live.requested_bytes, rel=NEAR)
            count += 1
        assert not out_of_bounds(examine_files((), [report]), *map(snapshot_bytes, report.devices)), path
    assert count > 5


def events_of(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found = json.loads(text, parse_float=Decimal)["traceEvents"]
    return [event for event in found if event.get("ph") == "X" and "dur" in event]


def steps_of(events: Iterable[dict[str, Any]]) -> list[tuple[int, int]]:
    on_host = (event for event in events if not str(event.get("cat")).startswith("gpu_"))
    return [span(event) for event in on_host if event["name"].startswith("ProfilerStep#")]


def working_steps(events: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the time of the steps: on the device for what they launched, where that takes longer than on the host."""
    steps, launched, works = sorted(steps_of(events)), {}, []
    for event in events:
        number = event.get("args", {}).get("correlation")
        if is_of(event, ON_DEVICE):
            works.append((number, span(event)))
        elif number is not None:
            launched[number] = span(event)[0]
    first = min((work[0] for number, work in works if number in launched), default=0)
    # A device that is behind first works off what was launched before the recording.
    moments = [(launched.get(number, work[0] if work[0] >= first else 0), work) for number, work in works]
    if any(moment < steps[-1][0] for moment, _ in moments) and not any(moment >= steps[-1][0] for moment, _ in moments):
        del steps[-1]
    start, end = steps[0][0], steps[-1][1]
    # What began before the last step on the host, such as the range of the recording, does not tell where it ends.
    others = [event for event in events if not event["name"].startswith("ProfilerStep#")]
    reach = max(span(event)[1] for event in others if is_of(event, ON_DEVICE) or span(event)[0] >= steps[-1][0])
    end = reach if end - reach > reach - start else end
    inside = [work for moment, work in moments if start <= moment < end]
    earlier = [work[1] for moment, work in moments if moment < start]
    begin, last = max([min(inside)[0], *earlier]), max(work[1] for work in inside)
    if last - begin > end - start:
        return begin, last
    return (start, last) if last - end > (end - start) / 10 else (start, end)


def is_of(event: dict[str, Any], categories: frozenset[str]) -> bool:
    return str(event.get("cat")).lower() in categories


def span(event: dict[str, Any]) -> tuple[int, int]:
    start = Decimal(event["ts"])
    return round(start * 1000), round((start + Decimal(event["dur"])) * 1000)


def union_ns(spans: Iterable[tuple[int, int]]) -> int:
    total = reached = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def clipped(spans: Iterable[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    return [(max(first, start), min(last, end)) for first, last in spans if last > start and first < end]


def assert_tables(report: TraceReport, events: list[dict[str, Any]]) -> None:
    """The tables are an independent sum of the trace's events."""
    kernels: Counter[str] = Counter()
    for event in events:
        if is_of(event, ON_DEVICE):
            kernels[event["name"]] += span(event)[1] - span(event)[0]
    of_table: Counter[str] = Counter()
    for row in report.kernels:
        of_table[row.name] += row.total_ns
    assert of_table == kernels
    lanes: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if report.operators and is_of(event, OPERATORS) and not event["name"].startswith(RANGES):
            lanes[event["pid"], event["tid"]].append(span(event))
    own = sum(row.self_ns for row in report.operators)
    assert own == pytest.approx(sum(union_ns(spans) for spans in lanes.values()), rel=NEAR)


def assert_time(report: TraceReport, events: list[dict[str, Any]]) -> None:
    """The lines sum to the steps, those of work to what ran on the device, and no finding recovers more than its.

    Idle causes sum to the idle time.
    """
    if report.idle and not report.is_sample and report.window is not None:
        assert sum(cause.total_ns for cause in report.idle) == pytest.approx(report.window.idle_ns, rel=NEAR)
    for ledger in (report.host_ledger, report.device_ledger):
        if ledger is not None:
            assert_sums(ledger, str(report.file))
    assert not out_of_bounds(examine_files([report], []), report.host_ledger, report.device_ledger)
    if (of_device := report.device_ledger) is None or not report.steps:
        return
    whole = working_steps(events)
    works = of_device.ns("compute", "collective", "copy") * of_device.steps
    busy = [span(event) for event in events if is_of(event, ON_DEVICE)]
    # Before the first event, one may run that began before the recording.
    early = max(min(min(busy)[0] - whole[0], max(end - start for start, end in busy)), 0)
    assert of_device.step_ns * of_device.steps == pytest.approx(whole[1] - whole[0] - early, rel=NEAR)
    assert works == pytest.approx(union_ns(clipped(busy, *whole)), rel=NEAR)


def assert_modules(report: TraceReport, events: list[dict[str, Any]]) -> int:
    """The lines of each module sum to its ranges in the steps; return the number of modules."""
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    steps = steps_of(events)
    for event in events:
        if event["name"].startswith("[pl][module]"):
            parts = [part for step in steps for part in clipped([span(event)], *step)]
            ranges[event["name"].rpartition(": ")[2]] += parts
    for module, spans in ranges.items():
        lines = report.host_ledger.lines if report.host_ledger else ()
        mine = [line for line in lines if f"{line.module}.".startswith(f"{module}.")]
        ns = sum(line.ns for line in mine if line.part not in {"backward", "backward_hook"})
        assert ns * len(steps) == pytest.approx(union_ns(spans), rel=NEAR, abs=10), module
    return len(ranges)


def test_recorded_traces_have_ledgers_and_tables_that_are_sums_of_their_events(recorded: Path) -> None:
    modules = 0
    for path in existing(recorded, endings=TRACE_ENDINGS):
        if path.name.startswith("cut"):
            continue
        report, events = trace_report(path), events_of(path)
        assert_tables(report, events)
        assert_time(report, events)
        modules += assert_modules(report, events)
    assert modules > 10


@pytest.mark.corpus
@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name[:24])
def test_traces_of_other_people_have_them_too(path: Path) -> None:
    report, events = trace_report(path), events_of(path)
    assert_tables(report, events)
    assert_time(report, events)


def ranges(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the fields beside each other that are a mean, median or percentile, a minimum and a maximum."""
    if isinstance(value, dict):
        for key in value:
            of = key.partition("mean")
            if of[1] and (
                found := {name: value.get(of[0] + name + of[2]) for name in ("min", "mean", "median", "max")}
            ):
                yield f"{path}.{key}", {name: each for name, each in found.items() if isinstance(each, int | float)}
        for key, each in value.items():
            yield from ranges(each, f"{path}.{key}")
    elif isinstance(value, list):
        for each in value:
            yield from ranges(each, path)


def test_no_mean_in_the_documents_is_outside_its_range() -> None:
    count = 0
    for path in sorted((RECORDED.parent / "expected").glob("*.json.gz")):
        for place, found in ranges(json.loads(gzip.decompress(path.read_bytes()))):
            if len(found) > 1:
                least, most = found.get("min", float("-inf")), found.get("max", float("inf"))
                assert all(least <= found[name] <= most for name in found), (path.name, place, found)
                count += "max" in found
    assert count > 10
