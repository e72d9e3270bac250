"""Steps that do not end, collectives that the ranks call differently, and workers that die."""

from __future__ import annotations

import signal
from typing import Final, NamedTuple

from lightning_memprof.account.ranks.hangs import Difference, Place, call, difference, last_calls, places, usual_call
from lightning_memprof.account.steps.workers import Worker, workers
from lightning_memprof.artifacts.naming import hang_stacks_name, hangs_name, processes_name
from lightning_memprof.artifacts.series import CollectiveRow, HangRow
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Evidence, Finding, Severity, titled
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.units import format_bytes, format_count, format_list, format_ns, sentence

MAX_OTHERS: Final = 4
# Of ranks without a report the first of these is the one that the others wait for.
ABSENT: Final = ("gone", "stopped", "finished", "running", "ended")
# By exit code; a signal's number with a minus sign.
DEATHS: Final = {-9: do.FEWER_WORKERS_FOR_MEMORY, -7: do.SHARED_MEMORY}


SILENT: Final = {
    "stopped": "Rank {rank} is stopped by a signal: rank {other} waits for it in step {step}.",
    "gone": "Rank {rank} died in step {step}: rank {other} waited for it in {where}.",
    "lost": "Rank {rank} closed its connection in step {step}: rank {other} waited for it in {where}.",
    "finished": "Rank {rank} has finished, but rank {other} waits for it in step {step}.",
    "ended": "Rank {rank} ended: rank {other} waits for it in step {step}.",
    "running": "Rank {rank} does not respond: rank {other} waits for it in step {step}.",
}


class Told(NamedTuple):
    """The title, the evidence and the remedy of a rank."""

    title: str
    why: str
    remedy: Remedy


def worker_died(facts: Facts) -> list[Finding]:
    """Find a DataLoader worker that a signal killed, or that ended with an exit code other than 0.

    The DataLoader raises an error without the reason.
    """
    dead = [(rank, worker) for rank in facts.run.ranks if rank.in_full for worker in workers(rank) if worker.exit_code]
    if not dead:
        return []
    rank, worker = dead[0]
    ended = f"The training ended: {rank.exception.rstrip('.')}." if rank.exception else "The training continued."
    more = f"{format_count(len(dead) - 1, 'more worker')} died" if len(dead) > 1 else ""
    memory = f"it had {format_bytes(worker.private_bytes)} of private memory" if worker.private_bytes else ""
    return [
        Finding(
            rule="worker_died",
            severity=Severity.WARNING if rank.exception is None else Severity.CRITICAL,
            title=titled(
                "A DataLoader worker{of}{data} died{rank}: {end}.",
                of=" of " if worker.dataset else "",
                data=worker.dataset or "",
                rank=facts.on_rank(rank),
                end=_end(worker),
            ),
            why=f"{sentence(memory, more)} {ended}".lstrip(),
            remedies=(DEATHS.get(worker.exit_code or 0, do.WITHOUT_WORKERS),),
            numbers={"rank": rank.rank, "pid": worker.pid, "exit_code": worker.exit_code, "workers": len(dead)},
            evidence=(Evidence(artifact=f"{facts.run.directory.name}/{processes_name(rank.rank)}", rank=rank.rank),),
            weight=1.0,
        )
    ]


def _end(worker: Worker) -> str:
    code = worker.exit_code or 0
    names = {number.value: number.name for number in signal.Signals}
    return f"exit code {code}" if code > 0 else f"signal {-code} ({names.get(-code, 'unknown')})"


