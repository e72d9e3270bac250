"""Runs the program in separate processes, alternately with and without remedies."""

from __future__ import annotations

import math
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import psutil
from msgspec.structs import replace

from lightning_memprof.compare.significance import FEWEST_PAIRS
from lightning_memprof.compare.trial import Measured, Outcome, Trial, equality, outcome
from lightning_memprof.errors import ConfigError, MemprofError
from lightning_memprof.judge import Finding
from lightning_memprof.trial.change import Change
from lightning_memprof.trial.changes import parse_change
from lightning_memprof.trial.process import CAN_STOP, LateError, run_in_turns, run_task, started
from lightning_memprof.trial.task import Task
from lightning_memprof.units import format_count

# Compared steps; a difference grows with each.
_CHECKED: Final = 20
_RECORDED: Final = 30
_FEWEST: Final = 10
_MOST: Final = 300
# Of the measured steps of a run: the start of its process takes longer, but processes differ.
_RUN_NS: Final = 2_000_000_000
_MOST_ROUNDS: Final = 30
# Of the minutes: the rest is for the remedies that won, together.
_ALONE: Final = 0.7
# A machine has slow phases of ten seconds and more, which all then share.
_TURN_NS: Final = 500_000_000
_FEWEST_IN_TURN: Final = 2
_SPARE: Final = 1.3


@dataclass(frozen=True, kw_only=True)
class TrialOptions:
    """Options of a trial, as on the command line.

    Attributes:
        remedies: their names; empty for those that the findings of a first recorded run advise.
        rounds: how often each is measured; None measures until each is decided, or the minutes are over.
        minutes: time limit of the trial without ``rounds``; a run in progress is then ended.
        steps: measured steps of each run; None takes as many as last two seconds.
        time_limit_s: of each run.
        progress: shows a text, and how much of how much is done; 0 and 0 where that is not known.

    Raises:
        ConfigError: a value is invalid.
    """

    remedies: Sequence[str] = ()
    rounds: int | None = None
    minutes: float = 3.0
    steps: int | None = None
    time_limit_s: float = 600.0
    progress: Callable[[str, int, int], None] = lambda _text, _done, _total: None

    def __post_init__(self) -> None:
        """Validate the values before the program runs."""
        if self.rounds is not None and self.rounds < FEWEST_PAIRS:
            raise ConfigError(f"--rounds {self.rounds}: must be at least {FEWEST_PAIRS}")
        if self.minutes <= 0:
            raise ConfigError(f"--minutes {self.minutes:g}: must be more than 0")
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"--steps {self.steps}: must be at least 1")
        if self.time_limit_s <= 0:
            raise ConfigError(f"--time-limit {self.time_limit_s:g}: must be more than 0 seconds")
        for name in self.remedies:
            parse_change(name)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Remedies that are tried at once; a finding promised the least and most share of the step, None if unknown."""

    remedies: tuple[Change, ...]
    rule: str = ""
    promised: tuple[float, float] | None = None

    @property
    def label(self) -> str:
        """The remedies on a page."""
        return "+".join(remedy.label for remedy in self.remedies)

    @property
    def tolerance(self) -> float:
        """The largest difference of a step's loss that they may cause."""
        return sum(remedy.tolerance for remedy in self.remedies)

    def empty(self) -> Outcome:
        """Return the outcome before anything is known."""
        code = tuple(line for remedy in self.remedies for line in remedy.code)
        return Outcome(remedy=self.label, rule=self.rule, code=code, promised=self.promised)


_BARE: Final = Candidate(remedies=())
_AGAIN: Final = "again"


