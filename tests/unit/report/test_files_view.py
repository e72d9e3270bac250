from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.cells import cell_len

from fake_runs import FakeRun, make_run
from lightning_memprof.errors import ArtifactError
from lightning_memprof.judge import Evidence, Finding, Severity
from lightning_memprof.judge.rule import Found
from lightning_memprof.judge.verdict import ROWS
from lightning_memprof.read.run.targets import find_targets
from lightning_memprof.report.document import Card, Document, Findings, Stack
from lightning_memprof.report.files_view import FilesView, files_view
from lightning_memprof.report.opened import OpenOptions, opened
from lightning_memprof.report.printers import html
from lightning_memprof.report.printers.json import to_json
from lightning_memprof.report.printers.markdown import to_markdown
from lightning_memprof.report.sections import document_of
from lightning_memprof.report.view import View
from lightning_memprof.units import MIB
from next_steps import step
from pages import printed, short, table_of
from snapshots import block, event, failed, segment, write_snapshot
from snapshots import snapshot as made

US_OF_STEP = 1000


def trace(path: Path, *, rank: int | None = 0, busy_us: int = 900, name: str = "gemm") -> Path:
    """Write a trace of three steps; in each one kernel of ``busy_us`` and 100 us of loading."""
    events: list[dict[str, Any]] = []
    for number in range(3):
        start = number * US_OF_STEP
        cpu = {"ph": "X", "pid": 1, "tid": 1}
        launch = {"correlation": number + 1}
        events += [
            {**cpu, "cat": "user_annotation", "name": f"ProfilerStep#{number}", "ts": start, "dur": US_OF_STEP},
            {**cpu, "cat": "user_annotation", "name": "enumerate(DataLoader)#x.__next__", "ts": start, "dur": 100},
            {**cpu, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": start + 100, "dur": 5, "args": launch},
            {
                "ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": start + 105, "dur": busy_us,
                "args": {**launch, "stream": 7, "device": 0},
            },
        ]  # fmt: skip
    info = {} if rank is None else {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schemaVersion": 1, **info, "traceEvents": events}))
    return path


def snapshot(path: Path) -> Path:
    """Write a snapshot of one segment of 4 MiB, half of it in use."""
    mib = 1 << 20
    frames = [{"filename": "train.py", "line": 3, "name": "forward"}]
    blocks = [
        {"address": 0, "size": 2 * mib, "requested_size": 2 * mib, "state": "active_allocated", "frames": frames},
        {"address": 2 * mib, "size": 2 * mib, "requested_size": 0, "state": "inactive", "frames": []},
    ]
    segment = {"device": 0, "address": 0, "total_size": 4 * mib, "stream": 0, "segment_type": "large", "blocks": blocks}
    alloc = {"action": "alloc", "addr": 0, "size": 2 * mib, "stream": 0, "time_us": 5, "frames": frames}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [[alloc]]}, protocol=4))
    return path


def viewed(*paths: Path, rank: int | None = None) -> FilesView:
    return files_view(find_targets(paths), rank=rank)


def stack(view: FilesView) -> str:
    return next(part.title for part in document_of(view).sections[0].parts if isinstance(part, Stack))


def bar(*paths: Path) -> str:
    return stack(viewed(*paths))


def test_the_bar_is_that_of_the_verdicts_device_or_of_the_one_with_the_highest_peak(tmp_path: Path) -> None:
    segments = [segment(block(0, size * MIB), device=device) for device, size in enumerate((1, 3, 2))]
    quiet = write_snapshot(tmp_path / "quiet.pickle", made(segments, [event("alloc", 0, MIB)]))
    assert bar(quiet) == "Reserved bytes at the end, quiet.pickle, cuda:1"
    full = write_snapshot(tmp_path / "full.pickle", made(segments[:1], [failed(MIB, 0)]))
    assert bar(quiet, full) == "Reserved bytes at the end, full.pickle, cuda:0"


def test_a_rule_that_fails_is_named_and_the_page_shows_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_facts: object) -> list[Found]:
        raise ValueError("negative time")

    (row,) = (row for row in ROWS["device"] if row.id == "gpu_idle")
    monkeypatch.setattr("lightning_memprof.judge.verdict.ROWS", {"device": (replace(row, find=failing),)})
    view = viewed(trace(tmp_path / "rank0.json"))
    assert "The rule gpu_idle failed (ValueError)" in view.verdict.title
    assert table_of(view, "kernels-0")


