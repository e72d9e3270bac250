from __future__ import annotations

import pytest
import torch

from lightning_memprof.demo.train import ByteWindows, read_library
from lightning_memprof.errors import MemprofError


def test_the_text_is_the_same_at_every_reading_and_as_long_as_asked():
    text = read_library(10_000)
    assert text.dtype == torch.uint8
    assert text.shape == (10_000,)
    assert torch.equal(text, read_library(20_000)[:10_000])


def test_the_text_is_python():
    assert b"import " in bytes(read_library(100_000).tolist())


def test_a_python_without_its_sources_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(MemprofError, match=str(tmp_path)):
        read_library()


def test_a_target_is_its_input_one_byte_later():
    windows = ByteWindows(torch.arange(10, dtype=torch.uint8), context=4)
    assert len(windows) == 2
    tokens, targets = windows[1]
    assert tokens.tolist() == [4, 5, 6, 7]
    assert targets.tolist() == [5, 6, 7, 8]
    assert tokens.dtype == targets.dtype == torch.int64
