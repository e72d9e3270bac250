from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler, Profiler, SimpleProfiler

from lightning_memprof.integration.feeds import ActionTap


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


def listener(log: list[str], name: str) -> Any:
    return (lambda action: log.append(f"{name} start {action}"), lambda action: log.append(f"{name} stop {action}"))


@pytest.mark.parametrize("make", [PassThroughProfiler, SimpleProfiler, AdvancedProfiler, lambda: Told([])])
def test_a_tap_that_was_removed_leaves_the_profiler_as_it_was(make: Any) -> None:
    profiler = make()
    before = dict(vars(profiler))
    tap = ActionTap(profiler, ignore)
    tap.install({}, {}, [])
    assert {"start", "stop"} <= set(vars(profiler))
    tap.remove()
    tap.remove()
    assert vars(profiler) == before


def test_what_the_profiler_itself_had_bound_is_bound_again() -> None:
    log: list[str] = []
    profiler = Told([])
    own: Any = lambda action_name: log.append(f"bound {action_name}")  # noqa: E731 an attribute as users set it
    profiler.start = own  # type: ignore[method-assign]
    tap = ActionTap(profiler, ignore)
    tap.install({}, {}, [])
    with profiler.profile("a"):
        pass
    tap.remove()
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
    tap = ActionTap(profiler, ignore)
    tap.install({"a": lambda: log.append("handler start")}, {"a": lambda: log.append("handler stop")}, [])
    with tap.listen(*listener(log, "first")), tap.listen(*listener(log, "second")), profiler.profile("a"):
        log.append("body")
    tap.remove()
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
    tap = ActionTap(profiler, ignore)
    tap.install({"a": lambda: log.append("a starts")}, {}, [])
    with profiler.profile("a"), profiler.profile("b"):
        pass
    with tap.listen(*listener(log, "l")), profiler.profile("b"):
        pass
    with profiler.profile("b"):
        pass
    tap.remove()
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
    tap = ActionTap(profiler, faults.append)
    tap.install(handler if edge == "start" else {}, handler if edge == "stop" else {}, [])
    nothing = lambda _: None  # noqa: E731 one that does not fail
    listening = (fail if edge == "start" else nothing, fail if edge == "stop" else nothing)
    with tap.listen(*(listening if kind == "listener" else (nothing, nothing))), profiler.profile("a"):
        pass
    tap.remove()
    assert faults == [error]
    assert profiler.log == ["own start a", "own stop a"]


def test_what_the_profiler_itself_raises_is_the_users() -> None:
    tap = ActionTap(profiler := SimpleProfiler(), ignore)
    tap.install({}, {}, [])
    with pytest.raises(ValueError, match="never started"):
        profiler.stop("never started")
    tap.remove()


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
    tap = ActionTap(profiler, ignore)
    tap.install({}, {}, [])
    with profiler.profile("a"):
        pass
    tap.remove()
    assert profiler.log == []
