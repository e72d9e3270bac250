"""The document of a trial."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.trial import NOTABLE_PEAK
from lightning_memprof.report.document import (
    Cell,
    Column,
    Command,
    Document,
    Figure,
    Figures,
    Line,
    Lines,
    Paragraph,
    Part,
    Section,
    Style,
    Table,
    Words,
    code,
    duration,
    phrase,
    size,
    text,
)
from lightning_memprof.units import percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.trial import Equality, Outcome, Trial

__all__ = ["listing", "trial_document", "tried_words"]

_NOTHING: Final = "None of the remedies makes the steps shorter or lowers the peak memory."
_NONE: Final = "There was no remedy to try."


def trial_document(trial: Trial) -> Document:
    """Return the document of a trial."""
    best = trial.best
    return Document(
        title=trial.program,
        kind="trial",
        about=phrase(
            "{} per step · {} peak {} · {} rounds of {} steps",
            duration(trial.step_ns),
            size(trial.peak_bytes),
            text("device memory" if trial.is_device else "memory"),
            trial.rounds,
            trial.steps,
        ),
        status="tried",
        badge="none",
        verdict=_verdict(trial),
        why="" if best is None or best.equality is None else _sentence(best.equality, trial.compared),
        next="" if best is None else "; ".join(best.code),
        sections=list(_sections(trial)),
        commands=[Command("lightning-memprof", f"run {trial.program}")],
    )


def listing(run: str, found: Sequence[tuple[str, str, float, tuple[float, float] | None]]) -> Document:
    """Return what would be tried for a run: name, code, tolerance of losses and promised shares of each remedy."""
    remedies = " ".join(f"--remedy {name}" for name, *_ in found)
    table = Table(
        id="remedies",
        title="Remedies",
        columns=(
            Column("remedy", "code"),
            Column("promised"),
            Column("losses may differ by"),
            Column("change", "code"),
        ),
        rows=[
            (code(name), text(_promise(promised)), text(percent(tolerance) if tolerance else "0%"), code(change))
            for name, change, tolerance, promised in found
        ],
        is_sortable=False,
        top=None,
    )
    return Document(
        title=run,
        kind="trial",
        status="not tried",
        verdict=f"{len(found)} {'remedy' if len(found) == 1 else 'remedies'} can be tried." if found else _NONE,
        sections=[Section("remedies", "Remedies", parts=[table] if found else [], summary=True)],
        commands=[Command("lightning-memprof try", f"{remedies} train.py")] if found else [],
    )


def tried_words(found: Outcome) -> str:
    """Return what a remedy gained: ``-22% step time (-26% to -18%; promised -30% to -10%), bit-equal``."""
    if found.problem or found.time is None:
        return f"not tried: {found.problem}"
    promise = _promise(found.promised)
    between = f"{_signed(found.time.low)} to {_signed(found.time.high)}{f'; promised {promise}' if promise else ''}"
    peak = f", {_signed(found.peak)} peak memory" if found.peak is not None and abs(found.peak) >= NOTABLE_PEAK else ""
    return f"{_signed(found.time.change)} step time ({between}){peak}, {_equality(found)}"


def _verdict(trial: Trial) -> Words:
    best = trial.best
    if best is None:
        return _NOTHING if trial.outcomes else _NONE
    name = best.remedy.replace("+", " with ")
    if best.is_faster and best.time is not None:
        gain, least, most = (percent(-share) for share in (best.time.change, best.time.high, best.time.low))
        return f"{name} makes each step {gain} shorter (95% interval: {least} to {most})."
    return f"{name} lowers the peak memory by {percent(-(best.peak or 0.0))}; the steps are not shorter."


def _sections(trial: Trial) -> Iterator[Section]:
    tried = [*trial.outcomes, *((trial.together,) if trial.together is not None else ())]
    parts: list[Part] = [
        Figures(
            [
                Figure("unchanged step", duration(trial.step_ns)),
                Figure("unchanged peak", size(trial.peak_bytes), "device memory" if trial.is_device else "RSS"),
                Figure("runs", Cell(trial.rounds, "count"), phrase("of {} steps each", trial.steps)),
            ]
        )
    ]
    if tried:
        parts.append(Lines("Remedies", [_line(found) for found in tried]))
    best = trial.best
    if best is not None:
        parts.append(Lines("Change the program", [Line(best.remedy, code(line)) for line in best.code]))
    parts += [Paragraph(note) for note in trial.notes]
    yield Section("overview", "Overview", parts=parts, summary=True)
    if tried:
        yield Section("remedies", "Remedies", parts=[_table(tried)])


def _line(found: Outcome) -> Line:
    style: Style = "good" if found.is_faster or found.saves_memory else "" if found.is_kept else "dim"
    return Line(found.remedy, tried_words(found), style)


def _table(tried: list[Outcome]) -> Table:
    return Table(
        id="tried",
        title="Remedies",
        columns=(
            Column("remedy", "code"),
            Column("promised"),
            Column("step time", "ns"),
            Column("change"),
            Column("95% interval"),
            Column("peak", "bytes", priority=1),
            Column("peak change", priority=1),
            Column("training"),
        ),
        rows=[_row(found) for found in tried],
        notes=[
            "The interval is of the change from the unchanged program, paired by round.",
            "bit-equal: the losses of all compared steps and the parameters after them have the same bits.",
        ],
        is_sortable=False,
        top=None,
    )


def _row(found: Outcome) -> list[Cell]:
    promised, name = _promise(found.promised), code(found.remedy)
    if found.time is None:
        empty = [text(None)] * 5
        return [name, text(promised), *empty, text(f"not tried: {found.problem}", "dim")]
    style: Style = "good" if found.is_faster else ""
    return [
        name,
        text(promised),
        duration(found.step_ns),
        text(_signed(found.time.change), style),
        text(f"{_signed(found.time.low)} to {_signed(found.time.high)}"),
        size(found.peak_bytes),
        text(None if found.peak is None else _signed(found.peak), "good" if found.saves_memory else ""),
        text(_equality(found), "" if found.is_kept else "bad"),
    ]


def _promise(shares: tuple[float, float] | None) -> str | None:
    return None if shares is None else f"{_signed(-shares[1])} to {_signed(-shares[0])}"


def _equality(found: Outcome) -> str:
    """Return how equal the training is, in words."""
    equal = found.equality
    if equal is None:
        return "not compared"
    apart = "" if equal.difference is None else f"losses differ by up to {_small(equal.difference)}"
    if equal.name == "within tolerance":
        return f"{apart} (tolerance {percent(equal.tolerance)})"
    if equal.name == "changes the training":
        return f"changes the training: {apart or 'its parameters differ'}"
    if equal.name == "not comparable":
        return "not comparable: the unchanged program does not repeat itself"
    return equal.name


def _sentence(equal: Equality, steps: int) -> str:
    """Return how equal the training is, as a sentence."""
    if equal.name == "not comparable":
        return "Whether the training is the same is not known: the unchanged program does not repeat itself."
    if equal.name == "bit-equal":
        return f"The losses of {steps} steps and the parameters after them are bit-equal."
    apart = "" if equal.difference is None else f" by up to {_small(equal.difference)} of the mean loss"
    return f"The losses of {steps} steps differ{apart}; the tolerance is {percent(equal.tolerance)}."


def _small(value: float) -> str:
    return f"{value:.1e}" if 0 < value < 0.001 else f"{value:.1%}"


def _signed(value: float) -> str:
    return f"{value:+.0%}".replace("+0%", "0%").replace("-0%", "0%")
