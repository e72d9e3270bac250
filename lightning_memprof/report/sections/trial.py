"""The document of a trial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from lightning_memprof.compare.trial import (
    equality_words,
    promise_words,
    signed,
)
from lightning_memprof.report.document import (
    Cell,
    Chart,
    Column,
    Command,
    Document,
    Item,
    Line,
    Lines,
    Paragraph,
    Section,
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
    from lightning_memprof.compare.batches import Batches, TriedBatch
    from lightning_memprof.compare.trial import Outcome, Trial


_NOTHING: Final = "None of the remedies makes the steps shorter, or lowers the peak memory by more than it costs."
_NONE: Final = "There was no remedy to try."
# More lines are a part of the page.
_MOST_CODE: Final = 2


def trial_document(trial: Trial) -> Document:
    """Return the document of a trial."""
    best, section = trial.best, trial_section(trial)
    undecided = min((found for found in trial.tried if found.is_undecided), key=lambda found: found.gain, default=None)
    other = trial.fastest_changed
    if other is not None and undecided is not None and other.gain <= undecided.gain:
        undecided = None
    why, following = "" if trial.outcomes else " ".join(trial.notes), ""
    if best is not None:
        why = f"Compared over {format_count(trial.compared, 'step')}: {equality_words(best)}."
        following = "; ".join(best.code) if len(best.code) <= _MOST_CODE else "Paste the lines below."
    elif undecided is not None:
        remedies = " ".join(f"--remedy {name}" for name in undecided.remedy.split("+"))
        why = f"Its {undecided.rounds} rounds differ: about {undecided.needed} would decide, fewer on a quiet machine."
        following = f"lightning-memprof try --rounds {undecided.needed} {remedies} {trial.program}"
    elif other is not None:
        differ = equality_words(other).removeprefix("changes the training: ")
        why = f"Compared over {format_count(trial.compared, 'step')}: {differ}."
    return Document(
        title=trial.program,
        kind="trial",
        about=phrase(
            "{} per step · {} peak {} · {}",
            duration(trial.step_ns),
            size(trial.peak_bytes),
            text("device memory" if trial.is_device else "memory"),
            text(f"{format_count(trial.rounds, 'round')} of {trial.steps} steps" if trial.rounds else "no rounds"),
        ),
        status="stopped" if trial.is_stopped else "tried",
        badge="none",
        verdict=_verdict(trial, best, undecided, other),
        why=why,
        next=following,
        sections=[] if section is None else [replace(section, lead="")],
        commands=[Command("lightning-memprof", f"run {trial.program}")],
    )


def listing(run: str, found: Sequence[tuple[Outcome, float]], program: str) -> Document:
    """Return the document of what would be tried for a run, each with its tolerance, and the command that tries it."""
    remedies = " ".join(f"--remedy {outcome.remedy}" for outcome, _ in found)
    table = Table(
        id="remedies",
        title="Remedies",
        columns=(Column("remedy", "code"), Column("finding", "code"), Column("promised"), Column("tolerance")),
        rows=[
            (
                code(outcome.remedy),
                code(outcome.rule),
                text(promise_words(outcome.promised)),
                text(percent(tolerance) if tolerance else "0%"),
            )
            for outcome, tolerance in found
        ],
        notes=["tolerance: how far the loss of a step may differ, as a share of the mean loss."],
        is_sortable=False,
        top=None,
    )
    changes = Lines("Changes", [Line(outcome.remedy, code("; ".join(outcome.code))) for outcome, _ in found])
    return Document(
        title=run,
        kind="trial",
        status="not tried",
        verdict=f"{len(found)} {'remedy' if len(found) == 1 else 'remedies'} can be tried." if found else _NONE,
        sections=[Section("remedies", "Remedies", parts=[table, changes] if found else [])],
        commands=[Command("lightning-memprof try", f"{remedies} {program}")] if found else [],
    )


def _verdict(trial: Trial, best: Outcome | None, undecided: Outcome | None, other: Outcome | None) -> Words:
    if best is not None:
        return _gained(best)
    if undecided is not None and undecided.time is not None:
        change, low, high = map(signed, (undecided.time.change, undecided.time.low, undecided.time.high))
        return f"Not decided: {undecided.remedy} changes the step time by {change} (95% interval: {low} to {high})."
    if not trial.outcomes:
        return _NONE
    if all(found.problem for found in trial.outcomes):
        return "None of the remedies could be tried."
    if other is not None:
        shorter = f"{other.remedy} makes each step {percent(-other.gain)} shorter"
        return f"{shorter}, but changes the training: it is not recommended."
    return _NOTHING


def _gained(best: Outcome) -> str:
    if best.is_faster and best.time is not None:
        gain, least, most = (percent(-share) for share in (best.time.change, best.time.high, best.time.low))
        return f"{best.remedy} makes each step {gain} shorter (95% interval: {least} to {most})."
    time = "whether steps are shorter is not decided" if best.is_undecided else "the steps are not shorter"
    time = f"each step takes {percent(best.gain)} longer" if best.is_slower else time
    return f"{best.remedy} lowers the peak memory by {percent(-(best.peak or 0.0))}; {time}."


def batches_document(found: Batches) -> Document:
    """Return the document of a search for the largest batch."""
    best, refused = found.best, found.refused
    limit = "the device" if found.limit_bytes is None else format_bytes(found.limit_bytes)
    rows = [
        (
            count(row.samples),
            duration(row.step_ns),
            rate(row.samples_per_s, "samples/s"),
            size(row.peak_bytes),
            text(_result(row, limit), "good" if row.fits else "dim"),
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
    verdict = "Stopped before any batch fit." if best is None and found.is_stopped else f"{fits} into {limit}."
    return Document(
        title=found.program,
        kind="trial",
        about=phrase(
            "the program's own batch has {} samples{}",
            count(found.samples),
            text(f" · with {', '.join(found.remedies)}" if found.remedies else ""),
        ),
        status="stopped" if found.is_stopped else "tried",
        verdict=verdict,
        why="" if refused is None else f"With {format_count(refused.samples, 'sample')}: {_result(refused, limit)}.",
        next="" if best is None else f"DataLoader(..., batch_size={best.samples})",
        sections=[Section("batches", "Batches", parts=[table])],
        commands=[Command("lightning-memprof", f"run {found.program}")],
    )


def _result(row: TriedBatch, limit: str) -> str:
    needed = "" if row.peak_bytes is None else f"needs {format_bytes(row.peak_bytes)}, more than {limit}"
    return "fits" if row.fits else row.problem or needed


def trial_section(trial: Trial | None) -> Section | None:
    """Return what remedies gained, and the change of the program; None without any."""
    if trial is None or not trial.outcomes:
        return None
    failed = [Line(found.remedy, found.problem, "dim") for found in trial.tried if found.problem]
    parts: list[Item] = [Chart("tried"), _table([found for found in trial.tried if not found.problem])]
    parts += [Lines("Not tried", failed)] if failed else []
    best = trial.best
    if best is not None and len(best.code) > _MOST_CODE:
        parts.append(Lines("Change", [Line("change", code(line)) for line in best.code]))
    parts += [Paragraph(note) for note in trial.notes]
    lead = phrase("{} ran in rounds of {} steps, unchanged and with each remedy.", code(trial.program), trial.steps)
    return Section("remedies", "Remedies", lead, parts)


def _table(tried: list[Outcome]) -> Table:
    return Table(
        id="tried",
        title="Gains",
        columns=(
            Column("remedy", "code"),
            Column("change"),
            Column("95% interval"),
            Column("promised"),
            Column("rounds", "count", priority=1),
            Column("step time", "ns", priority=1),
            Column("peak", "bytes", priority=1),
            Column("peak change"),
            Column("training"),
        ),
        rows=[_row(found) for found in tried],
        notes=["change: of the step time, from the unchanged program, paired by round."],
        is_sortable=False,
        top=None,
    )


def _row(found: Outcome) -> list[Cell]:
    time = found.time
    more = "" if found.needed is None else f"; not decided: about {found.needed} rounds would"
    return [
        code(found.remedy),
        text(None if time is None else signed(time.change), "good" if found.is_faster else ""),
        text(None if time is None else f"{signed(time.low)} to {signed(time.high)}"),
        text(promise_words(found.promised)),
        count(found.rounds),
        duration(found.step_ns),
        size(found.peak_bytes),
        text(None if found.peak is None else signed(found.peak), "good" if found.saves_memory else ""),
        text(f"{equality_words(found)}{more}", "" if found.is_kept else "bad"),
    ]