def try_program(program: Sequence[str], options: TrialOptions, findings: Sequence[Finding] | None = None) -> Trial:
    """Run a program alternately with and without remedies.

    Args:
        program: its command line.
        options: the remedies, and how they are measured.
        findings: advise remedies where none is named; None records the program first.

    Raises:
        MemprofError: the unchanged program cannot be measured, or the time limit passes before it is recorded.
    """
    notes: list[str] = []
    measured: dict[str, list[Measured]] = {}
    together: Outcome | None = None
    with TemporaryDirectory(prefix="lightning-memprof-try-", ignore_cleanup_errors=True) as directory:
        runs = _Runs(program, options, Path(directory))
        if options.remedies:
            candidates = [Candidate(remedies=(parse_change(name),)) for name in dict.fromkeys(options.remedies)]
        else:
            candidates = advice(runs.recorded() if findings is None else findings)
            if not candidates:
                notes.append("The findings advise nothing that can be tried from outside the program.")
        checks, steps = runs.checks, options.steps or 0
        with runs.ending():
            runs.check_unchanged()
            steps = steps or int(min(max(_RUN_NS / max(checks[""].step_ns, 1.0), _FEWEST), _MOST))
            runs.check_all(candidates)
            working = [candidate for candidate in candidates if not checks[candidate.label].problem]
            runs.in_turns(working, steps, measured, _ALONE if len(working) > 1 else 1.0)
        for candidate in candidates:
            checks.setdefault(candidate.label, Measured(problem="the trial ended before its first run"))
        outcomes = [_outcome(candidate, measured, checks) for candidate in candidates]
        if not (runs.is_stopped or runs.is_late):
            together = _together(runs, candidates, outcomes, steps)
    bare = measured.get("") or ([checks[""]] if "" in checks else [])
    if runs.is_stopped:
        notes.append("Stopped before its end.")
    if runs.is_late:
        nothing = "" if any(found.time for found in outcomes) else " Nothing was measured: raise it."
        notes.append(f"Ended at the limit of {options.minutes:g} minutes (--minutes).{nothing}")
    if bare and equality(checks[""], checks[_AGAIN], checks[""], 0.0).name != "bit-equal":
        notes.append("Two runs of the unchanged program differ in losses or weights: equality is unknown.")
    return Trial(
        program=shlex.join(program),
        rounds=len(measured.get("", [])),
        steps=steps,
        compared=len(checks[""].losses) if bare else 0,
        step_ns=statistics.median([run.step_ns for run in bare]) if bare else None,
        peak_bytes=round(statistics.median([run.peak_bytes for run in bare])) if bare else None,
        is_device=bool(bare) and bare[0].device_bytes is not None,
        outcomes=tuple(outcomes),
        together=together,
        notes=tuple(notes),
        is_stopped=runs.is_stopped,
    )


