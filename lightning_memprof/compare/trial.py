"""What remedies gain on a training run that ran alternately with and without them, and whether it is still the same."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from lightning_memprof.compare.significance import FEWEST_PAIRS, PairedChange, paired_change
from lightning_memprof.units import percent

# A smaller difference of the peak is the allocator's, or the machine's.
_NOTABLE_PEAK: Final = 0.05
# A gain that more rounds are worth: the least promised one, within these limits.
_WORTH: Final = (0.02, 0.05)
# Fewer rounds show too little of their spread to rule a gain out.
_FEWEST_FOR_NONE: Final = 5


class Measured(msgspec.Struct, kw_only=True):
    """One run of the training, as its process wrote it.

    Attributes:
        steps: measured steps; a step is a batch.
        step_ns: mean time from the end of a step to the end of the next, without validation.
        losses: of all steps, from the first; None is NaN or infinite, empty where the module returns none.
        weights: a hash of all parameters after the last step; empty where it was not computed.
        rss_bytes: peak RSS of the process.
        worker_bytes: memory of its DataLoader workers at the end, by their share of shared pages.
        device_bytes: peak memory of tensors on the device in the measured steps; None on a CPU.
        samples: in a batch; None where it is not known.
        ranks: processes that train on this machine; the figures are those of one.
        code: the change, as lines to paste.
        is_in_group: whether it can be stopped with all that it started.
        problem: why the training was not measured.
    """

    steps: int = 0
    step_ns: float = 0.0
    losses: list[float | None] = []
    weights: str = ""
    rss_bytes: int = 0
    worker_bytes: int = 0
    device_bytes: int | None = None
    samples: int | None = None
    ranks: int = 1
    code: list[str] = []
    is_in_group: bool = False
    problem: str = ""

    @property
    def peak_bytes(self) -> int:
        """The memory that a remedy may save: the device's, or the host's."""
        return self.rss_bytes + self.worker_bytes if self.device_bytes is None else self.device_bytes


EqualityName = Literal["bit-equal", "within tolerance", "changes the training", "not comparable"]


class Equality(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a training run is the same with a remedy.

    Attributes:
        name: how equal it is.
        difference: the largest difference of a step's loss, as a share of the mean loss; None where no loss is known.
        tolerance: what the remedy may change.
        is_mean: whether both are of the mean loss: the training draws other random numbers with the remedy.
    """

    name: EqualityName
    difference: float | None = None
    tolerance: float = 0.0
    is_mean: bool = False

    @property
    def is_kept(self) -> bool:
        """Whether the remedy may be recommended."""
        return self.name != "changes the training"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A remedy that was tried.

    Attributes:
        remedy: its name on the command line; several joined by ``+``.
        rule: of the finding that advised it; empty where none did.
        code: the change, as lines to paste.
        promised: least and most share of the step that the finding promised to recover.
        time: change of the step time.
        peak: change of the peak memory, as a share.
        is_smaller: whether every run with the remedy had a notably lower peak than every run without it.
        peak_bytes: median peak memory with the remedy.
        step_ns: median of the mean step times with the remedy.
        rounds: how often it was measured.
        equality: whether the training is the same.
        problem: why it could not be tried; everything else is then unknown.
    """

    remedy: str
    rule: str = ""
    code: tuple[str, ...] = ()
    promised: tuple[float, float] | None = None
    time: PairedChange | None = None
    peak: float | None = None
    is_smaller: bool = False
    peak_bytes: int | None = None
    step_ns: float | None = None
    rounds: int = 0
    equality: Equality | None = None
    problem: str = ""

    @property
    def is_kept(self) -> bool:
        """Whether the training is the same with it, as far as that could be compared."""
        return self.equality is not None and self.equality.is_kept

    @property
    def is_faster(self) -> bool:
        """Whether it makes steps shorter, and leaves the training the same."""
        return self.is_kept and self.time is not None and self.time.high < 0

    @property
    def is_slower(self) -> bool:
        """Whether it makes steps longer."""
        return self.time is not None and self.time.low > 0

    @property
    def is_undecided(self) -> bool:
        """Whether the interval contains both no gain and one that is worth having, or promised."""
        return self.is_kept and self.time is not None and self.time.low <= -self._worth and self.time.high >= 0

    @property
    def is_clear(self) -> bool:
        """Whether further rounds are not needed.

        A gain has to be twice the reach of its interval: stopping at the first interval without 0 would find gains by
        chance more often than 1 in 20.
        """
        if self.time is None or not self.is_kept:
            return True
        is_shown = self.time.high < 0 and self.time.high - self.time.change <= -self.time.high
        return is_shown or (self.rounds >= _FEWEST_FOR_NONE and self.time.low > -self._worth)

    @property
    def needed(self) -> int | None:
        """About how many rounds would decide whether there is a gain; None where it is decided."""
        if self.time is None or not self.is_undecided:
            return None
        return self.time.pairs_needed(self.rounds, self._worth)

    @property
    def _worth(self) -> float:
        least, most = _WORTH
        return most if self.promised is None else min(max(self.promised[0], least), most)

    @property
    def gain(self) -> float:
        """The change of the step time: less is better."""
        return 0.0 if self.time is None else self.time.change

    @property
    def saves_memory(self) -> bool:
        """Whether it lowers the peak by a larger share than it makes steps longer, and leaves the training the same."""
        longer = self.gain if self.is_slower else 0.0
        return self.is_kept and self.is_smaller and -(self.peak or 0.0) > longer


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The remedies that were tried on one program.

    Attributes:
        program: its command line.
        rounds: how often the unchanged program was measured.
        steps: measured steps of each run.
        compared: steps whose losses were compared.
        step_ns: median of the mean step times of the unchanged program; None where it was not measured.
        peak_bytes: median peak memory of the unchanged program; None if it was not measured.
        is_device: whether the peak is the device's, not the host's.
        outcomes: of each remedy, in the order in which they were asked for.
        together: of the remedies that won, at once; None where fewer than two did.
        notes: what a reader of the figures has to know.
        is_stopped: whether Ctrl-C ended it.
    """

    program: str
    rounds: int
    steps: int
    compared: int
    step_ns: float | None
    peak_bytes: int | None
    is_device: bool = False
    outcomes: tuple[Outcome, ...] = ()
    together: Outcome | None = None
    notes: tuple[str, ...] = ()
    is_stopped: bool = False

    @property
    def tried(self) -> list[Outcome]:
        """The outcome of each remedy, and of the winners together."""
        return [*self.outcomes, *((self.together,) if self.together is not None else ())]

    @property
    def fastest_changed(self) -> Outcome | None:
        """The outcome that gains most of those that change the training; None where none makes steps shorter."""
        faster = [found for found in self.tried if not found.is_kept and found.time is not None and found.time.high < 0]
        return min(faster, key=lambda found: found.gain, default=None)

    @property
    def best(self) -> Outcome | None:
        """The outcome that gains most; otherwise the one with the lowest peak; None where nothing was gained."""
        faster = [found for found in self.tried if found.is_faster]
        if faster:
            # Not the shortest step: the rounds of the winners together were later.
            return min(faster, key=lambda found: found.gain)
        smaller = [found for found in self.tried if found.saves_memory]
        return min(smaller, key=lambda found: found.peak or 0.0, default=None)


