"""Host time in the steps of a run: callbacks, hooks, logging, validation, checkpoints, GC pauses, stalls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from lightning_memprof.account.ledger.model import HostPart, TimeLedger, TimeLine, total
from lightning_memprof.account.steps.pauses import Pauses, pauses
from lightning_memprof.artifacts.series import GC_PAUSE
from lightning_memprof.judge.compute import is_oversubscribed
from lightning_memprof.judge.measures import core_use, few_steps, one_by_one
from lightning_memprof.judge.model import (
    NOTABLE,
    SHORT_STEP_NS,
    Facts,
    Finding,
    Recovery,
    Severity,
)
from lightning_memprof.judge.modules import operator_family
from lightning_memprof.judge.program.python import ONCE, work_of
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_bytes, format_count, format_ns, percent

# Below this share of a step there is nothing to gain; an action needs some time, too: the Trainer's own hooks and its
# progress bar take a millisecond per step, which is much of a short one.
LEAST_SHARE: Final = 0.05
# A number of calls explains the time from here on.
OFTEN: Final = 10
MIN_NS: Final = 1_000_000
MIN_SHORT_NS: Final = 2_000_000
# An action that ran less often in the whole run is a start or an end of it: it has to take twice the share.
MIN_CALLS: Final = 2.5
# It misses a step or two of the run: the first one, or one that ends an epoch.
ALWAYS: Final = 0.95
# Of many slow callbacks the first ones show what to do.
MAX_ACTIONS: Final = 3

SAVE_LESS: Final = (
    "Save less often: ModelCheckpoint(every_n_train_steps=1000) or (train_time_interval=timedelta(minutes=30)).",
    "Save less: ModelCheckpoint(save_weights_only=True, save_top_k=1, save_last=False).",
    "Save in the background: Trainer(plugins=[AsyncCheckpointIO()]) from lightning.pytorch.plugins.io.",
)


class _Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """The finding of a part of the ledger.

    Attributes:
        rule: of the finding.
        parts: of the ledger.
        sentence: with the fields ``name``, ``kind`` (the part), ``share`` and ``on_rank``.
        next_steps: with the field ``name``.
        saves: least and most share of the part's time that the first of them recovers.
        by_name: whether each action is a finding of its own.
        repeats: whether only an action that returns in several steps is a fault.
        least: share of the step from which on it is a finding.
    """

    rule: str
    parts: tuple[HostPart, ...]
    sentence: str
    next_steps: tuple[str, ...]
    saves: tuple[float, float]
    by_name: bool = False
    repeats: bool = False
    least: float = LEAST_SHARE


REMEDIES: Final = (
    _Remedy(
        rule="callback_bound",
        parts=("callback",),
        sentence="The callback {name} takes {share}{on_rank}.",
        next_steps=("Do the work of {name} every N batches, in on_train_epoch_end, or in a thread.",),
        saves=(0.5, 1.0),
        by_name=True,
    ),
    _Remedy(
        rule="hook_bound",
        parts=("module_hook",),
        sentence="The hook {name} of the module takes {share}{on_rank}.",
        next_steps=("Do the work of {name} every N batches, in on_train_epoch_end, or in a thread.",),
        saves=(0.5, 1.0),
        by_name=True,
    ),
    _Remedy(
        rule="transfer_bound",
        parts=("transfer",),
        sentence="Moving batches to the device takes {share}{on_rank}, in {name}.",
        next_steps=("Do the work of {name} in worker processes: in collate_fn or the data set.",),
        saves=(0.3, 1.0),
        by_name=True,
    ),
    _Remedy(
        rule="recompilation",
        parts=("compile",),
        sentence="torch.compile recompiles: compiling takes {share}{on_rank}.",
        next_steps=(
            "Compile for all shapes: dynamic=True in torch.compile, or torch._dynamo.mark_dynamic(tensor, dimension).",
            "Let few shapes occur: pad to a multiple of 64, or group samples of similar length.",
            "See what changes: set TORCH_LOGS=recompiles in the environment.",
        ),
        saves=(0.7, 1.0),
        repeats=True,
    ),
    _Remedy(
        rule="registered_hook_bound",
        parts=("forward_hook", "backward_hook"),
        sentence="The {kind} {name} takes {share}{on_rank}.",
        next_steps=(
            "Remove the hook {name}: call remove() of the handle that its registration returned.",
            "Do the work of {name} every N batches: return at once in the others.",
        ),
        saves=(0.8, 1.0),
        by_name=True,
    ),
    _Remedy(
        rule="metric_bound",
        parts=("metric",),
        sentence="Metrics take {share}{on_rank}, mostly {name}.",
        next_steps=(
            "Compute metrics once per epoch: call update() in the steps and {owner}.compute() in on_train_epoch_end.",
            "Choose a metric that keeps sums instead of all predictions, such as thresholds=100 for curves.",
        ),
        saves=(0.5, 1.0),
    ),
    _Remedy(
        rule="validation_bound",
        parts=("validation",),
        sentence="Validation takes {share}{on_rank}.",
        least=0.10,
        next_steps=(
            "Validate once per epoch, Trainer(val_check_interval=1.0), or less often, with check_val_every_n_epoch=5.",
            "Validate on less data: Trainer(limit_val_batches=50).",
        ),
        saves=(0.5, 0.9),
    ),
    _Remedy(
        rule="checkpoint_bound",
        parts=("checkpoint",),
        sentence="Saving checkpoints takes {share}{on_rank}.",
        next_steps=SAVE_LESS,
        saves=(0.5, 1.0),
    ),
    _Remedy(
        rule="logging_bound",
        parts=("logging", "self_log"),
        sentence="Logging takes {share}{on_rank}, mostly {name}.",
        next_steps=(
            "Log less often: Trainer(log_every_n_steps=50), self.log(name, value, on_step=False, on_epoch=True).",
            "Log several values at once, as epoch means: self.log_dict(values, on_step=False, on_epoch=True).",
            "Let {name} append to its file, or write in a thread, and log no images, histograms or gradients.",
        ),
        saves=(0.5, 1.0),
    ),
)


def actions_bound(facts: Facts) -> list[Finding]:
    """Find callbacks, hooks, validation, checkpoints and logging that take much of the steps.

    Recovers half to all of the action's time: it runs less often, or in the background. Lost: as many of its runs.
    """
    found = [
        finding
        for remedy in REMEDIES
        if (worst := facts.heaviest(lambda ledger, parts=remedy.parts: ledger.ns(*parts))) is not None  # type: ignore[misc]
        for finding in _of_actions(facts, *worst, remedy)
    ]
    return sorted(found, key=lambda finding: -finding.weight)


def _of_actions(facts: Facts, rank: Rank, ledger: TimeLedger, remedy: _Remedy) -> list[Finding]:
    lines = ledger.of(*remedy.parts)
    names = list(dict.fromkeys(line.name for line in lines))
    groups = [[line for line in lines if line.name == name] for name in names] if remedy.by_name else [[*lines]]
    return [
        _of_action(facts, rank, ledger, remedy, group)
        for group in groups[:MAX_ACTIONS]
        if _matters(ledger, group, remedy.least * (1 + _is_once(ledger, group)))
        and (not remedy.repeats or _repeats(ledger, group))
    ]


def _matters(ledger: TimeLedger, lines: Sequence[TimeLine], least_share: float = LEAST_SHARE) -> bool:
    ns = total(lines)
    is_hook = all(line.part == "module_hook" for line in lines)
    least = MIN_SHORT_NS if ledger.step_ns < SHORT_STEP_NS and not is_hook else MIN_NS
    return ns >= max(least, least_share * ledger.step_ns)


# Python collects everything once in a while, and programs at the end of epochs; a model is compiled for a few shapes:
# all calls together must be this many times the longest step's.
MIN_REPEATED: Final = 4


def _repeats(ledger: TimeLedger, lines: Sequence[TimeLine]) -> bool:
    longest = max((line.longest_ns or 0 for line in lines), default=0)
    return total(lines) * ledger.steps >= MIN_REPEATED * longest


def _count(lines: Sequence[TimeLine]) -> float:
    return sum(line.count for line in lines if line.name == lines[0].name and not line.operator)


def _is_once(ledger: TimeLedger, lines: Sequence[TimeLine]) -> bool:
    return 0 < _count(lines) * ledger.steps < MIN_CALLS


def _of_action(facts: Facts, rank: Rank, ledger: TimeLedger, remedy: _Remedy, lines: Sequence[TimeLine]) -> Finding:
    ns, first, count = total(lines), lines[0].name, _count(lines)
    kind = lines[0].part.replace("_", " ")
    name = first or f"these {kind}s"
    sentence = remedy.sentence if first else remedy.sentence.replace(", mostly {name}", "")
    if remedy.by_name and not first:
        sentence = f"{kind.capitalize()}s take {{share}}{{on_rank}}; which ones was not recorded."
    does, first_steps = work_of(facts, rank, replace(lines[0], count=count))
    often = f", {count:,.0f} times per step" if count >= OFTEN and not does else ""
    if often and "mostly {name}" in sentence:
        sentence, often = sentence.replace("mostly {name}", f"mostly {count:,.0f} calls of {{name}} per step"), ""
    least, most = (0.9, 1.0) if first.rpartition(".")[2] in ONCE else remedy.saves
    worth = Recovery(unit="ns", min=ns * least, max=ns * most, whole=ledger.step_ns)
    steps = (*first_steps, *(step.format(name=name, owner=name.rpartition(".")[0]) for step in remedy.next_steps))
    return Finding(
        rule=remedy.rule,
        severity=Severity.INFO if _is_once(ledger, lines) else worth.severity,
        sentence=sentence.removesuffix(".").format(
            name=name,
            kind=kind,
            share=ledger.share_text(ns),
            on_rank=facts.on_rank(rank),
        )
        # The source of a line may have braces.
        + f"{often}{does}.",
        why=_why(ledger, lines, ns, count),
        next_steps=steps,
        evidence=(facts.pulse(rank), *facts.recorded(rank, "hooks")),
        numbers={
            "rank": rank.rank,
            "action": lines[0].name or None,
            "ns": round(ns),
            "share": ns / ledger.step_ns,
            "count_per_step": count,
            "longest_ns": max((line.longest_ns or 0 for line in lines), default=None),
            "duration_ns": round(ledger.step_ns),
        },
        weight=worth.share,
        recovers=worth,
    )


def _why(ledger: TimeLedger, lines: Sequence[TimeLine], ns: float, count: float) -> str:
    why = f"{format_ns(ns)} of {ledger.length_text}"
    if not count:
        return f"{why}."
    if count * ledger.steps < 1.5:
        return f"{why}: it runs once, for {format_ns(ns / count)}."
    often = f"{count:,.3g} times per step" if count >= 1.05 else "in each step"
    if count < ALWAYS:
        often = f"every {1 / count:,.0f} steps, for {format_ns(ns / count)}"
    # Lines with operators are of recorded steps.
    longest = max((line.longest_ns or 0 for line in lines if line.operator is None), default=0)
    return f"{why}: it runs {often}{f', up to {format_ns(longest)} in a step' if longest else ''}."


# Lightning's loop and a logger stay below this in steps that are not short.
NOTABLE_BETWEEN: Final = 0.15
# The Trainer's own work between phases takes 1 to 4 ms per step and cannot be avoided.
MIN_BETWEEN_NS: Final = 5_000_000


def between_steps(facts: Facts) -> Finding | None:
    """Find time outside all phases and actions: code of the program around the batches.

    Recovers at most this time, less what the Trainer itself takes (5 ms); how much is not known.
    """
    if (worst := facts.heaviest(lambda ledger: ledger.ns("untracked"))) is None:
        return None
    rank, ledger = worst
    ns = ledger.ns("untracked")
    if ns <= max(NOTABLE_BETWEEN * ledger.step_ns, MIN_BETWEEN_NS):
        return None
    worth = Recovery(unit="ns", min=0, max=ns - MIN_BETWEEN_NS, whole=ledger.step_ns)
    return Finding(
        rule="between_steps",
        sentence=(f"{ledger.share_text(ns)} is outside the tracked phases{facts.on_rank(rank)}."),
        why=(
            f"{format_ns(ns)} of {ledger.length_text} are untracked: no hook, callback or logger of "
            "the Trainer runs then, but code of the program or of Lightning's loop."
        ),
        next_steps=(
            "Look at the code around the batches: a loop of your own, metrics, self.log with many values.",
            "Log fewer values per step: self.log(name, value, on_step=False).",
        ),
        evidence=(facts.pulse(rank), *facts.recorded(rank, "hooks")),
        numbers={"rank": rank.rank, "untracked_ns": round(ns), "duration_ns": round(ledger.step_ns)},
        **worth.parts,
    )


# Where a step mostly waits, nothing else is worth as much.
MOST_OF_STEP: Final = 0.5


def core_wait(facts: Facts) -> Finding | None:
    """Find a training thread that is ready to run but waits for a core, and the processes that use the cores.

    Recovers half to all of this time. Nobody can change what other programs take in the training itself: their share is
    a note below half of the step, and a warning at most.
    """
    worst = facts.heaviest(lambda ledger: ledger.ns("core_wait"))
    if worst is None or not _matters(worst[1], worst[1].of("core_wait")) or is_oversubscribed(facts, worst[0]):
        return None
    rank, ledger = worst
    ns = ledger.ns("core_wait")
    worth = Recovery(unit="ns", min=ns / 2, max=ns, whole=ledger.step_ns)
    if worth.share < NOTABLE:
        return None
    waits = f"the training thread waits {percent(ns / ledger.step_ns)} of each step for a core{facts.on_rank(rank)}"
    use = core_use(facts, rank)
    most = Severity.WARNING if ns >= MOST_OF_STEP * ledger.step_ns else Severity.INFO
    return Finding(
        rule="core_wait",
        severity=min(worth.severity, most) if use.by_others else worth.severity,
        sentence=f"{use.owner}: {waits}." if use.owner else f"{waits[0].upper()}{waits[1:]}.",
        why=(f"It is ready but has no core for {format_ns(ns)} of a {format_ns(ledger.step_ns)} step.{use.text}"),
        next_steps=use.next_steps,
        evidence=(facts.pulse(rank), *facts.recorded(rank, "system")),
        numbers={
            "rank": rank.rank,
            "core_wait_ns": round(ns),
            "duration_ns": round(ledger.step_ns),
            "cores": rank.facts.cpu_count,
            "cores_of_training": use.own,
            "cores_of_others": use.others,
        },
        weight=worth.share,
        recovers=worth,
    )


# A busy machine delays a step by less.
MIN_STALL_NS: Final = 50_000_000
NOTABLE_STALLS: Final = 0.10
# Batches of different lengths make a spread without a gap: the fastest slow step must take this many times the 90th
# percentile of the others.
APART: Final = 1.5
USUAL_PART: Final = 0.9
# Three delayed steps are equidistant by chance in one run of twenty, four hardly ever.
MIN_RHYTHM: Final = 4
CATCH: Final = "MemProfilerCallback(triggers=Triggers(anomalies=[SlowStep()]))"


BENCHMARK: Final = "Leave cuDNN's benchmark off, Trainer(benchmark=False), or pad batches to a few shapes."


def _may_convolve(ledger: TimeLedger) -> bool:
    """Return whether the passes have a convolution, or their operators are not known."""
    operators = {line.operator for line in ledger.of("forward", "backward") if line.operator}
    return not operators or any(operator_family(operator) == "convolution" for operator in operators)


def slow_steps(facts: Facts) -> Finding | None:
    """Find the few steps that take a multiple of the others for the same work.

    Recovers at most their excess. Another program on the machine makes such steps too, but none with a period.
    """
    if (worst := facts.heaviest(lambda ledger: ledger.ns("stall"))) is None or not worst[1].stalls:
        return None
    rank, ledger = worst
    ns, longest = ledger.ns("stall"), ledger.stalls[0]
    typical = rank.typical_steps
    slow = {stall.step for stall in ledger.stalls}
    durations = [(step, spent) for step, spent, _ in typical.steps] if typical else []
    few = few_steps(rank, [(step, spent if step in slow else 0) for step, spent in durations], stands_out=0)
    usual = sorted(spent for step, spent in durations if step not in slow)
    if ns <= NOTABLE_STALLS * ledger.step_ns or longest.excess_ns < MIN_STALL_NS or few is None or not usual:
        return None
    if min(stall.duration_ns for stall in ledger.stalls) < APART * usual[round(USUAL_PART * (len(usual) - 1))]:
        return None
    worth = Recovery(unit="ns", min=0, max=ns, whole=ledger.step_ns)
    is_regular = few.repeats and len(few.steps) >= MIN_RHYTHM
    mostly = f", mostly in {longest.owner}" if longest.owner else ""
    factor = few.mean_ns / max(ledger.median_ns, 1)
    record = f"MemProfilerCallback(schedule=Schedule(steps=({few.steps[0]},), active=1))"
    in_passes = longest.owner in {"forward", "backward"} and not rank.facts.is_cpu and _may_convolve(ledger)
    tries = in_passes and rank.training is not None and bool(rank.training.cudnn_benchmark)
    return Finding(
        rule="slow_steps",
        severity=worth.severity if is_regular else Severity.INFO,
        sentence=(
            f"{few.subject} {few.verb} {factor:.1f} times as long as the median{facts.on_rank(rank)}{mostly}"
            + (", with cuDNN's benchmark on." if tries else ".")
        ),
        why=(
            f"{len(few.steps)} of {few.seen} steps take {format_ns(few.mean_ns)}, the median step "
            f"{format_ns(ledger.median_ns)}: their excess is {ledger.share_text(ns)}."
            + (" cuDNN tries its algorithms for each new shape of the batches (benchmark=True)." if tries else "")
            + ("" if is_regular else " Without a period, a busy machine may be the cause.")
        ),
        next_steps=(
            *((BENCHMARK,) if tries else ()),
            "Compare the batches of these steps with the others: longer samples, shapes that recompile.",
            f"Record such a step: {record}." if is_regular else f"Let the next slow step open a window: {CATCH}.",
        ),
        evidence=(facts.pulse(rank, few.steps), *facts.recorded(rank, "hooks", few.steps)),
        numbers={
            "rank": rank.rank,
            "steps": list(few.steps),
            "period": few.period,
            "stall_ns": round(ns),
            "slow_ns": few.mean_ns,
            "median_ns": round(ledger.median_ns),
            "cause": longest.owner,
        },
        weight=worth.share,
        recovers=worth,
    )


# In this share of the steps the program calls gc.collect(): Python starts a full collection in one step of many.
EXPLICIT_SHARE: Final = 0.8
OLDEST: Final = 2
EXPLICIT: Final = "Find the gc.collect() call in the program or a callback: it runs a full collection every step."
FREEZE: Final = "Exempt permanent objects from collections: gc.collect(); gc.freeze() in on_train_start."
CHOOSE: Final = "Choose when to collect: gc.disable() in on_train_start, gc.collect() every 100 batches."
CYCLES: Final = "Break the cycles that hold tensors: store no tensor on an object that refers to itself or its owner."
# Collections of young generations remain.
COLLECTED: Final = (0.7, 1.0)


def gc_pauses(facts: Facts) -> Finding | None:
    """Find GC pauses that take much of the steps.

    Recovers 70% to all of them. Lost: memory of reference cycles is freed later.
    """
    if (worst := facts.heaviest(lambda ledger: ledger.ns("gc_pauses"))) is None:
        return None
    rank, ledger = worst
    lines = ledger.of("gc_pauses")
    if not _matters(ledger, lines) or not _repeats(ledger, lines):
        return None
    ns, count = total(lines), sum(line.count for line in lines)
    found, (how, fetch_at_once) = pauses(rank), one_by_one(rank, ledger) if _in_fetch(rank) else ("", ())
    where = f", mostly in fetches{how}" if how else ""
    worth = Recovery(unit="ns", min=ns * COLLECTED[0], max=ns * COLLECTED[1], whole=ledger.step_ns)
    return Finding(
        rule="gc_pauses",
        sentence=f"GC pauses take {ledger.share_text(ns)}{facts.on_rank(rank)}{where}.",
        why=_why_pauses(ledger, ns, count, found),
        next_steps=(*fetch_at_once, *_next_for_pauses(rank, found)),
        evidence=(facts.pulse(rank), *facts.recorded(rank, "garbage")),
        numbers={
            "rank": rank.rank,
            "gc_pauses_ns": round(ns),
            "gc_pauses_share": ns / ledger.step_ns,
            "count_per_step": count,
            "generations": {str(number): list(of) for number, of in found.generations.items()} if found else {},
            "tensor_bytes": found.tensor_bytes if found else None,
        },
        **worth.parts,
    )


def _in_fetch(rank: Rank) -> bool:
    """Return whether most of the time of pauses is in fetches, whose objects cause them."""
    spent = Counter[str]()
    for row in rank.actions:
        if row.action == GC_PAUSE and not row.in_window:
            spent[row.phase or ""] += row.total_ns or 0
    return spent["data_wait"] > spent.total() / 2


def _why_pauses(ledger: TimeLedger, ns: float, count: float, found: Pauses | None) -> str:
    parts = [f"{format_ns(ns)} of {ledger.length_text}; {count:,.3g} collections per step"]
    if found is not None and OLDEST in found.generations:
        full, full_ns = found.generations[OLDEST]
        parts.append(f"recorded: {format_count(full, 'full collection')}, {format_ns(full_ns)}")
    if found is not None and found.tensor_bytes:
        parts.append(f"reference cycles held {format_bytes(found.tensor_bytes)} of tensors")
    return "; ".join(parts) + "."


def _next_for_pauses(rank: Rank, found: Pauses | None) -> tuple[str, ...]:
    full, _ = found.generations.get(OLDEST, (0, 0)) if found else (0, 0)
    recorded = sum(len(window.steps) for window in rank.windows)
    explicit = (EXPLICIT,) if recorded and full >= EXPLICIT_SHARE * recorded else ()
    return (*explicit, FREEZE, CHOOSE, *((CYCLES,) if found and found.tensor_bytes else ()))
