"""The document of a trial."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from lightning_memprof.analysis.trial import (
    equality_words,
    promise_words,
    signed,
    small_share,
    tried_words,
    why_unknown,
)
from lightning_memprof.report.document import (
    Cell,
    Chart,
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
    count,
    duration,
    phrase,
    rate,
    size,
    text,
)
from lightning_memprof.units import format_bytes, format_count, percent

if TYPE_CHECKING:
    from lightning_memprof.analysis.batches import Batches, TriedBatch
    from lightning_memprof.analysis.trial import Equality, Outcome, Trial


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
        next=""
        if best is None
        else "; ".join(best.code)
        if len(best.code) < 3
        else "Paste the lines of the change below.",
        sections=list(_sections(trial)),
        commands=[Command("lightning-memprof", f"run {trial.program}")],
    )


def listing(run: str, found: Sequence[Outcome], tolerances: Sequence[float]) -> Document:
    """Return the document of what would be tried for a run, and how far losses may differ with each."""
    remedies = " ".join(f"--remedy {outcome.remedy}" for outcome in found)
    table = Table(
        id="remedies",
        title="Remedies",
        columns=(
            Column("remedy", "code"),
            Column("finding", "code"),
            Column("promised"),
            Column("tolerance"),
        ),
        rows=[
            (
                code(outcome.remedy),
                code(outcome.rule),
                text(promise_words(outcome.promised)),
                text(percent(tolerance) if tolerance else "0%"),
            )
            for outcome, tolerance in zip(found, tolerances, strict=True)
        ],
        notes=["tolerance: how far the loss of a step may differ, as a share of the mean loss."],
        is_sortable=False,
        top=None,
    )
    changes = Lines("Changes", [Line(outcome.remedy, code("; ".join(outcome.code))) for outcome in found])
    return Document(
        title=run,
        kind="trial",
        status="not tried",
        verdict=f"{len(found)} {'remedy' if len(found) == 1 else 'remedies'} can be tried." if found else _NONE,
        sections=[Section("remedies", "Remedies", parts=[table, changes] if found else [], summary=True)],
        commands=[Command("lightning-memprof try", f"{remedies} train.py")] if found else [],
    )


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
    parts: list[Part] = [
        Figures(
            [
                Figure("unchanged step", duration(trial.step_ns)),
                Figure("unchanged peak", size(trial.peak_bytes), "device memory" if trial.is_device else "RSS"),
                Figure("rounds", Cell(trial.rounds, "count"), phrase("of {} steps each", trial.steps)),
            ]
        )
    ]
    if trial.tried:
        parts.append(Lines("Remedies", [_line(found) for found in trial.tried]))
    best = trial.best
    if best is not None:
        parts.append(Lines("Change the program", [Line("change", code(line)) for line in best.code]))
    parts += [Paragraph(note) for note in trial.notes]
    yield Section("overview", "Overview", parts=parts, summary=True)
    if (section := trial_section(trial)) is not None:
        yield section


def batches_document(found: Batches) -> Document:
    """Return the document of a search for the largest batch."""
    best, limit = found.best, "the device" if found.limit_bytes is None else format_bytes(found.limit_bytes)
    rows = [
        (
            count(row.samples),
            duration(row.step_ns),
            rate(row.samples_per_s, "samples/s"),
            size(row.peak_bytes),
            text("fits" if row.fits else row.problem or f"needs more than {limit}", "good" if row.fits else "dim"),
        )
        for row in found.tried
    ]
    table = Table(
        id="batches",
        title="Batches",
        columns=(
            Column("samples", "count"),
            Column("step time", "ns"),
            Column("throughput", "samples/s"),
            Column("peak memory", "bytes"),
            Column("result"),
        ),
        rows=rows,
        notes=["One run of each: step times of a busy machine differ."],
        is_sortable=False,
        top=None,
    )
    fits = "Not even one sample fits" if best is None else f"A batch of {format_count(best.samples, 'sample')} fits"
    return Document(
        title=found.program,
        kind="trial",
        about=phrase(
            "the program's own batch has {} samples{}",
            count(found.samples),
            text(f" · with {', '.join(found.remedies)}" if found.remedies else ""),
        ),
        status="tried",
        verdict=f"{fits} into {limit}.",
        why="" if found.refused is None else _refused(found.refused, limit),
        next="" if best is None else f"DataLoader(..., batch_size={best.samples})",
        sections=[
            Section("overview", "Overview", parts=[Lines("Batches", list(map(_batch, found.tried)))], summary=True),
            Section("batches", "Batches", parts=[table]),
        ],
        commands=[Command("lightning-memprof", f"run {found.program}")],
    )


def _batch(row: TriedBatch) -> Line:
    label = format_count(row.samples, "sample")
    if row.peak_bytes is None:
        return Line(label, row.problem, "dim")
    words = phrase("{} peak, {}", size(row.peak_bytes), rate(row.samples_per_s, "samples/s"))
    return Line(label, words, "good" if row.fits else "dim")


def _refused(row: TriedBatch, limit: str) -> str:
    samples = format_count(row.samples, "sample")
    if row.peak_bytes is None:
        return f"With {samples}: {row.problem}."
    return f"With {samples} it needs {format_bytes(row.peak_bytes)}, more than {limit}."


def trial_section(trial: Trial | None) -> Section | None:
    """Return the table of the remedies that were tried; None without any."""
    if trial is None or not trial.outcomes:
        return None
    lead = phrase(
        "Each of {} rounds measured {} steps of {} and of each remedy.", trial.rounds, trial.steps, code(trial.program)
    )
    return Section("remedies", "Remedies", lead, [Chart("tried"), _table(trial.tried)])


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
    promised, name = promise_words(found.promised), code(found.remedy)
    if found.time is None:
        empty = [text(None)] * 5
        return [name, text(promised), *empty, text(f"not tried: {found.problem}", "dim")]
    style: Style = "good" if found.is_faster else ""
    return [
        name,
        text(promised),
        duration(found.step_ns),
        text(signed(found.time.change), style),
        text(f"{signed(found.time.low)} to {signed(found.time.high)}"),
        size(found.peak_bytes),
        text(None if found.peak is None else signed(found.peak), "good" if found.saves_memory else ""),
        text(equality_words(found), "" if found.is_kept else "bad"),
    ]


def _sentence(equal: Equality, steps: int) -> str:
    """Return how equal the training is, as a sentence."""
    if equal.name == "not comparable":
        return f"Whether the training is the same is not known: {why_unknown(equal)}."
    if equal.name == "bit-equal":
        return f"The losses of {steps} steps and the parameters after them are bit-equal."
    apart = "" if equal.difference is None else f" by up to {small_share(equal.difference)} of the mean loss"
    if equal.is_mean and equal.difference is not None:
        mean = f"The mean loss of {steps} steps differs by {small_share(equal.difference)}"
        return f"{mean}, since other random numbers are drawn; the tolerance is {percent(equal.tolerance)}."
    return f"The losses of {steps} steps differ{apart}; the tolerance is {percent(equal.tolerance)}."
