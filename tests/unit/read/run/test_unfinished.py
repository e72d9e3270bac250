from __future__ import annotations

from pathlib import Path

import pytest

from fake_runs import make_run
from lightning_memprof.read.run.load import load_run
from lightning_memprof.report.view import run_view

TRACE = "fit-{}-0[Strategy]SingleDeviceStrategy.training_step.17.pt.trace.json.gz.partial"


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # What is unfinished below tmp_path is taken for what a test has left behind.
    return tmp_path_factory.mktemp("log")


def run_directory(root: Path, *, killed: bool) -> Path:
    make_run(root)
    directory = root / "memprofiler"
    manifest = directory / "manifest.rank00000.jsonl"
    if killed:
        manifest.write_text("".join(line for line in manifest.open() if '"kind":"end"' not in line))
    return directory


def named(directory: Path) -> dict[str, str]:
    return {problem.piece: problem.message for problem in run_view(load_run(directory)).problems}


def test_a_whole_run_has_nothing_unfinished(root: Path) -> None:
    assert named(run_directory(root, killed=False)) == {}
    assert named(run_directory(root / "killed", killed=True)) == {}


@pytest.mark.parametrize(
    "piece",
    [
        "memprofiler/window000/rank00000.host.jsonl.partial",
        "memprofiler/rank_0_memory_stats.yaml.partial",
        "memprofiler/module_mem_rank_0_training_step_3.log.partial",
        "memprofiler/cuda_alloc_rank_0.training_step.3.end.pickle.partial",
        "memprofiler/oom.rank00000.json.partial",
        TRACE.format("fts_extended_pytorch_profiler"),
    ],
)
@pytest.mark.parametrize("killed", [True, False])
def test_a_file_that_was_not_finished_is_named(root: Path, piece: str, killed: bool) -> None:
    directory = run_directory(root, killed=killed)
    (root / piece).write_text('{"half')
    assert list(named(directory)) == [piece]
    assert "is partial" in named(directory)[piece]


def test_a_trace_that_was_not_compressed_yet_is_said_to_be_plain_json(root: Path) -> None:
    directory = run_directory(root, killed=True)
    piece = "memprofiler/window000/rank00000.operator_trace.jsonl.partial"
    (root / piece).write_text("{}")
    assert "uncompressed trace" in named(directory)[piece]


@pytest.mark.parametrize(
    "other",
    [
        "memprofiler/window000/rank00001.host.jsonl.partial",
        "memprofiler/report.html.partial",
        TRACE.format("fts_extended_pytorch_profiler-2"),
        "model.ckpt.partial",
    ],
)
def test_what_another_rank_run_or_program_has_not_finished_is_not_this_ones(root: Path, other: str) -> None:
    directory = run_directory(root, killed=True)
    (root / other).write_text("half")
    assert named(directory) == {}


@pytest.mark.parametrize("name", ["pulse.rank00000.csv", "system.rank00000.jsonl", "snapshots.rank00000.jsonl"])
def test_a_last_line_that_was_cut_is_named(root: Path, name: str) -> None:
    directory = run_directory(root, killed=True)
    with (directory / name).open("a") as file:
        file.write("4,")
    assert "last line is truncated" in named(directory)[name]
