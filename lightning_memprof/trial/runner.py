"""Runs the program in processes of their own, with and without remedies in turns."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
import psutil

from lightning_memprof.analysis.findings import Finding
from lightning_memprof.analysis.trial import Measured, Outcome, Trial, equality, outcome
from lightning_memprof.errors import ConfigError, MemprofError
from lightning_memprof.trial.remedies import Remedy, advised, parse_remedy
from lightning_memprof.trial.task import VARIABLE, Task, result_path
from lightning_memprof.units import format_bytes

__all__ = ["Advice", "Process", "Wanted", "advice", "run_in_turns", "run_task", "started", "try_program"]

FEWEST_ROUNDS: Final = 3
# Compared steps; a difference grows with each.
_CHECKED: Final = 20
_RECORDED: Final = 30
_FEWEST: Final = 10
_MOST: Final = 300
# Of the measured steps of a run: enough for the noise of a machine to even out.
_RUN_NS: Final = 4_000_000_000
_MOST_LINE: Final = 300
_LOG: Final = "output.txt"
# A machine has slow phases of ten seconds and more, which all then share.
_TURN_NS: Final = 500_000_000
_FEWEST_IN_TURN: Final = 2
_SPARE: Final = 1.3
# Not on macOS before Python 3.13.
_WAITS: Final = hasattr(os, "waitid")
_POLL_S: Final = 0.001
# Reading shared pages takes about a millisecond.
_LOOK_S: Final = 0.05
_ENDING: Final = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Options of a trial, as on the command line.

    Attributes:
        remedies: their names; empty for those that the findings of a first recorded run advise.
        rounds: how often each is measured.
        steps: measured steps of each run; None takes as many as last four seconds.
        time_limit_s: of each run.
        progress: is called with the name of a run, the count of runs done, and their number.

    Raises:
        ConfigError: a value is invalid.

    """

    remedies: Sequence[str] = ()
    rounds: int = 5
    steps: int | None = None
    time_limit_s: float = 600.0
    progress: Callable[[str, int, int], None] = lambda _name, _done, _total: None

    def __post_init__(self) -> None:
        """Validate the values before the program runs."""
        if self.rounds < FEWEST_ROUNDS:
            raise ConfigError(f"--rounds {self.rounds}: must be at least {FEWEST_ROUNDS}")
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"--steps {self.steps}: must be at least 1")
        if self.time_limit_s <= 0:
            raise ConfigError(f"--time-limit {self.time_limit_s:g}: must be more than 0 seconds")
        for name in self.remedies:
            parse_remedy(name)


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """Remedies that are tried at once, and the promise of a finding."""

    remedies: tuple[Remedy, ...]
    rule: str = ""
    promised: tuple[float, float] | None = None

    @property
    def label(self) -> str:
        return "+".join(remedy.label for remedy in self.remedies)

    @property
    def tolerance(self) -> float:
        return sum(remedy.tolerance for remedy in self.remedies)

    def environment(self) -> dict[str, str]:
        """Return environment variables of the program's process."""
        return {name: value for remedy in self.remedies for name, value in remedy.environment().items()}

    def empty(self) -> Outcome:
        """Return the outcome before anything is known."""
        code = tuple(remedy.code for remedy in self.remedies)
        return Outcome(remedy=self.label, rule=self.rule, code=code, promised=self.promised)


_BARE: Final = _Candidate(remedies=())


