from __future__ import annotations

from known import known
from lightning_memprof.account.steps.lines import MIN_LOOKS, main_spot
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
    helper = known(main_spot(rows))
    assert (helper.function, helper.share, helper.text, helper.at) == (
        HELPER,
        0.5,
        "Net.penalty (net.py:7)",
        ": `svd(weight)`",
    )
    assert helper.is_helper


def test_a_function_without_a_line_that_has_most_of_its_time_is_named_alone() -> None:
    found = known(main_spot([row(STEP, HELPER, ns=10, place=f"net.py:{line}") for line in range(5)]))
    assert (found.text, found.at) == (HELPER, "")
    assert main_spot([row(STEP, MODULE_CALL, FORWARD, ns=10, place=f"net.py:{line}") for line in range(5)]) is None


def test_a_line_that_calls_a_module_has_no_time_of_its_own() -> None:
    assert main_spot([row(STEP, MODULE_CALL, ns=90), row(STEP, ns=10)]) is None
    forward = known(main_spot([row(STEP, MODULE_CALL, FORWARD, ns=90), row(STEP, ns=10)]))
    assert (forward.function, forward.is_helper) == (FORWARD, False)


def test_few_looks_show_no_place() -> None:
    assert main_spot([row(STEP, HELPER, ns=90, looks=MIN_LOOKS - 1)]) is None
    assert main_spot([]) is None
