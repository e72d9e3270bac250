"""Host time in the steps of a run: callbacks, hooks, logging, validation, checkpoints, GC pauses, stalls."""

from __future__ import annotations

from collections import Counter
from typing import Final

from lightning_memprof.account.ledger.model import TimeLedger
from lightning_memprof.account.ledger.modules import operator_family
from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.pauses import pauses
from lightning_memprof.account.steps.statistics import typical_steps
from lightning_memprof.artifacts.series import GC_PAUSE
from lightning_memprof.judge.actions import work_of_action, work_of_checkpoint, work_of_transfer
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Finding, Recovery, Severity, titled
from lightning_memprof.judge.measures import core_use, few_steps, is_oversubscribed, one_by_one
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    BREAK_CYCLES,
    CATCH_STEP,
    CHOOSE_COLLECTIONS,
    CODE_AROUND_BATCHES,
    COMPARE_STEPS,
    DYNAMIC_SHAPES,
    FEW_SHAPES,
    FIND_COLLECT,
    FREEZE_OBJECTS,
    IN_WORKERS,
    LESS_OFTEN,
    LOG_AT_ONCE,
    LOG_CHEAPLY,
    LOG_FEWER,
    LOG_LESS_OFTEN,
    LOG_RECOMPILES,
    METRIC_OF_SUMS,
    METRIC_PER_EPOCH,
    NO_BENCHMARK,
    RECORD_STEP,
    REMOVE_HOOK,
    SAVE_ASYNC,
    SAVE_LESS,
    SAVE_LESS_OFTEN,
    SKIP_HOOK,
    VALIDATE_LESS_OFTEN,
    VALIDATE_ON_LESS,
    VALIDATE_PER_EPOCH,
)
from lightning_memprof.judge.rule import Detail, Fact, Rule, least_ns
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_bytes, format_count, format_ns, percent


def often_validated(_: Facts, fact: Fact) -> Detail:
    """Return the remedy of a validation that runs more than once per epoch."""
    epochs = {row["epoch"] for row in fact.rank.pulse if row["epoch"] is not None}
    is_often = fact.count * fact.ledger.steps > len(epochs) + 0.5
    return Detail(remedies=(VALIDATE_PER_EPOCH,) if is_often else ())


def core_wait(facts: Facts) -> Finding | None:
    """Find a training thread that is ready to run but waits for a core, and the processes that use the cores.

    Recovers half to all of this time. If other programs take the cores, no change of the training helps: then it is a
    note below half of the step, and a warning at most.
    """
    worst = facts.heaviest(lambda ledger: ledger.ns("core_wait"))
    if worst is None or is_oversubscribed(facts, worst[0]):
        return None
    rank, ledger = worst
    if least_ns(Fact(source=rank, ledger=ledger, lines=ledger.of("core_wait"))) > ledger.ns("core_wait"):
        return None
    ns = ledger.ns("core_wait")
    worth = Recovery(unit="ns", min=ns / 2, max=ns, whole=ledger.step_ns)
    waits = f"the training thread waits {percent(ns / ledger.step_ns)} of each step for a core{facts.on_rank(rank)}"
    use = core_use(facts, rank)
    most = Severity.WARNING if ns >= POLICY.bound * ledger.step_ns else Severity.INFO
    return Finding(
        rule="core_wait",
        severity=min(worth.severity, most) if use.by_others else worth.severity,
        title=titled("{owner}: {waits}.", owner=use.owner, waits=waits)
        if use.owner
        else f"{waits[0].upper()}{waits[1:]}.",
        why=f"It is ready but has no core for {format_ns(ns)} of {ledger.length_text}.{use.text}",
        remedies=use.remedies,
        evidence=(facts.pulse(rank), *facts.recorded(rank, "system")),
        numbers={
            "rank": rank.rank,
            "core_wait_ns": round(ns),
            "duration_ns": round(ledger.step_ns),
            "cores": rank.facts.cpu_count,
            "cores_of_training": use.load and use.load.own,
            "cores_of_others": use.load and use.load.others,
        },
        # The last one of the warnings: changes of the training itself come first.
        weight=0.0 if use.by_others else worth.share,
        recovers=worth,
    )


