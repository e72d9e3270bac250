"""What a trial decides between its runs."""

from __future__ import annotations

from lightning_memprof.analysis.compare.significance import PairedChange
from lightning_memprof.analysis.trial import Equality, Outcome
from lightning_memprof.trial.remedies import parse_remedy
from lightning_memprof.trial.runner import winners


def labels(**changes: float) -> list[str]:
    names = {"fused": "fused_optimizer", "foreach": "foreach_optimizer", "two": "workers=2", "four": "workers=4"}
    remedies = [parse_remedy(names.get(name, name)) for name in changes]
    outcomes = [
        Outcome(
            remedy=remedy.label,
            time=PairedChange(change=change, low=change - 0.05, high=change + 0.05),
            equality=Equality(name="bit-equal"),
        )
        for remedy, change in zip(remedies, changes.values(), strict=True)
    ]
    return [remedy.label for remedy in winners(remedies, outcomes)]


def test_of_remedies_that_replace_each_other_the_best_is_tried_with_the_others():
    assert labels(fused=-0.1, two=-0.2, foreach=-0.3, four=-0.4) == ["workers=4", "foreach_optimizer"]


def test_what_may_be_noise_has_not_won():
    assert labels(gc_freeze=-0.04, two=-0.2) == ["workers=2"]
    assert labels(gc_freeze=0.3) == []
