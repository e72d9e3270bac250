from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fake_runs import FakeRun, make_run
from lightning_memprof.account.oom.autopsy import Autopsy, ModuleStacks, autopsies, autopsy
from lightning_memprof.artifacts.manifest import Manifest, OomForwards, OomRow, TrainingFacts
from lightning_memprof.artifacts.rows import salvaged
from lightning_memprof.artifacts.sink import RunPlace, Sink
from lightning_memprof.judge import examine
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Severity
from lightning_memprof.judge.out_of_memory import remedies_for
from lightning_memprof.read.run.load import load_run
from lightning_memprof.read.run.ooms import OomEvent, oom_events
from lightning_memprof.units import GIB, KIB, MIB

SOURCES: dict[str, Any] = {
    "sources": [["model.py", 10, 20], ["model.py", 30, 40], ["/lib/torch/nn/modules/linear.py", 100, 140]],
    "modules": {
        "": ["Net", 0],
        "blocks.0": ["Block", 1],
        "blocks.0.up": ["Linear", 2],
        "blocks.1": ["Block", 1],
        "blocks.1.up": ["Linear", 2],
        "head": ["Linear", 2],
    },
}
BLOCK = [
    {"filename": "/lib/torch/nn/modules/linear.py", "line": 134, "name": "forward"},
    {"filename": "/lib/torch/nn/modules/module.py", "line": 1780, "name": "_call_impl"},
    {"filename": "model.py", "line": 33, "name": "forward"},
    {"filename": "model.py", "line": 15, "name": "forward"},
    {"filename": "model.py", "line": 55, "name": "training_step"},
]
HEAD = [BLOCK[0], BLOCK[1], *BLOCK[3:]]
OPTIMIZER = [{"filename": "/lib/torch/optim/adam.py", "line": 60, "name": "_init_group"}]


def block(size: int, state: str = "active_allocated", frames: Any = ()) -> dict[str, Any]:
    return {"size": size, "requested_size": size, "state": state, "frames": list(frames)}


def segment(*blocks: dict[str, Any], address: int = 0x1000, **more: Any) -> dict[str, Any]:
    total = sum(block["size"] for block in blocks)
    at = address
    for block in blocks:
        block["address"] = at
        at += block["size"]
    live = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    return {
        "device": 0, "address": address, "total_size": total, "allocated_size": live, "active_size": live,
        "requested_size": live, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
        "is_expandable": False, "frames": [], "blocks": list(blocks), **more,
    }  # fmt: skip


def written(path: Path, *segments: dict[str, Any]) -> Path:
    data = {"segments": list(segments), "device_traces": [[]], "allocator_settings": {}}
    path.write_bytes(pickle.dumps(data, protocol=4))
    return path


def facts(**changes: Any) -> dict[str, Any]:
    known = {
        "number": 0, "memory": "device", "device": "cuda:0", "seen": "observer", "ended_run": True,
        "exception": "OutOfMemoryError: CUDA out of memory.", "step": 4, "phase": "forward", "asked_bytes": 3 * GIB,
        "asked_source": "allocator", "limit_bytes": 80 * GIB, "total_bytes": 80 * GIB, "free_bytes": GIB,
        "statistics": {"allocated_bytes.all.current": 78 * GIB, "reserved_bytes.all.current": 79 * GIB},
        "held": {"parameter_bytes": GIB, "gradient_bytes": GIB, "optimizer_state_bytes": 2 * GIB, "other_bytes": 0},
        "stack": [["/lib/torch/nn/modules/linear.py", 134, "forward"], ["model.py", 33, "forward"]],
        "forwards": SOURCES, "unavailable": {}, "tensors": [],
    }  # fmt: skip
    return {**known, **changes}


def host(**changes: Any) -> dict[str, Any]:
    sizes = {
        "rss_bytes": 5 * GIB, "vms_bytes": 9 * GIB, "total_bytes": 64 * GIB, "available_bytes": 50 * GIB,
        "rlimit_as_bytes": None, "rlimit_data_bytes": None, "cgroup_limit_bytes": None, "cgroup_used_bytes": None,
    }  # fmt: skip
    asked = changes.pop("asked_bytes", 2 * GIB)
    sizes.update(changes)
    return facts(memory="host", device="cpu", asked_bytes=asked, statistics=None, free_bytes=None, host=sizes)


