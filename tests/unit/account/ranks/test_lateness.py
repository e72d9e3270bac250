"""The late rank by the pulses of all ranks: data, callbacks, forward, chance and turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from fake_runs import FakeRun, add_series, make_run
from findings import action, ids, write_rows
from known import known
from lightning_memprof.account.ledger.model import total
from lightning_memprof.account.parts import Part
from lightning_memprof.account.ranks.lateness import Lateness, late_rank, pulse_lateness
from lightning_memprof.account.ranks.report import RankReport
from lightning_memprof.judge import Facts, Severity
from lightning_memprof.judge.rules.communication import straggler
from lightning_memprof.read.run.load import load_run
from lightning_memprof.read.run.model import Rank

MS = 1_000_000
USUAL = {"data_wait": 1, "forward": 20, "backward": 40, "optimizer": 5, "callbacks": 1, "other": 1}


@pytest.mark.parametrize(
    ("late_ms", "found"),
    [
        pytest.param([[20], [20], [20]], (1, 20), id="in each step"),
        pytest.param([[5, 15], [20], [-3, 23]], (1, 21), id="several rows for a step"),
        pytest.param([[20]], (1, 20), id="a single step has no scatter"),
        pytest.param([[0], [0], [80], [0]], None, id="one hiccup"),
        pytest.param([[20], [22], [9]], (1, 17), id="in few steps, without the slowest one too"),
        pytest.param([[14], [9]], None, id="in few steps, without the slowest one too little"),
        pytest.param([[40], [-30], [40], [-30]], None, id="in turns"),
        pytest.param([[2], [2], [2]], None, id="little"),
        pytest.param([[], [], []], None, id="never"),
    ],
)
def test_the_late_rank_by_its_rows_from_whatever_they_are(
    late_ms: list[list[int]], found: tuple[int, int] | None
) -> None:
    """Rank 1 is late, rank 0 where the number is negative."""
    rows = [Lateness(step, int(ms > 0), abs(ms) * MS) for step, each in enumerate(late_ms) for ms in each]
    late = late_rank(rows, len(late_ms), 5 * MS)
    assert (late and (late.rank, late.caused_ns / MS)) == found


def compared(
    directory: Path,
    more_ms: Callable[[int, int], dict[str, int]],
    *,
    waits: bool = True,
    hosts: Sequence[str] = ("node0", "node0"),
) -> RankReport:
    """Compare two ranks; who does less in a step than the other has a longer backward, where it waits."""

    def phases(rank: int, step: int) -> dict[str, int]:
        mine, others = more_ms(rank, step), more_ms(1 - rank, step)
        wait = max(sum(others.values()) - sum(mine.values()), 0) if waits else 0
        own = {name: ms + mine.get(name, 0) for name, ms in USUAL.items()}
        return {name: (ms + wait * (name == "backward")) * MS for name, ms in own.items()}

    run = load_run(make_run(directory, FakeRun(world_size=2, phases=phases)))
    for rank, host in zip(run.ranks, hosts, strict=True):
        rank.facts.host = host
    return known(Facts.of(run).ranks)


def late_by(phase: str, waits_in: str) -> Callable[[int, int], dict[str, int]]:
    """Rank 1 does 30 ms more in a phase, and rank 0 waits as long in another one."""

    def phases(rank: int, _step: int) -> dict[str, int]:
        longer = phase if rank == 1 else waits_in
        return {name: (ms + 30 * (name == longer)) * MS for name, ms in USUAL.items()}

    return phases


@pytest.mark.parametrize(
    ("phase", "cause"),
    [
        ("data_wait", Part.DATA_WAIT),
        ("callbacks", Part.CALLBACK),
        ("other", Part.UNTRACKED),
        ("forward", Part.COMPUTE),
    ],
)
def test_a_rank_that_does_more_in_each_step_is_late_by_that_phase(phase: str, cause: Part, tmp_path: Path) -> None:
    late = known(compared(tmp_path, lambda rank, _: {phase: 30} if rank == 1 else {}).straggler)
    assert (late.rank, late.cause, late.caused_ns, late.caused_share) == (1, cause, 30 * MS, 1.0)
    assert (late.own_ns, late.others_ns) == ((USUAL[phase] + 30) * MS, USUAL[phase] * MS)


def test_a_rank_that_is_late_in_each_fifth_step_is_late_on_average(tmp_path: Path) -> None:
    late = compared(tmp_path, lambda rank, step: {"callbacks": 200} if rank == 0 and step % 5 == 0 else {}).straggler
    assert late is not None
    assert late.caused_ns is not None
    assert (late.rank, late.cause) == (0, Part.CALLBACK)
    assert 20 * MS < late.caused_ns < 60 * MS


def test_a_hiccup_of_a_rank_that_is_late_in_each_step_does_not_refute_it(tmp_path: Path) -> None:
    def waits(rank: int, step: int) -> dict[str, int]:
        return {"data_wait": 2000 if step == 9 else 50} if rank == 1 else {}

    late = known(compared(tmp_path, waits).straggler)
    assert (late.rank, late.cause) == (1, Part.DATA_WAIT)


@pytest.mark.parametrize(
    "more_ms",
    [
        pytest.param(lambda _rank, _step: {}, id="equal"),
        pytest.param(
            lambda rank, step: {"data_wait": 900 if step == 9 else 2} if rank == 1 else {}, id="one step, else little"
        ),
        pytest.param(lambda rank, step: {"data_wait": 60} if (step % 2) == rank else {}, id="in turns"),
        pytest.param(lambda rank, step: {"data_wait": 900} if rank == 1 and step == 9 else {}, id="one step"),
        pytest.param(lambda rank, _step: {"data_wait": 2} if rank == 1 else {}, id="little"),
        pytest.param(lambda rank, _step: {"forward": 6} if rank == 1 else {}, id="little on shared cores"),
        pytest.param(lambda rank, step: {"forward": 30} if rank == (step // 5) % 3 % 2 else {}, id="in long turns"),
    ],
)
def test_ranks_that_are_late_by_chance_or_in_turns_or_by_little_are_no_straggler(
    more_ms: Callable[[int, int], dict[str, int]], tmp_path: Path
) -> None:
    assert compared(tmp_path, more_ms).straggler is None


def test_a_rank_with_cores_of_its_own_is_late_by_a_few_percent_in_forward(tmp_path: Path) -> None:
    late = compared(tmp_path, lambda rank, _: {"forward": 6} if rank == 1 else {}, hosts=("node0", "node1")).straggler
    assert late is not None
    assert (late.rank, late.cause, late.caused_ns) == (1, Part.COMPUTE, 6 * MS)


@pytest.mark.parametrize(("phase", "cause"), [("callbacks", Part.CALLBACK), ("forward", Part.COMPUTE)])
def test_the_others_wait_in_the_phases_that_are_longer_than_the_late_ranks(
    phase: str, cause: Part, tmp_path: Path
) -> None:
    found = compared(tmp_path, lambda rank, _: {phase: 30} if rank == 1 else {"other": 30}, waits=False)
    assert found.straggler is not None
    assert (found.straggler.rank, found.straggler.cause) == (1, cause)
    assert found.waits_ns == {0: {"other": 30 * MS}}
    facts = Facts.of(load_run(next(tmp_path.iterdir())))
    assert facts.ledgers[0].ns("rank_wait") == 30 * MS
    assert facts.ledgers[0].ns("untracked") == MS
    assert not facts.ledgers[1].ns("rank_wait")
    assert total(facts.ledgers[0].lines) == facts.ledgers[0].step_ns


@pytest.mark.parametrize(("core_wait_ns", "severity"), [(10 * MS, Severity.CRITICAL), (None, Severity.INFO)])
def test_ranks_on_one_machine_have_a_straggler_if_waits_for_a_core_do_not_explain_it(
    core_wait_ns: int | None, severity: Severity, tmp_path: Path
) -> None:
    run = make_run(
        tmp_path, FakeRun(world_size=2, phases=late_by("forward", "other"), core_wait_ns=lambda _: core_wait_ns)
    )
    found = known(straggler(Facts.of(load_run(run))))
    assert found.severity is severity
    assert found.title.startswith("Rank 1 is the straggler: its forward takes 50.0 ms per step, 20.0 ms on ")


@pytest.mark.parametrize(("wait_ms", "late_ms"), [((0, 8), 22), ((40, 40), 30), ((40, 0), 30), ((0, 30), None)])
def test_what_a_rank_waits_longer_for_a_core_than_the_others_is_not_its_lateness(
    wait_ms: tuple[int, int], late_ms: int | None, tmp_path: Path
) -> None:
    def waiting(rank: Rank, ms: int) -> Rank:
        return replace(rank, pulse=tuple(replace(row, core_wait_ns=ms * MS) for row in rank.pulse))

    ranks = load_run(make_run(tmp_path, FakeRun(world_size=2, phases=late_by("forward", "backward")))).ranks
    found = known(pulse_lateness([waiting(rank, ms) for rank, ms in zip(ranks, wait_ms, strict=True)]))
    assert (found.late.caused_ns if found.late else None) == (late_ms * MS if late_ms else None)


@pytest.mark.parametrize(("elements", "late_ms"), [((1000, 2000), 25), ((1000, 1000), None), ((2000, 1000), None)])
def test_a_rank_with_larger_batches_is_late_where_waits_for_a_core_vary_more_than_its_lateness(
    elements: tuple[int, int], late_ms: int | None, tmp_path: Path
) -> None:
    def waiting(rank: Rank) -> Rank:
        waits = [[160, 0, 0, 0], [0, 60, 60, 60]][rank.rank]
        rows = (replace(row, core_wait_ns=waits[at % 4] * MS) for at, row in enumerate(rank.pulse, start=1))
        return replace(rank, pulse=tuple(rows))

    fake = FakeRun(
        steps=32,
        world_size=2,
        phases=late_by("forward", "backward"),
        elements=lambda rank, _: elements[rank],
        windows=((30, 31),),
    )
    found = known(pulse_lateness([waiting(rank) for rank in load_run(make_run(tmp_path, fake)).ranks]))
    assert (found.late.caused_ns if found.late else None) == (late_ms * MS if late_ms else None)


def test_the_next_step_names_the_data_set_that_a_late_rank_waits_for(tmp_path: Path) -> None:
    run = make_run(
        tmp_path, FakeRun(world_size=2, phases=late_by("data_wait", "backward"), loading=("Magnetograms.fetch",))
    )
    found = known(straggler(Facts.of(load_run(run))))
    assert found.next_steps[0].startswith("Check the data of rank 1, mostly Magnetograms: ")


@pytest.mark.parametrize(
    ("phase", "hook", "remedy"),
    [("callbacks", "Report.on_train_batch_start", "share_callback"), ("optimizer", "Paced.step", "compare_rank")],
)
def test_what_waits_on_the_late_rank_has_the_remedy_of_its_line(
    tmp_path: Path, phase: str, hook: str, remedy: str
) -> None:
    def phases(rank: int, _step: int) -> dict[str, int]:
        longer = "backward" if rank else phase
        return {name: (ms + 30 * (name == longer)) * MS for name, ms in USUAL.items()}

    training = {"optimizers": [{"name": "Paced", "parameters": 10}]}
    waits = lambda _: MS  # noqa: E731 as short as in the other tests
    run = make_run(tmp_path, FakeRun(world_size=2, phases=phases, training=training, core_wait_ns=waits))
    write_rows(run / "actions.rank00000.jsonl", action("[Callback]Report.on_train_batch_start", 30 * MS, "callbacks"))
    publish = {"functions": [hook, "Report.publish"], "place": "a.py:6", "source": "sleep(1)"}
    add_series(run, "lines", [{**publish, "looks": 40, "ns": 30 * MS, "asleep_ns": 30 * MS}])
    found = known(straggler(Facts.of(load_run(run))))
    assert ids(found.remedies) == ["wait_outside", remedy]
    assert "Report.publish (a.py:6) has 100% of " in found.why


def test_a_rank_for_which_nobody_waits_is_no_straggler(tmp_path: Path) -> None:
    assert compared(tmp_path, lambda rank, _: {"data_wait": 30} if rank == 1 else {}, waits=False).straggler is None


def test_who_waits_in_forward_is_not_late_by_it(tmp_path: Path) -> None:
    def more(rank: int, _step: int) -> dict[str, int]:
        return {"data_wait": 30} if rank == 1 else {"forward": 30}

    late = compared(tmp_path, more, waits=False).straggler
    assert late is None or late.rank == 1