def hang(facts: Facts) -> list[Finding]:
    """Find a step that does not end, or a rank that fails, and the rank that the others wait for."""
    found = places(facts.run.ranks)
    if not found:
        return []
    calls = last_calls(facts.run.ranks)
    differs = difference(facts.run.ranks)
    behind = _behind(found, calls, differs)
    if differs is not None and behind.state == "hang":
        conclusion = _differing_call(found, behind, differs)
    else:
        conclusion = _rank_behind(facts, found, behind, calls)
    others = [_words(place, calls) for place in found if place.rank != behind.rank and place.row is not None]
    waiting = f"Other ranks: {format_list(others, MAX_OTHERS)}." if others and differs is None else ""
    reports = next((place for place in (behind, *found) if place.row is not None), behind)
    row = reports.row
    stacks = hang_stacks_name(reports.rank) if row is not None and row.kind != "exception" else hangs_name(reports.rank)
    return [
        Finding(
            rule="hang",
            severity=Severity.CRITICAL,
            title=conclusion.title,
            why=" ".join(filter(None, (conclusion.why, waiting))),
            remedies=(conclusion.remedy, *((do.READ_STACKS.filled(file=stacks),) if stacks.endswith(".txt") else ())),
            evidence=(Evidence(artifact=f"{facts.run.directory.name}/{stacks}", rank=reports.rank),),
            numbers={
                "rank": behind.rank,
                "step": row.step if row else None,
                "waited_ns": row.waited_ns if row else None,
                "limit_ns": row.limit_ns if row else None,
                "collective": differs.number if differs else None,
            },
            # Nothing is worth more than a training run that ends; an out-of-memory report says more than its exception.
            weight=0.9 if behind.state == "raised" else 1.0,
        )
    ]


def _behind(found: list[Place], calls: dict[int, CollectiveRow], differs: Difference | None) -> Place:
    """Return the rank that the others wait for."""
    by_rank = {place.rank: place for place in found}

    def time(place: Place) -> int:
        return (place.row and place.row.time_ns) or 0

    if alone := [place for place in found if place.state == "raised" and not place.waits]:
        return min(alone, key=time)
    if differs is not None and differs.odd is not None:
        return by_rank[differs.odd]
    absent = [place for place in found if place.row is None]
    reported = [place for place in found if place.row is not None]
    if absent and all(place.waits for place in reported):
        return min(absent, key=lambda place: (ABSENT.index(place.state), place.rank))

    def order(place: Place) -> tuple[int, bool, int, int]:
        number = calls[place.rank].number or 0 if place.rank in calls else 0
        return (place.row and place.row.step) or 0, len(found) > 1 and place.waits, number, place.rank

    return min(reported, key=order)


def _differing_call(found: list[Place], behind: Place, differs: Difference) -> Told:
    """Describe a collective that the ranks call differently."""
    own = differs.calls[behind.rank]
    other = next(rank for rank, row in sorted(differs.calls.items()) if call(row) != call(own))
    theirs = differs.calls[other]
    is_alike = call(own)[0] == call(theirs)[0]
    title = titled(
        "Rank {rank} calls {own} in step {step}, rank {other} with {theirs}."
        if is_alike
        else "Rank {rank} calls {own} in step {step} where rank {other} calls {theirs}.",
        rank=behind.rank,
        own=_name(own),
        step=behind.row.step if behind.row else None,
        other=other,
        theirs=theirs.tensors if is_alike else _name(theirs),
    )
    by_rank = {place.rank: place for place in found}
    sides = "; ".join(_words(by_rank[rank], {rank: differs.calls[rank]}) for rank in (behind.rank, other))
    row = behind.row
    ended = row is not None and row.place is None and row.phase in ("between_steps", "other", "callbacks")
    return Told(
        title, f"Collective {differs.number} differs: {sides}.", do.SAME_BATCHES if ended else do.SAME_COLLECTIVES
    )


