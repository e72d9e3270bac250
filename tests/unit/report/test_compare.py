from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lightning_memprof.analysis.compare.comparison import compare
from lightning_memprof.analysis.compare.limits import check, parse_limit
from lightning_memprof.analysis.compare.model import Comparison, Measure, Side, Unit
from lightning_memprof.report.compare import comparison_document, comparison_lines, comparison_markdown, conclusion

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
        sentences={"input_bound": "47% of the step waits for data."},
        notes=(f"trace {HOSTILE} is torn",),
    )
    return a, b


@pytest.fixture
def comparison() -> Comparison:
    return compare(*sides())


def page(comparison: Comparison, *limits: str) -> str:
    lines = comparison_lines(comparison, [check(comparison, parse_limit(limit)) for limit in limits])
    return "\n".join("".join(text for text, _ in line) for line in lines)


def test_nothing_above_noise_is_said_in_these_words() -> None:
    a, _ = sides()
    assert conclusion(compare(a, a)) == "no difference above noise"
    assert "verdict  no difference above noise" in page(compare(a, a))


def test_the_page_has_both_sides_their_noise_and_the_change(comparison: Comparison) -> None:
    rows = {line.split(" ")[0]: line.split()[1:] for line in page(comparison).split("\n")}
    assert " ".join(rows["step_ns"]) == "20.0 ms +-5% 40.0 ms +-2% +100%"
    assert " ".join(rows["peak_allocated_bytes"]) == "100 B 1.95 KiB x20"
    assert rows["other_ns"][-1] == "~"
    assert " ".join(rows["reserved_bytes"]) == "100 B - n/a"


def test_the_page_says_what_appeared_and_disappeared(comparison: Comparison) -> None:
    lines = page(comparison).split("\n")
    assert any(line.startswith("  net ") and line.endswith("100 B -> 200 B") for line in lines)
    assert any(line.startswith("- old ") and line.endswith("50 B -> none") for line in lines)
    assert any(line.startswith("+ evil") and line.endswith("none -> 70 B") for line in lines)
    assert "    47% of the step waits for data." in lines


def test_the_verdict_names_time_and_peak_first(comparison: Comparison) -> None:
    assert conclusion(comparison) == ("B differs from A: step_ns +100%, peak_allocated_bytes x20, 3 modules, 1 finding")


def test_a_limit_is_shown_with_its_figures(comparison: Comparison) -> None:
    shown = page(comparison, "step_ns>5%", "step_ns>30ms")
    assert "limit    step_ns>5% BROKEN: step_ns increases (20.0 ms -> 40.0 ms, +100%)" in shown
    assert "limit    step_ns>30ms kept: step_ns increases" in shown


def test_the_page_fits_80_columns_and_shows_control_characters_instead_of_sending_them() -> None:
    a, b = sides()
    long = replace(b, named={**b.named, "modules": {"x" * 500: 9.0, HOSTILE: 70.0}}, label="dir/" * 60)
    shown = page(compare(a, long), "peak_allocated_bytes>5%")
    assert max(map(len, shown.split("\n"))) <= 80
    assert "\x1b" not in shown
    assert "\\x1b" in shown


def test_long_lists_are_cut_and_say_so() -> None:
    a, b = sides()
    many = replace(b, named={"modules": {f"layer{n}": 1000.0 + n for n in range(30)}})
    assert "24 more: --format json" in page(compare(a, many))
    assert len(comparison_document(compare(a, many))["changes"]) == 32


def test_the_document_is_json_and_has_every_figure(comparison: Comparison) -> None:
    outcome = check(comparison, parse_limit("step_ns>5%"))
    document = json.loads(json.dumps(comparison_document(comparison, [outcome]), allow_nan=False))
    assert document["is_same"] is False
    (step,) = [difference for difference in document["differences"] if difference["name"] == "step_ns"]
    assert (step["change"], step["relative"], step["is_above_noise"]) == (20e6, 1.0, True)
    assert step["a"]["noise"] == 1e6
    assert document["limits"] == [{"limit": "step_ns>5%", "is_broken": True, "sentence": "step_ns increases"}]
    assert {change["kind"] for change in document["changes"]} == {"appeared", "disappeared", "changed"}


def test_names_cannot_break_out_of_markdown(comparison: Comparison) -> None:
    text = comparison_markdown(comparison, [check(comparison, parse_limit("step_ns>5%"))])
    assert "**B differs from A:" in text
    assert "| step_ns | 20.0 ms +-5% | 40.0 ms +-2% | +100% |" in text
    assert "- step\\_ns&gt;5% BROKEN" in text
    assert "<script" not in text
    assert "<img" not in text
    (row,) = [line for line in text.split("\n") if "evil" in line and line.startswith("|")]
    assert row.replace("\\|", "").count("|") == 4
