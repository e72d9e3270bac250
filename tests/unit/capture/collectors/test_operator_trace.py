from __future__ import annotations

import gzip
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memprof.capture.collectors import operator_trace
from lightning_memprof.capture.collectors.operator_trace import NvtxRanges, OperatorTrace
from lightning_memprof.errors import ConfigError
from lightning_memprof.schedule import Schedule
from recorded_rows import read_rows
from sessions import context, drive, session


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return found


ORIGINAL_CALL = nn.Module._call_impl


def is_hooked() -> bool:
    return nn.Module._call_impl is not ORIGINAL_CALL


def test_a_window_gives_one_trace_with_its_active_steps_and_the_modules_names(tmp_path: Path) -> None:
    with context(tmp_path) as run:
        inside: list[bool] = []

        def forward(step: int) -> None:
            inside.append(is_hooked())
            run.model(torch.zeros(1, 4))

        with session(run, Schedule(), [OperatorTrace()]) as made:
            drive(made, range(6), forward)
        run.sink.drain()
        assert inside == [False, True, True, True, False, False]
        assert not is_hooked()
    (trace,) = tmp_path.glob("*.pt.trace.json.gz")
    names = [event.get("name") for event in events(trace)]
    assert [name for name in names if str(name).startswith("ProfilerStep")] == ["ProfilerStep#2", "ProfilerStep#3"]
    assert names.count("[pl][module]torch.nn.modules.linear.Linear: 0") == 2
    assert "aten::linear" in names
    assert list(tmp_path.rglob("*.partial")) == []


def test_a_window_that_only_warmed_up_leaves_no_trace_and_no_profiler(tmp_path: Path) -> None:
    with context(tmp_path) as run:
        with session(run, Schedule(wait=0, warmup=2), [OperatorTrace()]) as made:
            drive(made, range(2))
        run.sink.drain()
        # A busy machine adds pauses.
        kinds = [row["kind"] for row in read_rows(run.sink.manifest.path)[0] if row["kind"] != "pause"]
        assert kinds == ["window", "window"]
    assert list(tmp_path.glob("*.gz")) == []
    assert not torch.autograd._profiler_enabled()
    with torch.profiler.profile() as profiler:
        torch.zeros(1)
    assert len(list(profiler.events() or ())) > 0


def test_beside_a_profiler_of_the_user_the_window_is_unavailable_and_his_goes_on(tmp_path: Path) -> None:
    with context(tmp_path) as run:
        with torch.profiler.profile() as users, session(run, Schedule(wait=0), [OperatorTrace()]) as made:
            drive(made, range(4), lambda _: run.model(torch.zeros(1, 4)))
        rows, _ = read_rows(run.sink.manifest.path)
    reasons = [(row["collector"], row["reason"]) for row in rows if row["kind"] == "unavailable"]
    assert reasons == [("operator_trace", "another torch profiler is running")]
    assert sum(event.name == "aten::linear" for event in users.events() or ()) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("options", [{"profile_memory": True}, {"with_stack": True}], ids=["memory", "stack"])
@pytest.mark.parametrize("own", [False, True], ids=["", "own"])
def test_a_forked_process_does_not_record_and_may_have_a_profiler_of_its_own(
    tmp_path: Path, options: dict[str, Any], own: bool
) -> None:
    def work() -> None:
        assert not torch.autograd._profiler_enabled()
        assert sys.getprofile() is None
        if own:
            with torch.profiler.profile() as profiler:
                torch.zeros(2).add_(1)
            assert [event.name for event in profiler.events() or ()].count("aten::add_") == 1

    def inside(step: int) -> None:
        if step == 2:
            child = multiprocessing.get_context("fork").Process(target=work)
            child.start()
            child.join()
            assert child.exitcode == 0
        torch.zeros(2).add_(1)

    with context(tmp_path) as run:
        with session(run, Schedule(), [OperatorTrace(**options)]) as made:
            drive(made, range(6), inside)
        run.sink.drain()
        kinds = [row["kind"] for row in read_rows(run.sink.manifest.path)[0]]
    # The process wrote nothing.
    assert (kinds.count("unavailable"), kinds.count("export"), kinds.count("artifact")) == (0, 1, 1)
    (trace,) = tmp_path.glob("*.pt.trace.json.gz")
    assert [event.get("name") for event in events(trace)].count("aten::add_") == 2


