"""Host time in the steps of a run: callbacks, hooks, logging, validation, checkpoints, GC pauses, stalls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from lightning_memprof.account.ledger.model import TimeLedger
from lightning_memprof.account.ledger.modules import operator_family
from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.pauses import pauses
from lightning_memprof.account.steps.statistics import typical_steps
from lightning_memprof.artifacts.series import GC_PAUSE
from lightning_memprof.judge.actions import work_of_action, work_of_checkpoint, work_of_transfer
from lightning_memprof.judge.cores import (
    CoreLoad,
    core_load,
    free_cores,
    is_oversubscribed,
    ranks_on_host,
    torch_threads,
)
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.loading import loaders_of, one_by_one, slow_function
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    BREAK_CYCLES,
    CATCH_STEP,
    CHOOSE_COLLECTIONS,
    CODE_AROUND_BATCHES,
    COMPARE_STEPS,
    DYNAMIC_SHAPES,
    FASTER_FETCH,
    FEW_SHAPES,
    FEWER_THREADS,
    FEWER_WORKERS,
    FIND_COLLECT,
    FREE_CORES,
    FREEZE_OBJECTS,
    IN_WORKERS,
    LESS_OFTEN,
    LOG_AT_ONCE,
    LOG_CHEAPLY,
    LOG_LESS_OFTEN,
    LOG_RECOMPILES,
    METRIC_OF_SUMS,
    METRIC_PER_EPOCH,
    NO_BENCHMARK,
    RAISE_CPU_LIMIT,
    RECORD_STEP,
    REMOVE_HOOK,
    SAVE_ASYNC,
    SAVE_LESS,
    SAVE_LESS_OFTEN,
    SELF_LOG_LESS_OFTEN,
    SKIP_HOOK,
    VALIDATE_LESS_OFTEN,
    VALIDATE_ON_LESS,
    VALIDATE_PER_EPOCH,
    Remedy,
)
from lightning_memprof.judge.rhythm import few_steps
from lightning_memprof.judge.rule import PASSES, Detail, Fact, Found, Rule
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_bytes, format_count, format_ns, percent


def often_validated(_: Facts, fact: Fact) -> Detail:
    """Return the remedy of a validation that runs more than once per epoch."""
    epochs = {row["epoch"] for row in fact.rank.pulse if row["epoch"] is not None}
    is_often = fact.count * fact.ledger.steps > len(epochs) + 0.5
    return Detail(remedies=(VALIDATE_PER_EPOCH,) if is_often else ())


# Other programs keep their cores.
BY_OTHERS: Final = (0.0, 1 / 3)


def core_users(facts: Facts, fact: Fact) -> Detail:
    """Return who uses the cores of the machine, and what to do: fewer threads first, where they have no cores.

    Of a wait that other programs cause, fewer threads recover a third at most: these programs keep their cores. Below
    half of the step it is a note.
    """
    rank, load = fact.rank, core_load(facts, fact.rank)
    owner, remedies, by_others = _core_users(facts, rank, load) if load is not None else ("", (), False)
    used = (
        f"In recorded steps the training used {load.own:.1f} of {load.all_cores} cores, other processes "
        f"{load.others:.1f}."
        if load is not None
        else ""
    )
    return Detail(
        says=f"{owner}: the training thread waits {{share}} for a core{{rank}}." if owner else "",
        measured=f"The thread is ready to run but has no core for {format_ns(fact.ns)} of {fact.ledger.length_text}",
        why=used,
        remedies=remedies,
        saves=BY_OTHERS if by_others and fact.share >= POLICY.bound else None,
        is_note=by_others and fact.share < POLICY.bound,
        evidence=facts.recorded(rank, "system"),
        numbers={
            "cores": rank.facts.cpu_count,
            "cores_of_others": load and load.others,
        },
    )


def _core_users(facts: Facts, rank: Rank, load: CoreLoad) -> tuple[str, tuple[Remedy, ...], bool]:
    """Return the start of a title, remedies, and whether the training itself cannot change the wait."""
    cores, quota = rank.facts.cpu_count or 1, rank.facts.environment.get("cpu_quota")
    if load.own + load.others < POLICY.full * load.all_cores:
        if quota is not None and quota < load.all_cores and load.own >= quota / 2:
            limit = RAISE_CPU_LIMIT.filled(quota=f"{quota:g}", cores=load.all_cores)
            return f"The CPU limit is {quota:g} of {load.all_cores} cores", (limit,), False
        if cores == load.all_cores:
            # They had the cores in other steps than the recorded ones.
            return "", (), True
    ranks = len(ranks_on_host(facts, rank))
    each = max(cores // ranks, 1)
    count = max((loader.num_workers or 0 for loader in loaders_of(rank)), default=0)
    is_loading = load.workers >= load.process
    # Many workers that compute share the cores among themselves, whatever else runs.
    if load.others >= load.workers * ranks and not (is_loading and count >= POLICY.many_per_core * each):
        left = int(free_cores(facts, rank) or 1)
        fewer = (FEWER_THREADS.filled(threads=left),) if (torch_threads(rank) or 0) > left else ()
        return "Other processes take the cores", fewer, True
    if is_loading and (slow := slow_function(rank)) is not None:
        cheaper = FASTER_FETCH.filled(owner=f"{slow.function} ({percent(slow.share)} of the fetches)")
        return f"Workers in {slow.function} take the cores", (cheaper,), False
    if is_loading and count >= each > 1:
        fewer_workers = FEWER_WORKERS.filled(wanted=each - 1, cores=format_count(cores, "core"))
        return f"{count} DataLoader workers take the cores", (fewer_workers,), False
    threads = FEWER_THREADS.filled(threads=max(each - count, 1))
    return "The training's own processes share the cores", (threads,), False


def _may_convolve(ledger: TimeLedger) -> bool:
    """Return whether the passes have a convolution, or their operators are not known."""
    operators = {line.operator for line in ledger.of(*PASSES) if line.operator}
    return not operators or any(operator_family(operator) == "convolution" for operator in operators)


def stalls(facts: Facts) -> Iterator[Found]:
    """Yield the excess of the few steps that take a multiple of the others, where their times are apart from these.

    Another program on the machine makes such steps too, but none with a period.
    """
    if (worst := facts.heaviest(lambda ledger: ledger.ns(Part.STALL))) is None or not worst[1].stalls:
        return
    rank, ledger = worst
    longest, typical = ledger.stalls[0], typical_steps(rank)
    slow = {stall.step for stall in ledger.stalls}
    durations = [(step, spent) for step, spent, _ in typical.steps] if typical else []
    few = few_steps(rank, [(step, spent if step in slow else 0) for step, spent in durations], stands_out=0)
    usual = sorted(spent for step, spent in durations if step not in slow)
    if few is None or not usual or longest.excess_ns < POLICY.stall_ns:
        return
    if min(stall.duration_ns for stall in ledger.stalls) < POLICY.apart * usual[round(0.9 * (len(usual) - 1))]:
        return
    fact = Fact(source=rank, ledger=ledger, lines=ledger.of(Part.STALL))
    is_regular = few.repeats and len(few.steps) >= POLICY.rhythm
    in_passes = longest.owner in PASSES and not rank.facts.is_cpu and _may_convolve(ledger)
    tries = in_passes and rank.training is not None and bool(rank.training.cudnn_benchmark)
    cause = "" if is_regular else "They have no period: a busy machine may be the cause."
    cause = "cuDNN tries its algorithms for each new shape of the batches (benchmark=True)." if tries else cause
    yield (
        fact,
        Detail(
            fields={
                "few": f"{few.subject} {few.verb}",
                "factor": f"{few.mean_ns / max(ledger.median_ns, 1):.1f}",
                "part": longest.owner.label,
            },
            measured=(
                f"The mean of these steps is {format_ns(few.mean_ns)}, the median of all {few.seen} steps "
                f"{format_ns(ledger.median_ns)}; the excess without waits for a core is {fact.share_text}"
            ),
            why=cause,
            remedies=(
                *((NO_BENCHMARK,) if tries else ()),
                COMPARE_STEPS,
                RECORD_STEP.filled(step=few.steps[0]) if is_regular else CATCH_STEP,
            ),
            is_note=not is_regular,
            evidence=(facts.pulse(rank, few.steps), *facts.recorded(rank, "hooks", few.steps)),
            numbers={
                "steps": list(few.steps),
                "period": few.period,
                "median_ns": round(ledger.median_ns),
                "cause": longest.owner,
            },
        ),
    )


OLDEST: Final = 2


def pauses_detail(facts: Facts, fact: Fact) -> Detail:
    """Return the generations, what they freed, and whether the program collects itself."""
    rank, found = fact.rank, pauses(fact.rank)
    how, fetch_at_once = one_by_one(rank, fact.ledger) if _in_fetch(rank) else ("", ())
    full, full_ns = found.generations.get(OLDEST, (0, 0)) if found else (0, 0)
    recorded = sum(len(window.steps) for window in rank.windows)
    words = [f"{format_count(full, 'full collection')} in recorded steps took {format_ns(full_ns)}"] if full else []
    words += [f"mostly in fetches, {how}"] if how else []
    words += (
        [f"reference cycles held {format_bytes(found.tensor_bytes)} of tensors"] if found and found.tensor_bytes else []
    )
    # Python itself starts a full collection in one step of many.
    explicit = (FIND_COLLECT,) if recorded and full >= POLICY.each * recorded else ()
    cycles = (BREAK_CYCLES,) if found and found.tensor_bytes else ()
    text = "; ".join(words)
    return Detail(
        why=f"{text[0].upper()}{text[1:]}." if text else "",
        remedies=(*fetch_at_once, *explicit, *cycles),
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
def work_of_logging(facts: Facts, fact: Fact) -> Detail:
    """Return what logging does: calls of self.log cost time in each step, a logger in those that it writes."""
    found = work_of_action(facts, fact)
    writes = (LOG_LESS_OFTEN, LOG_CHEAPLY.filled(owner=fact.owner or "the logger"))
    usual = (SELF_LOG_LESS_OFTEN, LOG_AT_ONCE) if fact.lines[0].part == Part.SELF_LOG else writes
    return replace(found, remedies=(*found.remedies, *usual))


ROWS: Final = (
    Rule(
        id="callback_bound",
        about=(
            "Hooks of a callback run between batches, on the thread that launches work; an accelerator with an empty "
            "queue waits. MemProfilerCallback does not count."
        ),
        trade_off="The callback runs less often.",
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
        trade_off="The hook runs less often.",
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
            "it copies nothing, but visits each object of a batch."
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
        trade_off="Code for all shapes is slightly slower than code for one shape.",
        of=(Part.COMPILE,),
        says="torch.compile recompiles: compiling takes {share}{rank}.",
        remedies=(DYNAMIC_SHAPES, FEW_SHAPES, LOG_RECOMPILES),
        saves=(0.7, 1.0),
        repeats=True,
    ),
    Rule(
        id="registered_hook_bound",
        about=(
            "A hook that the program registered on modules or parameters runs in each forward or backward of "
            "these modules. The finding has its file and line. Needs an operator trace."
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
            "update and compute of torchmetrics take much of the step. Curves, such as the area under the ROC "
            "curve, sort all predictions since the last reset and become slower with every step."
        ),
        trade_off="Metric values are not available in every step.",
        of=(Part.METRIC,),
        says="Metrics take {share}{rank}, mostly {owner}.",
        unnamed="Metrics take {share}{rank}.",
        remedies=(METRIC_PER_EPOCH, METRIC_OF_SUMS),
        saves=(0.5, 1.0),
        detail=work_of_action,
    ),
    Rule(
        id="validation_bound",
        about="Validation inside fit takes much of the time; training stops meanwhile.",
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
        about=(
            "Training waits until a checkpoint is written; with several ranks, all ranks wait for the one that writes."
        ),
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
            "The logger's log_metrics and save, or calls of self.log, take much of the step. Reading a logged value "
            "from the device waits for all work before it; a logger that uploads, draws or rewrites its file takes "
            "more."
        ),
        trade_off="Steps that are not logged have no values.",
        of=(Part.LOGGING, Part.SELF_LOG),
        says="Logging takes {share}{rank}, mostly {owner}.",
        unnamed="Logging takes {share}{rank}.",
        saves=(0.5, 1.0),
        detail=work_of_logging,
    ),
    Rule(
        id="between_steps",
        about=(
            "Much of the time is outside all tracked phases, callbacks, hooks and loggers: code of the program "
            "around the batches, or Lightning's loop, which takes 1 to 4 ms per step."
        ),
        trade_off="None.",
        of=(Part.UNTRACKED,),
        says="{share} is outside the tracked phases{rank}.",
        remedies=(CODE_AROUND_BATCHES, SELF_LOG_LESS_OFTEN),
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
    Rule(
        id="core_wait",
        about=(
            "The training thread is ready to run, but another thread has the core: another process of the "
            "machine, a DataLoader worker or rank of the training, or the CPU limit of the container is reached. "
            "Threads that wait for a timer, a file, a lock or a worker process are not ready to run and do not "
            "count. Linux only."
        ),
        when=(
            "Not reported if operators use at least twice as many threads as there are cores. If other programs "
            "cause the wait, fewer threads recover at most a third of it, and below half of the step the finding "
            "is `info`."
        ),
        trade_off="None; with fewer threads, less parallelism when the cores are free again.",
        of=(Part.CORE_WAIT,),
        says="The training thread waits {share} for a core{rank}.",
        remedies=(FREE_CORES,),
        saves=(0.5, 1.0),
        # Other programs of a machine that does nothing else take some.
        note=POLICY.verdict,
        applies=lambda facts, fact: not is_oversubscribed(facts, fact.rank),
        detail=core_users,
    ),
    Rule(
        id="slow_steps",
        about=(
            "A few steps take a multiple of the others: they raise the mean step, and with several ranks all "
            "ranks wait for the slow one. Callbacks, validation, checkpoints and data have separate findings."
        ),
        when=(
            f"At most a third of the steps take at least twice the median and {POLICY.apart:g} times the p90 of "
            f"the others, the longest {POLICY.stall_ns / 1e6:g} ms more than usual. `info` unless at least "
            f"{POLICY.rhythm} of them follow a pattern: a busy machine delays single steps of any run."
        ),
        trade_off="None.",
        of=(Part.STALL,),
        find=stalls,
        says="{few} {factor} times as long as the median{rank}, mostly in {part}.",
        saves=(0.0, 1.0),
        # Some steps of every run take longer.
        note=POLICY.verdict,
    ),
)