def try_program(program: Sequence[str], wanted: Wanted, findings: Sequence[Finding] | None = None) -> Trial:
    """Run a program with and without remedies, in turns.

    Args:
        program: its command line.
        wanted: the remedies, and how they are measured.
        findings: advise remedies where none is named; None records the program first.

    Raises:
        MemprofError: the unchanged program cannot be measured.

    """
    notes: list[str] = []
    with TemporaryDirectory(prefix="lightning-memprof-try-", ignore_cleanup_errors=True) as directory:
        runs = _Runs(program, wanted, Path(directory))
        if wanted.remedies:
            candidates = [_Candidate(remedies=(parse_remedy(name),)) for name in dict.fromkeys(wanted.remedies)]
        else:
            candidates = [
                _Candidate(remedies=(found.remedy,), rule=found.rule, promised=found.promised)
                for found in advice(runs.recorded() if findings is None else findings)
            ]
            if not candidates:
                notes.append("The findings advise nothing that can be tried from outside the program.")
        runs.plan(2 + len(candidates) + wanted.rounds * (1 + len(candidates)) if candidates else 1)
        checks = runs.checks(candidates)
        steps = wanted.steps or _steps_for(checks.bare.step_ns)
        working = [candidate for candidate in candidates if not checks.changed[candidate.label].problem]
        measured = runs.in_turns(working, steps, checks) if candidates else {"": [checks.bare] * FEWEST_ROUNDS}
        outcomes = [_outcome(candidate, measured, checks) for candidate in candidates]
        together = _together(runs, candidates, outcomes, steps, wanted.rounds)
    bare = measured[""]
    if not checks.is_repeatable:
        notes.append("Two runs of the unchanged program differ in losses or weights: equality cannot be judged.")
    return Trial(
        program=" ".join(program),
        rounds=wanted.rounds,
        steps=steps,
        compared=len(checks.bare.losses),
        step_ns=statistics.median([run.step_ns for run in bare]),
        peak_bytes=round(statistics.median([run.peak_bytes for run in bare])),
        is_device=bare[0].device_bytes is not None,
        outcomes=tuple(outcomes),
        together=together,
        notes=tuple(notes),
    )


@dataclass(frozen=True, kw_only=True)
class _Checks:
    """Runs with seeded samples: twice of the unchanged program, and of each candidate by its label."""

    bare: Measured
    again: Measured
    changed: Mapping[str, Measured]

    @property
    def is_repeatable(self) -> bool:
        return equality(self.bare, self.again, self.bare, 0.0).name == "bit-equal"


class _Runs:
    """Runs of the program's process.

    Args:
        program: the command line.
        wanted: limits, and where progress goes.
        directory: where the files of all runs go.

    """

    def __init__(self, program: Sequence[str], wanted: Wanted, directory: Path) -> None:
        self._program = program
        self._wanted = wanted
        self._directory = directory
        self._done = 0
        self._planned = 0

    def plan(self, count: int) -> None:
        """Set how many further runs there are."""
        self._planned = self._done + count

    def recorded(self) -> Sequence[Finding]:
        """Return the findings of a recorded run."""
        from lightning_memprof.report.opened import opened
        from lightning_memprof.report.view import View

        place = self._directory / "recorded"
        self._wanted.progress("a first recorded run", 0, 0)
        task = Task(directory=str(place), steps=_RECORDED, is_recorded=True)
        found = run_task(self._program, task, self._wanted.time_limit_s)
        if found.problem:
            raise MemprofError(f"try: {' '.join(self._program)}: {found.problem}")
        with opened([str(place)]) as view:
            return view.findings if isinstance(view, View) else ()

    def checks(self, candidates: Sequence[_Candidate]) -> _Checks:
        """Run everything once, seeded, and the unchanged program twice.

        Raises:
            MemprofError: the unchanged program fails.

        """
        bare = self._checked(_BARE)
        if bare.problem:
            raise MemprofError(f"try: {' '.join(self._program)}: {bare.problem}")
        if not candidates:
            return _Checks(bare=bare, again=bare, changed={})
        changed = {candidate.label: self._checked(candidate) for candidate in candidates}
        return _Checks(bare=bare, again=self._checked(_BARE), changed=changed)

    def _checked(self, candidate: _Candidate) -> Measured:
        return self._run([candidate], min(_CHECKED, self._wanted.steps or _CHECKED), is_check=True)[0]

    def in_turns(self, candidates: Sequence[_Candidate], steps: int, checks: _Checks) -> dict[str, list[Measured]]:
        """Measure the unchanged program, as ``""``, and the candidates, by label, in each round."""
        order = [_BARE, *candidates]
        runs = [checks.bare, *(checks.changed[candidate.label] for candidate in candidates)]
        turns = [max(round(_TURN_NS / run.step_ns), _FEWEST_IN_TURN) for run in runs] if _fit_at_once(runs) else []
        found: dict[str, list[Measured]] = {candidate.label: [] for candidate in order}
        for number in range(self._wanted.rounds):
            if turns:
                measured = self._run(order, steps, turns)
            else:
                backwards = slice(None, None, -1 if number % 2 else 1)
                measured = [self._run([candidate], steps)[0] for candidate in order[backwards]][backwards]
            for candidate, run in zip(order, measured, strict=True):
                found[candidate.label].append(run)
        failed = next((run.problem for run in found[""] if run.problem), None)
        if failed is not None:
            raise MemprofError(f"try: {' '.join(self._program)}: {failed}")
        return found

    def _run(
        self, candidates: Sequence[_Candidate], steps: int, turns: Sequence[int] = (0,), *, is_check: bool = False
    ) -> list[Measured]:
        with ExitStack() as running:
            processes = []
            for candidate, turn in zip(candidates, turns, strict=True):
                self._wanted.progress(candidate.label or "unchanged", self._done, self._planned)
                self._done += 1
                # Checkpoints of all runs together may fill a disk.
                place = running.enter_context(TemporaryDirectory(dir=self._directory, ignore_cleanup_errors=True))
                names = tuple(remedy.label for remedy in candidate.remedies)
                task = Task(directory=place, steps=steps, remedies=names, turn=turn, is_check=is_check)
                limit_s, environment = self._wanted.time_limit_s, candidate.environment()
                processes.append(running.enter_context(started(self._program, task, limit_s, environment)))
            return run_in_turns(processes)


