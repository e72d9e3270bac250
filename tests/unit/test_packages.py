from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from lightning_memprof.packages import lightning_class, overrides
from training import Package


def test_a_class_is_lightnings_where_the_object_derives_from_it_in_either_package(package: Package) -> None:
    mine = type("Mine", (package.loggers.CSVLogger,), {})("logs")
    assert lightning_class(mine, "TensorBoardLogger", "CSVLogger") is package.loggers.CSVLogger
    assert lightning_class(mine, "TensorBoardLogger") is None


def test_a_class_of_the_program_is_never_lightnings(package: Package) -> None:
    namesake = type("CSVLogger", (package.loggers.logger.DummyLogger,), {})()
    assert lightning_class(namesake, "CSVLogger") is None
    assert lightning_class(object(), "object") is None


def test_a_method_is_overridden_by_a_class_a_mixin_or_the_instance(package: Package) -> None:
    base = package.pl.Callback

    class Callback(base):  # type: ignore[valid-type,misc]
        def on_train_start(self, *_: Any) -> None:
            pass

    class Below(Callback):
        pass

    own = base()
    own.on_train_end = print
    changed = [Callback(), Below(), type("Mixed", (Below, base), {})()]
    assert all(overrides(callback, "Callback", "on_train_start") for callback in changed)
    assert overrides(own, "Callback", "on_train_end")
    assert not any(overrides(callback, "Callback", "on_fit_start") for callback in (own, *changed))


@pytest.mark.parametrize("name", ["LightningModule", "LightningDataModule"])
def test_hooks_that_lightning_defines_above_the_class_are_its_own(package: Package, name: str) -> None:
    empty = type("Empty", (getattr(package.pl, name),), {})()
    for hook in ("train_dataloader", "on_after_batch_transfer", "on_save_checkpoint"):
        assert not overrides(empty, name, hook)


def test_a_profiler_that_adds_nothing_overrides_nothing(package: Package) -> None:
    idle, timing = package.profilers.PassThroughProfiler(), package.profilers.SimpleProfiler()
    namesake = type("Profiler", (package.profilers.PassThroughProfiler,), {"profile": nullcontext})()
    assert [overrides(profiler, "Profiler", "profile") for profiler in (idle, timing, namesake)] == [False, False, True]
    assert [overrides(profiler, "PassThroughProfiler", "start") for profiler in (idle, timing)] == [False, True]


def test_an_object_without_a_base_of_lightnings_has_methods_of_its_own() -> None:
    class Duck:
        def on_train_start(self) -> None:
            pass

    assert overrides(Duck(), "Callback", "on_train_start")
    assert not overrides(Duck(), "Callback", "on_train_end")
