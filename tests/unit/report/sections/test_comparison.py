from __future__ import annotations

import json
import re

import pytest
from msgspec.structs import replace

from lightning_memprof.compare.comparison import check, compare, parse_limit
from lightning_memprof.compare.model import Comparison, Measure, Side, Unit
from lightning_memprof.report.printers.json import comparison_to_json
from lightning_memprof.report.printers.markdown import to_markdown
from lightning_memprof.report.printers.text import full_page, plain
from lightning_memprof.report.printers.values import words_text
from lightning_memprof.report.sections.comparison import comparison_document, conclusion
from pages import table_of

HOSTILE = "evil|`</script><img onerror=alert(1)>\x1b[31m\n# head"


def measure(name: str, value: float, noise: float = 0.0, samples: int = 20) -> Measure:
    unit: Unit = "bytes" if name.endswith("bytes") else "ns"
    return Measure(name=name, unit=unit, value=value, noise=noise, samples=samples, source="x")


def sides() -> tuple[Side, Side]:
    a = Side(
        label="runs/a",
        kind="run",
        measures={
            "step_ns": measure("step_ns", 20e6, 1e6),
            "other_ns": measure("other_ns", 1e6, 1e6),
            "peak_allocated_bytes": measure("peak_allocated_bytes", 100),
            "reserved_bytes": measure("reserved_bytes", 100),
        },
        named={"modules": {"net": 100.0, "old": 50.0}, "findings": {}},
    )
    b = Side(
        label="runs/b",
        kind="run",
        measures={
            "step_ns": measure("step_ns", 40e6, 1e6),
            "other_ns": measure("other_ns", 1.1e6, 1e6),
            "peak_allocated_bytes": measure("peak_allocated_bytes", 2000),
        },
        named={"modules": {"net": 200.0, HOSTILE: 70.0}, "findings": {"input_bound": 3.0}},
        sentences={"input_bound": "47 % of the step waits for data."},
        notes=[f"trace {HOSTILE} is torn"],
    )
    return a, b


@pytest.fixture
def comparison() -> Comparison:
    return compare(*sides())


@pytest.mark.parametrize(("mean", "is_named"), [(40e6, False), (25e6, True)])
def test_the_mean_step_is_named_beside_the_median_where_it_changes_otherwise(mean: float, is_named: bool) -> None:
    a, b = sides()
    a = replace(a, measures={**a.measures, "mean_step_ns": measure("mean_step_ns", 20e6, 1e6)})
    b = replace(b, measures={**b.measures, "mean_step_ns": measure("mean_step_ns", mean, 1e6)})
    assert ("mean step +25%" in " ".join(page(compare(a, b)).split())) == is_named


def page(comparison: Comparison, *limits: str) -> str:
    document = comparison_document(comparison, [check(comparison, parse_limit(limit)) for limit in limits])
    return plain(full_page(document, 80))


def test_nothing_above_noise_is_said_in_these_words() -> None:
    a, _ = sides()
    assert words_text(conclusion(compare(a, a))) == "no difference above noise: step time 20.0 ms -> 20.0 ms"
    assert "verdict   no difference above noise: step time" in page(compare(a, a))


def test_the_table_has_both_sides_their_spread_and_the_change(comparison: Comparison) -> None:
    rows = {
        row["quantity"]: list(row.values())[1:6] for row in table_of(comparison_document(comparison), "quantity-table")
    }
    assert rows["step_ns"] == ["20.0 ms", "5%", "40.0 ms", "2%", "+100%"]
    assert rows["peak_allocated_bytes"] == ["100 B", "0%", "1.95 KiB", "0%", "x20"]
    assert rows["other_ns"][-1] == "within noise"
    assert rows["reserved_bytes"][2:] == ["-", "-", "n/a"]


@pytest.mark.parametrize(("count", "confidence"), [(3, "-"), (4, "97.1%"), (6, "99.7%"), (40, ">99.9%")])
def test_a_row_has_the_confidence_of_its_change_or_says_that_the_steps_are_too_few(count: int, confidence: str) -> None:
    a, b = (
        Side(
            label="x",
            kind="run",
            measures={"step_ns": replace(measure("step_ns", ns, samples=count), steps=(ns,) * count)},
        )
        for ns in (20e6, 25e6)
    )
    document = comparison_document(compare(a, b))
    (row,) = table_of(document, "quantity-table")
    assert (row["change"], row["confidence"]) == ("too few steps" if count == 3 else "+25%", confidence)