def test_an_exception_in_a_step_still_saves_the_trace(tmp_path: Path) -> None:
    def inside(step: int) -> None:
        torch.zeros(2) + 1
        if step == 2:
            raise RuntimeError

    with context(tmp_path) as run:
        opened = session(run, Schedule(), [OperatorTrace()])
        with pytest.raises(RuntimeError), opened as made:
            drive(made, range(6), inside)
        assert not is_hooked()
    (trace,) = tmp_path.glob("*.pt.trace.json.gz")
    assert "ProfilerStep#2" in {event.get("name") for event in events(trace)}


def test_the_user_gets_the_real_profile_and_may_export_it(tmp_path: Path) -> None:
    seen: list[object] = []

    def ready(profiler: torch.profiler.profile) -> None:
        seen.append(profiler)
        profiler.export_chrome_trace(str(tmp_path / "own.json"))
        profiler.export_chrome_trace(str(tmp_path / "own.json.gz"))

    with context(tmp_path / "log") as run, session(run, Schedule(), [OperatorTrace(on_trace_ready=ready)]) as made:
        drive(made, range(6))
    assert [type(profiler) for profiler in seen] == [torch.profiler.profile]
    (ours,) = (tmp_path / "log").glob("*.pt.trace.json.gz")
    assert json.loads((tmp_path / "own.json").read_text())["traceEvents"] == events(ours)
    assert events(tmp_path / "own.json.gz") == events(ours)


def test_a_callback_that_fails_where_the_program_starts_its_own_profiler_does_not_fail_that_one(tmp_path: Path) -> None:
    def ready(_: object) -> None:
        raise ZeroDivisionError

    profilers: list[torch.profiler.profile] = []

    def own(step: int) -> None:
        if step == 2:
            with torch.profiler.profile() as profiler:
                torch.zeros(1)
            profilers.append(profiler)

    with context(tmp_path) as run:
        with session(run, Schedule(), [OperatorTrace(on_trace_ready=ready)]) as made:
            drive(made, range(6), own)
        errors = [row for row in read_rows(run.sink.manifest.path)[0] if row["kind"] == "error"]
    assert [(row["collector"], row["message"]) for row in errors] == [("operator_trace", "ZeroDivisionError")]
    assert profilers[0].events()
    assert len(list(tmp_path.glob("*.pt.trace.json.gz"))) == 1


def test_without_export_nothing_is_written(tmp_path: Path) -> None:
    with context(tmp_path) as run, session(run, Schedule(), [OperatorTrace(export=False)]) as made:
        drive(made, range(6))
    assert list(tmp_path.glob("*.gz")) == []
    assert list(tmp_path.rglob("*.partial")) == []


def test_traces_may_go_elsewhere_and_are_then_listed_by_their_absolute_path(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    trace = OperatorTrace(dirpath=str(elsewhere), filename="mine")
    with context(tmp_path / "log") as run:
        with session(run, Schedule(), [trace]) as made:
            drive(made, range(6))
        run.sink.drain()
        rows, _ = read_rows(run.sink.manifest.path)
    (path,) = elsewhere.iterdir()
    assert path.name.startswith("fit-mine-0[Strategy]SingleDeviceStrategy.training_step.")
    assert [row["path"] for row in rows if row["kind"] == "artifact"] == [str(path)]


@pytest.mark.parametrize("activity", ["gpu", "", 3])
def test_an_unknown_activity_is_refused_at_once_with_the_known_ones(activity: Any) -> None:
    with pytest.raises(ConfigError, match="is unknown; use cpu, "):
        OperatorTrace(activities=["cpu", activity])


@pytest.mark.parametrize("wanted", [False, True])
def test_torch_is_given_its_deprecated_option_only_when_it_is_set(
    wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(operator_trace, "profile", given.update)
    OperatorTrace(with_modules=wanted).profiler()
    assert given.get("with_modules", False) is wanted
    assert ("with_modules" in given) is wanted


def test_nvtx_ranges_need_cuda(tmp_path: Path) -> None:
    with context(tmp_path) as run:
        assert NvtxRanges().unavailable(run) == "NVTX ranges need a CUDA device"
