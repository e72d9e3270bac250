from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fake_runs import FakeRun, make_run
from lightning_memprof.account.steps.workers import Loading, loading, workers
from lightning_memprof.read.run.load import load_run
from lightning_memprof.report.document import Lines, Table
from lightning_memprof.report.sections.workers import workers_section
from lightning_memprof.report.view import run_view
from lightning_memprof.units import MIB

S = 1_000_000_000
MS = 1_000_000


def worker(pid: int, second: int, **columns: Any) -> dict[str, Any]:
    """A sample of a worker that sleeps 30 ms and computes 10 ms for each of 25 batches a second."""
    return {
        "kind": "worker",
        "pid": pid,
        "worker": pid - 100,
        "dataset": "Images",
        "step": 50 * second,
        "time_ns": S * second,
        "batches": 25 * second,
        "fetch_ns": S * second,
        "fetch_cpu_ns": 250 * MS * second,
        "collate_ns": 25 * MS * second,
        "cpu_ns": 250 * MS * second,
        "core_wait_ns": 0,
        "queue_wait_ns": 0,
        "pss_bytes": 60 * MIB,
        "private_bytes": (40 + second) * MIB,
        "shared_bytes": 80 * MIB,
        **columns,
    }


def recorded(tmp_path: Path, *samples: dict[str, Any]) -> Path:
    directory = make_run(tmp_path, FakeRun(memory=None, trace=False))
    (directory / "processes.rank00000.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return directory


def test_the_times_of_workers_have_a_closed_form(tmp_path: Path) -> None:
    directory = recorded(tmp_path, *(worker(pid, second) for second in (1, 3) for pid in (100, 101)))
    lead = load_run(directory).lead
    for found in workers(lead):
        assert (found.batches, found.fetch_ns, found.collate_ns) == (75, 40 * MS, MS)
        assert (found.cpu_share, found.blocked_share, found.queue_share) == pytest.approx((0.25, 0.75, 0))
        assert (found.private_bytes, found.added_bytes) == (43 * MIB, 2 * MIB)
    assert loading(lead) == Loading(fetch_ns=40 * MS, cpu_ns=10 * MS, collate_ns=MS)


@pytest.mark.parametrize(("step_ms", "wanted"), [(50, 1), (40, 1), (39, 2), (10, 4), (9, 5)])
def test_the_number_of_workers_is_a_quotient(step_ms: int, wanted: int) -> None:
    cost = Loading(fetch_ns=40 * MS, cpu_ns=10 * MS)
    assert cost.workers_for(step_ms * MS) == wanted
    assert not cost.is_cpu_bound


def test_a_wait_for_a_core_is_not_a_cost_of_the_batch(tmp_path: Path) -> None:
    samples = [worker(100, second, core_wait_ns=500 * MS * second) for second in (1, 3)]
    lead = load_run(recorded(tmp_path, *samples)).lead
    assert loading(lead) == Loading(fetch_ns=20 * MS, cpu_ns=10 * MS, collate_ns=MS)


def test_workers_without_counters_have_memory_only(tmp_path: Path) -> None:
    columns = dict.fromkeys(("batches", "fetch_ns", "fetch_cpu_ns", "collate_ns", "queue_wait_ns", "worker"))
    lead = load_run(recorded(tmp_path, worker(100, 1, **columns), worker(100, 3, **columns))).lead
    (found,) = workers(lead)
    assert (found.fetch_ns, found.blocked_share) == (None, None)
    assert found.cpu_share == pytest.approx(0.25)
    assert loading(lead) is None


def test_the_page_has_each_worker_and_the_code_of_one_that_died(tmp_path: Path) -> None:
    samples = [worker(100, 1), worker(101, 1), worker(100, 3), worker(101, 3, exit_code=-9)]
    section = workers_section(run_view(load_run(recorded(tmp_path, *samples))))
    assert section is not None
    memory, time = (part for part in section.parts if isinstance(part, Table))
    headings = [column.heading for column in memory.columns]
    codes = [row[headings.index("exit code")].value for row in memory.rows]
    assert codes == [None, -9]
    assert [row[0].value for row in time.rows] == ["Images", "Images"]


def test_close_to_the_nodes_limit_the_page_has_the_number_of_workers_that_fits(tmp_path: Path) -> None:
    def labels(limit: int) -> list[str]:
        directory = make_run(tmp_path / str(limit), FakeRun(memory=None, trace=False, rss_bytes=lambda _: 100 * MIB))
        manifest = directory / "manifest.rank00000.jsonl"
        lines = [json.loads(line) for line in manifest.read_text().splitlines()]
        lines[0]["environment"]["memory_limit_bytes"] = limit
        manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
        samples = [worker(100, 3), {"kind": "workers", "step": 150, "workers": 1, "private_bytes": 43 * MIB}]
        (directory / "processes.rank00000.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        section = workers_section(run_view(load_run(directory)))
        assert section is not None
        (node,) = (part for part in section.parts if isinstance(part, Lines))
        return [line.label for line in node.rows]

    assert labels(2000 * MIB) == ["memory of the node", "limit of the node"]
    assert labels(200 * MIB) == ["memory of the node", "limit of the node", "num_workers that fits"]


def test_a_run_without_workers_has_no_section(tmp_path: Path) -> None:
    assert workers_section(run_view(load_run(recorded(tmp_path)))) is None
