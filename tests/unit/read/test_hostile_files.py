"""A run directory that somebody else has made: each of its files may be anything else under the same name."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fake_memory import FakeMemory
from fake_runs import FakeRun, make_run
from fuzz_targets import outcome
from lightning_memprof.account.ranks.summary import RankSummary, encode_summary, read_summary
from lightning_memprof.artifacts.manifest import ManifestWriter
from lightning_memprof.cli.main import main
from lightning_memprof.errors import ArtifactError, MemprofError
from lightning_memprof.read.run.following import Follower
from lightning_memprof.read.run.load import load_run
from lightning_memprof.report.opened import opened
from lightning_memprof.report.printers.json import to_json
from lightning_memprof.timeline.merge import merge_traces
from lightning_memprof.timeline.sources import run_sources
from lightning_memprof.units import GIB

TERABYTE = 1 << 40

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Have what reads without an end fail, and not the machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 3 * GIB, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def hollow(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(TERABYTE)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def dangling(path: Path) -> None:
    path.symlink_to("not there")


def binary(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 40)


HAZARDS: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "a device without an end": endless,
    "a directory": Path.mkdir,
    "a terabyte of holes": hollow,
    "a link to itself": loop,
    "a link to nothing": dangling,
    "bytes": binary,
    "nothing": Path.touch,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything that a rank writes, and what only some runs have."""
    root = tmp_path_factory.mktemp("whole") / "version_0"
    run = make_run(root, FakeRun(steps=6, windows=((1, 2),), trace=True, memory=FakeMemory()))
    summary = RankSummary(rank=0, world_size=1, host="node0", window=0, steps=[1, 2])
    (run / "window000" / "rank00000.summary.json").write_bytes(encode_summary(summary))
    (run / "system.rank00000.jsonl").write_text(json.dumps({"step": 1, "cpu_percent": 12.5}) + "\n")
    (run / "oom.rank00000.json").write_text(json.dumps({"events": [{"number": 1, "step": 2}]}))
    for name in ("functions.rank00000.jsonl", "snapshots.rank00000.jsonl"):
        if not (run / name).exists():
            (run / name).write_text(json.dumps({"step": 1, "function": "training_step"}) + "\n")
    with closing(ManifestWriter(run / "manifest.rank00000.jsonl")) as manifest:
        manifest.append("oom", number=1, step=2, requested_bytes=1, snapshot="cuda_oom_rank_0.pickle")
    return root


def look(root: Path) -> dict[str, Any]:
    with opened([os.fspath(root)]) as view:
        page = to_json(view)
    Follower(root / "memprofiler").look()
    return page


def names(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def copied(whole: Path, root: Path, hazard: str, taken: list[str]) -> Path:
    """Copy the run, with something else in the place of some of its files."""
    shutil.copytree(whole, root)
    for name in taken:
        (root / name).unlink()
        HAZARDS[hazard](root / name)
    return root


@pytest.mark.parametrize("hazard", ["a pipe", "a device without an end"])
def test_what_lies_in_the_place_of_one_file_is_not_waited_for(tmp_path: Path, whole: Path, hazard: str) -> None:
    assert len(names(whole)) > 8
    for number, name in enumerate(names(whole)):
        root = copied(whole, tmp_path / str(number) / "version_0", hazard, [name])
        if "manifest" in name:
            # Without it there is no run.
            with pytest.raises(MemprofError) as refusal:
                look(root)
            assert "\n" not in str(refusal.value)
        else:
            assert json.dumps(look(root))


@pytest.mark.slow
@pytest.mark.parametrize("hazard", HAZARDS)
def test_of_a_run_in_which_only_the_manifest_is_a_file_there_are_a_page_and_a_timeline_or_one_line(
    tmp_path: Path, whole: Path, hazard: str
) -> None:
    taken = [name for name in names(whole) if "manifest" not in name]
    root = copied(whole, tmp_path / "version_0", hazard, taken)
    assert json.dumps(look(root))
    assert "\n" not in outcome(lambda: merge_traces(run_sources(load_run(root), None, None), tmp_path / "all.json"))


@pytest.mark.parametrize("hazard", ["a pipe", "a device without an end", "a terabyte of holes"])
def test_a_manifest_that_is_none_is_one_line(
    tmp_path: Path, whole: Path, hazard: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = copied(whole, tmp_path / "version_0", hazard, ["memprofiler/manifest.rank00000.jsonl"])
    assert main(["show", str(root)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "manifest.rank00000.jsonl: cannot be read" in line


@pytest.mark.parametrize("hazard", HAZARDS)
def test_a_summary_that_is_none_is_refused(tmp_path: Path, hazard: str) -> None:
    path = tmp_path / "rank00000.summary.json"
    HAZARDS[hazard](path)
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_summary(path)


PLACES = ["../secret.json", "memprofiler/../../secret.json", "/dev/zero", "a\0b", "", ".", "..", "/", "~/secret.json"]


@pytest.mark.parametrize("kind", ["trace", "series", "snapshot", "table", "blob"])
def test_a_manifest_that_names_files_elsewhere_gets_a_page_and_nothing_of_them(
    tmp_path: Path, whole: Path, kind: str
) -> None:
    """None of these is below the run; a device that is named by its path is no file of a run."""
    root = tmp_path / "version_0"
    shutil.copytree(whole, root)
    (tmp_path / "secret.json").write_text('{"traceEvents": [{"ph": "X", "name": "the secret", "ts": 1, "dur": 1}]}')
    with closing(ManifestWriter(root / "memprofiler" / "manifest.rank00000.jsonl")) as manifest:
        for at, path in enumerate(PLACES):
            facts = {"type": kind, "path": path, "size_bytes": 0 if path == "/dev/zero" else None, "window": 0}
            manifest.append("artifact", collector=f"planted{at}", **facts)
    assert "the secret" not in json.dumps(look(root))


def planted(root: Path, name: str, victim: Path) -> None:
    victim.write_text("mine")
    (root / name).symlink_to(victim)


def test_looking_at_a_run_writes_through_no_link_that_lies_in_it(tmp_path: Path, whole: Path) -> None:
    """Whoever made the directory may have foreseen the name under which the table of operators is written."""
    root = tmp_path / "version_0"
    shutil.copytree(whole, root)
    (trace,) = root.glob("*.pt.trace.json.gz")
    table = trace.name.partition("[Strategy]")[0] + ".txt"
    planted(root, f"{table}.partial", tmp_path / "victim")
    look(root)
    assert (tmp_path / "victim").read_text() == "mine"
    assert (root / table).is_file()


@pytest.mark.slow
def test_the_page_is_not_written_through_a_link_that_lies_in_the_run(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "version_0"
    shutil.copytree(whole, root)
    planted(root / "memprofiler", "report.html", tmp_path / "victim")
    assert main(["report", str(root)]) == 1
    assert "report.html: is a link, and the page would be written where it leads" in capsys.readouterr().err
    (root / "memprofiler" / "report.html").unlink()
    planted(root / "memprofiler", "report.html.partial", tmp_path / "victim")
    assert main(["report", str(root)]) == 0
    assert (tmp_path / "victim").read_text() == "mine"
