from __future__ import annotations

from pathlib import Path

import pytest

from lightning_memprof.capture.faults import describe
from sessions import context


@pytest.mark.parametrize(("error", "words"), [(ValueError(), "ValueError"), (ValueError("a: b"), "ValueError: a: b")])
def test_an_exception_is_described_by_its_class_and_its_text_if_it_has_any(error: ValueError, words: str) -> None:
    assert describe(error) == words


def test_ctrl_c_amid_a_wait_for_a_thread_ends_the_training_and_disables_nothing(tmp_path: Path) -> None:
    def wait() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            # As the lock of a condition does that is left while it is released.
            raise RuntimeError("release unlocked lock")

    with context(tmp_path) as run:
        with pytest.raises(KeyboardInterrupt), run.faults.caught("pulse", "mark"):
            wait()
        assert not run.faults.disabled