def _rank_behind(facts: Facts, found: list[Place], behind: Place, calls: dict[int, CollectiveRow]) -> Told:
    """Describe a rank that others wait for, or the only one."""
    row, number = behind.row, behind.rank
    if row is None:
        return _silent_rank(facts, found, behind, calls)
    place = row.place or row.function or "?"
    source = f" `{row.source}`" if row.source else ""
    if behind.state == "raised":
        error = (row.error or "").partition(":")[0]
        title = titled(
            "Rank {rank} raised {error} {where} at {place}.", rank=number, error=error, where=_where(row), place=place
        )
        remedy = do.LOOK_AT_LINE.filled(place=place, what=f"`{row.source}`" if row.source else "it raised")
        return Told(title, f"{(row.error or '').rstrip('.')}.", remedy)
    title = titled(
        "Step {step} does not end{rank}: stuck in {phase}{worker} at {place}.",
        step=row.step,
        rank=facts.on_rank(number),
        phase=_phase(row.phase),
        worker=f", worker {row.worker}" if row.worker is not None else "",
        place=place,
    )
    limit = f" (limit {format_ns(row.limit_ns)})" if row.limit_ns else ""
    called = f", {_name(calls[number])}" if behind.waits and number in calls else ""
    why = f"After {format_ns(row.waited_ns or 0)}{limit} it is in {row.function}{source}{called}."
    if row.phase == "data_wait" and row.place is None:
        return Told(title, why, do.WITHOUT_WORKERS)
    if behind.waits and len(found) > 1:
        same = len({call(calls[place.rank]) for place in found if place.rank in calls}) == 1
        return Told(title, why, do.LOOK_AT_NETWORK if same and len(calls) == len(found) else do.SAME_COLLECTIVES)
    return Told(title, why, do.LOOK_AT_LINE.filled(place=place, what="it does not return"))


def _silent_rank(facts: Facts, found: list[Place], behind: Place, calls: dict[int, CollectiveRow]) -> Told:
    """Describe a rank that reports nothing."""
    waiting = next((place for place in found if place.row is not None), behind)
    row, number, beat = waiting.row, behind.rank, behind.beat
    own = next((rank for rank in facts.run.ranks if rank.rank == number), facts.run.lead)
    pid, host = (beat.pid if beat else None) or own.facts.pid, own.facts.host
    state = behind.state if behind.state in SILENT else "running"
    state = "lost" if state == "running" and waiting.state == "raised" else state
    title = titled(
        SILENT[state],
        rank=number,
        other=waiting.rank,
        step=row.step if row else None,
        where=_name(calls[waiting.rank]) if waiting.rank in calls else "a collective",
    )
    why = []
    if beat is not None:
        why.append(f"Its last heartbeat was {format_ns(beat.waited_ns or 0)} earlier, {_where(beat)}")
    made = next((list(rank.read(CollectiveRow).rows) for rank in facts.run.ranks if rank.rank == waiting.rank), [])
    if made and (before := usual_call(made)) is not None:
        why.append(f"in earlier steps rank {waiting.rank} called {_name(before)} there")
    if state == "running":
        remedy = do.DUMP_STACKS.filled(pid=pid, host=host)
    elif state == "stopped":
        remedy = do.CONTINUE_PROCESS.filled(pid=pid, host=host)
    elif state == "finished":
        remedy = do.SAME_BATCHES
    else:
        killed = f"; for SIGKILL, `dmesg | grep -i oom` on {host}" if state == "gone" else ""
        remedy = do.READ_OUTPUT.filled(rank=number, kernel=killed)
    return Told(title, sentence(*why), remedy)


def _words(place: Place, calls: dict[int, CollectiveRow]) -> str:
    """Describe a rank that has reported."""
    row = place.row
    if row is None:
        return f"rank {place.rank} in {_name(calls[place.rank])}"
    called = f" ({_name(calls[place.rank])})" if place.rank in calls and place.waits else ""
    raised = f"raised {(row.error or '').partition(':')[0]} " if place.state == "raised" else ""
    return f"rank {place.rank} {raised}{_where(row)} at {row.place or row.function}{called}"


def _name(row: CollectiveRow) -> str:
    return f"{call(row)[0]} {row.tensors or ''}".rstrip()


def _where(row: HangRow) -> str:
    if row.step is None:
        return "outside a step"
    between = row.phase == "between_steps"
    return f"before step {row.step}" if between else f"in {_phase(row.phase)} of step {row.step}"


def _phase(phase: str | None) -> str:
    return (phase or "?").replace("_", " ")
