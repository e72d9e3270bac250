from __future__ import annotations

import pytest

from lightning_memprof.capture.faults import describe


@pytest.mark.parametrize(("error", "words"), [(ValueError(), "ValueError"), (ValueError("a: b"), "ValueError: a: b")])
def test_an_exception_is_described_by_its_class_and_its_text_if_it_has_any(error: ValueError, words: str) -> None:
    assert describe(error) == words