def equality(
    bare: Measured, again: Measured, changed: Measured, tolerance: float, *, is_mean: bool = False
) -> Equality:
    """Compare a changed training with two runs of the unchanged one, all with the same seeds.

    Args:
        bare: the unchanged program.
        again: the same, to see whether it repeats itself.
        changed: the program with the remedy.
        tolerance: the largest difference of a step's loss that the remedy may cause, as a share of the mean loss.
        is_mean: whether that is of the mean loss instead.
    """
    difference = _difference(bare.losses, changed.losses, is_mean=is_mean)
    # Without losses nothing says how far the parameters may differ.
    is_unknown = not bare.losses and not changed.losses and tolerance > 0 and not _same(bare, changed)
    if is_unknown or not _same(bare, again):
        return Equality(name="not comparable", difference=difference, tolerance=tolerance, is_mean=is_mean)
    if _same(bare, changed):
        return Equality(name="bit-equal", difference=0.0 if bare.losses else None, tolerance=tolerance)
    # Rounding does not make a loss NaN or infinite.
    is_finite = [loss is None for loss in bare.losses] == [loss is None for loss in changed.losses]
    is_close = difference is not None and is_finite and tolerance > 0 and difference <= tolerance
    name: EqualityName = "within tolerance" if is_close else "changes the training"
    return Equality(name=name, difference=difference, tolerance=tolerance, is_mean=is_mean)