def steps(found: Autopsy) -> list[str]:
    """What the judge advises, with the id in front."""
    return [f"{remedy.id}: {remedy.text}" for remedy in remedies_for(found)]


def understood(
    known: Mapping[str, Any], snapshot: Path | None = None, training: Mapping[str, Any] | None = None
) -> Autopsy:
    return autopsy(
        OomEvent(0, 0, salvaged(dict(known), OomRow), snapshot), msgspec.convert(training or {}, TrainingFacts)
    )


def statistics(allocated: int, reserved: int) -> dict[str, int]:
    return {"allocated_bytes.all.current": allocated * GIB, "reserved_bytes.all.current": reserved * GIB}


@pytest.mark.parametrize(
    ("changes", "cause", "figure", "remedy"),
    [
        ({"asked_bytes": 81 * GIB}, "too large", "81.0 GiB", "smaller_batch"),
        (
            {"asked_bytes": 55 * GIB, "statistics": statistics(29, 30), "free_bytes": 50 * GIB}, "too large",
            "55.0 GiB", "smaller_batch",
        ),
        ({"statistics": statistics(70, 79)}, "fragmented", "9.00 GiB", "expandable_segments"),
        # Gaps of less than a tenth of the reserved memory.
        ({"statistics": statistics(72, 79)}, "full", "72.0 GiB", "checkpointing"),
        ({"statistics": statistics(29, 30), "free_bytes": 0}, "other process", "50.0 GiB", "stop_others"),
        # Of both, the larger share is the cause.
        ({"statistics": statistics(30, 35), "free_bytes": 0}, "other process", "45.0 GiB", "stop_others"),
        ({"statistics": statistics(30, 75), "free_bytes": 0}, "fragmented", "45.0 GiB", "expandable_segments"),
        # The context of this process.
        ({"statistics": statistics(78, 79), "free_bytes": GIB // 4}, "full", "78.0 GiB", "checkpointing"),
        (
            {"limit_bytes": 40 * GIB, "statistics": statistics(39, 39), "free_bytes": 41 * GIB}, "limited",
            "40.0 GiB", "raise_limit",
        ),
        ({}, "full", "78.0 GiB", "checkpointing"),
    ],
)  # fmt: skip
def test_the_cause_is_told_by_the_allocators_counters(
    changes: dict[str, Any], cause: str, figure: str, remedy: str
) -> None:
    found = understood(facts(**changes))
    assert (found.cause, remedies_for(found)[0].id) == (cause, remedy)
    assert 2 <= len(remedies_for(found)) <= 3
    assert figure in found.why


def driver(own: str, *others: tuple[int, str]) -> str:
    """Return torch's message where the driver shows the processes of a device."""
    shown = [f"Process {pid} has {size} memory in use. " for pid, size in others]
    return f"OutOfMemoryError: ... {''.join(shown)}Including non-PyTorch memory, {own} memory in use. Of the ..."


def test_processes_that_torch_names_are_named() -> None:
    said = driver("this process has 34.50 GiB", (4711, "45.00 GiB"), (4712, "512.00 MiB"))
    found = understood(facts(statistics=statistics(29, 30), free_bytes=0, exception=said))
    assert found.cause == "other process"
    assert "Processes 4711 (45.00 GiB), 4712 (512.00 MiB) use 45.5 GiB of 80.0 GiB; without that," in found.why


@pytest.mark.parametrize(
    ("live", "others", "cause"),
    [
        (29, "50.00 GiB", "other process"),
        # A display server, or the rest of what fills the device.
        (78, "1.00 GiB", "full"),
        (73, "6.00 GiB", "full"),
        (70, "9.00 GiB", "other process"),
        # What the driver does not know is a number that no device has; what it does not show is used, too.
        (78, "17179869184.00 GiB", "full"),
        (78, "1.2.3 GiB", "full"),
        (29, "17179869184.00 GiB", "other process"),
        (29, "5.00 MiB", "other process"),
    ],
)
@pytest.mark.parametrize("is_shown", [True, False])
def test_other_processes_are_the_cause_where_they_use_a_notable_part(
    live: int, others: str, cause: str, is_shown: bool
) -> None:
    said = driver(f"this process has {live + 1}.00 GiB", *([(522, others)] if is_shown else []))
    known = facts(statistics=statistics(live, live), free_bytes=0, asked_bytes=GIB // 2, exception=said)
    found = understood(known, training={"dataloaders": [{"batch_size": 64}]})
    assert found.cause == cause
    assert found.memory.process_bytes == (79 - live) * GIB
    assert ("Process 522" in found.why) == (is_shown and others == f"{79 - live}.00 GiB")
    is_smaller = any("DataLoader(batch_size=32)" in step for step in steps(found))
    assert is_smaller == (cause == "full")
    assert ("nvidia-smi" in steps(found)[0]) == (cause == "other process")


@pytest.mark.parametrize(("others", "cause"), [(900, "other process"), (600, "other process"), (400, "full")])
def test_on_a_small_device_a_quarter_of_it_is_more_than_a_desktop(others: int, cause: str) -> None:
    own = 2 * KIB - others
    said = driver(f"this process has {own}.00 MiB", (4711, f"{others}.00 MiB"))
    small = {"limit_bytes": 2 * GIB, "total_bytes": 2 * GIB, "free_bytes": 0, "asked_bytes": MIB, "exception": said}
    used = {"allocated_bytes.all.current": (own - 90) * MIB, "reserved_bytes.all.current": (own - 90) * MIB}
    assert understood(facts(**small, statistics=used)).cause == cause


def test_a_full_device_says_what_the_others_and_its_largest_part_use() -> None:
    said = driver("this process has 79.49 GiB", (522, "518.00 MiB"))
    found = understood(facts(free_bytes=0, asked_bytes=GIB // 2, exception=said))
    assert found.cause == "full"
    assert "Process 522 uses 518 MiB of 80.0 GiB." in found.why
    assert "use 78.0 GiB of 80.0 GiB (saved activations and temporaries 74.0 GiB)" in found.why
    assert found.memory.process_bytes == 518 * MIB


def test_a_process_that_the_training_would_not_fit_without_is_not_mentioned() -> None:
    said = driver("this process has 79.50 GiB", (522, "512.00 MiB"))
    found = understood(facts(free_bytes=0, asked_bytes=GIB, exception=said))
    assert found.cause == "full"
    assert "522" not in found.why


def test_a_process_without_this_one_beside_it_may_be_this_one() -> None:
    # In a container the driver shows the process numbers of the machine.
    said = "OutOfMemoryError: ... Process 4711 has 79.50 GiB memory in use. Of the allocated memory ..."
    found = understood(facts(free_bytes=0, asked_bytes=GIB // 2, exception=said))
    assert found.cause == "full"
    assert "4711" not in found.why
    assert found.memory.process_bytes is None


def test_a_snapshot_shows_the_largest_piece_and_whether_segments_can_grow(tmp_path: Path) -> None:
    free = [part for _ in range(9) for part in (block(7 * GIB), block(GIB, "inactive"))]
    known = facts(statistics=statistics(63, 72), free_bytes=GIB)
    found = understood(known, written(tmp_path / "a.pickle", segment(*free)))
    assert found.cause == "fragmented"
    assert found.memory.largest_free_bytes == GIB
    assert "in blocks of at most 1.00 GiB" in found.why
    grown = understood(known, written(tmp_path / "b.pickle", segment(*free, is_expandable=True)))
    assert steps(grown)[0].startswith("few_shapes: ")


def test_a_piece_that_is_large_enough_is_said_to_be_another_pools(tmp_path: Path) -> None:
    path = written(tmp_path / "a.pickle", segment(block(70 * GIB), block(9 * GIB, "inactive"), segment_pool_id=(1, 0)))
    found = understood(facts(statistics=statistics(70, 79)), path)
    assert "large blocks belong to another stream or pool" in found.why


def test_live_bytes_are_added_up_by_line_and_by_module(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.pickle",
        segment(
            block(4 * GIB, frames=BLOCK),
            block(3 * GIB, frames=BLOCK),
            block(2 * GIB, frames=HEAD),
            block(GIB, frames=OPTIMIZER),
            block(5 * GIB),
            block(GIB, "inactive"),
        ),
    )
    found = understood(facts(), path)
    lines = [(holder.name, holder.detail, holder.bytes // GIB, holder.blocks) for holder in found.by_stack]
    assert lines[0] == ("model.py(33): forward", "in forward", 7, 2)
    assert lines[1][0].startswith("no Python stack")
    assert lines[2] == ("model.py(15): forward", "in forward", 2, 1)
    assert lines[3][0] == "/lib/torch/optim/adam.py(60): _init_group"
    assert [(holder.name, holder.bytes // GIB) for holder in found.by_module] == [
        ("blocks.*.up (Linear)", 7),
        ("no Python stack: allocated by autograd threads, or while the history was off", 5),
        ("head", 2),
        ("outside module forwards", 1),
    ]
    assert sum(holder.bytes for holder in found.by_stack) == sum(holder.bytes for holder in found.by_module) == 15 * GIB
    assert found.by_stack_note is None


@pytest.mark.parametrize("name", ["by_stack", "by_module"])
def test_at_most_ten_holders_are_kept_the_largest(tmp_path: Path, name: str) -> None:
    sources = {
        "sources": [["m.py", 10 * index, 10 * index + 9] for index in range(1, 16)],
        "modules": {f"layer{index}": ["Layer", index - 1] for index in range(1, 16)},
    }
    blocks = [
        block(index * MIB, frames=[{"filename": "m.py", "line": 10 * index, "name": "forward"}])
        for index in range(1, 16)
    ]
    found = understood(facts(forwards=sources), written(tmp_path / "a.pickle", segment(*blocks)))
    sizes = [holder.bytes // MIB for holder in getattr(found, name)]
    assert sizes == list(range(15, 5, -1))


@pytest.mark.parametrize(
    ("content", "max_bytes", "words"),
    [
        (None, None, 'OOMAutopsy(history="always")'),
        (b"\x80\x04 no pickle", None, "a.pickle: is damaged"),
        (b"\x80\x04 no pickle", 10, "lightning-memprof show reads it"),
    ],
    ids=["no history", "damaged", "too large"],
)
def test_where_a_snapshot_has_no_holders_the_page_says_why(
    tmp_path: Path, content: bytes | None, max_bytes: int | None, words: str
) -> None:
    path = written(tmp_path / "a.pickle", segment(block(GIB)))
    path.write_bytes(content or path.read_bytes())
    found = autopsy(OomEvent(0, 0, salvaged(facts(), OomRow), path), max_bytes=max_bytes)
    assert (found.cause, found.by_stack, found.by_module) == ("full", (), ())
    assert words in (found.by_stack_note or "")


def test_what_the_model_holds_and_the_rest_add_up_to_what_is_allocated() -> None:
    found = understood(facts())
    assert [(holder.name, holder.bytes // GIB) for holder in found.held] == [
        ("parameters", 1),
        ("gradients", 1),
        ("optimizer state", 2),
        ("the rest: saved activations and temporaries", 74),
    ]
    assert sum(holder.bytes for holder in found.held) == found.memory.allocated_bytes


def test_the_asking_line_is_the_programs_and_the_module_is_known_by_its_stack() -> None:
    found = understood(facts(module=None))
    assert found.line == "model.py(33): forward"
    assert found.place["module"] == "blocks.*.up (Linear)"
    assert understood(facts(module="blocks.1.up")).place["module"] == "blocks.1.up"


@pytest.mark.parametrize(
    ("known", "cause", "figure"),
    [
        (host(asked_bytes=65 * GIB), "too large", "64.0 GiB"),
        (host(rlimit_as_bytes=10 * GIB), "limited", "10.0 GiB"),
        (host(rlimit_as_bytes=10 * GIB, asked_bytes=None), "limited", "10.0 GiB"),
        # 0.5 GiB below the limit: the allocator asks for more than it returns.
        (host(rlimit_as_bytes=19 * GIB // 2, asked_bytes=GIB // 8), "limited", "9.50 GiB"),
        (host(rlimit_as_bytes=20 * GIB, asked_bytes=GIB // 8), "full", "50.0 GiB"),
        (host(cgroup_limit_bytes=6 * GIB, cgroup_used_bytes=5 * GIB), "limited", "6.00 GiB"),
        (host(available_bytes=GIB), "full", "1.00 GiB"),
        (host(available_bytes=GIB, asked_bytes=None), "full", "1.00 GiB"),
    ],
)
def test_the_hosts_cause_is_told_by_its_limits(known: dict[str, Any], cause: str, figure: str) -> None:
    found = understood(known)
    assert (found.cause, found.is_host, len(remedies_for(found))) == (cause, True, 3)
    assert figure in found.why


@pytest.mark.parametrize(
    ("changes", "training", "words"),
    [
        ({"phase": "optimizer"}, {"optimizers": [{"name": "Adam", "fused": None}]}, "fused=True"),
        ({"phase": "setup", "step": None}, {}, "Trainer(strategy='fsdp')"),
        ({"phase": None, "step": None, "asked_bytes": 90 * GIB}, {}, "Trainer(precision='bf16-true')"),
        ({"function": "validation_step"}, {}, "smaller_input: "),
        ({}, {"dataloaders": [{"batch_size": 64}]}, "DataLoader(batch_size=32) and Trainer(accumulate_grad_batches=2)"),
        ({}, {"accumulate_grad_batches": 4}, "Trainer(accumulate_grad_batches=8)"),
        ({}, {"precision": "32-true"}, "bfloat16: "),
    ],
)
def test_the_steps_fit_the_phase_and_the_trainer(changes: dict[str, Any], training: dict[str, Any], words: str) -> None:
    assert any(words in step for step in steps(understood(facts(**changes), training=training)))


def test_half_precision_is_not_advised_to_those_who_have_it() -> None:
    for known in (facts(), facts(asked_bytes=81 * GIB), host(available_bytes=GIB)):
        told = steps(understood(known, training={"precision": "bf16-mixed"}))
        assert len(told) == 3
        assert not any("precision" in step for step in told)


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        (8, "DataLoader(num_workers=4)"),
        (1, "DataLoader(num_workers=0)"),
        (0, "map_file: "),
    ],
)
def test_waiting_for_data_on_a_full_host_asks_for_fewer_workers_where_there_are_any(workers: int, words: str) -> None:
    known = {**host(available_bytes=GIB), "phase": "data_wait"}
    told = steps(understood(known, training={"dataloaders": [{"num_workers": workers}]}))
    assert words in told[0]


@pytest.mark.parametrize("known", [facts(), facts(asked_bytes=90 * GIB), host(available_bytes=GIB)])
def test_before_the_first_step_no_batch_and_no_activation_is_blamed(known: dict[str, Any]) -> None:
    found = understood({**known, "phase": None, "step": None, "function": None})
    assert len(steps(found)) == 3
    assert not any("batch" in step or "activations" in step or "checkpoint(" in step for step in steps(found))


def test_what_no_tensor_of_a_full_host_holds_is_shown_and_looked_for() -> None:
    known = host(available_bytes=GIB)
    known["host"]["rss_bytes"] = 50 * GIB
    found = understood(known)
    assert found.held[-1].name.startswith("the rest: Python objects")
    assert sum(holder.bytes for holder in found.held) == 50 * GIB
    assert steps(found)[0].startswith("release_tensors: ")


@pytest.mark.parametrize("full", [facts(), host(available_bytes=GIB)])
def test_where_tensors_of_nobodys_fill_the_memory_their_keeper_is_looked_for(full: dict[str, Any]) -> None:
    found = understood({**full, "held": {"parameter_bytes": GIB, "other_bytes": 60 * GIB}})
    assert "keeps the tensors" in steps(found)[0]


def test_modules_that_hold_most_are_named_where_checkpointing_helps(tmp_path: Path) -> None:
    found = understood(facts(), written(tmp_path / "a.pickle", segment(block(4 * GIB, frames=BLOCK))))
    assert "Checkpoint each of blocks.*.up (Linear)" in steps(found)[0]


@pytest.mark.parametrize(
    ("module", "first"),
    [
        ("blocks.1.up", "checkpointing: Checkpoint each of blocks.* (Block)"),
        ("blocks.1", "checkpointing: Checkpoint each of blocks.* (Block)"),
        # These are not repeated, or have no modules of which one can be computed again.
        ("head", "smaller_batch: Use DataLoader(batch_size=32)"),
        ("rows.0", "smaller_batch: Use DataLoader(batch_size=32)"),
        ("mixed.0.up", "smaller_batch: Use DataLoader(batch_size=32)"),
        ("", "smaller_batch: Use DataLoader(batch_size=32)"),
    ],
)
def test_the_repeated_blocks_around_the_failed_allocation_are_named_or_a_smaller_batch(module: str, first: str) -> None:
    others: dict[str, list[object]] = {f"rows.{row}": ["Linear", 2] for row in range(3)}
    others |= {"mixed.0": ["Block", 1], "mixed.0.up": ["Linear", 2], "mixed.1": ["Net", 0], "mixed.1.up": ["Linear", 2]}
    forwards = {**SOURCES, "modules": SOURCES["modules"] | others}
    known = facts(module=module, forwards=forwards)
    found = understood(known, training={"dataloaders": [{"batch_size": 64}]})
    assert steps(found)[0].startswith(first)
    assert any("torch.utils.checkpoint" in step for step in steps(found)[:2])


@pytest.mark.parametrize(
    ("stack", "name"),
    [
        ([("linear.py", 5, "forward"), ("net.py", 5, "forward")], "only"),
        ([("linear.py", 5, "forward")], "only"),
        ([("helper.py", 5, "gelu"), ("net.py", 5, "forward")], "Net"),
        ([("linear.py", 5, "forward"), ("block.py", 5, "forward"), ("net.py", 5, "forward")], "stack.*.fc1 (Linear)"),
        ([("block.py", 5, "forward"), ("linear.py", 5, "forward"), ("net.py", 5, "forward")], "only"),
        ([("helper.py", 5, "main")], None),
        ([], None),
    ],
)
def test_a_stack_names_the_modules_that_it_can_have_been_in(stack: list[Any], name: str | None) -> None:
    written = {
        "sources": [["net.py", 1, 9], ["block.py", 1, 9], ["linear.py", 1, 9]],
        "modules": {
            "": ["Net", 0],
            "stack.0": ["Block", 1],
            "stack.0.fc1": ["Linear", 2],
            "stack.1": ["Block", 1],
            "stack.1.fc1": ["Linear", 2],
            "only": ["Linear", 2],
        },
    }
    stacks = ModuleStacks(msgspec.convert(written, OomForwards))
    assert stacks.name_of(stack) == name


def recorded(tmp_path: Path, *rows: dict[str, Any], file: str | None = None) -> Path:
    run = make_run(tmp_path)
    sink = Sink(RunPlace(tmp_path, 1), 0)
    for row in rows:
        sink.manifest.append("oom", **row)
    sink.close()
    (run / "oom.rank00000.json").write_text(json.dumps({"events": [facts()]}) if file is None else file)
    return run


def test_a_run_carries_its_events_with_what_its_file_adds(tmp_path: Path) -> None:
    recorded(tmp_path, {"number": 0, "memory": "device", "ended_run": False}, {"number": 1, "memory": "host"})
    run = load_run(tmp_path)
    assert [(oom.rank, oom.number, oom.facts.memory) for oom in run.ooms] == [(0, 0, "device"), (0, 1, "host")]
    assert run.ooms[0].facts.statistics == facts()["statistics"]
    assert [oom.cause for oom in autopsies(run)] == ["full", "full"]


def test_a_full_host_names_the_memory_of_its_workers(tmp_path: Path) -> None:
    run = recorded(tmp_path, {"number": 0, "memory": "device"}, {"number": 1, "memory": "host"})
    sample = {"kind": "workers", "step": 40, "workers": 2, "private_bytes": 4 * GIB}
    (run / "processes.rank00000.jsonl").write_text(json.dumps(sample) + "\n")
    device, host = autopsies(load_run(tmp_path))
    assert host.why.endswith("2 DataLoader workers had 4.00 GiB of private memory in step 40.")
    assert "worker" not in device.why


@pytest.mark.parametrize(
    "file", ["", "[]", '{"events": 3}', '{"events": [3]}', '{"events": [{"number": "x"}]}', "[" * 9999]
)
def test_where_the_file_is_damaged_the_manifests_rows_are_left(tmp_path: Path, file: str) -> None:
    recorded(tmp_path, {key: value for key, value in facts().items() if key != "statistics"}, file=file)
    (event,) = load_run(tmp_path).ooms
    assert event.facts.asked_bytes == 3 * GIB
    found = autopsy(event)
    assert found.memory.allocated_bytes is None
    assert steps(found)


@pytest.mark.parametrize("name", ["../elsewhere.pickle", "/etc/passwd", "gone.pickle", "", 3, "a" * 300])
def test_a_snapshot_is_looked_for_in_the_run_directory_only(tmp_path: Path, name: Any) -> None:
    (tmp_path / "elsewhere.pickle").write_bytes(b"")
    (tmp_path / "run").mkdir()
    row = OomRow(number=0, fields={"number": 0, "snapshot": name})
    (event,) = oom_events(tmp_path / "run", 0, Manifest(tmp_path / "run", [row]))
    assert event.snapshot is None


@pytest.mark.parametrize("value", [None, "x", -1, [], {}, 1e300, True])
def test_any_field_may_be_anything_in_a_file_from_outside(value: Any) -> None:
    for key in (*facts(), "host", "module"):
        understood({**facts(), key: value})
        understood({**host(), key: value})
    for inside in ({"sources": value}, {"modules": value}, {"sources": [value, [value] * 3], "modules": {"a": value}}):
        understood({**facts(), "forwards": inside, "stack": [value, [value] * 3]})


def test_the_verdict_of_a_run_that_ran_out_of_memory_is_that_it_did(tmp_path: Path) -> None:
    recorded(tmp_path, facts())
    first = examine(Facts.of(load_run(tmp_path)))[0]
    assert (first.rule, first.severity) == ("out_of_memory", Severity.CRITICAL)
    assert first.title == "cuda:0 ran out of memory in step 4, in forward: live memory fills it."


def test_the_peak_of_a_failure_without_a_window_has_the_owners_of_the_failed_allocation(tmp_path: Path) -> None:
    run = make_run(tmp_path, FakeRun(windows=(), device_bytes=lambda _: 78 * GIB, trace=False))
    sink = Sink(RunPlace(tmp_path, 1), 0)
    sink.manifest.append("oom", number=0, memory="device", device="cuda:0")
    sink.close()
    held = {"parameter_bytes": GIB, "gradient_bytes": GIB, "optimizer_state_bytes": 2 * GIB, "other_bytes": 4 * GIB}
    (run / "oom.rank00000.json").write_text(json.dumps({"events": [facts(held=held)]}))
    ledger = Facts.of(load_run(tmp_path)).byte_ledgers[0]
    assert {name: size // GIB for name, size in ledger.categories.items()} == {
        "activation_and_temporary": 70,
        "other_tensors": 4,
        "optimizer_state": 2,
        "parameter": 1,
        "gradient": 1,
    }
    assert sum(line.bytes for line in ledger.lines) == ledger.peak_bytes == 78 * GIB


def test_events_that_the_program_caught_are_a_warning(tmp_path: Path) -> None:
    caught = facts(ended_run=False)
    recorded(tmp_path, caught, {**caught, "number": 1}, file=json.dumps({"events": [caught]}))
    (first,) = [finding for finding in examine(Facts.of(load_run(tmp_path))) if finding.rule == "out_of_memory"]
    assert first.severity is Severity.WARNING
    assert "2 times" in first.title