def test_files_of_several_programs_are_named_with_their_findings(tmp_path: Path) -> None:
    segments = [segment(block(0, 2 * MIB), device=0)]
    small = write_snapshot(tmp_path / "small.pickle", made(segments, [failed(MIB, 0)]))
    full = write_snapshot(tmp_path / "full.pickle", made(segments, [failed(2 * MIB, 0)]))
    document = document_of(viewed(small, full))
    assert {card.file for card in findings_of(document)} == {"small.pickle", "full.pickle"}
    assert str(document.verdict).startswith(findings_of(document)[0].heading)
    alone = document_of(viewed(full))
    assert [card.file for card in findings_of(alone)] == [""]
    assert str(alone.verdict) == findings_of(alone)[0].title


def findings_of(document: Document) -> list[Card]:
    return [card for part in document.sections[0].parts if isinstance(part, Findings) for card in part.cards]


def test_the_device_time_is_that_of_the_verdicts_trace(tmp_path: Path) -> None:
    busy, idle = trace(tmp_path / "busy.json"), trace(tmp_path / "idle.json", busy_us=100)
    view = viewed(busy, idle)
    assert stack(view) == "Device time, idle.json"
    found = replace(view.findings[0], evidence=(Evidence(artifact=str(busy)),))
    assert stack(replace(view, findings=(found,))) == "Device time, busy.json"


def test_the_document_has_the_promised_keys_and_figures(tmp_path: Path) -> None:
    document = to_json(viewed(trace(tmp_path / "a.json"), snapshot(tmp_path / "b.pickle")))
    document = json.loads(json.dumps(document, allow_nan=False))
    (report,) = document["traces"]
    assert report["file"] == str(tmp_path / "a.json")
    assert report["rank"] == 0
    assert report["gpu_window"] == {
        "window_ns": 2_900_000,
        "busy_ns": 2_700_000,
        "idle_ns": 200_000,
        "compute_ns": 2_700_000,
        "communication_ns": 0,
        "memory_copy_ns": 0,
        "communication_overlapped_ns": 0,
        "communication_exposed_ns": 0,
    }
    assert report["step_window"]["data_loading_ns"] == 300_000
    assert report["step_window"]["mean_step_ns"] == 1_000_000
    assert [step["number"] for step in report["steps"]] == [0, 1, 2]
    (other,) = document["snapshots"]
    (device,) = other["devices"]
    assert other["oom"] is None
    assert (device["reserved_bytes"], device["allocated_bytes"], device["inactive_bytes"]) == (
        4 << 20,
        2 << 20,
        2 << 20,
    )
    (holder,) = device["holders_at_peak"]
    assert (holder["site"], holder["bytes"]) == ("train.py(3): forward", 2 << 20)
    for finding in document["findings"]:
        assert {"rule", "severity", "title", "numbers", "evidence", "remedies"} <= finding.keys()
    assert {"title", "why", "next"} <= document["verdict"].keys()


def test_a_trace_of_a_run_has_the_rank_that_the_run_knows_it_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html, "charts", lambda _view: {})
    with opened([str(make_run(tmp_path, FakeRun(world_size=2)))], OpenOptions(rank=1)) as view:
        assert isinstance(view, View)
        (trace,) = view.traces
        assert trace.rank == 1
        assert not any("no rank" in words for words in trace.missing)
        assert to_json(view)["traces"][0]["rank"] == 1
        section = html.to_html(view).partition('id="traces"')[2].partition("</section>")[0]
        # By itself the file does not say it.
        assert viewed(trace.file).traces[0].rank is None
    assert "unknown" not in section


def test_the_operators_of_a_trace_without_a_device_are_on_every_page(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    cpu = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1}
    events = [{**cpu, "name": "aten::linear", "ts": 0, "dur": 4000}, {**cpu, "name": "aten::mm", "ts": 10, "dur": 3000}]
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    view = viewed(path)
    assert [list(row.values())[:5] for row in table_of(view, "operators-0")] == [
        ["aten::mm", "3.00 ms", "75%", "3.00 ms", "1"],
        ["aten::linear", "1.00 ms", "25%", "4.00 ms", "1"],
    ]
    operators = to_json(view)["traces"][0]["operators"]
    assert [operator["self_ns"] for operator in operators] == [3_000_000, 1_000_000]
    assert "Operators on the host" in html.to_html(view)


