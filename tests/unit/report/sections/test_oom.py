from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from fake_runs import FakeRun, make_run
from lightning_memprof.artifacts.sink import RunPlace, Sink
from lightning_memprof.read.run.load import load_rank, load_run
from lightning_memprof.report.printers.json import to_json
from lightning_memprof.report.summary import print_autopsy, print_summary
from lightning_memprof.report.view import run_view
from lightning_memprof.units import GIB
from pages import full, short, words

STACK = [{"filename": "/home/me/model.py", "line": 33, "name": "forward"}]


def event(**changes: Any) -> dict[str, Any]:
    known = {
        "number": 0, "memory": "device", "device": "cuda:0", "rank": 0, "stage": "fit", "seen": "observer",
        "ended_run": True, "exception": "OutOfMemoryError: CUDA out of memory.", "step": 412, "global_step": 412,
        "epoch": 1, "phase": "backward", "function": None, "point": "before_backward", "window": 2,
        "module": "blocks.3.mlp", "module_class": "MLP", "asked_bytes": 5 * GIB, "asked_source": "allocator",
        "limit_bytes": 80 * GIB, "total_bytes": 80 * GIB, "free_bytes": GIB,
        "statistics": {"allocated_bytes.all.current": 78 * GIB, "reserved_bytes.all.current": 79 * GIB},
        "held": {"parameter_bytes": 4 * GIB, "gradient_bytes": 4 * GIB}, "snapshot": "cuda_oom_rank_0.pickle",
        "stack": [["/home/me/model.py", 33, "forward"]], "unavailable": {},
        "forwards": {"sources": [["/home/me/model.py", 30, 40]], "modules": {"": ["Net", None], "mlp": ["MLP", 0]}},
        "tensors": [{"bytes": GIB, "category": "other", "name": None, "shape": [4, 4], "dtype": "float32"}],
    }  # fmt: skip
    return {**known, **changes}


def recorded(root: Path, *events: dict[str, Any], stack: list[dict[str, Any]] | None = None, **fake: Any) -> Path:
    """A made-up run that ran out of memory, with a snapshot of one block."""
    ended = {0: "OutOfMemoryError: CUDA out of memory."}
    run = make_run(root, FakeRun(device_bytes=lambda _: GIB, endings=ended, **fake))
    sink = Sink(RunPlace(root, 1), 0)
    for event in events:
        sink.manifest.append("oom", **event)
    sink.close()
    (run / "oom.rank00000.json").write_text(json.dumps({"events": events}))
    block = {"address": 1 << 40, "size": 70 * GIB, "requested_size": 70 * GIB, "state": "active_allocated"}
    segment = {
        "device": 0, "address": 1 << 40, "total_size": 70 * GIB, "allocated_size": 70 * GIB, "active_size": 70 * GIB,
        "stream": 0, "segment_type": "large", "blocks": [{**block, "frames": STACK if stack is None else stack}],
    }  # fmt: skip
    snapshot = {"segments": [segment], "device_traces": [[]]}
    (run / "cuda_oom_rank_0.pickle").write_bytes(pickle.dumps(snapshot, protocol=4))
    return run


def test_the_peak_that_a_failed_allocation_divides_is_the_lead_of_the_memory(tmp_path: Path) -> None:
    page = shown(recorded(tmp_path / "divided", event(), memory=None))
    assert "Memory peaks at 1.12 GiB on cuda:0." in page
    assert "The peak by category is not available" not in page
    whole = shown(make_run(tmp_path / "whole", FakeRun(device_bytes=lambda _: GIB, memory=None)))
    assert "The peak by category is not available" in whole


def test_a_run_that_ran_out_of_memory_before_its_first_step_has_a_page(tmp_path: Path) -> None:
    file = io.StringIO()
    print_summary(recorded(tmp_path, event(), steps=0, windows=()), file)
    assert len(file.getvalue().splitlines()) > 10


def printed(run: Path) -> str:
    file = io.StringIO()
    print_autopsy(run, 0, file)
    return file.getvalue()


def shown(run: Path) -> str:
    return full(run_view(load_run(run)))


@pytest.mark.parametrize(
    ("said", "words_"),
    [
        ("Process 7 has 512.00 MiB memory in use. Including ..., this process has 79.50 GiB memory in use.",
         "free 0 B · other processes 512 MiB · CUDA context 512 MiB · device 80.0 GiB"),
        ("CUDA out of memory.", "free 0 B · outside of torch 1.00 GiB · device 80.0 GiB"),
    ],
)  # fmt: skip
def test_the_state_has_other_processes_where_the_driver_shows_them(tmp_path: Path, said: str, words_: str) -> None:
    run = recorded(tmp_path, event(free_bytes=0, exception=f"OutOfMemoryError: {said}"))
    assert words_ in words(printed(run))


def test_the_autopsy_says_what_was_asked_why_where_who_held_the_rest_and_what_to_try(tmp_path: Path) -> None:
    run = recorded(tmp_path, event())
    said = words(printed(run))
    for part in (
        "memory out of memory on cuda:0 (rank 0), step 412, backward, in blocks.3.mlp (MLP), window 2 open",
        "failed allocation of 5.00 GiB by /home/me/model.py(33): forward",
        "why full: Live tensors use 78.0 GiB of 80.0 GiB",
        "state allocated 78.0 GiB · reserved 79.0 GiB · unused 1.00 GiB",
        "Allocated bytes by category category bytes parameters 4.00 GiB",
        "line bytes /home/me/model.py(33): forward 70.0 GiB",
        "module bytes mlp 70.0 GiB",
        "next 1. Checkpoint each of mlp",
        f"file {run}/oom.rank00000.json snapshot {run}/cuda_oom_rank_0.pickle",
    ):
        assert part in said
    assert all(f" {number}. " in said for number in (1, 2, 3))
    assert "Largest tensors" not in said


