from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from corpus_files import TRACES, recorded_file
from lightning_memprof.account.trace.report import trace_report
from lightning_memprof.judge import Finding, Severity, examine_files

pytestmark = pytest.mark.corpus


@cache
def findings_of(path: Path) -> tuple[Finding, ...]:
    report = trace_report(path)
    return examine_files((report,), ())


def found(name: str) -> dict[str, Finding]:
    return {finding.rule: finding for finding in findings_of(recorded_file(f"traces/{name}/*.json.gz"))}


def above_info(name: str) -> set[str]:
    return {rule for rule, finding in found(name).items() if finding.severity > Severity.INFO}


def test_a_training_without_workers_is_input_bound_with_its_share() -> None:
    finding = found("kineto_resnet50_nw0")["input_bound"]
    exposed = finding.numbers["share"]
    assert f"{exposed:.0%} of each step" in finding.title
    assert finding.severity > Severity.INFO
    assert finding.numbers["steps"] == 6
    assert finding.numbers["data_loading_ns"] == pytest.approx(416e6, rel=1e-3)
    assert 0.28 < exposed < 0.396
    assert "num_workers" in finding.next_steps[0]
    longest = finding.evidence[-1]
    assert longest.artifact.endswith("worker0.1623143089861.pt.trace.json.gz")
    assert longest.start_ns is not None
    assert longest.end_ns is not None
    assert 30_000_000 < longest.end_ns - longest.start_ns < 100_000_000


def test_input_bound_is_what_weighs_most_in_it() -> None:
    findings = found("kineto_resnet50_nw0").values()
    assert max(findings, key=lambda finding: (finding.severity, finding.weight)).rule == "input_bound"


def test_the_first_schema_is_understood_too() -> None:
    assert found("kineto_resnet50_nw0_legacy")["input_bound"].numbers["data_loading_ns"] == pytest.approx(
        280e6, rel=0.01
    )


def test_of_a_busy_device_only_the_arithmetic_in_32_bits_is_above_info() -> None:
    assert "input_bound" not in found("hta_ns_resolution")
    assert above_info("hta_ns_resolution") == {"tensor_cores_unused"}


@pytest.mark.parametrize(
    "name", ["hta_sampled_128", "hta_trace_diff_control", "tl_mi300_resnet_ddp_rank0of8", "tl_h100_bert", "hta_triton"]
)
def test_trainings_that_load_well_are_not_input_bound(name: str) -> None:
    assert "input_bound" not in found(name)


@pytest.mark.parametrize(("name", "share"), [("tl_h100_bert", 0.9296), ("sidnb13_h100_transformer", 0.8675)])
def test_small_transformers_are_launch_bound(name: str, share: float) -> None:
    finding = found(name)["gpu_idle"]
    assert finding.severity is Severity.CRITICAL
    assert finding.numbers["launch_bound"] is True
    assert finding.numbers["share"] == pytest.approx(share, rel=1e-2)


@pytest.mark.parametrize(
    ("name", "share", "collective"),
    [
        ("hta_trace_diff_control", 0.18924, "all_to_all"),
        ("tl_mi300_resnet_ddp_rank0of8", 0.62429, "all_reduce"),
    ],
)
def test_exposed_communication_names_its_collective(name: str, share: float, collective: str) -> None:
    finding = found(name)["communication_exposed"]
    assert finding.numbers["share"] == pytest.approx(share, rel=1e-3)
    assert finding.title.endswith(f"mostly {collective}.")
    worst = finding.numbers["collectives"][0]
    assert worst["bytes_each"] > 10_000_000
    assert worst["exposed_ns"] <= worst["max_ns"] * worst["count"]


def test_a_file_with_a_part_of_the_events_has_no_findings() -> None:
    assert not found("hta_sampled_128")


@pytest.mark.parametrize("name", ["hta_ns_resolution", "kineto_resnet50_nw0", "tl_h100_bert"])
def test_a_single_rank_communicates_nothing(name: str) -> None:
    assert "communication_exposed" not in found(name)


def test_copies_of_a_hundredth_of_the_time_are_not_reported() -> None:
    (path,) = (path for path in TRACES if path.parent.name == "kineto_resnet50_nw0")
    (copies,) = (copies for copies in trace_report(path).copies if copies.is_pageable and copies.kind == "HtoD")
    assert (copies.count, copies.total_ns) == (12, 11_492_000)
    for name in ("kineto_resnet50_nw0", "hta_trace_diff_control", "hta_sampled_128", "hta_ns_resolution"):
        assert "blocking_transfers" not in found(name)


def test_tensor_cores_are_missed_where_they_are_and_are_not_used() -> None:
    assert found("hta_ns_resolution")["tensor_cores_unused"].numbers["tensor_ns"] == 0
    assert "torch.float16" in found("kineto_resnet50_nw0")["tensor_cores_unused"].next_steps[0]
    for name in ("tl_h100_bert", "sidnb13_h100_transformer", "tl_mi300_resnet_ddp_rank0of8", "hta_amd_mi250"):
        assert "tensor_cores_unused" not in found(name)


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.parent.name)
def test_every_finding_is_whole_and_points_into_its_trace(path: Path) -> None:
    for finding in findings_of(path):
        assert finding.title.endswith(".")
        assert finding.why.endswith(".")
        assert finding.next_steps
        assert 0 <= finding.weight <= 1
        assert finding.evidence[0].artifact == os.fspath(path)
        whole = finding.evidence[0]
        assert whole.start_ns is not None
        assert whole.end_ns is not None
        for each in finding.evidence[1:]:
            assert each.start_ns is not None
            assert each.end_ns is not None
            assert whole.start_ns <= each.start_ns <= each.end_ns <= whole.end_ns
