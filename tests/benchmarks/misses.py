"""Where a missed target's time goes: the profile of the training thread, beside that of the bare fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aims import Aim
from figures import Stretches
from profiles import Spent
from workload import Fit

from measured import table

LINES = 14


@dataclass(frozen=True, order=True)
class Miss:
    """A stretch of a configuration that is too slow; one may miss several targets."""

    workload: str
    name: str
    stretch: str


def of(aims: Iterable[Aim]) -> list[Miss]:
    """Give what a profile can explain, once each."""
    return sorted({Miss(aim.workload, aim.name, aim.stretch) for aim in aims if aim.met is False and aim.stretch})


def steps(stretch: str, stretches: Stretches, count: int) -> range:
    """Give the batches whose turns make up a stretch of a fit of ``count`` steps."""
    return {
        "waiting": stretches.waiting,
        "active": stretches.recording,
        "closing": range(stretches.closing, stretches.closing + 1),
        "after": range(stretches.closing + 2, count - 1),
        "end": range(count - 1, count),
    }[stretch]


def text(miss: Miss, fit: Fit, bare: Fit, count: int) -> str:
    """Give the functions in which a step was longer than a bare one, as Markdown; of the ends, the whole."""
    nothing = Spent(0, 0.0, 0.0)
    more = sorted(
        ((now.own - bare.profile.get(name, nothing).own, name, now) for name, now in fit.profile.items()), reverse=True
    )
    # What rounds to nothing, or is shorter than in the bare fit, explains nothing.
    rows = [
        [f"`{name}`", f"{now.calls / count:.0f}", f"{1000 * own / count:.2f}", f"{1000 * now.whole / count:.2f}"]
        for own, name, now in more[:LINES]
        if 1000 * own / count >= 0.005
    ]
    total = sum(now.own for now in fit.profile.values()) - sum(now.own for now in bare.profile.values())
    headings = ["function", "calls", "ms more than bare, own", "ms, with what it calls"]
    shown = table(headings, rows) if rows else "No function took longer than in the bare fit."
    return (
        f"### `{miss.name}` on {miss.workload}: {miss.stretch}\n\n"
        f"{abs(1000 * total / count):.2f} ms {'less' if total < 0 else 'more'} than bare{' a step' * (count > 1)}.\n\n"
        f"{shown}"
    )


def texts(profiled: Mapping[Miss, tuple[Fit, Fit]], stretches: Stretches, count: int) -> str:
    """Give all as a fragment of the page, below a heading each."""
    if not profiled:
        return "Nothing was missed."
    parts = [
        text(miss, fit, bare, len(steps(miss.stretch, stretches, count))) for miss, (fit, bare) in profiled.items()
    ]  # fmt: skip
    return "\n\n".join(parts)