def test_holders_beyond_the_listed_ones_are_one_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_memprof.report.printers.json.MAX_ROWS", 0)
    (report,) = to_json(viewed(snapshot(tmp_path / "b.pickle")))["snapshots"]
    assert report["devices"][0]["holders_at_peak"] == []
    assert (report["devices"][0]["other_holders"], report["devices"][0]["other_holders_bytes"]) == (1, 2 << 20)


def test_what_is_worth_less_than_a_verdict_comes_after_what_the_device_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for share, first in ((0.04, "nothing_found"), (0.5, "small")):
        small = Finding(
            rule="small", severity=Severity.INFO, title="It takes 4%.", why="", remedies=(step("x"),), weight=share
        )
        monkeypatch.setattr("lightning_memprof.judge.verdict.STEP_RULES", (lambda _facts, found=small: found,))
        view = viewed(trace(tmp_path / "a.json"))
        assert view.verdict.rule == first
        assert small in view.findings


def test_a_healthy_trace_says_what_the_device_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_memprof.judge.verdict.ROWS", {})
    view = viewed(trace(tmp_path / "a.json"))
    assert view.verdict.rule == "nothing_found"
    assert view.verdict.title == "Compute-bound: matrix multiplication takes 93% of each step (898 µs of 965 µs)."
    assert "lightning-memprof view" in view.verdict.next_steps[-1]


def test_a_file_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    torn = tmp_path / "torn.pt.trace.json"
    torn.write_text('{"traceEvents": [{"ph": "X"')
    view = viewed(trace(tmp_path / "a.json"), torn)
    assert [trace.file.name for trace in view.traces] == ["a.json"]
    (problem,) = view.problems
    assert problem.piece == str(torn)
    assert not problem.message.startswith(str(torn))
    assert "damaged" in printed(view)
    with pytest.raises(ArtifactError, match=r"torn\.pt\.trace\.json: is truncated"):
        viewed(torn)


def test_a_rank_chooses_its_traces_and_one_that_is_not_there_is_refused(tmp_path: Path) -> None:
    paths = [trace(tmp_path / "a.json", rank=0), trace(tmp_path / "b.json", rank=1)]
    assert [trace.rank for trace in viewed(*paths, rank=1).traces] == [1]
    with pytest.raises(ArtifactError, match="--rank 7: no trace is of this rank; there are 0, 1"):
        viewed(*paths, rank=7)


@pytest.mark.parametrize("width", [1, 40, 60, 80, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_page_is_no_wider_than_100_columns_or_the_terminal(tmp_path: Path, width: int, encoding: str) -> None:
    hostile = "k" * 300 + "[red]\x1b[31m\n</script>"
    paths = [trace(tmp_path / f"{'n' * 100}{rank}.json", rank=rank, name=hostile) for rank in range(3)]
    text = printed(viewed(*paths, snapshot(tmp_path / "b.pickle")), width, encoding=encoding)
    assert "\x1b" not in text
    assert text.startswith("verdict" if width > 7 else "")
    lines = text.partition("\n\nfiles ")[0].partition("\n\ncommands ")[0].splitlines()
    if width >= 40:
        assert max(cell_len(line) for line in lines) <= min(width, 100)
    assert [line for line in text.split("\n") if line != line.rstrip()] == []


def test_the_short_page_names_the_command_that_shows_all_rows(tmp_path: Path) -> None:
    assert short(viewed(trace(tmp_path / "a.json"))).count(" --all\n") == 1


def test_several_traces_stand_beside_each_other_and_the_least_busy_comes_in_full(tmp_path: Path) -> None:
    paths = [trace(tmp_path / f"{rank}.json", rank=rank, busy_us=900 - 200 * rank) for rank in range(4)]
    view = viewed(*paths)
    assert [row["file"] for row in table_of(view, "traces-table")] == ["3.json", "2.json", "1.json", "0.json"]
    assert "Device time, 3.json" in short(view)


def test_markdown_has_tables_and_makes_names_inert(tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)> *bold* `code` | cell"
    text = to_markdown(
        document_of(viewed(trace(tmp_path / "a.json", name=hostile), snapshot(tmp_path / "b.pickle"))), is_full=True
    )
    assert text.startswith("**")
    assert "| kernel | kind | total |" in text
    assert "`train.py(3) forward`" in text
    assert "<img" not in text.replace("\\<img", "")
    assert " | cell" not in text