def test_names_that_appeared_disappeared_and_changed_are_there(comparison: Comparison) -> None:
    document = comparison_document(comparison)
    rows = {row["name"][:4]: [row["change"], row["A"], row["B"]] for row in table_of(document, "modules-table")}
    assert rows == {
        "net": ["changed", "100 B", "200 B"],
        "old": ["only in A", "50 B", "-"],
        "evil": ["only in B", "-", "70 B"],
    }
    (finding,) = table_of(document, "findings-table")
    assert finding["finding"] == "47 % of the step waits for data."


def test_the_verdict_names_the_time_and_the_reason_the_rest(comparison: Comparison) -> None:
    assert words_text(conclusion(comparison)) == "step time +100% (20.0 ms -> 40.0 ms)"
    assert words_text(comparison_document(comparison).why).startswith(
        "Also: peak allocated x20, 3 modules, 1 finding. "
    )
    assert comparison_document(comparison).next.endswith("lightning-memprof show runs/b.")


@pytest.mark.parametrize(
    ("others", "counted"),
    [(1, "Also: peak allocated x20, forward +50%,"), (3, "callbacks +50%"), (4, "1 more quantity,")],
)
def test_the_part_that_grew_is_named_and_the_others_are_counted(others: int, counted: str) -> None:
    a, b = sides()
    names = ["forward_ns", "callbacks_ns", "optimizer_ns", "data_wait_ns"][:others]
    for name in names:
        a = replace(a, measures={**a.measures, name: measure(name, 2e6)})
        b = replace(b, measures={**b.measures, name: measure(name, 3e6)})
    a = replace(a, measures={**a.measures, "backward_ns": measure("backward_ns", 10e6)})
    b = replace(b, measures={**b.measures, "backward_ns": measure("backward_ns", 29e6)})
    found = compare(a, b)
    title = words_text(conclusion(found))
    assert title == "step time +100% (20.0 ms -> 40.0 ms), mostly backward (10.0 ms -> 29.0 ms)"
    assert len(title) + len("inconclusive: ") <= 100
    assert counted in words_text(comparison_document(found).why)


@pytest.mark.parametrize(
    ("kernels", "named"),
    [
        (("flash_fwd_kernel", "void flash::flash_bwd_kernel<128>(int)"), "attention (4.00 ms -> 18.0 ms)"),
        (("a" * 90, "sgemm"), f"{'a' * 33}… (2.00 ms -> 16.0 ms)"),
        ((), "GPU compute (10.0 ms -> 29.0 ms)"),
    ],
)
def test_of_a_device_the_kernels_that_grew_are_named(kernels: tuple[str, ...], named: str) -> None:
    a, b = (replace(each, kind="traces", named={}) for each in sides())
    a = replace(a, measures={**a.measures, "gpu_compute_ns": measure("gpu_compute_ns", 10e6)})
    b = replace(b, measures={**b.measures, "gpu_compute_ns": measure("gpu_compute_ns", 29e6)})
    if kernels:
        a = replace(a, named={"kernels": dict.fromkeys(kernels, 2e6)})
        b = replace(b, named={"kernels": {kernels[0]: 16e6, kernels[1]: 2e6}})
    found = compare(a, b)
    assert words_text(conclusion(found)) == f"step time +100% (20.0 ms -> 40.0 ms), mostly {named}"
    limited = conclusion(found, [check(found, parse_limit("step_ns>1%"))])
    assert len(words_text(limited)) <= 100


def test_of_a_host_alone_the_operators_that_grew_are_named() -> None:
    a, b = (replace(each, kind="traces", named={}) for each in sides())
    a = replace(a, named={"operators": {"aten::mkldnn_convolution": 5e6, "aten::relu": 1e6}})
    b = replace(b, named={"operators": {"aten::mkldnn_convolution": 22e6, "aten::relu": 2e6}})
    assert words_text(conclusion(compare(a, b))).endswith(", mostly convolution (5.00 ms -> 22.0 ms)")


def test_a_step_time_of_too_few_steps_is_unclear() -> None:
    a, b = sides()
    steps = {"a": (20e6, 20.1e6, 20e6), "b": (21e6, 21.1e6, 21e6)}
    a, b = (
        replace(each, measures={**each.measures, "step_ns": replace(each.measures["step_ns"], value=ns[0], steps=ns)})
        for each, ns in zip((a, b), steps.values(), strict=True)
    )
    words = "B differs from A, step time unclear, too few steps (20.0 ms -> 21.0 ms): "
    assert words_text(conclusion(compare(a, b))).startswith(words)


