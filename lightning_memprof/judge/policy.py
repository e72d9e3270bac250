"""The thresholds of the verdict, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Policy:
    """From which figures on a finding is made, a verdict is given, and a word is used.

    Attributes:
        note: share of the step, or of the peak, below which nothing is reported: less than 1.05 times as fast.
        verdict: share from which on a finding may be the verdict: 1.1 times as fast.
        severe: share from which on it is severe: 1.4 times as fast.
        bound: share of the step from which on it is bound by a part.
        steps: fewer steps are judged by nobody: the first ones start workers and select kernels, and one validation or
            checkpoint is most of a short run.
        short_step_ns: the Trainer itself takes 1 to 4 ms per step; in shorter steps its share hides the model's.
        title: characters of a title.
        action_ns: time per step of an action below which nothing is reported: the Trainer's own hooks and its progress
            bar take a millisecond.
        action_short_ns: the same in short steps.
        calls: an action that runs less often in the whole run starts or ends it.
        repeated: what returns in several steps takes this many times its longest step: Python collects everything, and
            a model is compiled, once in a while.
        always: calls per step from which on an action runs in each step: it may miss the first step, or the last one.
        owners: findings of a rule, one for each owner; of many slow callbacks the first ones show what to do.
    """

    note: float = 0.05
    verdict: float = 0.10
    severe: float = 0.30
    bound: float = 0.50
    steps: int = 10
    short_step_ns: int = 10_000_000
    title: int = 100
    action_ns: int = 1_000_000
    action_short_ns: int = 2_000_000
    calls: float = 2.5
    repeated: int = 4
    always: float = 0.95
    owners: int = 3


POLICY: Final = Policy()