def test_the_autopsy_of_a_training_that_ran_out_of_memory_does_not_read_its_pulse(tmp_path: Path) -> None:
    run = recorded(tmp_path, event())
    assert load_run(run).lead.pulse
    assert load_rank(run, 0).lead.pulse == ()
    assert load_rank(run, 0).ooms == load_run(run).ooms


def test_without_stacks_the_blocks_of_the_recorded_steps_are_to_be_checkpointed(tmp_path: Path) -> None:
    run = recorded(tmp_path, event(held={"parameter_bytes": GIB}), stack=[])
    assert "next 1. Checkpoint each of net.blocks.0-3: torch.utils.checkpoint" in words(printed(run))
    assert "next Checkpoint each of net.blocks.0-3: torch.utils.checkpoint" in words(shown(run))


def test_show_prints_the_autopsy_again_below_the_verdict(tmp_path: Path) -> None:
    run = recorded(tmp_path, event())
    said = words(shown(run))
    assert said.startswith("verdict cuda:0 ran out of memory in step 412, in backward: live memory fills it.")
    assert "memory out of memory on cuda:0 (rank 0), step 412, backward" in said
    assert "line bytes /home/me/model.py(33): forward 70.0 GiB" in said
    page = words(short(run_view(load_run(run))))
    assert "failed allocation of 5.00 GiB" in page
    assert page.count("why ") == page.count("next ") == 1


def test_json_has_every_event_in_bytes(tmp_path: Path) -> None:
    document = to_json(run_view(load_run(recorded(tmp_path, event(ended_run=False), event(number=1)))))
    first, second = json.loads(json.dumps(document["oom"], allow_nan=False))
    assert [event["ended_run"] for event in (first, second)] == [False, True]
    assert (second["asked_bytes"], second["memory"]["total_bytes"], second["cause"]) == (5 * GIB, 80 * GIB, "full")
    assert second["place"]["module"] == "blocks.3.mlp"
    assert second["by_stack"] == [
        {"name": "/home/me/model.py(33): forward", "detail": None, "bytes": 70 * GIB, "blocks": 1}
    ]
    assert len(second["remedies"]) == 3


def test_a_run_that_had_enough_memory_says_nothing_of_it(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert to_json(run_view(load_run(run)))["oom"] == []
    assert "out of memory" not in shown(run)
    assert printed(run) == ""


def test_of_many_events_the_page_shows_the_fatal_one_and_the_latest_and_counts_the_others(tmp_path: Path) -> None:
    events = [event(number=number, step=number, ended_run=number == 1) for number in range(4)]
    said = words(shown(recorded(tmp_path, *events)))
    assert "(rank 0), step 1, backward" in said
    assert "(rank 0), step 3, backward" in said
    assert "(rank 0), step 2" not in said
    assert "2 more events: --format json" in said
    assert "caught: the run continued" in said


def test_a_terminal_that_knows_no_unicode_gets_what_it_can_print(tmp_path: Path) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_autopsy(recorded(tmp_path, event()), 0, file)
    file.seek(0)
    assert "out of memory on cuda:0" in file.read()


def test_the_hosts_memory_is_told_in_its_own_words(tmp_path: Path) -> None:
    host = {
        "rss_bytes": 5 * GIB, "vms_bytes": 9 * GIB, "total_bytes": 64 * GIB, "available_bytes": 50 * GIB,
        "rlimit_as_bytes": 10 * GIB,
    }  # fmt: skip
    known = event(
        memory="host", device="cpu", host=host, statistics=None, snapshot=None, asked_bytes=None, module="",
        module_class="Net", window=None, function="validation_step", phase="forward",
    )  # fmt: skip
    said = words(printed(recorded(tmp_path, known)))
    assert "out of memory on the host (rank 0), step 412, forward of validation_step, in Net, no window open" in said
    assert "failed allocation of unknown size by /home/me/model.py(33): forward" in said
    assert "limited: RLIMIT_AS (ulimit -v) limits this process to 10.0 GiB" in said
    assert "RSS 5.00 GiB · VMS 9.00 GiB · available 50.0 GiB · limit 10.0 GiB · machine 64.0 GiB" in said
    assert "lines not available: the host allocator has no history" in said
    assert "Largest tensors" in said


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("/home/me/" + "deep/" * 12 + "package/model.py", "…/deep/package/model.py(7): forward 70.0 GiB"),
        ("/m.py", "/m.py(7): forward 70.0 GiB"),
        ("x" * 90 + ".py", f"{'x' * 20}.py(7): forward"),
    ],
)
def test_the_end_of_a_long_path_is_shown(tmp_path: Path, path: str, line: str) -> None:
    frame = {"filename": path, "line": 7, "name": "forward"}
    assert line in words(printed(recorded(tmp_path, event(), stack=[frame])))


def test_what_has_no_stack_is_named_in_full(tmp_path: Path) -> None:
    run = recorded(tmp_path, event())
    snapshot = pickle.loads((run / "cuda_oom_rank_0.pickle").read_bytes())  # noqa: S301 our own
    other = dict(snapshot["segments"][0], address=1 << 41)
    other["blocks"] = [{**other["blocks"][0], "address": 1 << 41, "frames": []}]
    snapshot["segments"].append(other)
    (run / "cuda_oom_rank_0.pickle").write_bytes(pickle.dumps(snapshot, protocol=4))
    assert "no Python stack: allocated by autograd threads, or while" in words(printed(run))