class Process:
    """One run of the program, in a process group of its own.

    Args:
        program: its command line.
        task: the steps; its directory is made.
        time_limit_s: the longest wait for the end of a turn.
        environment: further environment variables.

    """

    def __init__(self, program: Sequence[str], task: Task, time_limit_s: float, environment: Mapping[str, str]) -> None:
        self.is_stopped = False
        self._place = Path(task.directory)
        self._limit_s = time_limit_s
        self._limit_bytes = task.host_limit_bytes
        self._ended_for = ""
        self._place.mkdir(parents=True, exist_ok=True)
        own = {
            VARIABLE: msgspec.json.encode(task).decode(),
            "WANDB_DIR": str(self._place),
            "MLFLOW_TRACKING_URI": str(self._place),
            # It would write where the user's experiments are.
            "WANDB_MODE": "offline",
            "LIGHTNING_MEMPROF": "1" if task.is_recorded else "",
        }
        with (self._place / _LOG).open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lightning_memprof.trial.program", *program],
                env={**os.environ, **own, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def until_turn_ends(self) -> None:
        """Wait until the process has stopped itself or ended; end it at its limits."""
        deadline = time.monotonic() + self._limit_s
        next_look = 0.0
        while self._process.poll() is None:
            # waitid reports each stop once, and leaves an end to poll.
            if _WAITS and os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG) is not None:
                self.is_stopped = True
                return
            now = time.monotonic()
            if now > deadline:
                limit = f"{self._limit_s:g} s"
                self._end(f"did not reach its last step within {limit}: change --steps or --time-limit")
            elif self._limit_bytes and now > next_look:
                next_look = now + _LOOK_S
                if _used_bytes(self._process.pid) > self._limit_bytes:
                    self._end(f"needs more than {format_bytes(self._limit_bytes)}")
            time.sleep(_POLL_S)

    def _end(self, reason: str) -> None:
        self._ended_for = reason
        self.close()

    def resume(self) -> None:
        """Let a stopped process run its next turn."""
        self.is_stopped = False
        os.killpg(self._process.pid, signal.SIGCONT)

    def result(self) -> Measured:
        """Return the measurement of an ended process, or its problem."""
        if self._ended_for:
            return Measured(problem=self._ended_for)
        try:
            return msgspec.json.decode(result_path(self._place, 0).read_bytes(), type=Measured)
        except (OSError, msgspec.DecodeError):
            return Measured(problem=_failure(self._process.wait(), self._place / _LOG))

    def close(self) -> None:
        """End the process with all that it started: workers and other ranks outlive it."""
        self.is_stopped = False
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def started(
    program: Sequence[str], task: Task, time_limit_s: float, environment: Mapping[str, str]
) -> Iterator[Process]:
    """Start a process that ends with the context; the arguments are those of :class:`Process`."""
    process: Process | None = None
    try:
        with _uninterrupted():
            process = Process(program, task, time_limit_s, environment)
        yield process
    finally:
        if process is not None:
            process.close()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Raise Ctrl-C and SIGTERM after the context: amid a start, the process would be lost and continue."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = {number: signal.signal(number, lambda number, _: arrived.append(number)) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for arrival in arrived:
            signal.raise_signal(arrival)


