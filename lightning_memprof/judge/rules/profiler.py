"""Steps that do not end, workers that die, and the profiler overhead of a run and of an operator trace."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Final

from lightning_memprof.account.ledger.run import typical_in_windows
from lightning_memprof.account.ranks.hangs import Difference, Place, call, difference, last_calls, places, usual_call
from lightning_memprof.account.steps.statistics import PulseStatistics
from lightning_memprof.account.steps.workers import Worker, workers
from lightning_memprof.artifacts.manifest import OverheadFacts
from lightning_memprof.artifacts.naming import hang_stacks_name, hangs_name, processes_name
from lightning_memprof.artifacts.series import (
    PROFILERS,
    PYTHON_PROFILER,
    TORCH_PROFILER,
    CollectiveRow,
    HangRow,
    PulseRow,
)
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Evidence, Finding, Recovery, Severity
from lightning_memprof.judge.measures import own_ns
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.traces import (
    LAUNCHING,
    NOTABLE_SHARE,
    idle_ns,
    is_brief,
    on_rank,
    remedies,
    remedy,
    seen_in,
    times,
)
from lightning_memprof.read.run.model import Rank
from lightning_memprof.read.trace.model import TraceReport
from lightning_memprof.units import format_bytes, format_count, format_list, format_ns, percent

# Why the operator trace is not available: the words of capture and integration.
OTHER_PROFILER: Final = re.compile(r"its own torch profiler|owns torch\.profiler")
# At this share of the figures, a phase would be a finding.
SEVERE_SHARE: Final = 0.20
# The pulse may take 20 µs per step: a larger share occurs only in very short steps.
NOTABLE_PULSE: Final = 0.02
# Windows are a choice, and their cost is paid once.
NOTABLE_WINDOWS: Final = 0.25
FEWER: Final = "Train some steps outside windows: MemProfilerCallback(schedule=Schedule(wait=10, active=2))."
LESS: Final = "Record less per step: MemProfilerCallback(collectors=[...])"
SHORTER: Final = "Open fewer or shorter windows: MemProfilerCallback(schedule=Schedule(repeat=1, active=2))."
NO_PULSE: Final = "Leave the pulse out of MemProfilerCallback(collectors=[...]), or use larger batches."


# Its events take host time for every operator, and are garbage to collect when it ends.
OTHER: Final = (0.2, 0.5)
# The share of calls of Python functions in the work is unknown.
PYTHON_OTHER: Final = (0.02, 0.2)
MIN_PROFILED: Final = 3
PROFILED: Final = (
    "forward", "backward", "optimizer", "callback", "module_hook", "logging", "gc_pauses", "untracked", "stall",
)  # fmt: skip
REMOVE: Final = {
    TORCH_PROFILER: 'Remove the other profiler: torch.profiler.profile(...) or Trainer(profiler="pytorch").',
    PYTHON_PROFILER: (
        "Remove the other profiler, or use it for a few steps: cProfile, sys.setprofile(...) or "
        'Trainer(profiler="advanced").'
    ),
}

MAX_OTHERS: Final = 4
# Of ranks without a report the first of these is the one that the others wait for.
ABSENT: Final = ("gone", "stopped", "finished", "running", "ended")
TIMEOUT: Final = "Let a stuck worker raise: DataLoader(timeout=60); num_workers=0 shows its line."
SAME_CALLS: Final = "Call the same collectives on every rank, in the same order and with the same shapes."
SAME_BATCHES: Final = (
    "Give every rank the same number of batches: DistributedSampler(drop_last=True), or limit_train_batches=N."
)
NETWORK: Final = "All ranks wait in one collective: look at the network of the nodes; for NCCL set NCCL_DEBUG=INFO."

# A sentence, what it rests on, and the next step.
Told = tuple[str, str, str]

WITHOUT_WORKERS: Final = "Run with DataLoader(num_workers=0): the main process then shows the error with its line."
# By exit code; a signal's number with a minus sign.
DEATHS: Final = {
    -9: (
        "The kernel kills processes when memory runs out: use fewer workers; `dmesg | grep -i oom` on the node "
        "confirms it."
    ),
    -7: "Shared memory is full: enlarge /dev/shm (docker run --shm-size=8g), or use fewer workers.",
}


def worker_died(facts: Facts) -> list[Finding]:
    """Find a DataLoader worker that a signal killed, or that ended with an exit code of its own."""
    dead = [(rank, worker) for rank in facts.run.ranks if rank.in_full for worker in workers(rank) if worker.exit_code]
    if not dead:
        return []
    rank, worker = dead[0]
    name = f" of {worker.dataset}" if worker.dataset else ""
    more = f" {format_count(len(dead) - 1, 'more worker')} died." if len(dead) > 1 else ""
    ended = f"The training ended: {rank.exception.rstrip('.')}." if rank.exception else "The training continued."
    held = f"It had {format_bytes(worker.private_bytes)} of private memory. " if worker.private_bytes else ""
    return [
        Finding(
            rule="worker_died",
            severity=Severity.WARNING if rank.exception is None else Severity.CRITICAL,
            title=f"A DataLoader worker{name} died{facts.on_rank(rank)}: {_end(worker)}.",
            why=f"{held}{ended}{more}",
            remedies=(DEATHS.get(worker.exit_code or 0, WITHOUT_WORKERS),),
            numbers={"rank": rank.rank, "pid": worker.pid, "exit_code": worker.exit_code, "workers": len(dead)},
            evidence=(Evidence(artifact=f"{facts.run.directory.name}/{processes_name(rank.rank)}", rank=rank.rank),),
            weight=1.0,
        )
    ]


def _end(worker: Worker) -> str:
    code = worker.exit_code or 0
    names = {number.value: number.name for number in signal.Signals}
    return f"exit code {code}" if code > 0 else f"signal {-code} ({names.get(-code, 'unknown')})"


def other_profiler(facts: Facts) -> Finding | None:
    """Find another profiler that runs in the training: torch's or a Python one.

    If it records some steps only, recovers how much longer those and the next ones, which write the trace, take than
    the median of the others. If it records all steps: of torch's profiler, 20% to 50% of forward and backward and the
    GC pauses; of a Python profiler, 2% to 20% of the work of the step.
    """
    found = [finding for rank in facts.run.ranks if (finding := _profiled(facts, rank)) is not None]
    return max(found, key=lambda finding: finding.weight) if found else None


def _profiled(facts: Facts, rank: Rank) -> Finding | None:
    refused = next(
        (row for row in facts.run.unavailable if row.rank == rank.rank and OTHER_PROFILER.search(row.reason)), None
    )
    steps = [row for row in rank.pulse if row.window is None and row.duration_ns is not None]
    kinds = [row.other_profiler for row in steps if row.other_profiler]
    ledger = facts.ledgers.get(rank.rank)
    if ledger is None or not (refused or len(kinds) >= MIN_PROFILED):
        return None
    kind = TORCH_PROFILER if refused or TORCH_PROFILER in kinds else PYTHON_PROFILER
    excess, others = _beyond_others(steps)
    part = ""
    if others >= POLICY.steps and len(kinds) >= MIN_PROFILED:
        part = f" in {len(kinds)} of {len(steps)} steps"
        least = most = min(excess, ledger.ns(*PROFILED))
        why = (
            f"{format_count(len(kinds), 'step')} and those after them take {format_ns(excess)} of {ledger.length_text}"
        )
    elif kind == TORCH_PROFILER:
        passes, pauses = ledger.ns("forward", "backward"), ledger.ns("gc_pauses")
        least, most = (pauses + passes * share for share in OTHER)
        why = (
            f"It costs time for each operator; forward and backward take {format_ns(passes)}, GC pauses "
            f"{format_ns(pauses)} of {ledger.length_text}"
        )
    else:
        work = ledger.ns(*PROFILED)
        least, most = (work * share for share in PYTHON_OTHER)
        why = f"It costs time for each call of a function; the training's own work takes {format_ns(work)}"
    worth = Recovery(unit="ns", min=least, max=most, whole=ledger.step_ns)
    return Finding(
        rule="other_profiler",
        title=f"Another profiler is on: {PROFILERS[kind]} records the training{part}{facts.on_rank(rank)}.",
        why=f"{f'{refused.reason[:1].upper()}{refused.reason[1:]}. ' if refused else ''}{why}.",
        remedies=(REMOVE[kind],),
        evidence=(facts.pulse(rank),),
        numbers={"rank": rank.rank, "profiled_steps": len(kinds), "steps": len(steps), "beyond_others_ns": excess},
        **worth.parts,
    )


def _beyond_others(steps: Sequence[PulseRow]) -> tuple[float, int]:
    """Return the excess of profiled steps and the next ones over the median of the others, and the number of these.

    The excess is in ns per step of the run.
    """
    others: list[int] = []
    profiled: list[int] = []
    for before, row in pairwise(steps):
        (profiled if before.other_profiler or row.other_profiler else others).append(row.duration_ns or 0)
    if not others or not profiled:
        return 0.0, len(others)
    return max(sum(profiled) - len(profiled) * median(others), 0.0) / len(steps), len(others)


def profiler_overhead(facts: Facts) -> list[Finding]:
    """Find profiler overhead that takes much of the steps that the figures come from, or of the whole run."""
    found = []
    for rank in facts.run.ranks:
        statistics = facts.statistics.get(rank.rank)
        if statistics is None or not statistics.mean_ns:
            continue
        finding = _in_figures(facts, rank, statistics) or _of_run(facts, rank)
        found += [finding] if finding is not None else []
    return [max(found, key=lambda finding: (finding.severity, finding.weight))] if found else []


def _in_figures(facts: Facts, rank: Rank, statistics: PulseStatistics) -> Finding | None:
    overhead_ns = own_ns(rank, statistics)
    share = overhead_ns / statistics.mean_ns
    if share <= NOTABLE_SHARE:
        return None
    steps, dearest = typical_in_windows(rank), _dearest(rank)
    return Finding(
        rule="profiler_overhead",
        severity=Severity.WARNING if share >= SEVERE_SHARE else Severity.INFO,
        title=f"Recording takes {percent(share)} of the steps that the figures come from{facts.on_rank(rank)}.",
        why=(
            f"{len(steps)} of the {statistics.used} steps are in windows; profiler overhead is "
            f"{format_ns(overhead_ns)} of a {format_ns(statistics.mean_ns)} step, and operators are slower there too."
        ),
        remedies=(FEWER, f"{LESS}; {dearest}" if dearest else f"{LESS}."),
        evidence=(facts.pulse(rank, steps), *facts.recorded(rank, "hooks")),
        numbers={"rank": rank.rank, "own_share": share, "own_ns": overhead_ns, "steps": len(steps)},
        weight=share,
    )


def _of_run(facts: Facts, rank: Rank) -> Finding | None:
    """Return the cost of the pulse or of the windows to the whole run; the user chose both."""
    run_ns = sum(row["duration_ns"] or 0 for row in rank.pulse)
    overhead = rank.overhead or OverheadFacts()
    pulse_ns = (overhead.pulse_ns if overhead.pulse_cpu_ns is None else overhead.pulse_cpu_ns) or 0
    windows_ns = overhead.windows_ns or 0
    if not run_ns:
        return None
    numbers = {"rank": rank.rank, "pulse_ns": pulse_ns, "windows_ns": windows_ns, "run_ns": run_ns}
    if windows_ns > NOTABLE_WINDOWS * (run_ns + windows_ns):
        share = windows_ns / (run_ns + windows_ns)
        dearest = _dearest(rank)
        return Finding(
            rule="profiler_overhead",
            severity=Severity.INFO,
            title=(f"Windows take {percent(share)} of the run{facts.on_rank(rank)}; other steps have the pulse only."),
            why=(
                f"{format_count(len(rank.windows), 'window')} took {format_ns(windows_ns)}, all steps "
                f"{format_ns(run_ns)}{f'; {dearest}' if dearest else '.'}"
            ),
            remedies=(SHORTER,),
            evidence=facts.recorded(rank, "hooks"),
            numbers=numbers,
            weight=share,
        )
    if pulse_ns > NOTABLE_PULSE * run_ns:
        return Finding(
            rule="profiler_overhead",
            severity=Severity.INFO,
            title=f"The pulse takes {percent(pulse_ns / run_ns)} of step time{facts.on_rank(rank)}.",
            why=f"{format_ns(pulse_ns / len(rank.pulse))} of a {format_ns(run_ns / len(rank.pulse))} step.",
            remedies=(NO_PULSE,),
            evidence=(facts.pulse(rank),),
            numbers=numbers,
            weight=pulse_ns / run_ns,
        )
    return None


def _dearest(rank: Rank) -> str | None:
    known = {name: ns for name, ns in rank.overhead.collectors_ns.items() if ns} if rank.overhead else {}
    if not known:
        return None
    name = max(known, key=lambda collector: known[collector])
    return f"{name} took the most, {format_ns(known[name])}."


# torch's profiler takes 0.6 µs on the host for a Python function and 2 µs or more for an operator, measured on a CPU.
EVENT_NS: Final = 1_000
# Kineto reports work of the driver for the program in the same category.
OTHERS: Final = frozenset(
    {"Driver Compiler", "Lazy Function Loading", "Runtime Triggered Module Loading", "Command Buffer Full"}
)
OPTIONS: Final = ("with_stack", "profile_memory", "record_shapes")
COMPARE: Final = (
    remedy("Compare with the steps outside windows, which the pulse has, before acting on idle times.", "lightning"),
    remedy("Compare with the step time without the profiler before acting on idle times.", "other program"),
)


def recording_ns(trace: TraceReport) -> tuple[int, int]:
    """Return the profiler's own work as torch records it, and the same estimated from host events, in ns.

    At most the time in which the host works and the device waits for it: elsewhere nobody waits for the profiler.
    """
    waiting_ns = idle_ns(trace, *LAUNCHING)
    known_ns = sum(cost.total_ns for cost in trace.profiler_overhead if cost.name not in OTHERS)
    return min(known_ns, waiting_ns), min(trace.host_events * EVENT_NS, waiting_ns)


def recording_overhead(trace: TraceReport) -> Finding | None:
    """Note in which share of the steps the device may wait for the profiler's own work."""
    window = trace.window
    if window is None or is_brief(trace) or trace.steady is not None:
        return None  # of a steady state the other findings do not contain it
    costs = [cost for cost in trace.profiler_overhead if cost.name not in OTHERS]
    known_ns, estimated_ns = recording_ns(trace)
    share = max(known_ns, estimated_ns) / window.window_ns
    if share <= POLICY.note:
        return None
    is_known = known_ns >= estimated_ns
    if is_known:
        shown = ", ".join(f"{cost.name} {times(cost.count)}" for cost in costs)
        why = f"{format_ns(known_ns)} of {format_ns(window.window_ns)}: {shown}."
    else:
        options = f", recorded with {', '.join(trace.recorded_with)}" if trace.recorded_with else ""
        each = f"about {format_ns(EVENT_NS)} of host time each"
        why = f"{trace.host_events:,} host events{options}, {each}, while the GPU waits for the host."
    less = ", ".join(f"{name}=False" for name in OPTIONS if name in trace.recorded_with)
    profiler = "ExtendedPyTorchProfiler" if trace.program.is_lightning else "torch.profiler.profile"
    return Finding(
        rule="recording_overhead",
        # It does not describe the program, but the reliability of the other findings: without a weight.
        severity=Severity.INFO,
        title=f"The profiler takes up to {percent(share)} of the time, in which the GPU is idle{on_rank(trace)}.",
        why=why,
        remedies=remedies(trace, *((f"Record less per step: {profiler}({less}).",) if less else ()), *COMPARE),
        evidence=seen_in(trace),
        numbers={
            "share": share,
            "profiler_ns": known_ns,
            "estimated_ns": estimated_ns,
            "events": trace.events,
            "host_events": trace.host_events,
            "span_ns": window.window_ns,
            "recorded_with": list(trace.recorded_with),
        },
    )


