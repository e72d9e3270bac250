"""Where results go."""

from __future__ import annotations

import pytest

from lightning_memprof import ConfigError, Output


def test_a_policy_that_does_not_exist_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"Output\(on_error='explode'\): must be 'warn' or 'raise'"):
        Output(on_error="explode")  # type: ignore[arg-type]
