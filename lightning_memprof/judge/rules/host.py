"""Host time in the steps of a run: callbacks, hooks, logging, validation, checkpoints, GC pauses, stalls."""

from __future__ import annotations

from collections import Counter
from typing import Final

from msgspec.structs import replace

from lightning_memprof.account.parts import Part
from lightning_memprof.account.steps.pauses import pauses
from lightning_memprof.account.steps.statistics import typical_steps
from lightning_memprof.account.steps.workers import Call
from lightning_memprof.artifacts.series import GC_PAUSE
from lightning_memprof.judge import remedies as do
from lightning_memprof.judge.actions import contents_of_checkpoint, work_of_action, work_of_transfer
from lightning_memprof.judge.cores import (
    CoreLoad,
    busiest_thread,
    core_load,
    free_cores,
    is_oversubscribed,
    ranks_on_host,
    torch_threads,
)
from lightning_memprof.judge.fact import Fact
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Severity
from lightning_memprof.judge.loading import loaders_of, one_by_one, slow_function
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import Remedy
from lightning_memprof.judge.rhythm import few_steps
from lightning_memprof.judge.rule import Detail, Rule
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_count, format_ns, percent, sentence


def validation_setting(_: Facts, fact: Fact) -> Detail:
    """Return the setting of the Trainer to change: of a validation in an epoch, or of one after each."""
    epochs = {row["epoch"] for row in fact.rank.pulse if row["epoch"] is not None}
    is_often = fact.count * fact.ledger.steps > len(epochs) + 0.5
    return Detail(fields={"setting": "val_check_interval=1.0" if is_often else "check_val_every_n_epoch=5"})


# Other programs keep their cores.
BY_OTHERS: Final = (0.0, 1 / 3)


def core_users(facts: Facts, fact: Fact) -> Detail | None:
    """Return who uses the cores of the machine, and what to do: fewer threads first, where they have no cores.

    Of a wait that other programs cause, fewer threads recover a third at most: these programs keep their cores. It is a
    note where it is not severe, and from there on the verdict where no other remedy recovers more.
    """
    rank, load, is_severe = fact.rank, core_load(facts, fact.rank), fact.share >= POLICY.severe
    if is_oversubscribed(facts, rank):
        return None
    slow = slow_function(rank)
    owner, remedies, by_others = _core_users(facts, rank, load, slow) if load is not None else ("", (), False)
    used = (
        f"In recorded steps the training used {load.own:.1f} of {load.all_cores} cores, other processes "
        f"{load.others:.1f}."
        if load is not None
        else ""
    )
    return Detail(
        says=f"{owner}: training waits {{share}} for a core{{rank}}." if owner else "",
        fields={"function": slow.function if slow is not None else ""},
        measured=f"The thread is ready to run but has no core for {format_ns(fact.ns)} of {fact.ledger.length_text}",
        why=used,
        remedies=remedies,
        saves=BY_OTHERS if by_others and is_severe else None,
        is_note=by_others and not is_severe,
        at_least=Severity.WARNING if is_severe else Severity.NONE,
        evidence=facts.recorded(rank, "system"),
        numbers={
            "cores": rank.facts.cpu_count,
            "cores_of_others": load and load.others,
        },
    )


