from __future__ import annotations

import copy
import pickle
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import _GeneratorContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler, Profiler, SimpleProfiler

from lightning_memprof.capture.observe import hide_wrappers
from lightning_memprof.integration.feeds import ActionTap, unprofiled_parts
from training import Perceptron, trainer


class Told(Profiler):
    """A profiler of the user's that writes down what it hears."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def start(self, action_name: str) -> None:
        self.log.append(f"own start {action_name}")

    def stop(self, action_name: str) -> None:
        self.log.append(f"own stop {action_name}")


class Idle(Told):
    """One of which it is declared that it does nothing."""

    idle_actions = True


def ignore(error: Exception) -> None:
    raise AssertionError(error)


@contextmanager
def tapped(
    profiler: Any, starts: Any, stops: Any, kept: Any = (), *, on_fault: Callable[[Exception], Any] = ignore
) -> Iterator[ActionTap]:
    tap = ActionTap(profiler, on_fault)
    tap.install(starts, stops, kept)
    try:
        yield tap
    finally:
        tap.remove()


def listener(log: list[str], name: str) -> Any:
    return (lambda action: log.append(f"{name} start {action}"), lambda action: log.append(f"{name} stop {action}"))


@pytest.mark.parametrize("make", [PassThroughProfiler, SimpleProfiler, AdvancedProfiler, lambda: Told([])])
def test_a_tap_adds_nothing_to_the_profiler_and_is_gone_from_its_class_when_removed(make: Any) -> None:
    profiler = make()
    before, of_class = dict(vars(profiler)), dict(vars(type(profiler)))
    tap = ActionTap(profiler, ignore)
    tap.install({}, {}, [])
    try:
        assert vars(profiler) == before
        assert type(profiler).start is not of_class.get("start")
    finally:
        tap.remove()
        tap.remove()
    assert vars(profiler) == before
    assert dict(vars(type(profiler))) == of_class


@pytest.mark.parametrize("make", [PassThroughProfiler, SimpleProfiler, lambda: Told([])])
def test_a_profiler_is_pickled_and_copied_as_without_the_tap(make: Any) -> None:
    profiler = make()
    before = set(vars(profiler))
    with tapped(profiler, {"a": lambda: None}, {}):
        copies = [copy.copy(profiler), copy.deepcopy(profiler), pickle.loads(pickle.dumps(profiler))]  # noqa: S301 our own
    assert all(set(vars(each)) == before for each in copies)


@pytest.mark.parametrize("make", [PassThroughProfiler, SimpleProfiler, lambda: Told([])])
def test_another_profiler_of_the_same_class_is_not_tapped(make: Any) -> None:
    log: list[str] = []
    profiler, other = make(), make()
    with tapped(profiler, {"a": lambda: log.append("handler")}, {}), other.profile("a"):
        pass
    assert log == []
    assert not isinstance(other, Told) or other.log == ["own start a", "own stop a"]


def test_what_the_profiler_itself_had_bound_is_bound_again() -> None:
    log: list[str] = []
    profiler = Told([])
    own: Any = lambda action_name: log.append(f"bound {action_name}")  # noqa: E731 an attribute as users set it
    profiler.start = own  # type: ignore[method-assign]
    with tapped(profiler, {}, {}), profiler.profile("a"):
        pass
    assert vars(profiler)["start"] is own
    assert "stop" not in vars(profiler)
    assert log == ["bound a"]
    assert profiler.log == ["own stop a"]


def test_removing_a_tap_that_was_never_installed_changes_nothing() -> None:
    profiler = SimpleProfiler()
    before = dict(vars(profiler))
    ActionTap(profiler, ignore).remove()
    assert vars(profiler) == before


def test_the_profilers_own_time_holds_none_of_ours() -> None:
    log: list[str] = []
    profiler = Told(log)
    with (
        tapped(profiler, {"a": lambda: log.append("handler start")}, {"a": lambda: log.append("handler stop")}) as tap,
        tap.listen(*listener(log, "first")),
        tap.listen(*listener(log, "second")),
        profiler.profile("a"),
    ):
        log.append("body")
    assert log == [
        "handler start",
        "first start a",
        "second start a",
        "own start a",
        "body",
        "own stop a",
        "second stop a",
        "first stop a",
        "handler stop",
    ]


def test_handlers_hear_of_their_action_only_and_listeners_of_all() -> None:
    log: list[str] = []
    profiler = PassThroughProfiler()
    with tapped(profiler, {"a": lambda: log.append("a starts")}, {}) as tap:
        with profiler.profile("a"), profiler.profile("b"):
            pass
        with tap.listen(*listener(log, "l")), profiler.profile("b"):
            pass
        with profiler.profile("b"):
            pass
    assert log == ["a starts", "l start b", "l stop b"]


@pytest.mark.parametrize("where", ["start handler", "stop handler", "start listener", "stop listener"])
def test_what_ours_raise_goes_to_the_fault_handler_and_never_to_the_caller(where: str) -> None:
    error = ValueError(where)

    def fail(*_: object) -> None:
        raise error

    faults: list[Exception] = []
    profiler = Told([])
    edge, kind = where.split()
    handler = {"a": fail} if kind == "handler" else {}
    with tapped(
        profiler, handler if edge == "start" else {}, handler if edge == "stop" else {}, on_fault=faults.append
    ) as tap:
        nothing = lambda _: None  # noqa: E731 one that does not fail
        listening = (fail if edge == "start" else nothing, fail if edge == "stop" else nothing)
        with tap.listen(*(listening if kind == "listener" else (nothing, nothing))), profiler.profile("a"):
            pass
    assert faults == [error]
    assert profiler.log == ["own start a", "own stop a"]


def test_what_the_profiler_itself_raises_is_the_users() -> None:
    tap = ActionTap(profiler := SimpleProfiler(), ignore)
    tap.install({}, {}, [])
    with pytest.raises(ValueError, match="never started"):
        profiler.stop("never started")
    tap.remove()


@pytest.mark.parametrize("name", ["start", "stop"])
def test_an_exception_of_the_profiler_has_the_traceback_and_the_context_that_it_has_without_the_tap(name: str) -> None:
    class Failing(Told):
        def start(self, action_name: str) -> None:
            if name == "start":
                raise OSError

        def stop(self, action_name: str) -> None:
            if name == "stop":
                raise OSError

    def raised(profiler: Profiler) -> list[list[str]]:
        found = []
        error: BaseException | None
        try:
            with profiler.profile("a"):
                pass
        except OSError as caught:
            # As at the end of a run.
            hide_wrappers(caught)
            error = caught
        while error is not None:
            found.append([frame.name for frame in traceback.extract_tb(error.__traceback__)])
            error = error.__context__
        return found

    profiler = Failing([])
    before = raised(profiler)
    with tapped(profiler, {"a": lambda: None}, {"a": lambda: None}):
        assert raised(profiler) == before


def test_a_listener_may_leave_while_it_is_told() -> None:
    profiler = PassThroughProfiler()
    tap = ActionTap(profiler, ignore)
    log: list[str] = []
    leaving: list[Any] = []

    def leave(action: str) -> None:
        log.append("leaves")
        leaving.pop().__exit__(None, None, None)

    tap.install({}, {}, [])
    leaving.append(tap.listen(leave, lambda _: None))
    leaving[0].__enter__()
    with tap.listen(*listener(log, "other")), profiler.profile("a"), profiler.profile("b"):
        pass
    tap.remove()
    assert log == ["leaves", "other start a", "other start b", "other stop b", "other stop a"]


def test_idle_profilers_are_not_called() -> None:
    profiler = Idle([])
    with tapped(profiler, {}, {}), profiler.profile("a"):
        pass
    assert profiler.log == []


def test_an_idle_profiler_makes_no_generator_and_keeps_the_meaning_of_profile() -> None:
    log: list[str] = []
    profiler = PassThroughProfiler()
    with tapped(profiler, {"a": lambda: log.append("a starts")}, {"a": lambda: log.append("a stops")}):
        assert not isinstance(profiler.profile("a"), _GeneratorContextManager)
        with profiler.profile(action_name="a") as name, profiler.profile("b") as other:
            assert (name, other) == ("a", "b")
        with pytest.raises(ValueError, match="of the body"), profiler.profile("a"):
            raise ValueError("of the body")
        profiler.profile("a")(lambda: log.append("body"))()
    assert type(profiler).profile is Profiler.profile
    assert log == ["a starts", "a stops"] * 2 + ["a starts", "body", "a stops"]


def test_a_profiler_of_the_user_keeps_its_own_profile() -> None:
    for profiler in (SimpleProfiler(), Told([])):
        tap = ActionTap(profiler, ignore)
        tap.install({}, {}, [])
        assert type(profiler).profile is Profiler.profile
        tap.remove()


def test_a_program_that_wraps_start_during_the_run_hears_every_action() -> None:
    log: list[str] = []
    profiler = PassThroughProfiler()
    with tapped(profiler, {"a": lambda: log.append("handler")}, {}):
        below = profiler.start

        def start(action_name: str) -> None:
            log.append(f"program {action_name}")
            below(action_name)

        profiler.start = start  # type: ignore[method-assign]
        with profiler.profile("a"):
            pass
        del profiler.start
        with profiler.profile("a"):
            pass
    assert log == ["program a", "handler", "handler"]


def test_two_runs_at_a_time_share_an_idle_profiler() -> None:
    log: list[str] = []
    profiler = PassThroughProfiler()
    outer, inner = ActionTap(profiler, ignore), ActionTap(profiler, ignore)
    outer.install({"a": lambda: log.append("outer")}, {}, [])
    inner.install({"a": lambda: log.append("inner")}, {}, [])
    with profiler.profile("a"):
        pass
    inner.remove()
    with profiler.profile("a"):
        pass
    outer.remove()
    assert sorted(log[:2]) == ["inner", "outer"]
    assert log[2:] == ["outer"]
    assert PassThroughProfiler.profile is Profiler.profile


def test_a_listener_that_an_actions_handler_adds_hears_that_action() -> None:
    log: list[str] = []
    profiler = PassThroughProfiler()
    tap = ActionTap(profiler, ignore)
    listening = tap.listen(*listener(log, "l"))
    tap.install({"a": listening.__enter__}, {}, [])
    with profiler.profile("a"), profiler.profile("b"):
        pass
    listening.__exit__(None, None, None)
    tap.remove()
    assert log == ["l start a", "l start b", "l stop b", "l stop a"]


def test_an_interrupt_in_a_handler_ends_the_action_too() -> None:
    log: list[str] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    profiler = PassThroughProfiler()
    stops = {"a": lambda: log.append("stop")}
    with tapped(profiler, {"a": interrupt}, stops), pytest.raises(KeyboardInterrupt), profiler.profile("a"):
        log.append("body")
    assert log == ["stop"]


def test_an_interrupt_that_was_kept_is_raised_by_an_action_of_the_same_thread() -> None:
    kept: list[BaseException] = [KeyboardInterrupt()]
    profiler = PassThroughProfiler()
    with tapped(profiler, {}, {}, kept):

        def other_thread() -> None:
            with profiler.profile("a"):
                pass

        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        assert len(kept) == 1
        with pytest.raises(KeyboardInterrupt), profiler.profile("a"):
            pass
    assert kept == []


def test_an_action_that_is_open_when_the_tap_is_removed_calls_no_handler() -> None:
    log: list[str] = []
    profiler = PassThroughProfiler()
    tap = ActionTap(profiler, ignore)
    tap.install({}, {"a": lambda: log.append("stop")}, [])
    with profiler.profile("a"):
        tap.remove()
    assert log == []


def test_names_of_actions_without_end_are_not_kept() -> None:
    profiler = PassThroughProfiler()
    with tapped(profiler, {}, {}):
        assert profiler.profile("a") is profiler.profile("a")
        for number in range(5000):
            with profiler.profile(f"batch {number}"):
                pass
        assert profiler.profile("batch 4999") is not profiler.profile("batch 4999")


def made(directory: Path) -> pl.Trainer:
    loggers = [CSVLogger(directory, name=name) for name in ("a", "b")]
    trained = trainer(directory, logger=loggers)
    trained.strategy.connect(Perceptron())
    trained.strategy.optimizers = [torch.optim.SGD(Perceptron().parameters(), 0.1)]
    return trained


def test_every_part_is_a_method_that_its_owner_has(tmp_path: Path) -> None:
    parts = unprofiled_parts(made(tmp_path), "fit")
    assert all(callable(getattr(part.owner, part.method)) for part in parts)
    names = [part.action for part in parts]
    assert {
        "[Precision]Precision.backward",
        "[Strategy]SingleDeviceStrategy.save_checkpoint",
        "[CheckpointIO]TorchCheckpointIO.save_checkpoint",
        "[Optimizer]SGD.step",
        "logging",
        "run_validation",
    } <= set(names)
    assert names.count("[Logger]CSVLogger.log_metrics") == 2


def test_only_fit_has_optimizers_and_a_validation_inside(tmp_path: Path) -> None:
    names = {part.action for part in unprofiled_parts(made(tmp_path), "validate")}
    assert not names & {"run_validation", "[Optimizer]SGD.step"}
    assert "logging" in names


def test_what_waits_for_other_ranks_is_timed_where_there_are_some(tmp_path: Path) -> None:
    alone = {part.action for part in unprofiled_parts(made(tmp_path), "fit")}
    with mock.patch.object(pl.Trainer, "world_size", 2):
        parts = unprofiled_parts(made(tmp_path), "fit")
    together = {part.action for part in parts}
    assert {part.method for part in parts if part.meets and part.always} == {
        "barrier",
        "broadcast",
        "all_gather",
        "log",
    }
    assert together - alone == {
        f"[Strategy]SingleDeviceStrategy.{name}" for name in ("barrier", "broadcast", "all_gather", "broadcast_sigterm")
    }


def test_a_part_that_lightning_no_longer_has_is_left_out(tmp_path: Path) -> None:
    trained = made(tmp_path)
    with mock.patch.object(type(trained._logger_connector), "log_eval_end_metrics", None):
        assert "log_eval_end_metrics" not in {part.method for part in unprofiled_parts(trained, "fit")}