def run_task(program: Sequence[str], task: Task, time_limit_s: float) -> Measured:
    """Run the program once; only the files in the task's directory remain."""
    with started(program, task, time_limit_s, {}) as process:
        return run_in_turns([process])[0]


def run_in_turns(processes: Sequence[Process]) -> list[Measured]:
    """Let one process run while the others are stopped, until all have ended; return their measurements."""
    for process in processes:
        process.until_turn_ends()
    while any(process.is_stopped for process in processes):
        for process in processes:
            if process.is_stopped:
                process.resume()
                process.until_turn_ends()
    return [process.result() for process in processes]


def _used_bytes(pid: int) -> int:
    """Return the memory of a process and of all that it started; pages that they share count once."""
    found = 0
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                memory = process.memory_full_info()
                found += getattr(memory, "pss", memory.uss)
    return found


def _fit_at_once(runs: Sequence[Measured]) -> bool:
    """Return whether the host's memory holds all at the same time; a device's is not shared."""
    needed = sum(run.peak_bytes * run.ranks for run in runs) * _SPARE
    return _WAITS and all(run.device_bytes is None for run in runs) and needed < psutil.virtual_memory().available


def _failure(code: int, log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip()[:_MOST_LINE] if lines else "it printed nothing"
    ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"{ended}: {last}"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A remedy of a finding; ``promised`` is the least and most share of the step, None where nobody can tell."""

    remedy: Remedy
    rule: str
    promised: tuple[float, float] | None = None


def advice(findings: Sequence[Finding]) -> list[Advice]:
    """Return the remedies of findings in their order, the most severe first."""
    found: dict[str, Advice] = {}
    for finding in findings:
        worth = finding.recovers
        is_time = worth is not None and worth.unit == "ns" and worth.whole > 0
        promised = (worth.min / worth.whole, worth.max / worth.whole) if worth is not None and is_time else None
        # The promise is that of the first next step.
        first = {remedy.label for remedy in advised(finding.next_steps[:1])}
        for remedy in advised(finding.next_steps):
            mine = promised if remedy.label in first else None
            found.setdefault(remedy.name, Advice(remedy=remedy, rule=finding.rule, promised=mine))
    return list(found.values())


def _outcome(candidate: _Candidate, measured: Mapping[str, Sequence[Measured]], checks: _Checks) -> Outcome:
    checked = checks.changed[candidate.label]
    if checked.problem:
        return replace(candidate.empty(), problem=checked.problem)
    is_mean = any(remedy.is_random for remedy in candidate.remedies)
    equal = equality(checks.bare, checks.again, checked, candidate.tolerance, is_mean=is_mean)
    return outcome(candidate.empty(), measured[""], measured[candidate.label], equal)


def _together(
    runs: _Runs, candidates: Sequence[_Candidate], outcomes: Sequence[Outcome], steps: int, rounds: int
) -> Outcome | None:
    """Measure the remedies that won, at once: their gains do not add."""
    won = [candidate for candidate, found in zip(candidates, outcomes, strict=True) if found.is_faster]
    if len({remedy.name for candidate in won for remedy in candidate.remedies}) < max(2, len(won)):
        return None
    both = _Candidate(remedies=tuple(remedy for candidate in won for remedy in candidate.remedies))
    runs.plan(3 + 2 * rounds)
    checks = runs.checks([both])
    measured = runs.in_turns([both], steps, checks) if not checks.changed[both.label].problem else {"": []}
    return _outcome(both, measured, checks)


def _steps_for(step_ns: float) -> int:
    return int(min(max(_RUN_NS / max(step_ns, 1.0), _FEWEST), _MOST))