class _Runs:
    """Runs of the program's process.

    Args:
        program: the command line.
        options: limits, and where progress goes.
        directory: where the files of all runs go.
    """

    def __init__(self, program: Sequence[str], options: TrialOptions, directory: Path) -> None:
        self._program = program
        self._options = options
        self._directory = directory
        self._began = time.monotonic()
        self._end_s = self._began + 60 * options.minutes if options.rounds is None else math.inf
        # Duration of the last run, including the start of its process.
        self._run_s = 0.0
        self.checks: dict[str, Measured] = {}
        self.is_stopped = self.is_late = False

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Leave the context on Ctrl-C or at the time limit; completed measurements count."""
        try:
            yield
        except KeyboardInterrupt:
            self.is_stopped = True
        except LateError:
            self.is_late = True

    def _tell(self, text: str, rest_s: float = 0.0) -> None:
        """Show the current run, and the remaining time of the trial."""
        now = time.monotonic()
        left_s = rest_s if self._options.rounds else max(self._end_s - now, 0.0)
        left = f", about {format_count(max(round(left_s / 10), 1) * 10, 'second')} left" if left_s else ""
        spent_s = now - self._began
        self._options.progress(f"{text}{left}", round(spent_s), round(spent_s + left_s) if left_s else 0)

    def runs_left(self) -> float:
        """Return how many more runs of the last run's duration fit into the time limit."""
        return max(self._end_s - time.monotonic(), 0.0) / max(self._run_s, 1e-9)

    def _allowed(self, candidates: Sequence[Candidate], rounds: int, others: int) -> list[Candidate]:
        """Return the first candidates, at least one, for which the time limit is enough.

        Args:
            candidates: the most important first.
            rounds: of these and the unchanged program.
            others: further runs of each.
        """
        return list(candidates[: max(int(min((self.runs_left() - rounds) / (rounds + others), len(candidates))), 1)])

    def recorded(self) -> Sequence[Finding]:
        """Return the findings of a recorded run."""
        from lightning_memprof.report.opened import opened
        from lightning_memprof.report.view import View

        place = self._directory / "recorded"
        self._tell("a first recorded run")
        task = Task(directory=str(place), steps=_RECORDED, is_recorded=True)
        found = run_task(self._program, task, self._options.time_limit_s, self._end_s)
        if found.problem:
            raise MemprofError(f"try: {' '.join(self._program)}: {found.problem}")
        with opened([str(place)]) as view:
            return view.findings if isinstance(view, View) else ()

    def check_unchanged(self) -> None:
        """Run the unchanged program, seeded.

        Raises:
            MemprofError: it fails.
        """
        bare = self.check(_BARE)
        if bare.problem:
            raise MemprofError(f"try: {' '.join(self._program)}: {bare.problem}")
        self.checks |= {"": bare, _AGAIN: bare}

    def check_all(self, candidates: Sequence[Candidate]) -> None:
        """Run the unchanged program once more, and each candidate for which there is time, all seeded."""
        if not candidates:
            return
        self.checks[_AGAIN] = self.check(_BARE)
        allowed = self._allowed(candidates, FEWEST_PAIRS, others=1)
        for candidate in candidates[len(allowed) :]:
            words = f"{self._options.minutes:g} minutes are too few: raise --minutes"
            self.checks[candidate.label] = Measured(problem=words)
        for candidate in allowed:
            self.checks[candidate.label] = self.check(candidate)

    def check(self, candidate: Candidate) -> Measured:
        """Run a candidate once, seeded."""
        self._tell(f"comparison of losses: {candidate.label or 'unchanged'}")
        began = time.monotonic()
        (found,) = self._run([candidate], min(_CHECKED, self._options.steps or _CHECKED), is_check=True)
        self._run_s = time.monotonic() - began
        return found

    def in_turns(
        self, candidates: Sequence[Candidate], steps: int, found: dict[str, list[Measured]], share: float = 1.0
    ) -> None:
        """Measure the unchanged program, as ``""``, and the candidates, by label, in rounds.

        Further rounds skip candidates that are decided or have failed, and the last candidates if there is no time for
        three rounds.

        Args:
            candidates: measured in turns; each has been checked.
            steps: measured steps of each run.
            found: gets the measurements of each complete round.
            share: of the trial's minutes, after which no further round begins.
        """
        found |= {candidate.label: [] for candidate in (_BARE, *candidates)}
        left, is_alternating = list(candidates), True
        while left and self._has_time(number := len(found[""]), len(left) + 1, share):
            more = (self._options.rounds or FEWEST_PAIRS) - number
            if more > 0:
                left = self._allowed(left, more, others=0)
            self._tell(
                f"round {number + 1}: {', '.join(each.label for each in left)}",
                max(more, 1) * self._run_s * (len(left) + 1),
            )
            began = time.monotonic()
            order = [_BARE, *left]
            runs = [self.checks[candidate.label] for candidate in order]
            turns = [max(round(_TURN_NS / run.step_ns), _FEWEST_IN_TURN) for run in runs]
            is_alternating = is_alternating and _fit_at_once(runs)
            measured = self._run(order, steps, turns) if is_alternating else []
            if not measured or any(run.problem for run in measured):
                # Each ran when alone: two may want the same port or file.
                is_alternating = False
                backwards = slice(None, None, -1 if number % 2 else 1)
                measured = [self._run([candidate], steps)[0] for candidate in order[backwards]][backwards]
            if measured[0].problem:
                raise MemprofError(f"try: {' '.join(self._program)}: {measured[0].problem}")
            for candidate, run in zip(order, measured, strict=True):
                found[candidate.label].append(run)
            left = [candidate for candidate in left if not self._is_decided(candidate, found)]
            self._run_s = (time.monotonic() - began) / len(order)

    def _has_time(self, rounds: int, runs: int, share: float) -> bool:
        if self._options.rounds is not None:
            return rounds < self._options.rounds
        end_s = self._began + 60 * self._options.minutes * share
        is_early = time.monotonic() + self._run_s * runs < end_s
        return rounds < FEWEST_PAIRS or (rounds < _MOST_ROUNDS and is_early)

    def _is_decided(self, candidate: Candidate, found: Mapping[str, Sequence[Measured]]) -> bool:
        runs = found[candidate.label]
        can_decide = self._options.rounds is None and len(runs) >= FEWEST_PAIRS
        return bool(runs[-1].problem) or (can_decide and _outcome(candidate, found, self.checks).is_clear)

    def _run(
        self, candidates: Sequence[Candidate], steps: int, turns: Sequence[int] = (0,), *, is_check: bool = False
    ) -> list[Measured]:
        with ExitStack() as running:
            processes = []
            for candidate, turn in zip(candidates, turns, strict=True):
                # Checkpoints of all runs together may fill a disk.
                place = running.enter_context(TemporaryDirectory(dir=self._directory, ignore_cleanup_errors=True))
                names = tuple(remedy.label for remedy in candidate.remedies)
                task = Task(directory=place, steps=steps, remedies=names, turn=turn, is_check=is_check)
                variables = {
                    name: value for remedy in candidate.remedies for name, value in remedy.environment().items()
                }
                process = started(self._program, task, self._options.time_limit_s, variables, self._end_s)
                processes.append(running.enter_context(process))
            return run_in_turns(processes)


