"""Runs the program in separate processes, alternately with and without remedies."""

from __future__ import annotations

import shlex
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import psutil
from msgspec.structs import replace

from lightning_memprof.analysis.compare.significance import FEWEST_PAIRS
from lightning_memprof.analysis.findings import Finding
from lightning_memprof.analysis.trial import Measured, Outcome, Trial, equality, outcome
from lightning_memprof.errors import ConfigError, MemprofError
from lightning_memprof.trial.process import CAN_STOP, run_in_turns, run_task, started
from lightning_memprof.trial.remedies import advised, parse_remedy
from lightning_memprof.trial.remedy import Remedy
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
class Wanted:
    """Options of a trial, as on the command line.

    Attributes:
        remedies: their names; empty for those that the findings of a first recorded run advise.
        rounds: how often each is measured; None measures until each is decided, or the minutes are over.
        minutes: how long the trial may take without ``rounds``; it has three rounds at least.
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
            parse_remedy(name)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Remedies that are tried at once; a finding promised the least and most share of the step, None if unknown."""

    remedies: tuple[Remedy, ...]
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
_Checks = Mapping[str, Measured]
"""A seeded run of each candidate by its label, and two of the unchanged program: as ``""``, and again."""


def try_program(program: Sequence[str], wanted: Wanted, findings: Sequence[Finding] | None = None) -> Trial:
    """Run a program alternately with and without remedies.

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
            candidates = [Candidate(remedies=(parse_remedy(name),)) for name in dict.fromkeys(wanted.remedies)]
        else:
            candidates = advice(runs.recorded() if findings is None else findings)
            if not candidates:
                notes.append("The findings advise nothing that can be tried from outside the program.")
        checks = runs.checks(candidates)
        steps = wanted.steps or int(min(max(_RUN_NS / max(checks[""].step_ns, 1.0), _FEWEST), _MOST))
        working = [candidate for candidate in candidates if not checks[candidate.label].problem]
        measured = runs.in_turns(working, steps, checks, _ALONE if len(working) > 1 else 1.0)
        outcomes = [_outcome(candidate, measured, checks) for candidate in candidates]
        together = None if runs.is_stopped else _together(runs, candidates, outcomes, steps, checks)
    bare = measured[""] or [checks[""]]
    if runs.is_stopped:
        notes.append("Stopped before its end.")
    if equality(checks[""], checks[_AGAIN], checks[""], 0.0).name != "bit-equal":
        notes.append("Two runs of the unchanged program differ in losses or weights: equality is unknown.")
    return Trial(
        program=shlex.join(program),
        rounds=len(measured[""]),
        steps=steps,
        compared=len(checks[""].losses),
        step_ns=statistics.median([run.step_ns for run in bare]),
        peak_bytes=round(statistics.median([run.peak_bytes for run in bare])),
        is_device=bare[0].device_bytes is not None,
        outcomes=tuple(outcomes),
        together=together,
        notes=tuple(notes),
        is_stopped=runs.is_stopped,
    )


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
        self._began = time.monotonic()
        self._check_s = 0.0
        self.is_stopped = False

    def _tell(self, text: str, rest_s: float = 0.0) -> None:
        """Show what runs, and how long the trial still takes: at least the rest of its rounds."""
        spent_s = time.monotonic() - self._began
        left_s = rest_s if self._wanted.rounds else max(rest_s, 60 * self._wanted.minutes - spent_s)
        left = f", about {format_count(max(round(left_s / 10), 1) * 10, 'second')} left" if left_s else ""
        self._wanted.progress(f"{text}{left}", round(spent_s), round(spent_s + left_s) if left_s else 0)

    def recorded(self) -> Sequence[Finding]:
        """Return the findings of a recorded run."""
        from lightning_memprof.report.opened import opened
        from lightning_memprof.report.view import View

        place = self._directory / "recorded"
        self._tell("a first recorded run")
        task = Task(directory=str(place), steps=_RECORDED, is_recorded=True)
        found = run_task(self._program, task, self._wanted.time_limit_s)
        if found.problem:
            raise MemprofError(f"try: {' '.join(self._program)}: {found.problem}")
        with opened([str(place)]) as view:
            return view.findings if isinstance(view, View) else ()

    def checks(self, candidates: Sequence[Candidate]) -> _Checks:
        """Run everything once, seeded, and the unchanged program twice.

        Raises:
            MemprofError: the unchanged program fails.
        """
        bare = self.check(_BARE)
        if bare.problem:
            raise MemprofError(f"try: {' '.join(self._program)}: {bare.problem}")
        changed = {candidate.label: self.check(candidate) for candidate in candidates}
        return {"": bare, **changed, _AGAIN: self.check(_BARE) if candidates else bare}

    def check(self, candidate: Candidate) -> Measured:
        """Run a candidate once, seeded."""
        self._tell(f"comparison of losses: {candidate.label or 'unchanged'}")
        began = time.monotonic()
        (found,) = self._run([candidate], min(_CHECKED, self._wanted.steps or _CHECKED), is_check=True)
        self._check_s = time.monotonic() - began
        return found

    def in_turns(
        self, candidates: Sequence[Candidate], steps: int, checks: _Checks, share: float = 1.0
    ) -> dict[str, list[Measured]]:
        """Measure the unchanged program, as ``""``, and the candidates, by label, in rounds.

        A candidate that is decided or has failed is left out of further rounds. Ctrl-C ends them.

        Args:
            candidates: what is measured.
            steps: measured steps of each run.
            checks: runs of the same.
            share: of the trial's minutes, after which no further round begins.
        """
        found: dict[str, list[Measured]] = {candidate.label: [] for candidate in (_BARE, *candidates)}
        left, is_alternating, round_s = list(candidates), True, self._check_s * len(found)
        try:
            while left and self._has_time(number := len(found[""]), round_s, share):
                began = time.monotonic()
                more = (self._wanted.rounds or FEWEST_PAIRS) - number
                self._tell(f"round {number + 1}: {', '.join(each.label for each in left)}", max(more, 1) * round_s)
                order = [_BARE, *left]
                runs = [checks[candidate.label] for candidate in order]
                turns = [max(round(_TURN_NS / run.step_ns), _FEWEST_IN_TURN) for run in runs]
                is_alternating = is_alternating and _fit_at_once(runs)
                measured = self._run(order, steps, turns) if is_alternating else []
                if not measured or any(run.problem for run in measured):
                    # Each has run alone: two may want the same port or file.
                    is_alternating = False
                    backwards = slice(None, None, -1 if number % 2 else 1)
                    measured = [self._run([candidate], steps)[0] for candidate in order[backwards]][backwards]
                if measured[0].problem:
                    raise MemprofError(f"try: {' '.join(self._program)}: {measured[0].problem}")
                for candidate, run in zip(order, measured, strict=True):
                    found[candidate.label].append(run)
                left = [candidate for candidate in left if not self._is_decided(candidate, found, checks)]
                round_s = time.monotonic() - began
        except KeyboardInterrupt:
            self.is_stopped = True
        return found

    def _has_time(self, rounds: int, round_s: float, share: float) -> bool:
        if self._wanted.rounds is not None:
            return rounds < self._wanted.rounds
        end = self._began + 60 * self._wanted.minutes * share
        return rounds < FEWEST_PAIRS or (rounds < _MOST_ROUNDS and time.monotonic() + round_s < end)

    def _is_decided(self, candidate: Candidate, found: Mapping[str, Sequence[Measured]], checks: _Checks) -> bool:
        runs = found[candidate.label]
        can_decide = self._wanted.rounds is None and len(runs) >= FEWEST_PAIRS
        return bool(runs[-1].problem) or (can_decide and _outcome(candidate, found, checks).is_clear)

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
                process = started(self._program, task, self._wanted.time_limit_s, variables)
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
        # The promise is that of the first next step.
        first = {remedy.label for remedy in advised(finding.next_steps[:1])}
        for remedy in advised(finding.next_steps):
            mine = promised if remedy.label in first else None
            found.setdefault(remedy.name, Candidate(remedies=(remedy,), rule=finding.rule, promised=mine))
    return list(found.values())


def _outcome(candidate: Candidate, measured: Mapping[str, Sequence[Measured]], checks: _Checks) -> Outcome:
    checked = checks[candidate.label]
    if checked.problem:
        return replace(candidate.empty(), problem=checked.problem)
    is_mean = any(remedy.is_random for remedy in candidate.remedies)
    equal = equality(checks[""], checks[_AGAIN], checked, candidate.tolerance, is_mean=is_mean)
    tried = replace(candidate.empty(), code=tuple(checked.code))
    return outcome(tried, measured[""], measured[candidate.label], equal)


def winners(remedies: Sequence[Remedy], outcomes: Sequence[Outcome]) -> tuple[Remedy, ...]:
    """Return the remedies that made steps shorter; of those that replace each other, the best."""
    won: dict[str, Remedy] = {}
    pairs = [(found.gain, remedy) for remedy, found in zip(remedies, outcomes, strict=True) if found.is_faster]
    for _, remedy in sorted(pairs, key=lambda pair: pair[0]):
        won.setdefault(remedy.family or remedy.name, remedy)
    return tuple(won.values())


def _together(
    runs: _Runs, candidates: Sequence[Candidate], outcomes: Sequence[Outcome], steps: int, checks: _Checks
) -> Outcome | None:
    """Measure the remedies that won, at once: their gains do not add."""
    remedies = [remedy for candidate in candidates for remedy in candidate.remedies]
    won = winners(remedies, outcomes)
    if len(won) < 2:
        return None
    both = Candidate(remedies=won)
    try:
        checks = {**checks, both.label: runs.check(both)}
    except KeyboardInterrupt:
        runs.is_stopped = True
        return None
    working = [] if checks[both.label].problem else [both]
    return _outcome(both, runs.in_turns(working, steps, checks), checks)
