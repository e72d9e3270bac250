"""When holders are searched for: by growth, at the end, on request; and what a search costs a healthy run."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memprof.capture import census
from lightning_memprof.capture.base import RunContext, StepRecord
from lightning_memprof.capture.collectors import holders
from lightning_memprof.capture.collectors.holders import Holders
from lightning_memprof.schedule import Action
from lightning_memprof.units import MIB
from recorded_rows import read_rows
from sessions import context, drive, session

SECOND = 1_000_000_000


class Memory:
    """A resident size that the test sets; counts the searches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 500 * MIB
        self.taken: list[int] = []
        real = holders.take_census

        def take(step: int, *rest: Any) -> census.Census:
            self.taken.append(step)
            time.sleep(0.05)
            return real(step, *rest)

        monkeypatch.setattr(holders, "take_census", take)

    def read(self, _step: int | None = None) -> int:
        return self.bytes

    after_step = read

    def close(self) -> None:
        pass


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    return Memory(monkeypatch)


def follow(run: RunContext, memory: Memory, sizes: Iterable[int], windows: tuple[int, ...] = ()) -> list[Any]:
    """Follow steps of a second with these resident sizes in MiB; return the rows."""
    run.resident = memory  # type: ignore[assignment]
    with Holders(seconds=60).follow(run) as on_step:
        assert on_step is not None
        for step, size in enumerate(sizes):
            memory.bytes = size * MIB
            window = 0 if step in windows else None
            on_step(StepRecord(step, step, 0, window, step * SECOND, SECOND, None, None))  # type: ignore[arg-type]
    path = run.sink.place.directory / "holders.rank00000.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


STEADY = [500] * 60


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(STEADY, id="steady"),
        pytest.param([500, 900, 950, *[960] * 50], id="grows in the first steps"),
        pytest.param([500 + 4 * (step % 2) for step in range(60)], id="goes up and down"),
        pytest.param([900 - step for step in range(60)], id="shrinks"),
    ],
)
def test_without_growth_nothing_is_counted(tmp_path: Path, memory: Memory, sizes: list[int]) -> None:
    with context(tmp_path) as run:
        assert follow(run, memory, sizes) == []
    assert memory.taken == []


@pytest.mark.slow
def test_growth_is_counted_once_then_searched_for_ever_more_rarely_and_at_the_end(
    tmp_path: Path, memory: Memory
) -> None:
    with context(tmp_path) as run:
        rows = follow(run, memory, [500 + 4 * step for step in range(200)])
        assert run.apart_ns["holders"] > 0
        pauses = [row["ns"] for row in read_rows(run.sink.manifest.path)[0] if row["kind"] == "pause"]
    # At 8 MiB, 32 MiB later, four times as far, and at the end.
    assert memory.taken == [7, 15, 39, 135, 199]
    # Other ranks do not wait for the last.
    assert len(pauses) == 4
    assert run.apart_ns["holders"] == sum(pauses)
    assert {row["since_step"] for row in rows} == {7}
    assert rows[-1]["kind"] in ("remainder", "free memory")
    assert rows[-1]["grown_bytes"] == 4 * 192 * MIB


def test_what_a_window_adds_is_no_growth(tmp_path: Path, memory: Memory) -> None:
    sizes = [*[500] * 10, *[700] * 3, *[720] * 40]
    with context(tmp_path) as run:
        assert follow(run, memory, sizes, windows=(10, 11, 12)) == []
    assert memory.taken == []


def test_after_an_exception_nothing_is_searched_for(tmp_path: Path, memory: Memory) -> None:
    with context(tmp_path) as run:
        try:
            int("no number")
        except ValueError:
            follow(run, memory, [500 + 2 * step for step in range(20)])
    assert len(memory.taken) == 1


def test_a_program_with_too_many_objects_is_noted_once(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(census, "_MOST_OBJECTS", 10)
    with context(tmp_path) as run:
        assert follow(run, memory, [500 + 4 * step for step in range(200)]) == []
        manifest = (run.sink.place.directory / "manifest.rank00000.jsonl").read_text()
    assert memory.taken == [7]
    assert manifest.count("a search for holders would take too long") == 1


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []


def every_step(step: int) -> Action:
    return Action.RECORD_AND_SAVE if step == 7 else Action.RECORD


@pytest.mark.parametrize("asked", [True, False])
def test_a_window_is_compared_only_if_it_is_asked_for(tmp_path: Path, asked: bool) -> None:
    with context(tmp_path, on_error="raise") as run:
        model = Kept()
        run.__dict__["model"] = model
        run.holders_asked = asked
        with session(run, every_step, [Holders(seconds=60)]) as made:
            drive(made, range(8), lambda _: model.kept.append(torch.ones(512, 512)))
        path = run.sink.place.directory / "holders.rank00000.jsonl"
        assert path.exists() is asked
        if asked:
            row = json.loads(path.read_text().splitlines()[0])
            assert (row["place"], row["added"], row["asked"]) == ("Kept.kept[...]", 8, True)


def test_a_search_that_fails_is_a_failure_of_the_collector(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(holders, "grown_holders", fail)
    with context(tmp_path) as run:
        run.holders_asked = True
        with session(run, every_step, [Holders(seconds=60)]) as made:
            drive(made, range(8))
        assert "holders" in run.faults.disabled
    assert gc.isenabled()
