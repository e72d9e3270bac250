from __future__ import annotations

from lightning_memprof.account.steps.lines import MIN_LOOKS, spots
from lightning_memprof.artifacts.series import MODULE_CALL, LineRow

STEP, HELPER, FORWARD = "Net.training_step", "Net.penalty", "Block.forward"


def row(*functions: str, ns: int, looks: int = MIN_LOOKS, place: str = "net.py:7", source: str = "") -> LineRow:
    return LineRow(functions=[*functions], ns=ns, looks=looks, place=place, source=source or None)


def test_the_innermost_function_with_much_of_the_time_comes_first_with_its_line() -> None:
    rows = [
        row(STEP, HELPER, ns=40, source="svd(weight)  # slow"),
        row(STEP, HELPER, ns=10, place="net.py:8"),
        row(STEP, MODULE_CALL, ns=50),
    ]
    helper, *others = spots(rows)
    assert (helper.function, helper.share, helper.text, helper.at) == (
        HELPER,
        0.5,
        "Net.penalty (net.py:7)",
        ": `svd(weight)`",
    )
    assert helper.is_helper
    # All of the step's own time is that of the helper: the step itself has no line with most of it.
    assert others == []


def test_a_function_without_a_line_that_has_most_of_its_time_is_named_alone() -> None:
    (found,) = spots([row(STEP, HELPER, ns=10, place=f"net.py:{line}") for line in range(5)])
    assert (found.text, found.at) == (HELPER, "")
    assert spots([row(STEP, MODULE_CALL, FORWARD, ns=10, place=f"net.py:{line}") for line in range(5)]) == []


def test_a_line_that_calls_a_module_has_no_time_of_its_own() -> None:
    assert spots([row(STEP, MODULE_CALL, ns=90), row(STEP, ns=10)]) == []
    forward = spots([row(STEP, MODULE_CALL, FORWARD, ns=90), row(STEP, ns=10)])
    assert [(found.function, found.is_helper) for found in forward] == [(FORWARD, False)]


def test_few_looks_show_no_place() -> None:
    assert spots([row(STEP, HELPER, ns=90, looks=MIN_LOOKS - 1)]) == []
    assert spots([]) == []
