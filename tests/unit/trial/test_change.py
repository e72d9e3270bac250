from __future__ import annotations

import pytest

from lightning_memprof.errors import ConfigError
from lightning_memprof.trial.changes import parse_change


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("workers", "workers=4"),
        ("workers=0", "workers=4"),
        ("workers=many", "workers=4"),
        ("workers=²", "workers=4"),
        ("workers=100000", "workers=4"),
        ("fused_optimizer=1", "fused_optimizer"),
        ("precision=8-bit", "precision=bf16-mixed"),
        ("without_callback=a b", "without_callback=MyCallback"),
    ],
)
def test_an_invalid_value_names_a_valid_one(text, wanted):
    with pytest.raises(ConfigError, match=rf"--remedy {text}: must be as in {wanted}$"):
        parse_change(text)