# A busy machine delays a step by less.
MIN_STALL_NS: Final = 50_000_000
# Batches of different lengths make a spread without a gap: the fastest slow step must take this many times the 90th
# percentile of the others.
APART: Final = 1.5
USUAL_PART: Final = 0.9
# Three delayed steps are equidistant by chance in one run of twenty, four hardly ever.
MIN_RHYTHM: Final = 4


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
    typical = typical_steps(rank)
    slow = {stall.step for stall in ledger.stalls}
    durations = [(step, spent) for step, spent, _ in typical.steps] if typical else []
    few = few_steps(rank, [(step, spent if step in slow else 0) for step, spent in durations], stands_out=0)
    usual = sorted(spent for step, spent in durations if step not in slow)
    if ns <= POLICY.verdict * ledger.step_ns or longest.excess_ns < MIN_STALL_NS or few is None or not usual:
        return None
    if min(stall.duration_ns for stall in ledger.stalls) < APART * usual[round(USUAL_PART * (len(usual) - 1))]:
        return None
    worth = Recovery(unit="ns", min=0, max=ns, whole=ledger.step_ns)
    is_regular = few.repeats and len(few.steps) >= MIN_RHYTHM
    in_passes = longest.owner in {"forward", "backward"} and not rank.facts.is_cpu and _may_convolve(ledger)
    tries = in_passes and rank.training is not None and bool(rank.training.cudnn_benchmark)
    cause = "" if is_regular else "Without a period, a busy machine may be the cause."
    cause = "cuDNN tries its algorithms for each new shape of the batches (benchmark=True)." if tries else cause
    return Finding(
        rule="slow_steps",
        severity=worth.severity if is_regular else Severity.INFO,
        title=titled(
            "{few} {factor} times as long as the median{rank}, mostly in {owner}."
            if longest.owner
            else "{few} {factor} times as long as the median{rank}.",
            few=f"{few.subject} {few.verb}",
            factor=f"{few.mean_ns / max(ledger.median_ns, 1):.1f}",
            rank=facts.on_rank(rank),
            owner=longest.owner,
        ),
        why=(
            f"{len(few.steps)} of {few.seen} steps take {format_ns(few.mean_ns)}, the median step "
            f"{format_ns(ledger.median_ns)}: their excess is {ledger.share_text(ns)}. {cause}"
        ).rstrip(),
        remedies=(
            *((NO_BENCHMARK,) if tries else ()),
            COMPARE_STEPS,
            RECORD_STEP.filled(step=few.steps[0]) if is_regular else CATCH_STEP,
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


def pauses_detail(facts: Facts, fact: Fact) -> Detail:
    """Return the generations, what they freed, and whether the program collects itself."""
    rank, found = fact.rank, pauses(fact.rank)
    how, fetch_at_once = one_by_one(rank, fact.ledger) if _in_fetch(rank) else ("", ())
    full, full_ns = found.generations.get(OLDEST, (0, 0)) if found else (0, 0)
    recorded = sum(len(window.steps) for window in rank.windows)
    words = [f"{format_count(full, 'full collection')} in recorded steps took {format_ns(full_ns)}"] if full else []
    words += [f"mostly in fetches, {how}"] if how else []
    words += [f"cycles held {format_bytes(found.tensor_bytes)} of tensors"] if found and found.tensor_bytes else []
    explicit = (FIND_COLLECT,) if recorded and full >= EXPLICIT_SHARE * recorded else ()
    cycles = (BREAK_CYCLES,) if found and found.tensor_bytes else ()
    text = "; ".join(words)
    return Detail(
        why=f"{text[0].upper()}{text[1:]}." if text else "",
        remedies=(*fetch_at_once, *explicit, *cycles),
        numbers={
            "generations": {str(number): list(of) for number, of in found.generations.items()} if found else {},
            "tensor_bytes": found.tensor_bytes if found else None,
        },
        evidence=facts.recorded(rank, "garbage"),
    )


def _in_fetch(rank: Rank) -> bool:
    """Return whether most of the time of pauses is in fetches, whose objects cause them."""
    spent = Counter[str]()
    for row in rank.actions:
        if row.action == GC_PAUSE and not row.in_window:
            spent[row.phase or ""] += row.total_ns or 0
    return spent["data_wait"] > spent.total() / 2


# What an action does it can do less often, or in the background: half to all of its time. Lost: as many of its runs.
ROWS: Final = (
    Rule(
        id="callback_bound",
        about=(
            "Hooks of a callback run between batches, on the thread that launches work; an accelerator that has "
            "finished its queue waits. This package's own callback is not counted."
        ),
        trade_off="It runs less often.",
        of=(Part.CALLBACK,),
        says="The callback {owner} takes {share}{rank}.",
        unnamed="Callbacks take {share}{rank}; which ones was not recorded.",
        remedies=(LESS_OFTEN,),
        saves=(0.5, 1.0),
        each=True,
        detail=work_of_action,
    ),
    Rule(
        id="hook_bound",
        about=(
            "A hook of the LightningModule (on_train_batch_end, on_before_optimizer_step) or of the data module "
            "(train_dataloader) takes much of the step; lr_scheduler_step is the time of the learning rate schedules."
        ),
        trade_off="It runs less often.",
        of=(Part.MODULE_HOOK,),
        says="The hook {owner} of the module takes {share}{rank}.",
        unnamed="Hooks of the module take {share}{rank}; which ones was not recorded.",
        remedies=(LESS_OFTEN,),
        saves=(0.5, 1.0),
        each=True,
        detail=work_of_action,
    ),
    Rule(
        id="transfer_bound",
        about=(
            "batch_to_device, or one of the hooks on_before_batch_transfer, transfer_batch_to_device and "
            "on_after_batch_transfer, runs on the training thread between loading and forward. Without a device "
            "nothing is copied, but each object of a batch is visited."
        ),
        trade_off="None, or the time in worker processes.",
        of=(Part.TRANSFER,),
        says="{moving} takes {share}{rank}, in {owner}.",
        unnamed="{moving} takes {share}{rank}.",
        remedies=(IN_WORKERS,),
        saves=(0.3, 1.0),
        each=True,
        detail=work_of_transfer,
    ),
    Rule(
        id="recompilation",
        about=(
            "torch.compile compiles again and again during the run. A compilation takes as long as tens or hundreds "
            "of steps; at the limit of recompilations torch runs the code uncompiled."
        ),
        trade_off="Code for all shapes is somewhat slower than code for one.",
        of=(Part.COMPILE,),
        says="torch.compile recompiles: compiling takes {share}{rank}.",
        remedies=(DYNAMIC_SHAPES, FEW_SHAPES, LOG_RECOMPILES),
        saves=(0.7, 1.0),
        repeats=True,
    ),
    Rule(
        id="registered_hook_bound",
        about=(
            "A hook that the program registered on modules or parameters runs in each forward or backward of each of "
            "its modules. It is named with its file and line. Needs an operator trace."
        ),
        trade_off="The hook's results.",
        of=(Part.FORWARD_HOOK, Part.BACKWARD_HOOK),
        says="The {kind} {owner} takes {share}{rank}.",
        unnamed="Hooks that the program registered take {share}{rank}; which ones was not recorded.",
        remedies=(REMOVE_HOOK, SKIP_HOOK),
        saves=(0.8, 1.0),
        each=True,
        detail=work_of_action,
    ),
    Rule(
        id="metric_bound",
        about=(
            "update and compute of torchmetrics take much of the step. Curves such as the area under the ROC curve "
            "sort all predictions since the last reset, which becomes slower with every step."
        ),
        trade_off="No values in every step.",
        of=(Part.METRIC,),
        says="Metrics take {share}{rank}, mostly {owner}.",
        unnamed="Metrics take {share}{rank}.",
        remedies=(METRIC_PER_EPOCH, METRIC_OF_SUMS),
        saves=(0.5, 1.0),
        detail=work_of_action,
    ),
    Rule(
        id="validation_bound",
        about="Validation inside fit takes much of the time; nothing is trained meanwhile.",
        trade_off="Validation metrics are updated less often.",
        of=(Part.VALIDATION,),
        says="Validation takes {share}{rank}.",
        remedies=(VALIDATE_LESS_OFTEN, VALIDATE_ON_LESS),
        saves=(0.5, 0.9),
        # Every training validates.
        note=POLICY.verdict,
        detail=often_validated,
    ),
    Rule(
        id="checkpoint_bound",
        about="Training waits until a checkpoint is written; with several ranks, all wait for the one that writes.",
        trade_off="A failed run loses the steps since its last checkpoint.",
        of=(Part.CHECKPOINT,),
        says="Saving checkpoints takes {share}{rank}.",
        remedies=(SAVE_LESS_OFTEN, SAVE_LESS, SAVE_ASYNC),
        saves=(0.5, 1.0),
        detail=work_of_checkpoint,
    ),
    Rule(
        id="logging_bound",
        about=(
            "The logger's log_metrics and save, or the calls of self.log, take much of the step. Reading a logged "
            "value from the device waits for all work before it, and a logger that sends, draws or rewrites its file "
            "takes time in addition."
        ),
        trade_off="No values for the steps that are not logged.",
        of=(Part.LOGGING, Part.SELF_LOG),
        says="Logging takes {share}{rank}, mostly {owner}.",
        unnamed="Logging takes {share}{rank}.",
        remedies=(LOG_LESS_OFTEN, LOG_AT_ONCE, LOG_CHEAPLY),
        saves=(0.5, 1.0),
        detail=work_of_action,
    ),
    Rule(
        id="between_steps",
        about=(
            "Much of the time is outside all phases, callbacks, hooks and loggers: code of the program around the "
            "batches, or Lightning's loop, which takes 1 to 4 ms."
        ),
        trade_off="None.",
        of=(Part.UNTRACKED,),
        says="{share} is outside the tracked phases{rank}.",
        remedies=(CODE_AROUND_BATCHES, LOG_FEWER),
        saves=(0.0, 1.0),
        # Lightning's loop and a logger stay below this.
        note=0.15,
        # The Trainer's own work between phases takes 1 to 4 ms.
        applies=lambda _, fact: fact.ns > 5_000_000,
    ),
    Rule(
        id="gc_pauses",
        about=(
            "A pause of Python's garbage collector stops the whole process, and its next kernels launch late. With "
            "several ranks, pauses occur at different times, and each rank waits for the pauses of all others."
        ),
        trade_off="Reference cycles are freed later.",
        of=(Part.GC_PAUSES,),
        says="GC pauses take {share}{rank}.",
        remedies=(FREEZE_OBJECTS, CHOOSE_COLLECTIONS),
        # Collections of young generations remain.
        saves=(0.7, 1.0),
        repeats=True,
        detail=pauses_detail,
    ),
)
