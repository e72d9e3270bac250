from __future__ import annotations

from pathlib import Path

import pytest

from fake_memory import FakeMemory
from fake_runs import FakeRun, make_run
from lightning_memprof.account.memory.activations import (
    Activations,
    ModuleBytes,
    checkpointing,
    patterns,
    read_saved_steps,
    repeated_blocks,
)
from lightning_memprof.account.memory.report import memory_report
from lightning_memprof.read.run.load import load_run
from lightning_memprof.units import KIB, MIB


def backward(modules: dict[str, tuple[int, int | None, int | None]], step: int = 0) -> Activations:
    """Give one whose modules have inclusive bytes, nanoseconds and bytes of input."""
    return Activations(
        window=0,
        step=step,
        total_bytes=0,
        modules=tuple(
            ModuleBytes(name=name, own_activation_bytes=0, inclusive_activation_bytes=inclusive, calls=1, forward_ns=ns)
            for name, (inclusive, ns, _) in modules.items()
        ),
        inputs={name: given for name, (*_, given) in modules.items() if given is not None},
    )


def test_checkpointing_a_block_frees_what_it_keeps_less_its_input(tmp_path: Path) -> None:
    (group,) = memory_report(load_run(make_run(tmp_path, FakeRun()))).lead.checkpointing
    assert group.name == "net.blocks.0-3"
    assert [block.name for block in group.blocks] == [f"net.blocks.{index}" for index in range(4)]
    assert {block.saved_bytes for block in group.blocks} == {2 * MIB - 256 * KIB}
    assert {block.still_held_bytes for block in group.blocks} == {256 * KIB}
    assert {block.recompute_ns for block in group.blocks} == {1_100_000}
    assert group.saved_bytes == 4 * (2 * MIB - 256 * KIB)
    assert (group.still_held_bytes, group.recompute_ns) == (MIB, 4_400_000)
    assert group.recompute_peak_bytes == 2 * MIB - 256 * KIB


def test_blocks_that_keep_nothing_but_their_input_have_nothing_to_trade(tmp_path: Path) -> None:
    memory = FakeMemory(kept_bytes=0)
    assert memory_report(load_run(make_run(tmp_path, FakeRun(memory=memory)))).lead.checkpointing == ()


def test_time_is_the_median_over_steps_of_the_sum_of_a_steps_forwards() -> None:
    steps = [backward({"x.0.a": (9, 1, 1), "x.1.a": (9, ns, 1), "x.0": (9, ns, 1), "x.1": (9, ns, 1)}, step)
             for step, ns in enumerate((10, 20, 90))]  # fmt: skip
    (group,) = checkpointing(steps[0], [*steps, steps[1]])
    # Step 1 has two backwards: 40. The median of 10, 40 and 90 is 40.
    assert [block.recompute_ns for block in group.blocks] == [40, 40]


@pytest.mark.parametrize(
    ("forward_ns", "recomputed"), [(20, [10, 10]), (39, [20, 20]), (40, [20, 20]), (None, [20, 20])]
)
def test_recomputation_takes_no_longer_than_the_forward_of_unrecorded_steps(
    forward_ns: int | None, recomputed: list[int]
) -> None:
    recorded = backward({"x.0.a": (9, 1, 1), "x.1.a": (9, 1, 1), "x.0": (9, 20, 1), "x.1": (9, 20, 1)})
    (group,) = checkpointing(recorded, [recorded], forward_ns)
    assert [block.recompute_ns for block in group.blocks] == recomputed
    assert group.recompute_ns == min(40, forward_ns or 40)


def test_a_time_that_is_unknown_makes_the_sum_unknown_and_not_less() -> None:
    backward_pass = backward({"x.0": (9, None, 1), "x.1": (9, 5, 1), "x.0.a": (1, 1, 1), "x.1.a": (1, 1, 1)})
    (group,) = checkpointing(backward_pass, [backward_pass])
    assert [block.recompute_ns for block in group.blocks] == [None, 5]
    assert group.recompute_ns is None


def test_a_block_whose_input_is_unknown_is_left_out() -> None:
    backward_pass = backward({"x.0": (9, 1, None), "x.1": (9, 5, 2), "x.0.a": (1, 1, 1), "x.1.a": (1, 1, 1)})
    (group,) = checkpointing(backward_pass, [backward_pass])
    assert [block.name for block in group.blocks] == ["x.1"]


def test_groups_inside_of_a_groups_blocks_are_left_out() -> None:
    names = [f"x.{outer}.y.{inner}.z" for outer in range(2) for inner in range(3)]
    names += [f"x.{outer}.y.{inner}" for outer in range(2) for inner in range(3)]
    names += [f"x.{outer}{rest}" for outer in range(2) for rest in ("", ".y")]
    given: dict[str, tuple[int, int | None, int | None]] = dict.fromkeys(names, (9, 1, 1))
    backward_pass = backward(given)
    assert [group.name for group in checkpointing(backward_pass, [backward_pass])] == ["x.0-1"]
    # Where the outer blocks free nothing, the inner ones can.
    free = backward({**given, "x.0": (1, 1, 9), "x.1": (1, 1, 9)})
    assert [group.name for group in checkpointing(free, [free])] == ["x.0.y.0-2", "x.1.y.0-2"]


@pytest.mark.parametrize(
    ("names", "parameters", "groups"),
    [
        (["b.0.w", "b.1.w", "b.0", "b.1"], {}, {"b.0-1": ("b.0", "b.1")}),
        (["b.0.w", "b.1.v", "b.0", "b.1"], {}, {}),  # not the same names below
        (["b.0.w", "b.1.w", "b.0", "b.1"], {"b.0.w": 4, "b.1.w": 8}, {}),  # not the same sizes
        (["b.0", "b.1"], {}, {}),  # nothing is known of them but their names
        (["b.0", "b.1", "b.2"], {"b.0": 4, "b.1": 0, "b.2": 4}, {"b.0,2": ("b.0", "b.2")}),
        (["0", "1"], {"0": 4, "1": 4}, {}),  # siblings of nobody
        (["b.0"], {"b.0": 4}, {}),
        ([f"b.{index}" for index in range(11)], {f"b.{index}": 4 for index in range(11)},
         {"b.0-10": tuple(f"b.{index}" for index in range(11))}),
        (["b.0", "b.3", "b.6", "b.9"], dict.fromkeys(["b.0", "b.3", "b.6", "b.9"], 1),
         {"b.0,3,6,…9": ("b.0", "b.3", "b.6", "b.9")}),
    ],
)  # fmt: skip
def test_blocks_repeat_where_names_and_sizes_do(
    names: list[str], parameters: dict[str, int], groups: dict[str, tuple[str, ...]]
) -> None:
    assert repeated_blocks(names, parameters) == groups


def test_modules_that_are_alike_share_a_name() -> None:
    parameters = {f"b.{outer}.e.{inner}": 4 for outer in range(2) for inner in range(3)}
    names = ["", "b", *parameters, "b.0", "b.1", "b.0.e", "b.1.e", "head"]
    shared = patterns(names, parameters)
    assert {shared[name] for name in parameters} == {"b.0-1.e.0-2"}
    assert shared["b.1.e"] == "b.0-1.e"
    assert (shared[""], shared["head"]) == ("", "head")


def test_a_run_without_the_collector_has_no_saved_steps(tmp_path: Path) -> None:
    saved = read_saved_steps(load_run(make_run(tmp_path, FakeRun(memory=None))).lead)
    assert (saved.backwards, saved.ends) == ((), {})