def _fit_at_once(runs: Sequence[Measured]) -> bool:
    """Return whether the host's memory holds all at the same time; a device's is not shared."""
    needed = sum(run.peak_bytes * run.ranks for run in runs) * _SPARE
    can_alternate = CAN_STOP and all(run.device_bytes is None and run.is_in_group for run in runs)
    return can_alternate and needed < psutil.virtual_memory().available


def advice(findings: Sequence[Finding]) -> list[Candidate]:
    """Return the remedies of findings in their order, the most severe first."""
    found: dict[str, Candidate] = {}
    for finding in findings:
        worth = finding.recovers
        is_time = worth is not None and worth.unit == "ns" and worth.whole > 0
        promised = (worth.min / worth.whole, worth.max / worth.whole) if worth is not None and is_time else None
        for number, remedy in enumerate(finding.remedies):
            if remedy.change:
                change = parse_change(remedy.change)
                # The promise is that of the first remedy.
                mine = promised if number == 0 else None
                found.setdefault(change.name, Candidate(remedies=(change,), rule=finding.rule, promised=mine))
    return list(found.values())


def _outcome(
    candidate: Candidate, measured: Mapping[str, Sequence[Measured]], checks: Mapping[str, Measured]
) -> Outcome:
    checked = checks[candidate.label]
    if checked.problem:
        return replace(candidate.empty(), problem=checked.problem)
    is_mean = any(remedy.is_random for remedy in candidate.remedies)
    equal = equality(checks[""], checks[_AGAIN], checked, candidate.tolerance, is_mean=is_mean)
    tried = replace(candidate.empty(), code=tuple(checked.code))
    return outcome(tried, measured.get("", []), measured.get(candidate.label, []), equal)


def winners(remedies: Sequence[Change], outcomes: Sequence[Outcome]) -> tuple[Change, ...]:
    """Return the remedies that made steps shorter; of those that replace each other, the best."""
    won: dict[str, Change] = {}
    pairs = [(found.gain, remedy) for remedy, found in zip(remedies, outcomes, strict=True) if found.is_faster]
    for _, remedy in sorted(pairs, key=lambda pair: pair[0]):
        won.setdefault(remedy.family or remedy.name, remedy)
    return tuple(won.values())


def _together(runs: _Runs, candidates: Sequence[Candidate], outcomes: Sequence[Outcome], steps: int) -> Outcome | None:
    """Measure the remedies that won, at once: their gains do not add."""
    remedies = [remedy for candidate in candidates for remedy in candidate.remedies]
    won = winners(remedies, outcomes)
    # A check, and rounds with the unchanged program.
    if len(won) < 2 or runs.runs_left() < 1 + 2 * FEWEST_PAIRS:
        return None
    both = Candidate(remedies=won)
    measured: dict[str, list[Measured]] = {}
    with runs.ending():
        runs.checks[both.label] = runs.check(both)
        runs.in_turns([] if runs.checks[both.label].problem else [both], steps, measured)
    return _outcome(both, measured, runs.checks) if both.label in runs.checks else None
