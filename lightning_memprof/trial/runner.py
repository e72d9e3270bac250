"""Runs the program in separate processes, with and without remedies in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import psutil

from lightning_memprof.analysis.findings import Finding
from lightning_memprof.analysis.trial import Measured, Outcome, Trial, equality, outcome
from lightning_memprof.errors import ConfigError, MemprofError
from lightning_memprof.trial.process import CAN_STOP, run_in_turns, run_task, started
from lightning_memprof.trial.remedies import advised, parse_remedy
from lightning_memprof.trial.remedy import Remedy
from lightning_memprof.trial.task import Task

FEWEST_ROUNDS: Final = 3
# Compared steps; a difference grows with each.
_CHECKED: Final = 20
_RECORDED: Final = 30
_FEWEST: Final = 10
_MOST: Final = 300
# Of the measured steps of a run: enough for the noise of a machine to even out.
_RUN_NS: Final = 4_000_000_000
# A machine has slow phases of ten seconds and more, which all then share.
_TURN_NS: Final = 500_000_000
_FEWEST_IN_TURN: Final = 2
_SPARE: Final = 1.3


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
        code = tuple(line for remedy in self.remedies for line in remedy.code)
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
        notes.append("Two runs of the unchanged program differ in losses or weights: equality is unknown.")
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
            measured = self._run(order, steps, turns) if turns else []
            if any(run.problem for run in measured):
                # Each has run alone: two may want the same port or file.
                turns, measured = [], []
            if not measured:
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


def _fit_at_once(runs: Sequence[Measured]) -> bool:
    """Return whether the host's memory holds all at the same time; a device's is not shared."""
    needed = sum(run.peak_bytes * run.ranks for run in runs) * _SPARE
    can_alternate = CAN_STOP and all(run.device_bytes is None and run.is_in_group for run in runs)
    return can_alternate and needed < psutil.virtual_memory().available


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
    runs: _Runs, candidates: Sequence[_Candidate], outcomes: Sequence[Outcome], steps: int, rounds: int
) -> Outcome | None:
    """Measure the remedies that won, at once: their gains do not add."""
    remedies = [remedy for candidate in candidates for remedy in candidate.remedies]
    won = winners(remedies, outcomes)
    if len(won) < 2:
        return None
    both = _Candidate(remedies=won)
    runs.plan(3 + 2 * rounds)
    checks = runs.checks([both])
    measured = runs.in_turns([both], steps, checks) if not checks.changed[both.label].problem else {"": []}
    return _outcome(both, measured, checks)


def _steps_for(step_ns: float) -> int:
    return int(min(max(_RUN_NS / max(step_ns, 1.0), _FEWEST), _MOST))
