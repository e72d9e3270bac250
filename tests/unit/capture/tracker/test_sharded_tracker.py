"""FSDPMemory's configuration, and what it says of a model that is not sharded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from lightning_memprof.capture.tracker.collectors import FSDPMemory
from lightning_memprof.errors import ConfigError
from sessions import context

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("options", [{"depth": 0}, {"units": "MB"}])
def test_what_could_never_be_recorded_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        FSDPMemory(**options)


def test_a_strategy_that_does_not_shard_by_fully_shard_is_named(tmp_path: Path) -> None:
    with context(tmp_path) as run:
        reason = FSDPMemory().unavailable(run)
        assert reason is not None
        assert "SingleDeviceStrategy does not use fully_shard" in reason
        assert FSDPMemory().unavailable(replace(run, strategy="ModelParallelStrategy")) is None
        assert FSDPMemory().unavailable(replace(run, stage="test")) == "test has no training step"


def sharded(monkeypatch: pytest.MonkeyPatch, *paths: str) -> nn.Module:
    """A model of which ``paths`` count as sharded."""
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "head": nn.Linear(2, 2)})

    def modules(of: nn.Module) -> dict[str, nn.Module]:
        return {path: of.get_submodule(path) for path in paths}

    monkeypatch.setattr("lightning_memprof.capture.tracker.sharded_tracker.sharded_modules", modules)
    return model


def root(collector: FSDPMemory, model: nn.Module) -> str:
    return collector._root(model)[0]


def test_the_root_is_the_module_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharded(monkeypatch, "encoder", "encoder.0")
    assert root(FSDPMemory(root_module="encoder.0"), model) == "encoder.0"


@pytest.mark.parametrize(
    ("paths", "found"), [(("", "encoder", "head"), ""), (("encoder.0", "encoder"), "encoder"), (("head",), "head")]
)
def test_without_a_name_the_root_is_the_outermost(
    monkeypatch: pytest.MonkeyPatch, paths: tuple[str, ...], found: str
) -> None:
    assert root(FSDPMemory(), sharded(monkeypatch, *paths)) == found


@pytest.mark.parametrize(
    ("name", "paths", "words"),
    [
        ("decoder", ("encoder",), ["'decoder'", "no such module", "'encoder'"]),
        ("head", ("encoder",), ["'head'", "fully_shard was not called on it", "'encoder'"]),
        ("", ("encoder", "head"), ["''", "fully_shard was not called on it", "'encoder', 'head'"]),
        ("head", (), ["'head'", "the model has none"]),
    ],
)
def test_a_root_that_cannot_be_is_refused_and_the_others_are_named(
    monkeypatch: pytest.MonkeyPatch, name: str, paths: tuple[str, ...], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        root(FSDPMemory(root_module=name), sharded(monkeypatch, *paths))
    for word in words:
        assert word in str(refused.value)


def test_a_model_under_another_tensor_type_has_no_shards() -> None:
    from lightning_memprof.capture.tracker.sharded_tracker import sharded_modules

    assert sharded_modules(nn.Linear(2, 2, dtype=torch.float64)) == {}
