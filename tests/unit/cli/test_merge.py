from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fake_runs import FakeRun, make_run
from kineto import write_trace
from lightning_memprof.cli.main import main


def slices(path: Path) -> list[dict[str, object]]:
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        return [one for one in json.load(stream)["traceEvents"] if one["ph"] == "X"]


def processes(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        found = json.load(stream)["traceEvents"]
    return [one["args"]["name"] for one in found if one["ph"] == "M" and one["name"] == "process_name"]


def two(folder: Path) -> list[str]:
    event = {"ph": "X", "name": "a", "pid": 7, "tid": 8, "ts": 1, "dur": 2}
    return [str(write_trace(folder / name, [event])) for name in ("a.pt.trace.json.gz", "b.json")]


def test_traces_of_any_origin_become_one_named_by_their_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json.gz"
    assert main(["merge", *two(tmp_path), "-o", str(out)]) == 0
    assert processes(out) == ["a · 7", "b · 7"]
    assert len(slices(out)) == 2
    assert capsys.readouterr().out.startswith(f"{out}: 2 events, 0.0 MB; ")


def test_traces_of_ranks_are_on_one_clock_and_their_timeline_is_no_trace_to_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        reduce = {"ph": "X", "cat": "user_annotation", "name": "gloo:all_reduce", "pid": 7, "tid": 8, "dur": 10}
        events = [{**reduce, "ts": 1000 * number + 3_000_000 * rank} for number in range(5)]
        write_trace(tmp_path / f"r{rank}.json", events, distributedInfo={"rank": rank, "world_size": 2})
    out = tmp_path / "out.json.gz"
    assert main(["merge", str(tmp_path), "-o", str(out)]) == 0
    times = [one["ts"] for one in slices(out)]
    assert times[:5] == times[5:] == [0, 1000, 2000, 3000, 4000]
    said = capsys.readouterr().out
    assert said.startswith("The clocks of 2 traces were aligned by 5 collectives; the residual error is 0 ns.\n")
    assert main(["show", str(out)]) == 1
    assert capsys.readouterr().err == (
        f"lightning-memprof: error: {out}: is a timeline of 2 merged traces, for lightning-memprof view; "
        "name the run or the traces themselves\n"
    )
    assert main(["merge", str(tmp_path / "r0.json"), "-o", str(out)]) == 0
    assert main(["show", str(out)]) == 0


def test_a_directory_of_traces_is_merged_as_view_opens_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "traces").mkdir()
    two(tmp_path / "traces")
    out = tmp_path / "out.json.gz"
    assert main(["merge", str(tmp_path / "traces"), "-o", str(out)]) == 0
    assert processes(out) == ["a · 7", "b · 7"]
    (tmp_path / "traces" / "c.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": [[]]}, 4))
    assert main(["merge", str(tmp_path / "traces"), "-o", str(out)]) == 1
    assert "c.pickle: is not a trace" in capsys.readouterr().err


def test_a_run_becomes_one_timeline_of_all_ranks_or_of_the_chosen_ones(tmp_path: Path) -> None:
    make_run(tmp_path, FakeRun(world_size=2))
    out = tmp_path / "out.json.gz"
    assert main(["merge", str(tmp_path), "-o", str(out)]) == 0
    assert {name.split(" · ")[0] for name in processes(out) if name.startswith("rank")} == {"rank 0", "rank 1"}
    assert any("aten::addmm" in str(one["name"]) for one in slices(out))
    assert main(["merge", str(tmp_path), "-o", str(out), "--ranks", "1", "--window", "0"]) == 0
    assert {name.split(" · ")[0] for name in processes(out) if name.startswith("rank")} == {"rank 1"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["a.json", "b.json", "--window", "1"], "trace files are merged whole"),
        (["a.json", "missing.json"], "no such file"),
    ],
)
def test_what_cannot_be_merged_is_one_line_on_stderr(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.json", "b.json"):
        write_trace(tmp_path / name, [{"ph": "X", "name": "a", "pid": 7, "tid": 8, "ts": 1, "dur": 2}])
    assert main(["merge", *arguments, "-o", "out.json"]) == 1
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_a_person_sees_a_bar_on_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("lightning_memprof.cli.progress.PATIENCE_SECONDS", 0.0)
    assert main(["merge", *two(tmp_path), "-o", str(tmp_path / "out.json")]) == 0
    assert "merging" in terminal.getvalue()


def test_a_file_of_the_run_is_never_the_result_and_what_is_damaged_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, FakeRun(world_size=2))
    manifest = run / "manifest.rank00001.jsonl"
    before = manifest.read_bytes()
    assert main(["merge", str(run), "-o", str(manifest)]) == 1
    assert "this is an input file" in capsys.readouterr().err
    assert manifest.read_bytes() == before
    series = next(run.glob("window000/rank00001.host.jsonl"))
    series.unlink()
    assert main(["merge", str(run), "-o", str(tmp_path / "out.json.gz")]) == 0
    assert "rank00001.host.jsonl: is listed but missing" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("end", [os.kill, os.killpg], ids=["alone", "with its group"])
def test_a_merge_that_is_ended_leaves_nothing_behind_and_says_nothing(
    tmp_path: Path, number: signal.Signals, end: Callable[[int, int], None]
) -> None:
    event = {"ph": "X", "name": "a" * 2000, "pid": 7, "tid": 8, "dur": 2}
    traces = [
        write_trace(tmp_path / name, [{**event, "ts": at} for at in range(4000)]) for name in ("a.json", "b.json")
    ]
    command = [sys.executable, "-m", "lightning_memprof", "merge", *map(str, traces), "-o", str(tmp_path / "out.json")]
    process = stopped_amid(command, tmp_path / "out.json.partial")
    end(process.pid, number)
    # What other processes of the group would say, before this one ends them.
    time.sleep(0.3)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == 130
    assert not list(tmp_path.glob("*.partial"))


def stopped_amid(command: list[str], partial: Path) -> subprocess.Popen[bytes]:
    """Start the command, again if it was faster, and stop it while the file is there: a signal comes before its end."""
    while True:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        while process.poll() is None:
            if partial.exists():
                # Not by Popen, which would wait for it, too.
                os.kill(process.pid, signal.SIGSTOP)
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
                if partial.exists():
                    return process
                os.kill(process.pid, signal.SIGCONT)
            time.sleep(0.002)
        process.communicate()


def test_without_a_result_the_option_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", *two(tmp_path)]) == 2
    assert "merge: -o is required, as in: lightning-memprof merge RUN -o merged.json.gz" in capsys.readouterr().err
