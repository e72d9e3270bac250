"""The document of a trial."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from lightning_memprof.compare.trial import equality_words, promise_words, signed
from lightning_memprof.report.document import (
    Cell,
    Chart,
    Command,
    Document,
    Item,
    Line,
    Lines,
    Paragraph,
    Section,
    Table,
    Words,
    phrase,
)
from lightning_memprof.report.sections.tables import Field, filled
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
    memory = "device memory" if trial.is_device else "memory"
    rounds = f"{format_count(trial.rounds, 'round')} of {trial.steps} steps" if trial.rounds else "no rounds"
    return Document(
        title=trial.program,
        kind="trial",
        about=phrase("{ns} per step · {bytes} peak {} · {}", trial.step_ns, trial.peak_bytes, memory, rounds),
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
    note = "tolerance: how far the loss of a step may differ, as a share of the mean loss."
    table = filled(
        Table("remedies", "Remedies", notes=[note], is_sortable=False, top=None),
        found,
        Field("remedy", "code", lambda row: row[0].remedy),
        Field("finding", "code", lambda row: row[0].rule),
        Field("promised", "text", lambda row: promise_words(row[0].promised)),
        Field("tolerance", "text", lambda row: percent(row[1]) if row[1] else "0%"),
    )
    changes = Lines("Changes", [Line(outcome.remedy, Cell("; ".join(outcome.code), "code")) for outcome, _ in found])
    return Document(
        title=run,
        kind="trial",
        status="not tried",
        verdict=f"{len(found)} {'remedy' if len(found) == 1 else 'remedies'} can be tried." if found else _NONE,
        sections=[Section("remedies", "Remedies", parts=[*table, changes] if found else [])],
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
    note = "One run of each: step times of a busy machine differ."
    table = filled(
        Table("batches", "Batches", notes=[note], is_sortable=False, top=None),
        found.tried,
        Field("samples", "count", lambda row: row.samples),
        Field("step time", "ns", lambda row: row.step_ns),
        Field("throughput", "samples/s", lambda row: row.samples_per_s),
        Field("peak memory", "bytes", lambda row: row.peak_bytes),
        Field("result", "text", lambda row: Cell(_result(row, limit), style="good" if row.fits else "dim")),
    )
    fits = "Not even one sample fits" if best is None else f"A batch of {format_count(best.samples, 'sample')} fits"
    verdict = "Stopped before any batch fit." if best is None and found.is_stopped else f"{fits} into {limit}."
    remedies = f" · with {', '.join(found.remedies)}" if found.remedies else ""
    return Document(
        title=found.program,
        kind="trial",
        about=phrase("the program's own batch has {} samples{}", found.samples, remedies),
        status="stopped" if found.is_stopped else "tried",
        verdict=verdict,
        why="" if refused is None else f"With {format_count(refused.samples, 'sample')}: {_result(refused, limit)}.",
        next="" if best is None else f"DataLoader(..., batch_size={best.samples})",
        sections=[Section("batches", "Batches", parts=list(table))],
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
    parts: list[Item] = [Chart("tried"), *_gains([found for found in trial.tried if not found.problem])]
    parts += [Lines("Not tried", failed)] if failed else []
    best = trial.best
    if best is not None and len(best.code) > _MOST_CODE:
        parts.append(Lines("Change", [Line("change", Cell(line, "code")) for line in best.code]))
    parts += [Paragraph(note) for note in trial.notes]
    lead = phrase("{} ran in rounds of {} steps, unchanged and with each remedy.", trial.program, trial.steps)
    return Section("remedies", "Remedies", lead, parts)


def _gains(tried: list[Outcome]) -> Iterator[Table]:
    note = "change: of the step time, from the unchanged program, paired by round."
    return filled(
        Table("tried", "Gains", notes=[note], is_sortable=False, top=None),
        tried,
        Field("remedy", "code", lambda found: found.remedy),
        Field("change", "text", _change),
        Field("95% interval", "text", _interval),
        Field("promised", "text", lambda found: promise_words(found.promised)),
        Field("rounds", "count", lambda found: found.rounds, priority=1),
        Field("step time", "ns", lambda found: found.step_ns, priority=1),
        Field("peak", "bytes", lambda found: found.peak_bytes, priority=1),
        Field("peak change", "text", _peak_change),
        Field("training", "text", _training),
    )


def _change(found: Outcome) -> Cell:
    return Cell(None if found.time is None else signed(found.time.change), style="good" if found.is_faster else "")


def _interval(found: Outcome) -> str | None:
    return None if found.time is None else f"{signed(found.time.low)} to {signed(found.time.high)}"


def _peak_change(found: Outcome) -> Cell:
    return Cell(None if found.peak is None else signed(found.peak), style="good" if found.saves_memory else "")


def _training(found: Outcome) -> Cell:
    more = "" if found.needed is None else f"; not decided: about {found.needed} rounds would"
    return Cell(f"{equality_words(found)}{more}", style="" if found.is_kept else "bad")