def _same(a: Measured, b: Measured) -> bool:
    return a.weights == b.weights and a.losses == b.losses


def _difference(a: Sequence[float | None], b: Sequence[float | None], *, is_mean: bool) -> float | None:
    """Return the largest difference of two losses, or that of their means, as a share of the mean; None without any."""
    first, second = ([loss for loss in losses if loss is not None] for losses in (a, b))
    if len(a) != len(b) or not first or not second:
        return None
    if is_mean:
        apart = abs(statistics.fmean(first) - statistics.fmean(second))
    else:
        apart = max((abs(x - y) for x, y in zip(a, b, strict=True) if x is not None and y is not None), default=0.0)
    return apart / (statistics.fmean(map(abs, first)) or 1.0)


def outcome(tried: Outcome, bare: Sequence[Measured], changed: Sequence[Measured], equal: Equality) -> Outcome:
    """Return what a remedy gained.

    Args:
        tried: the remedy, its code and its promise.
        bare: the unchanged program, by round.
        changed: the program with the remedy, in the first of these rounds.
        equal: whether the training is the same.
    """
    problem = next((run.problem for run in changed if run.problem), "")
    if problem or len(changed) < FEWEST_PAIRS:
        return replace(tried, problem=problem or f"stopped after {len(changed)} of {FEWEST_PAIRS} rounds")
    bare = bare[: len(changed)]
    before = statistics.median(run.peak_bytes for run in bare)
    after = statistics.median(run.peak_bytes for run in changed)
    peak = after / before - 1 if before else None
    least, most = min(run.peak_bytes for run in bare), max(run.peak_bytes for run in changed)
    return replace(
        tried,
        time=paired_change([run.step_ns for run in bare], [run.step_ns for run in changed]),
        peak=peak,
        is_smaller=peak is not None and peak <= -_NOTABLE_PEAK and most < least,
        peak_bytes=round(after),
        step_ns=statistics.median(run.step_ns for run in changed),
        rounds=len(changed),
        equality=equal,
    )


def tried_words(found: Outcome) -> str:
    """Return what a remedy gained: ``-22% step time (-26% to -18%; promised -30% to -10%), bit-equal``."""
    if found.problem or found.time is None:
        return f"not tried: {found.problem}"
    promise = promise_words(found.promised)
    between = f"{signed(found.time.low)} to {signed(found.time.high)}{f'; promised {promise}' if promise else ''}"
    peak = f", {signed(found.peak)} peak memory" if found.peak is not None and abs(found.peak) >= _NOTABLE_PEAK else ""
    more = "" if found.needed is None else f", not decided: about {found.needed} rounds would"
    return f"{signed(found.time.change)} step time ({between}){peak}, {equality_words(found)}{more}"


def promise_words(shares: tuple[float, float] | None) -> str | None:
    """Return what a finding promised, as a change of the step time; None where it promised nothing."""
    return None if shares is None else f"{signed(-shares[1])} to {signed(-shares[0])}"


def equality_words(found: Outcome) -> str:
    """Return how equal the training is, in words."""
    equal = found.equality
    if equal is None:
        return "not compared"
    differ = "mean loss differs by" if equal.is_mean else "losses differ by up to"
    share = equal.difference
    apart = "" if share is None else f"{differ} {f'{share:.1e}' if 0 < share < 0.001 else f'{share:.1%}'}"
    if equal.name == "within tolerance":
        return f"{apart} (tolerance {percent(equal.tolerance)})"
    if equal.name == "changes the training":
        return f"changes the training: {apart or 'losses or parameters differ'}"
    if equal.name == "not comparable":
        reason = "no loss is known" if share is None else "the unchanged program does not repeat itself"
        return f"not comparable: {reason}"
    return equal.name


def signed(value: float) -> str:
    """Return a change in percent with its sign."""
    return f"{value:+.0%}".replace("+0%", "0%").replace("-0%", "0%")
