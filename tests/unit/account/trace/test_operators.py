from __future__ import annotations

import inspect
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kineto import ACCELERATED, Made, event_fields, torch_table, write_trace
from lightning_memprof.account.trace.events import HostEvents
from lightning_memprof.account.trace.host import operators
from lightning_memprof.account.trace.key_averages import OperatorRow, collect_rows
from lightning_memprof.account.trace.operators import (
    AVAILABLE_SORT_KEYS,
    TableOptions,
    operator_table,
    write_operator_table,
)
from lightning_memprof.errors import ArtifactError, ConfigError
from lightning_memprof.read.trace.columns import read_columns

ALL = TableOptions(row_limit=-1)


@dataclass
class Recorded:
    """A real profile: the saved trace and torch's own view of it."""

    path: Path
    profile: Any
    options: dict[str, bool]

    def averages(self, *, by_shapes: bool) -> Any:
        from torch.profiler import profile

        options: dict[str, Any] = {"group_by_input_shape": by_shapes}
        if "include_python_functions" in inspect.signature(profile.key_averages).parameters:
            options["include_python_functions"] = True
        return self.profile.key_averages(**options)


def training(steps: int = 3) -> None:
    import torch
    from torch.profiler import record_function

    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for step in range(steps):
        with record_function(f"ProfilerStep#{step}"):
            with record_function("twin"), record_function("twin"):
                loss = model(torch.randn(4, 16)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cat([torch.randn(3, 4)] * 3)
    del model, optimizer
    torch.ones(3)


def save(recording: Any, path: Path) -> None:
    recording.profiler.kineto_results.save(str(path))


@pytest.fixture(
    scope="module",
    params=[{}, {"record_shapes": True}, {"record_shapes": True, "profile_memory": True}, {"with_stack": True}],
    ids=lambda options: "+".join(options) or "plain",
)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    from torch.profiler import ProfilerActivity, profile

    path = tmp_path_factory.mktemp("traces") / "t.pt.trace.json"
    training(1)
    recording = profile(activities=[ProfilerActivity.CPU], **request.param)
    recording.prepare_trace()
    recording.start_trace()
    training()
    recording.stop_trace()
    save(recording, path)
    return Recorded(path, recording, request.param)


def test_the_report_of_a_trace_gives_operators_the_time_that_the_table_gives_them(recorded: Recorded) -> None:
    table = {row.name: row for row in collect_rows([recorded.path], group_by_input_shapes=False).rows}
    columns = read_columns(recorded.path)
    found = operators(columns, HostEvents(columns))
    assert len(found) > 30
    # Counts may differ: the table takes an operator and its only child of the same name for one.
    assert {operator.name: operator.self_ns for operator in found} == {
        operator.name: table[operator.name].self_cpu_ns for operator in found
    }


def rows_of(
    path: Path, *, by_shapes: bool = False, on_device: bool = False
) -> dict[tuple[str, bool, str], OperatorRow]:
    collected = collect_rows([path], group_by_input_shapes=by_shapes).rows
    found = [row for row in collected if row.on_device == on_device]
    rows = {(row.name, row.is_annotation, row.input_shapes): row for row in found}
    assert len(rows) == len(found)
    return rows


def near(us: float) -> Any:
    return pytest.approx(us, rel=0.01, abs=2)


NUMBER = re.compile(r"-?\d+\.\d+")


def alike(found: str, wanted: str) -> bool:
    """Whether two tables have the same words in the same columns, numbers to one unit of their last digit."""
    if NUMBER.sub(lambda number: "0" * len(number[0]), found) != NUMBER.sub(
        lambda number: "0" * len(number[0]), wanted
    ):
        return False
    pairs = zip(NUMBER.findall(found), NUMBER.findall(wanted), strict=True)
    return all(abs(float(a) - float(b)) < 1.5 * 10 ** -len(a.split(".")[1]) for a, b in pairs)


@pytest.mark.parametrize("by_shapes", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        {"row_limit": -1, "max_name_column_width": 40, "max_shapes_column_width": 30, "header": "a run"},
        *({"time_unit": unit, "row_limit": 5, "top_level_events_only": True} for unit in ("s", "ms", "us")),
    ],
)
def test_the_text_is_what_torch_prints(recorded, by_shapes, shape):
    wanted = recorded.averages(by_shapes=by_shapes).table(**shape)
    found = operator_table([recorded.path], TableOptions(group_by_input_shapes=by_shapes, **shape))
    assert alike(found, wanted + "Windows: 1\n"), f"{wanted}\n{found}"


def first_column(table: str) -> list[str]:
    lines = table.splitlines()
    width = len(lines[0].split()[0])
    end = next(i for i, line in enumerate(lines) if i > 2 and line == lines[0])
    return [line[:width].strip() for line in lines[3:end]]


@pytest.mark.slow
@pytest.mark.parametrize("key", sorted(AVAILABLE_SORT_KEYS))
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_sort_key_orders_as_torch_does(recorded, key):
    averages = recorded.averages(by_shapes=False)
    attribute = key.replace("cuda", "device").replace("xpu", "device").replace("privateuse1", "device")
    wanted = averages.table(sort_by=key, row_limit=-1, max_name_column_width=None)
    values = {average.key: getattr(average, attribute) for average in averages}
    found = operator_table([recorded.path], TableOptions(sort_by=key, row_limit=-1, max_name_column_width=None))
    ours, theirs = first_column(found), first_column(wanted)
    assert sorted(ours) == sorted(theirs)
    if key == "key":
        assert ours == theirs
    else:
        # Where values are equal torch's order is that of its rounding errors.
        assert [values[name] for name in ours] == pytest.approx([values[name] for name in theirs], rel=1e-9)