def test_traces_without_steps_are_compared_by_the_time_of_the_device() -> None:
    times = {"gpu_window_ns": (6e6, 13e6), "duration_ns": (6e6, 13e6), "gpu_idle_ns": (0, 7e6)}
    a, b = (
        Side(label=label, kind="traces", measures={name: measure(name, each[at]) for name, each in times.items()})
        for at, label in enumerate("ab")
    )
    title = words_text(conclusion(compare(a, b)))
    assert title == "GPU window +117% (6.00 ms -> 13.0 ms), mostly GPU idle (0 ns -> 7.00 ms)"


def test_kernels_have_their_short_names() -> None:
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, int>(int)"
    a, b = (replace(each, named={"kernels": {name: ns}}) for each, ns in zip(sides(), (1e6, 9e6), strict=True))
    (row,) = table_of(comparison_document(compare(a, b)), "kernels-table")
    assert row["name"] == "vectorized_elementwise_kernel<CUDAFunctor_add<float>>"


def test_the_verdict_has_the_result_of_the_limits_and_a_step_time_within_noise() -> None:
    a, b = sides()
    same = compare(a, replace(b, measures={**b.measures, "step_ns": replace(a.measures["step_ns"], value=20.4e6)}))
    words = "B differs from A, step time within noise (20.0 ms -> 20.4 ms): peak allocated x20"
    for limits, status in (
        (("step_ns>1%", "peak_allocated_bytes>5%"), "fail"),
        (("step_ns>1%", "other_ns>50%"), "inconclusive"),
        (("step_ns>5%",), "pass"),
    ):
        outcomes = [check(same, parse_limit(limit)) for limit in limits]
        assert words_text(conclusion(same, outcomes)).startswith(f"{status}: {words}")


def test_80_columns_have_both_spreads_and_what_is_within_noise(comparison: Comparison) -> None:
    rows = [" ".join(line.split()) for line in page(comparison).split("\n")]
    assert "quantity A A spread B B spread change" in rows
    assert "other_ns 1.00 ms 100% 1.10 ms 91% within noise" in rows


def test_a_limit_is_shown_with_its_figures(comparison: Comparison) -> None:
    shown = page(comparison, "step_ns>5%", "step_ns>30ms")
    assert "fail      step_ns>5%: step_ns increases (20.0 ms -> 40.0 ms, +100%)" in shown
    assert "pass      step_ns>30ms: step_ns increases" in shown


def test_long_lists_are_cut_and_say_so() -> None:
    a, b = sides()
    many = compare(a, replace(b, named={"modules": {f"layer{n}": 1000.0 + n for n in range(30)}}))
    assert "24 more" in page(many)
    assert len(comparison_to_json(many, conclusion(many))["changes"]) == 32


def test_the_document_is_json_and_has_every_figure(comparison: Comparison) -> None:
    outcome = check(comparison, parse_limit("step_ns>5%"))
    document = json.loads(
        json.dumps(comparison_to_json(comparison, conclusion(comparison), [outcome]), allow_nan=False)
    )
    assert document["is_same"] is False
    (step,) = [difference for difference in document["differences"] if difference["name"] == "step_ns"]
    assert (step["change"], step["relative"], step["is_above_noise"]) == (20e6, 1.0, True)
    assert step["a"]["noise"] == 1e6
    assert document["limits"] == [{"limit": "step_ns>5%", "status": "fail", "title": "step_ns increases"}]
    assert {change["kind"] for change in document["changes"]} == {"appeared", "disappeared", "changed"}


def test_names_cannot_break_out_of_markdown(comparison: Comparison) -> None:
    document = comparison_document(comparison, [check(comparison, parse_limit("step_ns>5%"))])
    text = to_markdown(document, is_full=True)
    assert "**fail: step time +100%" in text
    assert "| `step_ns` | 20.0 ms | 5% | 40.0 ms | 2% | +100% |" in text
    assert "fail: step\\_ns\\>5%: step" in text
    assert "<script" not in text
    assert not re.search(r"(?<!\\)<img", text)
    (row,) = [line for line in text.split("\n") if "evil" in line and line.startswith("|")]
    assert row.replace("\\|", "").count("|") == 5