def hang(facts: Facts) -> list[Finding]:
    """Find a step that does not end, or one rank that fails, by the rank that the others wait for."""
    found = places(facts.run.ranks)
    if not found:
        return []
    calls = last_calls(facts.run.ranks)
    differs = difference(facts.run.ranks)
    behind = _behind(found, calls, differs)
    if differs is not None and behind.state == "hang":
        sentence, why, step = _of_call(found, behind, differs)
    else:
        sentence, why, step = _of_rank(facts, found, behind, calls)
    others = [_words(place, calls) for place in found if place.rank != behind.rank and place.row is not None]
    waiting = f" Other ranks: {format_list(others, MAX_OTHERS)}." if others and differs is None else ""
    reports = next((place for place in (behind, *found) if place.row is not None), behind)
    row = reports.row
    stacks = hang_stacks_name(reports.rank) if row is not None and row.kind != "exception" else hangs_name(reports.rank)
    return [
        Finding(
            rule="hang",
            severity=Severity.CRITICAL,
            title=sentence,
            why=f"{why}{waiting}".strip(),
            remedies=(step, f"Read the stacks of all threads in {stacks}.") if stacks.endswith(".txt") else (step,),
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


def _of_call(found: list[Place], behind: Place, differs: Difference) -> Told:
    """Describe a collective that the ranks call differently."""
    own = differs.calls[behind.rank]
    other = next(rank for rank, row in sorted(differs.calls.items()) if call(row) != call(own))
    step = behind.row.step if behind.row else None
    theirs = differs.calls[other]
    if call(own)[0] == call(theirs)[0]:
        sentence = f"Rank {behind.rank} calls {_name(own)} in step {step}, rank {other} with {theirs.tensors}."
    else:
        sentence = f"Rank {behind.rank} calls {_name(own)} in step {step} where rank {other} calls {_name(theirs)}."
    by_rank = {place.rank: place for place in found}
    sides = "; ".join(_words(by_rank[rank], {rank: differs.calls[rank]}) for rank in (behind.rank, other))
    row = behind.row
    ended = row is not None and row.place is None and row.phase in ("between_steps", "other", "callbacks")
    return sentence, f"Collective {differs.number} differs: {sides}.", SAME_BATCHES if ended else SAME_CALLS


def _of_rank(facts: Facts, found: list[Place], behind: Place, calls: dict[int, CollectiveRow]) -> Told:
    """Describe a rank that others wait for, or the only one."""
    row, number = behind.row, behind.rank
    if row is None:
        return _of_absent(facts, found, behind, calls)
    place = row.place or row.function or "?"
    source = f" `{row.source}`" if row.source else ""
    if behind.state == "raised":
        error = (row.error or "").partition(":")[0]
        sentence = f"Rank {number} raised {error} {_where(row)} at {place}."
        return sentence, f"{(row.error or '').rstrip('.')}.", f"Look at {place}:{source or ' it raised'}."
    worker = f", worker {row.worker}" if row.worker is not None else ""
    sentence = f"Step {row.step} does not end{facts.on_rank(number)}: stuck in {_phase(row.phase)}{worker} at {place}."
    limit = f" (limit {format_ns(row.limit_ns)})" if row.limit_ns else ""
    called = f", {_name(calls[number])}" if behind.waits and number in calls else ""
    why = f"After {format_ns(row.waited_ns or 0)}{limit} it is in {row.function}{source}{called}."
    if row.phase == "data_wait" and row.place is None:
        return sentence, why, TIMEOUT
    if behind.waits and len(found) > 1:
        same = len({call(calls[place.rank]) for place in found if place.rank in calls}) == 1
        return sentence, why, NETWORK if same and len(calls) == len(found) else SAME_CALLS
    return sentence, why, f"Look at {place}: it does not return."


def _of_absent(facts: Facts, found: list[Place], behind: Place, calls: dict[int, CollectiveRow]) -> Told:
    """Describe a rank that reports nothing."""
    waiting = next((place for place in found if place.row is not None), behind)
    row, number, beat = waiting.row, behind.rank, behind.beat
    own = next((rank for rank in facts.run.ranks if rank.rank == number), facts.run.lead)
    pid, host = (beat.pid if beat else None) or own.facts.pid, own.facts.host
    step, where = row.step if row else None, _name(calls[waiting.rank]) if waiting.rank in calls else "a collective"
    sentences = {
        "stopped": f"Rank {number} is stopped by a signal: rank {waiting.rank} waits for it in step {step}.",
        "gone": f"Rank {number} died in step {step}: rank {waiting.rank} waited for it in {where}.",
        "lost": f"Rank {number} closed its connection in step {step}: rank {waiting.rank} waited for it in {where}.",
        "finished": f"Rank {number} has finished, but rank {waiting.rank} waits for it in step {step}.",
        "ended": f"Rank {number} ended: rank {waiting.rank} waits for it in step {step}.",
    }
    steps = {
        "stopped": f"Continue it: `kill -CONT {pid}` on {host}.",
        "gone": f"Read the end of the output of rank {number}; for SIGKILL, `dmesg | grep -i oom` on {host}.",
        "finished": SAME_BATCHES,
        "ended": f"Read the end of the output of rank {number}.",
        "lost": f"Read the end of the output of rank {number}.",
    }
    silent = f"Rank {number} does not respond: rank {waiting.rank} waits for it in step {step}."
    look = f"Look where it is: `py-spy dump --pid {pid}` on {host}."
    why = []
    if beat is not None:
        ago = format_ns(beat.waited_ns or 0)
        why.append(f"Its last heartbeat was {ago} earlier, {_where(beat)}.")
    made = next((list(rank.read(CollectiveRow).rows) for rank in facts.run.ranks if rank.rank == waiting.rank), [])
    if made and (before := usual_call(made)) is not None:
        why.append(f"In earlier steps rank {waiting.rank} called {_name(before)} there.")
    state = "lost" if behind.state == "running" and waiting.state == "raised" else behind.state
    return sentences.get(state, silent), " ".join(why), steps.get(state, look)


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