def test_threads_do_not_mix(tmp_path):
    import torch
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    config = _ExperimentalConfig(profile_all_threads=True)
    recording = profile(activities=[ProfilerActivity.CPU], experimental_config=config, profile_memory=True)
    recording.prepare_trace()
    recording.start_trace()
    threads = [threading.Thread(target=training) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.ones(2)
    recording.stop_trace()
    path = tmp_path / "t.json"
    save(recording, path)
    rows = rows_of(path)
    averages = {(average.key, average.is_user_annotation, ""): average for average in recording.key_averages()}
    assert len(averages) > 10
    assert {key: row.count for key, row in rows.items()} == {key: average.count for key, average in averages.items()}
    for key, average in averages.items():
        assert rows[key].self_cpu_ns / 1000 == near(average.self_cpu_time_total), key
        assert rows[key].self_cpu_bytes == average.self_cpu_memory_usage, key


@pytest.mark.parametrize("by_shapes", [False, True])
@pytest.mark.parametrize("sort_by", [None, "self_cuda_time_total", "self_device_memory_usage"])
def test_device_times_and_memory_are_torchs(tmp_path, by_shapes, sort_by):
    path = write_trace(tmp_path / "t.json.gz", [event_fields(made) for made in ACCELERATED])
    found = operator_table([path], TableOptions(sort_by=sort_by, row_limit=-1, group_by_input_shapes=by_shapes))
    assert found == torch_table(ACCELERATED, by_shapes=by_shapes, sort_by=sort_by, row_limit=-1) + "Windows: 1\n"
    assert "Self CUDA time total: 1.350ms\n" in found


def test_python_functions_without_rows_still_separate_operators_from_their_callers(tmp_path):
    made = (
        Made("aten::linear", 0, 100),
        Made("train.py(3): inner", 10, 50, "python_function"),
        Made("aten::addmm", 20, 30),
    )
    path = write_trace(tmp_path / "t.json", [event_fields(event) for event in made])
    every = {row.name: row for row in collect_rows([path], group_by_input_shapes=False).rows}
    without = collect_rows([path], group_by_input_shapes=False, include_python_functions=False).rows
    assert sorted(every) == ["aten::addmm", "aten::linear", "train.py(3): inner"]
    assert [row.name for row in without] == ["aten::linear", "aten::addmm"]
    assert [row.self_cpu_ns for row in without] == [every[row.name].self_cpu_ns for row in without] == [60_000, 10_000]
    assert "inner" in operator_table([path], ALL)
    assert "inner" not in operator_table([path], TableOptions(include_python_functions=False))


def test_device_work_belongs_to_the_operator_that_launched_it(tmp_path):
    rows = rows_of(write_trace(tmp_path / "t.json", [event_fields(made) for made in ACCELERATED]))
    assert rows["aten::addmm", False, ""].self_device_ns == 1_000_000
    assert (rows["aten::linear", False, ""].self_device_ns, rows["aten::linear", False, ""].device_ns) == (0, 1_000_000)
    assert rows["cudaLaunchKernel", False, ""].device_ns == 0
    kernels = rows_of(tmp_path / "t.json", on_device=True)
    assert kernels["gemm<float>", False, ""].self_device_ns == 1_250_000


def test_the_profilers_own_work_counts_on_the_main_thread(tmp_path):
    events = [Made("aten::add", 0, 100), Made("Buffer Flush", 40, 60, "overhead", thread=0)]
    fields = [event_fields(made) for made in events]
    fields[1]["pid"] = -1
    rows = rows_of(write_trace(tmp_path / "t.json", fields))
    assert rows["aten::add", False, ""].self_cpu_ns == 80_000


def test_windows_are_added_up_in_one_table(tmp_path):
    first = [Made("a", 0, 10), Made("b", 2, 4), Made("[memory]", 3, 3, "cpu_instant_event", bytes=8)]
    second = [Made("c", 0, 10), Made("a", 20, 25)]
    paths = [
        write_trace(tmp_path / f"{i}.json", [event_fields(made) for made in events])
        for i, events in enumerate([first, second])
    ]
    found = collect_rows(paths, group_by_input_shapes=False)
    assert [(row.name, row.count, row.cpu_ns, row.self_cpu_ns, row.cpu_bytes) for row in found.rows] == [
        ("a", 2, 15_000, 13_000, 8),
        ("b", 1, 2_000, 2_000, 8),
        ("c", 1, 10_000, 10_000, 0),
    ]
    assert operator_table(paths, ALL).endswith("Self CPU time total: 25.000us\nWindows: 2\n")


def test_a_trace_without_operators_is_refused(tmp_path):
    path = write_trace(tmp_path / "t.json", [])
    with pytest.raises(ArtifactError, match=r"t\.json: has no operators"):
        operator_table([path], ALL)
    with pytest.raises(ArtifactError, match="no trace: has no operators"):
        operator_table([], ALL)


@pytest.mark.parametrize("wrong", [{"sort_by": "speed"}, {"time_unit": "ns"}])
def test_options_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}=.*use "):
        TableOptions(**wrong)


def test_lightnings_sort_keys_are_known():
    from lightning.pytorch.profilers import PyTorchProfiler

    assert PyTorchProfiler.AVAILABLE_SORT_KEYS <= AVAILABLE_SORT_KEYS


def test_a_failed_write_leaves_the_old_table(tmp_path):
    out = tmp_path / "table.txt"
    out.write_text("old")
    with pytest.raises(ArtifactError):
        write_operator_table([tmp_path / "missing.json"], out, ALL)
    assert out.read_text() == "old"
