"""Remedies that fit what a module or a line computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fake_runs import FakeRun, make_run
from findings import ids
from lightning_memprof.account.ledger.model import TimeLine
from lightning_memprof.account.ledger.modules import Heaviest, heaviest_module, in_compiled
from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.lines import Spot
from lightning_memprof.judge.operators import faster, fitting
from lightning_memprof.read.run.load import load_run
from lightning_memprof.units import MIB

MS = 1_000_000


def line(module: str, operator: str, ms: float, **of: Any) -> TimeLine:
    return TimeLine(**{"part": Part.FORWARD, "module": module, "operator": operator, "ns": ms * MS, "count": 1.0, **of})


@pytest.mark.parametrize(
    ("operator", "on_device", "ids"),
    [
        ("aten::conv1d", False, ["less_work", "compile"]),
        ("aten::conv2d", False, ["less_work", "channels_last"]),
        ("aten::conv2d", True, ["bfloat16", "channels_last"]),
    ],
)
def test_channels_last_is_for_images(tmp_path: Path, operator: str, on_device: bool, ids: list[str]) -> None:
    heaviest = heaviest_module([line("net", "aten::mkldnn_convolution", 4), line("net", operator, 0.1)])
    assert heaviest is not None
    fake = FakeRun(device_bytes=lambda _: MIB) if on_device else FakeRun()
    assert [remedy.id for remedy in faster(heaviest, load_run(make_run(tmp_path, fake)).lead)] == ids


@pytest.mark.parametrize(
    ("family", "share", "first"),
    [
        ("matrix multiplication", 0.9, "less_work"),
        ("recurrent layers", 0.9, "less_work"),
        ("matrix multiplication", 0.3, "compile"),
        ("aten::mul", 0.9, "compile"),
    ],
)
def test_on_a_cpu_arithmetic_is_not_to_be_fused(tmp_path: Path, family: str, share: float, first: str) -> None:
    heaviest = Heaviest(module="net", ns=100.0, family=family, family_ns=100 * share)
    assert faster(heaviest, load_run(make_run(tmp_path)).lead)[0].id == first


@pytest.mark.parametrize(
    ("compiled", "module", "is_compiled", "is_advised"),
    [
        ([], "net", False, True),
        (["head"], "net", False, True),
        (["net"], "net", True, False),
        (["net"], "net.blocks.0", True, False),
        ([f"blocks.{number}" for number in range(6)], "blocks.0-5.norm", True, False),
        (["net.blocks.0"], "net", False, False),
        ([""], "the model", True, False),
    ],
)
def test_a_compiled_module_is_named_as_compiled_and_not_to_be_compiled(
    tmp_path: Path, compiled: list[str], module: str, is_compiled: bool, is_advised: bool
) -> None:
    run = load_run(make_run(tmp_path, FakeRun(training={"compiled": compiled})))
    heaviest = Heaviest(module=module, ns=9.0, family="aten::mul", family_ns=9.0)
    assert in_compiled(module, run.lead) == is_compiled
    assert any(step.id == "compile" for step in faster(heaviest, run.lead)) == is_advised


@pytest.mark.parametrize(
    ("called", "inside", "remedy"),
    [
        ("DataLoader.__iter__", "RandomSampler.__iter__", "keep_iterator"),
        ("_BaseDataLoaderIter.__next__", None, "keep_iterator"),
        ("deepcopy", "_deepcopy_dict", "copy_less"),
        ("Module.state_dict", None, "copy_less"),
        ("dump", None, "write_less"),
        ("gelu", "gelu", None),
        (None, None, None),
    ],
)
def test_the_remedy_fits_the_function_of_a_library_that_a_line_calls(
    called: str | None, inside: str | None, remedy: str | None
) -> None:
    spot = Spot(function="f", share=0.5, depth=0, place="a.py:1", source="deepcopy(x)", called=called, inside=inside)
    assert ids(fitting("aten::mul", spot)) == ([remedy] if remedy else [])


@pytest.mark.parametrize(
    ("operator", "remedy"),
    [
        ("aten::_linalg_svd", "decompose_less"),
        ("aten::linalg_eigh", "decompose_less"),
        ("aten::sort", "sort_less"),
        ("aten::cat", "copy_less"),
        ("aten::cumsum", None),
        ("attention without the fused kernel", "fused_attention"),
        ("matrix multiplication", None),
        ("aten::mul", None),
        ("aten::softmax", None),
    ],
)
def test_the_remedy_fits_the_family_of_an_operator(operator: str, remedy: str | None) -> None:
    assert ids(fitting(operator, None)) == ([remedy] if remedy else [])


def test_a_function_that_waits_has_the_remedy_of_a_wait_whatever_it_calls() -> None:
    spot = Spot(function="Remote.fetch", share=0.9, depth=0, called="dump", waits=True)
    assert ids(fitting("aten::mul", spot)) == ["wait_outside"]


def test_a_helper_of_unknown_work_is_to_run_less_often() -> None:
    assert ids(fitting("aten::mul", Spot(function="Net.table", share=0.5, depth=1))) == ["work_less"]
    assert fitting("aten::mul", Spot(function="Block.forward", share=0.5, depth=2)) == ()
