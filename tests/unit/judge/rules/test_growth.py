"""Memory of a device that grows: the variable, or the function, that keeps it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_memory import FakeMemory
from fake_runs import FakeRun, add_series, make_run
from findings import HISTORY, found, found_in_run, limited, noisy, recovery, write_rows
from lightning_memprof.account.memory.model import DeviceAllocations, Site, WindowAllocations
from lightning_memprof.account.memory.report import memory_report
from lightning_memprof.account.snapshot.report import SnapshotReport, snapshot_report
from lightning_memprof.judge import Facts, Finding, Severity, examine
from lightning_memprof.read.run.load import load_run
from lightning_memprof.units import GIB, MIB
from snapshots import MODEL, TRAIN, History, write_snapshot

KEPT = {**MODEL, "line": 9, "name": "keep"}


def piled_up(path: Path, steps: int, size: int) -> SnapshotReport:
    """Return a snapshot in which each step frees a block of forward, and keeps one."""
    history = History()
    for _ in range(steps):
        history.free(history.allocate(GIB, MODEL, TRAIN), history.allocate(MIB))
        history.allocate(size, KEPT, TRAIN)
    write_snapshot(path, history.data())
    return snapshot_report(path)


def grown(
    root: Path, *snapshots: SnapshotReport, per_step: int = 20 * MIB, holder: dict[str, Any] | None = None
) -> list[Finding]:
    """Return the findings about memory that grows in a run on a device."""
    directory = make_run(
        root, FakeRun(steps=120, device_bytes=lambda step: GIB + per_step * step, memory=None, trace=False)
    )
    if holder is not None:
        write_rows(directory / "holders.rank00000.jsonl", holder)
    found = examine(Facts.of(load_run(directory), (), snapshots))
    return [finding for finding in found if finding.rule == "memory_growth"]


OUTPUTS: dict[str, Any] = {
    "kind": "attribute", "place": "Net.outputs[...]", "content": "Tensor[9]", "line": "a/train.py:3", "step": 119,
    "since_step": 19, "count": 120, "added": 100, "added_bytes": 2000 * MIB, "grown_bytes": 2000 * MIB,
    "source": "self.outputs = []",
}  # fmt: skip


def test_growth_of_a_device_names_the_function_whose_blocks_pile_up_in_its_snapshot(tmp_path: Path) -> None:
    (finding,) = grown(tmp_path / "run", piled_up(tmp_path / "snapshot.pickle", 10, 20 * MIB))
    assert finding.rule == "memory_growth"
    assert finding.title.endswith(": keep.")
    assert finding.remedies[0].id == "release_tensors"
    assert finding.severity is Severity.CRITICAL


def test_the_variable_that_keeps_the_tensors_is_named_before_the_function_that_allocates_them(tmp_path: Path) -> None:
    (finding,) = grown(tmp_path / "run", piled_up(tmp_path / "snapshot.pickle", 10, 20 * MIB), holder=OUTPUTS)
    assert finding.title.endswith(" in Net.outputs (a/train.py:3).")
    assert finding.remedies[0].id == "bound_holder"
    assert "self.outputs = []" in finding.next_steps[0]


def test_tensors_that_keep_their_graphs_are_to_be_kept_without_them(tmp_path: Path) -> None:
    holder = {**OUTPUTS, "content": "Tensor[9] with its graph", "bound": 500, "source": "self.outputs = deque(500)"}
    (finding,) = grown(tmp_path / "run", piled_up(tmp_path / "snapshot.pickle", 10, 20 * MIB), holder=holder)
    assert finding.title.endswith(" in Net.outputs with its graph (a/train.py:3).")
    assert finding.remedies[0].id == "without_graphs"
    assert "self.outputs = deque(500)" in finding.next_steps[0]


def test_views_that_keep_larger_tensors_are_to_be_copied(tmp_path: Path) -> None:
    holder = {**OUTPUTS, "content": "Tensor[9] of a larger tensor", "bound": 500}
    (finding,) = grown(tmp_path / "run", piled_up(tmp_path / "snapshot.pickle", 10, 20 * MIB), holder=holder)
    assert finding.remedies[0].id == "copy_parts"


@pytest.mark.parametrize(
    ("place", "content"),
    [("Node[...]", "FakeTensor[640,160]"), ("FakeTensorMode[...]", "ShapeEnv with FakeTensor[8] and others")],
)
def test_graphs_of_the_compiler_are_a_note_with_the_remedy_of_recompilations(
    tmp_path: Path, place: str, content: str
) -> None:
    (finding,) = grown(tmp_path, holder={**OUTPUTS, "place": place, "content": content, "line": "fx/graph.py:1280"})
    assert (finding.numbers["owner"], finding.severity) == ("graphs of torch.compile", Severity.INFO)
    assert [remedy.id for remedy in finding.remedies] == ["dynamic_shapes"]


def test_growth_of_the_host_recovers_host_memory_where_the_run_has_a_device_too(tmp_path: Path) -> None:
    fake = FakeRun(
        steps=120, rss_bytes=lambda step: GIB + 5 * MIB * step, device_bytes=lambda _: GIB, memory=None, trace=False
    )
    finding = found(tmp_path, fake)["memory_growth"]
    assert recovery(finding).max == finding.numbers["bytes"]


HOOK = "[Callback]History.on_train_batch_end"
FETCH = "[_TrainingEpochLoop].train_dataloader_next"
GROWING = FakeRun(steps=120, rss_bytes=lambda step: GIB + 4 * MIB * step, memory=None, trace=False)


def growth(root: Path, **changes: tuple[int, int]) -> Finding:
    directory = make_run(root, GROWING)
    names = {"hook": HOOK, "fetch": FETCH}
    found = [
        {"step": step, "recorded": True, "action": names[name], "rss_change_bytes": change}
        for name, sizes in changes.items()
        for step, change in zip((2, 3), sizes, strict=True)
    ]
    add_series(directory, "action_memory", found)
    return found_in_run(directory)["memory_growth"]


def test_growth_names_the_hook_that_adds_it_and_recovers_its_line(tmp_path: Path) -> None:
    finding = growth(tmp_path, hook=(4 * MIB, 3 * MIB), fetch=(0, 0))
    assert finding.title == "Host memory grows by 4.00 MiB per step in History.on_train_batch_end."
    assert "History.on_train_batch_end" in finding.next_steps[0]
    assert recovery(finding).max == finding.numbers["bytes"] < recovery(finding).whole


def test_growth_names_the_hook_that_uses_freed_memory_again(tmp_path: Path) -> None:
    directory = make_run(tmp_path, GROWING)
    found = [
        {"step": step, "action": HOOK, "rss_change_bytes": 0, "heap_change_bytes": 4 * MIB, "recorded": True}
        for step in (2, 3)
    ]
    add_series(directory, "action_memory", found)
    finding = found_in_run(directory)["memory_growth"]
    assert finding.title == "Host memory grows by 4.00 MiB per step in History.on_train_batch_end."
    assert "The heap rises by 4.00 MiB over it in each recorded step." in finding.why


def test_growth_names_the_fetch_that_adds_it(tmp_path: Path) -> None:
    assert growth(tmp_path, fetch=(4 * MIB, 4 * MIB)).title.endswith("in the fetch from the data set.")


def test_a_hook_that_adds_memory_once_is_not_accused(tmp_path: Path) -> None:
    assert growth(tmp_path, hook=(4 * MIB, 0)).title == "Host memory grows by 4.00 MiB per step."


@pytest.mark.parametrize(
    ("steps", "lengths", "severity"),
    [(60, (64, 80), Severity.INFO), (60, (64, 64), Severity.WARNING), (120, (64, 80), Severity.WARNING)],
)
def test_growth_in_a_short_run_with_batches_of_varying_length_may_be_the_allocators(
    tmp_path: Path, steps: int, lengths: tuple[int, int], severity: Severity
) -> None:
    directory = make_run(tmp_path, replace(GROWING, steps=steps))
    found = [
        {"step": step, "recorded": True, "positions": 8 * each} for step, each in zip((2, 3), lengths, strict=True)
    ]
    add_series(directory, "throughput", found)
    finding = found_in_run(directory)["memory_growth"]
    assert finding.severity is severity


def retained(
    directory: Path, rss: int, *, phase: str = "forward", step: int = 2, size: int = 300 * MIB
) -> dict[str, Finding]:
    """Return the findings about bytes that a phase of a step allocated and that are live at the peak, in step 3."""
    run = load_run(make_run(directory, FakeRun(rss_bytes=lambda _: rss, memory=FakeMemory(kept_bytes=40 * MIB))))
    site = Site("aten::addmm", "net", None, (), step=step, phase=phase, bytes=size, blocks=9)
    device = DeviceAllocations(
        device="cpu", start_bytes=None, peak_bytes=GIB, peak_time_ns=1, peak_step=3, sites=(site,),
        unattributed_bytes=0, freed_outside_bytes=0, curve=(), steps=(), marks=(), allocations=9,
    )  # fmt: skip
    allocations = [WindowAllocations(rank=0, window=0, devices=(device,))]
    return {finding.rule: finding for finding in examine(Facts.of(run, memory=memory_report(run, allocations)))}


@pytest.mark.parametrize(
    ("phase", "step", "size", "is_found"),
    [
        ("forward", 2, 300, True), ("forward", 3, 300, False), ("optimizer", 2, 300, False), ("forward", 2, 20, False)
    ],
    ids=["the step before", "the same step", "optimizer state", "a few outputs"],
)  # fmt: skip
def test_activations_that_outlive_their_step_are_a_retained_graph(
    tmp_path: Path, phase: str, step: int, size: int, is_found: bool
) -> None:
    finding = retained(tmp_path, GIB, phase=phase, step=step, size=size * MIB).get("retained_graph")
    assert (finding is not None) == is_found
    if finding is not None:
        assert finding.title == "Graphs outlive their step: 300 MiB of saved activations are live in the next one."
        assert finding.severity is Severity.CRITICAL
        assert recovery(finding).min == 300 * MIB
        assert recovery(finding).max == 2 * 300 * MIB
        assert "29% of 1.01 GiB" in finding.why
        assert "retain_graph=True" in finding.next_steps[0]


def held(root: Path, *found: dict[str, Any], fake: FakeRun = GROWING) -> dict[str, Finding]:
    directory = make_run(root, fake)
    both = {"since_step": 20, "step": 119, "grown_bytes": 396 * MIB}
    write_rows(directory / "holders.rank00000.jsonl", *({**both, **row} for row in found))
    return found_in_run(directory)


def test_growth_names_its_holder_and_the_line_that_assigns_it(tmp_path: Path) -> None:
    finding = held(tmp_path, HISTORY)["memory_growth"]
    assert finding.title == "Host memory grows by 4.00 MiB per step in Net.history (a/train.py:14)."
    assert "Since step 20, Net.history gained 99 Tensor[8,8] (396 MiB)." in finding.why
    assert finding.next_steps[0].startswith("Clear or bound Net.history, assigned in a/train.py:14: self.history = []")
    assert finding.numbers["holder"]["place"] == "Net.history[...]"
    assert "memprofiler/holders.rank00000.jsonl" in {source.artifact for source in finding.evidence}


@pytest.mark.parametrize(
    ("row", "is_accused"),
    [
        pytest.param({**HISTORY, "bound": 1000}, False, id="a deque with a limit"),
        pytest.param({**HISTORY, "place": "AdamW.state[...]", "bound": 150}, False, id="state of an optimizer"),
        pytest.param({"kind": "first touch", "added_bytes": 300 * MIB}, False, id="an array that is filled"),
        pytest.param({"kind": "mapped file", "place": "/a", "added_bytes": 300 * MIB}, False, id="a mapped file"),
        pytest.param({**HISTORY, "bound": 10_000_000}, True, id="a limit that is out of reach"),
        pytest.param({**HISTORY, "bound": 1000, "added_bytes": 40 * MIB}, True, id="a small part with a limit"),
        pytest.param({"kind": "nothing"}, True, id="nothing found"),
    ],
)
def test_growth_that_ends_is_not_accused(tmp_path: Path, row: dict[str, Any], is_accused: bool) -> None:
    assert ("memory_growth" in held(tmp_path, row)) == is_accused


def test_freed_memory_that_the_allocator_keeps_is_a_note(tmp_path: Path) -> None:
    finding = held(tmp_path, {"kind": "free memory", "added_bytes": 300 * MIB})["memory_growth"]
    assert finding.severity is Severity.INFO
    assert finding.title.endswith(": the C allocator keeps freed memory.")


@pytest.mark.parametrize("kind", ["free memory", "remainder"])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"steps": 60}, id="pools may still fill"),
        pytest.param({"rss_bytes": lambda step: GIB + 4 * MIB * min(step, 100)}, id="the last eighth adds nothing"),
    ],
)
def test_freed_memory_is_no_growth_in_a_short_run_or_where_it_no_longer_rises(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    found = held(tmp_path, {"kind": kind, "added_bytes": 300 * MIB}, fake=replace(GROWING, **changes))
    assert ("memory_growth" not in found) == (kind == "free memory")


def test_freed_memory_is_not_what_a_hook_adds_in_windows(tmp_path: Path) -> None:
    directory = make_run(tmp_path, GROWING)
    found = {"kind": "free memory", "added_bytes": 300 * MIB, "since_step": 20, "step": 119, "grown_bytes": 396 * MIB}
    write_rows(directory / "holders.rank00000.jsonl", found)
    added = {"action": HOOK, "rss_change_bytes": 4 * MIB, "recorded": True}
    add_series(directory, "action_memory", [{**added, "step": step} for step in (2, 3)])
    finding = found_in_run(directory)["memory_growth"]
    assert finding.title.endswith(": the C allocator keeps freed memory.")


@pytest.mark.parametrize(("kind", "is_note"), [("free memory", True), ("remainder", False)])
def test_freed_memory_that_an_earlier_search_found_remains_a_note_where_a_later_one_finds_nothing(
    tmp_path: Path, kind: str, is_note: bool
) -> None:
    directory = make_run(tmp_path, GROWING)
    found = {"kind": kind, "added_bytes": 200 * MIB, "since_step": 20, "step": 70, "grown_bytes": 200 * MIB}
    write_rows(directory / "holders.rank00000.jsonl", found, {"kind": "nothing", "step": 119})
    finding = found_in_run(directory)["memory_growth"]
    assert (finding.severity is Severity.INFO) == is_note
    assert finding.title.endswith("keeps freed memory.") == is_note


@pytest.mark.parametrize(("epochs", "severity"), [(1, Severity.INFO), (5, Severity.INFO), (100, Severity.WARNING)])
def test_freed_memory_that_fills_the_machine_before_the_training_ends_is_a_warning(
    tmp_path: Path, epochs: int, severity: Severity
) -> None:
    endless = replace(GROWING, training={"max_steps": -1, "max_epochs": epochs})
    directory = make_run(tmp_path, endless)
    limited(directory, 8 * GIB)
    row = {"kind": "free memory", "added_bytes": 300 * MIB, "since_step": 20, "step": 119, "grown_bytes": 396 * MIB}
    write_rows(directory / "holders.rank00000.jsonl", row)
    finding = found_in_run(directory)["memory_growth"]
    assert finding.severity is severity
    assert ("more steps, before the training ends." in finding.why) == (severity is Severity.WARNING)


def test_memory_that_no_python_object_refers_to_is_named(tmp_path: Path) -> None:
    finding = held(tmp_path, {"kind": "remainder", "added_bytes": 300 * MIB})["memory_growth"]
    assert finding.severity > Severity.INFO
    assert finding.title == "Host memory grows by 4.00 MiB per step outside Python objects."
    assert "300 MiB" in finding.why


@pytest.mark.parametrize(
    ("action", "where"),
    [(FETCH, " outside Python objects."), (HOOK, " in History.on_train_batch_end.")],
)
def test_what_no_python_object_holds_is_not_blamed_on_the_fetch_but_on_a_hook(
    tmp_path: Path, action: str, where: str
) -> None:
    directory = make_run(tmp_path, GROWING)
    found = [{"step": step, "recorded": True, "action": action, "rss_change_bytes": 4 * MIB} for step in (2, 3)]
    add_series(directory, "action_memory", found)
    row = {"kind": "remainder", "added_bytes": 300 * MIB, "since_step": 20, "step": 119, "grown_bytes": 396 * MIB}
    write_rows(directory / "holders.rank00000.jsonl", row)
    finding = found_in_run(directory)["memory_growth"]
    assert finding.title == f"Host memory grows by 4.00 MiB per step{where}"


def test_holders_of_one_line_count_together_as_the_states_of_a_metric_do(tmp_path: Path) -> None:
    states = [{**HISTORY, "place": f"Net.curve.{name}[...]", "added_bytes": 115 * MIB} for name in ("preds", "target")]
    together, apart = (
        held(tmp_path / name, *({**row, "line": f"a/train.py:{at}"} for row, at in zip(states, lines, strict=True)))
        for name, lines in (("together", (14, 14)), ("apart", (14, 15)))
    )
    assert (
        together["memory_growth"].title == "Host memory grows by 4.00 MiB per step in Net.curve.preds (a/train.py:14)."
    )
    assert apart["memory_growth"].numbers["holder"] is None


def test_a_buffer_with_a_limit_is_no_holder_of_growth_however_much_is_freed(tmp_path: Path) -> None:
    members = {**HISTORY, "place": "Ensemble.members[...]", "bound": 3, "added": 2, "added_bytes": 80 * MIB}
    finding = held(tmp_path, members, {**FREED, "added_bytes": 316 * MIB})["memory_growth"]
    assert finding.severity is Severity.INFO
    assert finding.title.endswith(": the C allocator keeps freed memory.")


def test_only_the_last_search_counts(tmp_path: Path) -> None:
    finding = held(tmp_path, {**HISTORY, "step": 60}, {"kind": "nothing"})["memory_growth"]
    assert finding.title == "Host memory grows by 4.00 MiB per step."


@pytest.mark.parametrize(("batches", "is_accused"), [(200, False), (20, True)])
def test_a_cache_by_index_is_full_after_an_epoch(tmp_path: Path, batches: int, is_accused: bool) -> None:
    training = {"num_batches": batches, "dataloaders": [{"num_workers": 0, "batch_size": 4}]}
    cache = {**HISTORY, "kind": "sample cache", "place": "Images.cache[...]"}
    found = held(tmp_path, cache, fake=replace(GROWING, training=training))
    assert ("memory_growth" in found) is is_accused


FREED = {"kind": "free memory", "added_bytes": 300 * MIB}


def test_a_list_that_is_cleared_before_the_last_search_keeps_its_name(tmp_path: Path) -> None:
    finding = held(tmp_path, {**HISTORY, "step": 90}, FREED)["memory_growth"]
    assert finding.title == "Host memory grows by 4.00 MiB per step in Net.history (a/train.py:14)."
    assert finding.severity > Severity.INFO


@pytest.mark.parametrize(("size", "is_named"), [(96 * MIB, True), (12 * MIB, False)])
def test_a_leak_that_fragments_the_heap_is_named_and_a_small_list_is_not(
    tmp_path: Path, size: int, is_named: bool
) -> None:
    finding = held(tmp_path, {**HISTORY, "added_bytes": size}, FREED)["memory_growth"]
    assert ("in Net.history" in finding.title) is is_named
    assert (finding.severity > Severity.INFO) is is_named


SHORT = replace(GROWING, steps=40, rss_bytes=lambda step: GIB + 4 * MIB * (step // 20))


@pytest.mark.parametrize(
    ("count", "grows"), [pytest.param(39, True, id="at one rate"), pytest.param(25 + 500, False, id="ever more slowly")]
)
def test_a_container_that_gains_entries_at_one_rate_is_growth_where_the_pulse_is_too_short(
    tmp_path: Path, count: int, grows: bool
) -> None:
    row = {**HISTORY, "since_step": 14, "step": 39, "count": count, "added": 25, "added_bytes": 400 * MIB}
    found = held(tmp_path, row, fake=SHORT)
    assert ("memory_growth" in found) is grows
    if grows:
        assert found["memory_growth"].title == "Host memory grows by 15.8 MiB per step in Net.history (a/train.py:14)."


def test_memory_that_grows_with_every_step_is_found_with_its_slope(tmp_path: Path) -> None:
    fake = FakeRun(steps=60, rss_bytes=lambda step: 500 * MIB + step * 2 * MIB)
    finding = found(tmp_path, fake)["memory_growth"]
    assert finding.title == "Host memory grows by 2.00 MiB per step."
    assert finding.numbers["bytes_per_step"] == 2 * MIB
    assert ".item()" in finding.next_steps[0]
    assert "detach()" in finding.next_steps[0]


@pytest.mark.parametrize(
    "rss",
    [
        pytest.param(noisy, id="noise"),
        pytest.param(lambda step: 500 * MIB + (200 * MIB if step > 30 else 0), id="one jump"),
        pytest.param(lambda step: 500 * MIB + (400 * MIB if step > 2 else 0), id="window"),
        pytest.param(lambda step: 500 * MIB + min(step, 12) * 40 * MIB, id="warm-up"),
        pytest.param(lambda step: 500 * MIB + round(400 * MIB * (1 - 0.9**step)), id="cache that fills"),
        pytest.param(lambda step: 500 * MIB + step * 4096, id="drift of the allocator"),
        pytest.param(lambda step: 900 * MIB - step * 4 * MIB, id="shrinks"),
        pytest.param(lambda step: 500 * MIB + (step % 20) * 10 * MIB, id="saw"),
    ],
)
def test_memory_that_does_not_grow_steadily_is_no_finding(tmp_path: Path, rss: Callable[[int], int]) -> None:
    assert "memory_growth" not in found(tmp_path, FakeRun(steps=60, rss_bytes=rss))
