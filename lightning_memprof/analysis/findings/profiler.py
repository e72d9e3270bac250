"""Steps that do not end, workers that die, and the profiler overhead of a run and of an operator trace."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.findings.measures import own_ns
from lightning_memprof.analysis.findings.model import Evidence, Facts, Finding, Recovery, Severity
from lightning_memprof.analysis.findings.traces import NOTABLE_SHARE, idle_ns, on_rank, remedies, remedy, seen_in, times
from lightning_memprof.analysis.ledger.run import typical_in_windows
from lightning_memprof.analysis.steps.workers import workers
from lightning_memprof.artifacts.manifest import OverheadFacts
from lightning_memprof.artifacts.naming import hang_stacks_name, processes_name
from lightning_memprof.artifacts.series import HangRow
from lightning_memprof.units import format_bytes, format_count, format_ns, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.run.model import Rank
    from lightning_memprof.analysis.steps.statistics import PulseStatistics
    from lightning_memprof.analysis.steps.workers import Worker
    from lightning_memprof.analysis.trace.model import TraceReport

__all__ = ["hang", "other_profiler", "profiler_overhead", "recording_ns", "recording_overhead", "worker_died"]

# Why the operator trace is not available: the words of capture and integration.
OTHER_PROFILER: Final = re.compile(r"its own torch profiler|owns torch\.profiler")
# At this share of the figures, a phase would be a finding.
SEVERE_SHARE: Final = 0.20
# Fewer steps support no conclusions: a longer run has steps outside windows.
MIN_USED: Final = 10
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

COLLECTIVE: Final = "torch.distributed."
TIMEOUT: Final = "Let a stuck worker raise: DataLoader(timeout=60); num_workers=0 shows its line."

WITHOUT_WORKERS: Final = "Run with DataLoader(num_workers=0): the main process then shows the error with its line."
# By exit code; a signal's number with a minus sign.
DEATHS: Final = {
    -9: "The kernel kills what exceeds the memory: use fewer workers; `dmesg | grep -i oom` on the node tells.",
    -7: "Shared memory is full: enlarge /dev/shm (docker run --shm-size=8g), or use fewer workers.",
}


def hang(facts: Facts) -> list[Finding]:
    """Find a step that has not ended, by the rank that the others wait for."""
    hanging = {rank.rank: row for rank in facts.run.ranks if (row := _unfinished(rank)) is not None}
    if not hanging:
        return []
    silent = {
        rank.rank: rank.exception
        for rank in facts.run.ranks
        if rank.rank not in hanging and (rank.status == "running or killed" or rank.exception)
    }
    behind = _behind(hanging, silent)
    if behind not in hanging:
        waiting = min(hanging)
        row, error = hanging[waiting], silent[behind]
        end = f"raised {error.partition(':')[0]}" if error else "is stuck or gone"
        sentence = f"Rank {behind} {end}: rank {waiting} waits in {_phase(row)} of step {row.step}."
    else:
        row = hanging[behind]
        place = row.place or row.function or "?"
        sentence = f"Step {row.step} does not end{facts.on_rank(behind)}: stuck in {_phase(row)} at {place}."
    others = [
        f"rank {number} in {_phase(other)} of step {other.step}, {other.place or other.function}"
        for number, other in sorted(hanging.items())
        if other is not row
    ]
    source = f" `{row.source}`" if row.source else ""
    rank = behind if behind in hanging else min(hanging)
    stacks = facts.run.directory / hang_stacks_name(rank)
    return [
        Finding(
            rule="hang",
            severity=Severity.CRITICAL,
            sentence=sentence,
            why=(
                f"After {format_ns(row.waited_ns or 0)} (limit {format_ns(row.limit_ns or 0)}) it is in "
                f"{row.function}{source}{'; also waiting: ' + '; '.join(others) if others else ''}."
            ),
            next_steps=(_remedy(row, behind, hanging), f"Read the stacks of all threads in {stacks.name}."),
            evidence=(Evidence(artifact=f"{facts.run.directory.name}/{stacks.name}", rank=rank),),
            numbers={"rank": behind, "step": row.step, "waited_ns": row.waited_ns, "limit_ns": row.limit_ns},
            # Nothing else is worth more than a training that ends.
            weight=1.0,
        )
    ]


def _phase(row: HangRow) -> str:
    return (row.phase or "?").replace("_", " ")


def _unfinished(rank: Rank) -> HangRow | None:
    """Return the step that a rank did not leave, or left only by an exception."""
    # Also of ranks that are not read in full: of thousands each may be the one.
    rows = rank.read(HangRow).rows if rank.status != "finished" else []
    row = next((row for row in reversed(rows) if row.kind == "hang"), None)
    if row is None or row is rows[-1]:
        return row
    continued = bool(rank.pulse) and (rank.pulse[-1]["step"] or 0) > (row.step or 0)
    return None if rank.exception is None or continued else row


def _behind(hanging: dict[int, HangRow], silent: dict[int, str | None]) -> int:
    """Return the rank that the others wait for: the one in the earliest step, outside of collectives, or silent.

    Of silent ranks one that raised an exception comes first.
    """

    def order(number: int) -> tuple[int, bool, int]:
        row = hanging[number]
        return row.step or 0, len(hanging) + len(silent) > 1 and _waits(row), number

    first = min(hanging, key=order)
    return min(silent, key=lambda rank: (silent[rank] is None, rank)) if silent and _waits(hanging[first]) else first


def _waits(row: HangRow) -> bool:
    """Return whether a rank is inside a collective; those of DistributedDataParallel run inside backward."""
    return (row.function or "").startswith(COLLECTIVE) or (row.phase == "backward" and row.place is None)


def _remedy(row: HangRow, behind: int, hanging: dict[int, HangRow]) -> str:
    if row.phase == "data_wait":
        return TIMEOUT
    if _waits(row) and len(hanging) > 1:
        return "Call the same collectives on every rank, in the same order and with the same shapes."
    if behind not in hanging:
        return f"Look at the log of rank {behind}, and whether its process is stopped or was killed: `ps` on its node."
    return f"Look at {row.place or row.function}: it does not return."


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
            sentence=f"A DataLoader worker{name} died{facts.on_rank(rank)}: {_end(worker)}.",
            why=f"{held}{ended}{more}",
            next_steps=(DEATHS.get(worker.exit_code or 0, WITHOUT_WORKERS),),
            numbers={"rank": rank.rank, "pid": worker.pid, "exit_code": worker.exit_code, "workers": len(dead)},
            evidence=(Evidence(artifact=f"{facts.run.directory.name}/{processes_name(rank.rank)}", rank=rank.rank),),
            weight=1.0,
        )
    ]


def _end(worker: Worker) -> str:
    code = worker.exit_code or 0
    names = {number.value: number.name for number in signal.Signals}
    return f"exit code {code}" if code > 0 else f"signal {-code} ({names.get(-code, 'unknown')})"


def other_profiler(facts: Facts) -> list[Finding]:
    """Find another torch profiler that runs in the training.

    Recovers 20% to 50% of forward and backward, and the GC pauses in them.
    """
    seen = next((row for row in facts.run.unavailable if OTHER_PROFILER.search(row.reason)), None)
    if seen is None or (ledger := facts.ledgers.get(seen.rank)) is None:
        return []
    passes, pauses = ledger.ns("forward", "backward"), ledger.ns("gc_pauses")
    worth = Recovery(unit="ns", min=pauses + passes * OTHER[0], max=pauses + passes * OTHER[1], whole=ledger.running_ns)
    return [
        Finding(
            rule="other_profiler",
            severity=worth.severity,
            sentence=f"Another profiler is on: torch.profiler records the training{facts.on_rank(seen.rank)}.",
            why=(
                f"{seen.reason[:1].upper()}{seen.reason[1:]}. It costs time for each operator; forward and backward "
                f"take {format_ns(passes)}, GC pauses {format_ns(pauses)} of a {format_ns(ledger.step_ns)} step."
            ),
            next_steps=('Remove the other profiler: torch.profiler.profile(...) or Trainer(profiler="pytorch").',),
            evidence=tuple(facts.pulse(rank) for rank in facts.run.ranks if rank.rank == seen.rank),
            numbers={"rank": seen.rank, "passes_ns": passes, "gc_pauses_ns": pauses},
            weight=worth.share,
            recovers=worth,
        )
    ]


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
        severity=Severity.WARNING if share >= SEVERE_SHARE and statistics.used >= MIN_USED else Severity.INFO,
        sentence=f"Recording takes {percent(share)} of the steps that the figures come from{facts.on_rank(rank)}.",
        why=(
            f"{len(steps)} of the {statistics.used} steps are in windows; the marks take {format_ns(overhead_ns)} of a "
            f"{format_ns(statistics.mean_ns)} step, and operators are slower there too."
        ),
        next_steps=(FEWER, f"{LESS}; {dearest}" if dearest else f"{LESS}."),
        evidence=(facts.pulse(rank, steps), *facts.recorded(rank, "hooks")),
        numbers={"rank": rank.rank, "own_share": share, "own_ns": overhead_ns, "steps": len(steps)},
        weight=share,
    )


def _of_run(facts: Facts, rank: Rank) -> Finding | None:
    """Return the cost of the pulse or of the windows to the whole run; the user chose both."""
    run_ns = sum(row["duration_ns"] or 0 for row in rank.pulse)
    overhead = rank.overhead or OverheadFacts()
    pulse_ns, windows_ns = overhead.pulse_ns or 0, overhead.windows_ns or 0
    if not run_ns:
        return None
    numbers = {"rank": rank.rank, "pulse_ns": pulse_ns, "windows_ns": windows_ns, "run_ns": run_ns}
    if windows_ns > NOTABLE_WINDOWS * (run_ns + windows_ns):
        share = windows_ns / (run_ns + windows_ns)
        dearest = _dearest(rank)
        return Finding(
            rule="profiler_overhead",
            severity=Severity.INFO,
            sentence=(
                f"Windows take {percent(share)} of the run{facts.on_rank(rank)}; other steps have the pulse only."
            ),
            why=(
                f"{format_count(len(rank.windows), 'window')} took {format_ns(windows_ns)}, all steps "
                f"{format_ns(run_ns)}{f'; {dearest}' if dearest else '.'}"
            ),
            next_steps=(SHORTER,),
            evidence=facts.recorded(rank, "hooks"),
            numbers=numbers,
            weight=share,
        )
    if pulse_ns > NOTABLE_PULSE * run_ns:
        return Finding(
            rule="profiler_overhead",
            severity=Severity.INFO,
            sentence=f"The pulse takes {percent(pulse_ns / run_ns)} of step time{facts.on_rank(rank)}.",
            why=f"{format_ns(pulse_ns / len(rank.pulse))} of a {format_ns(run_ns / len(rank.pulse))} step.",
            next_steps=(NO_PULSE,),
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
# If the host prepares kernels for less of the time, a slower host changes nothing.
HOST_MATTERS: Final = 0.10
# Kineto reports work of the driver for the program in the same category.
OTHERS: Final = frozenset(
    {"Driver Compiler", "Lazy Function Loading", "Runtime Triggered Module Loading", "Command Buffer Full"}
)
OPTIONS: Final = ("with_stack", "profile_memory", "record_shapes")
COMPARE: Final = (
    remedy("Compare with the steps outside windows, which the pulse has, before acting on idle times.", "lightning"),
    remedy("Compare with the step time without the profiler before acting on idle times.", "other program"),
)


def recording_ns(trace: TraceReport) -> tuple[int, int, int]:
    """Return the profiler's own work as torch records it, the same estimated from host events, and the recorded time.

    The estimate is 0 where the host prepares kernels for little of the time. All are in ns.
    """
    window_ns = trace.gpu_window.window_ns if trace.gpu_window else 0
    known_ns = sum(cost.total_ns for cost in trace.profiler_overhead if cost.name not in OTHERS)
    span_ns = max(trace.end_ns - trace.start_ns, window_ns, 1)
    host_ns = idle_ns(trace, "python", "operators", "launch")
    estimated_ns = min(trace.host_events * EVENT_NS, span_ns) if host_ns > HOST_MATTERS * window_ns else 0
    return known_ns, estimated_ns, span_ns


def recording_overhead(trace: TraceReport) -> list[Finding]:
    """Find a trace in which the profiler's own work, known or estimated from the host's events, takes much time."""
    window = trace.gpu_window
    if window is None or not window.window_ns:
        return []
    costs = [cost for cost in trace.profiler_overhead if cost.name not in OTHERS]
    known_ns, estimated_ns, span_ns = recording_ns(trace)
    share = min(max(known_ns, estimated_ns) / span_ns, 1.0)
    if share <= NOTABLE_SHARE:
        return []
    is_known = known_ns >= estimated_ns
    is_idle = window.idle_ns > HOST_MATTERS * window.window_ns
    if is_known:
        shown = ", ".join(f"{cost.name} {times(cost.count)}" for cost in costs)
        why = f"{format_ns(known_ns)} of {format_ns(span_ns)}: {shown}."
    else:
        options = f", recorded with {', '.join(trace.recorded_with)}" if trace.recorded_with else ""
        each = f"about {format_ns(EVENT_NS)} of host time each"
        why = f"{trace.host_events:,} host events in {format_ns(span_ns)}{options}, {each}."
    less = ", ".join(f"{name}=False" for name in OPTIONS if name in trace.recorded_with)
    profiler = "ExtendedPyTorchProfiler" if trace.program.is_lightning else "torch.profiler.profile"
    return [
        Finding(
            rule="recording_overhead",
            # It does not describe the program, but the reliability of the other findings.
            severity=Severity.WARNING if is_known and is_idle else Severity.INFO,
            sentence=(
                f"The profiler takes {'' if is_known else 'about '}{percent(share)} of the recorded time"
                f"{on_rank(trace)}; without it the GPU is less idle."
            ),
            why=why,
            next_steps=remedies(trace, *((f"Record less per step: {profiler}({less}).",) if less else ()), *COMPARE),
            evidence=seen_in(trace),
            numbers={
                "share": share,
                "profiler_ns": known_ns,
                "estimated_ns": estimated_ns,
                "events": trace.events,
                "host_events": trace.host_events,
                "span_ns": span_ns,
                "recorded_with": list(trace.recorded_with),
            },
            weight=share,
        )
    ]