def _core_users(facts: Facts, rank: Rank, load: CoreLoad, slow: Call | None) -> tuple[str, tuple[Remedy, ...], bool]:
    """Return the start of a title, remedies, and whether the training itself cannot change the wait."""
    cores, quota = rank.facts.cpu_count or 1, rank.facts.environment.get("cpu_quota")
    if load.own + load.others < POLICY.full * load.all_cores:
        if quota is not None and quota < load.all_cores and load.own >= quota / 2:
            limit = do.RAISE_LIMIT.filled(limit="cpu.max, docker run --cpus, sbatch --cpus-per-task")
            return f"The CPU limit is {quota:g} of {load.all_cores} cores", (limit,), False
        if cores == load.all_cores:
            # They had the cores in other steps than the recorded ones.
            return "", (), True
    ranks = len(ranks_on_host(facts, rank))
    each = max(cores // ranks, 1)
    count = max((loader.num_workers or 0 for loader in loaders_of(rank)), default=0)
    # The training thread itself needs one core.
    is_loading = load.workers >= load.process - 1
    # Many workers that compute share the cores among themselves, whatever else runs.
    are_many = is_loading and count >= POLICY.many_per_core * each
    if load.others >= max(load.workers * ranks, POLICY.verdict * load.all_cores) and not are_many:
        left = int(free_cores(facts, rank) or 1)
        fewer = (do.THREADS.filled(threads=left),) if (torch_threads(rank) or 0) > left else ()
        return "Other processes take the cores", fewer, True
    fewer_workers = do.FEWER_WORKERS.filled(workers=max(each - 1, 1))
    if is_loading and slow is not None:
        cheaper = do.FASTER_FETCH.filled(owner=f"{slow.function} ({percent(slow.share)} of the fetches)")
        choices = (fewer_workers, cheaper) if are_many else (cheaper,)
        return "Workers in {function} take the cores", choices, False
    if is_loading and count >= each > 1:
        return f"{count} DataLoader workers take the cores", (fewer_workers,), False
    owner, remedies = _own_threads(rank)
    return owner, (*remedies, do.THREADS.filled(threads=max(each - count, 1))), False


def _own_threads(rank: Rank) -> tuple[str, tuple[Remedy, ...]]:
    """Return the start of a title for cores that the training itself uses, with its busiest thread if that is known."""
    thread = busiest_thread(rank)
    if thread is None or (thread.cpu_ns or 0) < POLICY.verdict * (thread.elapsed_ns or 1):
        return "The training's own processes share the cores", ()
    name = (thread.thread or "").partition(" (")[0]
    return f"Threads of {name} take the cores", (do.THREAD_LESS.filled(owner=thread.thread),)


def stalls(facts: Facts, fact: Fact) -> Detail | None:
    """Return the excess of the few steps that take a multiple of the others, where their times are apart from these.

    Another program on the machine makes such steps too, but none with a period.
    """
    rank, ledger = fact.rank, fact.ledger
    if not ledger.stalls:
        return None
    longest, typical = ledger.stalls[0], typical_steps(rank)
    slow = {stall.step for stall in ledger.stalls}
    durations = [(step, spent) for step, spent, _ in typical.steps] if typical else []
    few = few_steps([(step, spent if step in slow else 0) for step, spent in durations], stands_out=0)
    usual = sorted(spent for step, spent in durations if step not in slow)
    if few is None or not usual or longest.excess_ns < POLICY.stall_ns:
        return None
    if min(stall.duration_ns for stall in ledger.stalls) < POLICY.apart * usual[round(0.9 * (len(usual) - 1))]:
        return None
    is_regular = few.period is not None and len(few.steps) >= POLICY.rhythm
    # Batches do not change the work of the optimizer.
    rarer = do.RARER_WORK.filled(part=longest.owner.label, step=few.steps[0])
    return Detail(
        fields={
            "few": f"{few.subject} {few.verb}",
            "factor": f"{few.mean_ns / max(ledger.median_ns, 1):.1f}",
            "part": longest.owner.label,
        },
        measured=(
            f"The mean of these steps is {format_ns(few.mean_ns)}, the median of all {few.seen} steps "
            f"{format_ns(ledger.median_ns)}; the excess without waits for a core is {fact.share_text}"
        ),
        why="" if is_regular else "They have no period: a busy machine may be the cause.",
        remedies=(rarer if longest.owner == Part.OPTIMIZER else do.COMPARE_STEPS, do.CATCH_STEP),
        is_note=not is_regular,
        evidence=(facts.pulse(rank, few.steps), *facts.recorded(rank, "hooks", few.steps)),
        numbers={
            "steps": list(few.steps),
            "period": few.period,
            "median_ns": round(ledger.median_ns),
            "cause": longest.owner,
        },
    )


OLDEST: Final = 2


def pauses_detail(facts: Facts, fact: Fact) -> Detail:
    """Return the generations, what they freed, and whether the program collects itself."""
    rank, found = fact.rank, pauses(fact.rank)
    how, fetch_at_once = one_by_one(rank, fact.ledger) if _in_fetch(rank) else ("", ())
    full, full_ns = found.generations.get(OLDEST, (0, 0)) if found else (0, 0)
    recorded = sum(len(window.steps) for window in rank.windows)
    words = (
        f"{format_count(full, 'full collection')} in recorded steps took {format_ns(full_ns)}" if full else "",
        f"mostly in fetches, {how}" if how else "",
    )
    # Python itself starts a full collection in one step of many.
    explicit = (do.FIND_COLLECT,) if recorded and full >= POLICY.each * recorded else ()
    return Detail(
        why=sentence(*words),
        remedies=(*fetch_at_once, *explicit),
        evidence=facts.recorded(rank, "garbage"),
    )


def _in_fetch(rank: Rank) -> bool:
    """Return whether most of the time of pauses is in fetches, whose objects cause them."""
    spent = Counter[str]()
    for row in rank.actions:
        if row.action == GC_PAUSE and not row.in_window:
            spent[row.phase or ""] += row.total_ns or 0
    return spent["data_wait"] > spent.total() / 2


def work_of_logging(facts: Facts, fact: Fact) -> Detail:
    """Return what logging does: calls of self.log cost time in each step, a logger in those that it writes."""
    found = work_of_action(facts, fact)
    writes = (do.LOG_LESS_OFTEN, do.WRITE_LESS.filled(owner=fact.owner or "the logger"))
    usual = (do.SELF_LOG_LESS_OFTEN,) if fact.lines[0].part == Part.SELF_LOG else writes
    return replace(found, remedies=(*found.remedies, *usual))


ROWS: Final = (
    Rule(
        id="callback_bound",
        about="A callback's hooks run between batches, on the thread that launches work.",
        trade_off="The callback runs less often.",
        of=(Part.CALLBACK,),
        says="The callback {owner} takes {share}{rank}.",
        unnamed="Callbacks take {share}{rank}; which ones was not recorded.",
        remedies=(do.LESS_OFTEN,),
        saves=(0.5, 1.0),
        each=True,
        detail=work_of_action,
    ),
    Rule(
        id="hook_bound",
        about="A hook of the LightningModule or data module; lr_scheduler_step is the time of the schedules.",
        trade_off="The hook runs less often.",
        of=(Part.MODULE_HOOK,),
        says="The hook {owner} of the module takes {share}{rank}.",
        unnamed="Hooks of the module take {share}{rank}; which ones was not recorded.",
        remedies=(do.LESS_OFTEN,),
        saves=(0.5, 1.0),
        each=True,
        detail=work_of_action,
    ),
    Rule(
        id="transfer_bound",
        about="batch_to_device, or a hook around it, runs on the training thread between loading and forward.",
        trade_off="None, or the time in worker processes.",
        of=(Part.TRANSFER,),
        says="{moving} takes {share}{rank}, in {owner}.",
        unnamed="{moving} takes {share}{rank}.",
        remedies=(do.IN_WORKERS,),
        saves=(0.3, 1.0),
        each=True,
        detail=work_of_transfer,
    ),
    Rule(
        id="recompilation",
        about="torch.compile compiles again and again; at the limit of recompilations torch runs the code uncompiled.",
        trade_off="Code for all shapes is slightly slower than code for one shape.",
        of=(Part.COMPILE,),
        says="torch.compile recompiles: compiling takes {share}{rank}.",
        remedies=(do.DYNAMIC_SHAPES, do.FEW_SHAPES),
        saves=(0.7, 1.0),
        repeats=True,
    ),
    Rule(
        id="registered_hook_bound",
        about="A hook on a module or parameter runs in each of its forwards or backwards. Needs an operator trace.",
        trade_off="The hook's results.",
        of=(Part.FORWARD_HOOK, Part.BACKWARD_HOOK),
        says="The {kind} {owner} takes {share}{rank}.",
        unnamed="Hooks that the program registered take {share}{rank}; which ones was not recorded.",
        remedies=(do.REMOVE_HOOK,),
        saves=(0.8, 1.0),
        each=True,
        detail=work_of_action,
    ),
    Rule(
        id="metric_bound",
        about="update and compute of torchmetrics; curves sort all predictions since the last reset.",
        trade_off="Metric values are not available in every step.",
        of=(Part.METRIC,),
        says="Metrics take {share}{rank}, mostly {owner}.",
        unnamed="Metrics take {share}{rank}.",
        remedies=(do.METRIC_PER_EPOCH,),
        saves=(0.5, 1.0),
        detail=work_of_action,
    ),
    Rule(
        id="validation_bound",
        about="Validation inside fit takes much of the time; training stops meanwhile.",
        trade_off="Validation metrics are updated less often.",
        of=(Part.VALIDATION,),
        says="Validation takes {share}{rank}.",
        remedies=(do.VALIDATE_LESS_OFTEN,),
        saves=(0.5, 0.9),
        # Every training validates.
        note=POLICY.verdict,
        detail=validation_setting,
    ),
    Rule(
        id="checkpoint_bound",
        about="Training waits until a checkpoint is written, on all ranks for the one that writes.",
        trade_off="A failed run loses the steps since its last checkpoint.",
        of=(Part.CHECKPOINT,),
        says="Saving checkpoints takes {share}{rank}.",
        remedies=(do.SAVE_LESS_OFTEN, do.SAVE_LESS, do.SAVE_ASYNC),
        saves=(0.5, 1.0),
        detail=contents_of_checkpoint,
    ),
    Rule(
        id="logging_bound",
        about="log_metrics, save or self.log take much of the step: a logger may upload, draw or rewrite its file.",
        trade_off="Steps that are not logged have no values.",
        of=(Part.LOGGING, Part.SELF_LOG),
        says="Logging takes {share}{rank}, mostly {owner}.",
        unnamed="Logging takes {share}{rank}.",
        saves=(0.5, 1.0),
        detail=work_of_logging,
    ),
    Rule(
        id="between_steps",
        about="Code of the program around the batches, or Lightning's loop, which takes 1 to 4 ms per step.",
        trade_off="None.",
        of=(Part.UNTRACKED,),
        says="{share} is outside the tracked phases{rank}.",
        remedies=(do.CODE_AROUND_BATCHES, do.SELF_LOG_LESS_OFTEN),
        saves=(0.0, 1.0),
        # Lightning's loop and a logger stay below this.
        note=0.15,
        least=POLICY.trainer_ns,
    ),
    Rule(
        id="gc_pauses",
        about="A pause of Python's garbage collector stops the whole process, and all other ranks wait for it.",
        trade_off="Reference cycles are freed later.",
        of=(Part.GC_PAUSES,),
        says="GC pauses take {share}{rank}.",
        remedies=(do.FREEZE_OBJECTS,),
        # Collections of young generations remain.
        saves=(0.7, 1.0),
        repeats=True,
        detail=pauses_detail,
    ),
    Rule(
        id="core_wait",
        about="The training thread is ready to run, but another process, worker or rank has the core. Linux only.",
        when=(
            "Not with thread_oversubscription. If other programs cause the wait, fewer threads recover at most a third "
            f"of it; below {percent(POLICY.severe)} of the step the finding is `info`, else at least `warning`."
        ),
        trade_off="None; with fewer threads, less parallelism when the cores are free again.",
        of=(Part.CORE_WAIT,),
        says="The training thread waits {share} for a core{rank}.",
        remedies=(do.FREE_CORES,),
        saves=(0.5, 1.0),
        # Other programs of a machine that does nothing else take some.
        note=POLICY.verdict,
        detail=core_users,
    ),
    Rule(
        id="slow_steps",
        about="A few steps take a multiple of the others, not in callbacks, validation, checkpoints or data.",
        when=(
            f"At most a third of the steps take {POLICY.apart:g} times the p90 of the others, the longest "
            f"{POLICY.stall_ns / 1e6:g} ms more; `info` unless {POLICY.rhythm} follow a pattern: a busy machine delays "
            "single steps of any run."
        ),
        trade_off="None.",
        of=(Part.STALL,),
        detail=stalls,
        says="{few} {factor} times as long as the median{rank}, mostly in {part}.",
        # Some of these batches are what they have to be.
        saves=(0.0, 0.5),
        # Some steps of every run take longer.
        note=POLICY.verdict,
    ),
)
