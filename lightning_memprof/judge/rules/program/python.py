"""The program outside of its modules: Python in the training step and in other threads, callbacks, hooks, transfers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from lightning_memprof.account.ledger.model import TimeLedger, TimeLine, grouped, total
from lightning_memprof.account.steps.events import FORWARD
from lightning_memprof.account.steps.lines import Spot, lines, spots
from lightning_memprof.artifacts.series import MODULE_CALL, ProcessRow
from lightning_memprof.judge.facts import Facts
from lightning_memprof.judge.finding import Finding, Recovery, titled
from lightning_memprof.judge.measures import MOST, OF_VALUES, READS, VIEWS
from lightning_memprof.judge.policy import POLICY
from lightning_memprof.judge.remedies import (
    BUILD_ONCE,
    COPY_LESS,
    GRADIENTS_AT_ONCE,
    LEAVE_OUT,
    LOG_AT_ONCE,
    NO_BUFFERS,
    NO_SYNC,
    NO_TEXT,
    ON_GPU,
    PIN_MEMORY,
    READ_ONE_VALUE,
    RECORD_FUNCTIONS,
    REFRESH_LESS_OFTEN,
    RETURN_TENSORS,
    REUSE_OUTPUTS,
    SCHEDULE_ONCE,
    THREAD_AS_PROCESS,
    THREAD_LESS,
    WHOLE_BATCH,
    WHOLE_TENSORS,
    WORK_LESS,
    Remedy,
)
from lightning_memprof.judge.rule import Detail, Fact
from lightning_memprof.judge.rules.program.lines import has, of_action, of_spot
from lightning_memprof.read.run.model import Rank
from lightning_memprof.units import format_bytes, format_ns, percent

# In a forward of fewer operators, a recording explains the remaining time only by a line of the program.
MIN_CALLED: Final = 10
SAVED_PYTHON: Final = (0.5, 0.9)
SAVED_READS: Final = (0.8, 1.0)
# A loop over values reads at least this many.
MIN_READS: Final = 256
# Python collects young objects after this many new ones; a value that is read makes one or two.
COLLECTED_AFTER: Final = 700
# What torch calls to write a tensor as text, beside the reads of its values.
FORMATS: Final = frozenset({"aten::masked_select", "aten::resolve_conj"})


class _Python(msgspec.Struct, frozen=True, kw_only=True):
    """Time outside operators in the forward of a module, or in the training step (an empty path).

    ``reads`` is the number of values that it reads one by one; then ``ns`` has the operators that read them, and the GC
    pauses of the objects that these make. ``formats``: torch reads them to write tensors as text. ``is_most``:
    operators have less of the forward.
    """

    module: str
    ns: float
    reads: float
    formats: bool = False
    is_most: bool = False

    @property
    def says(self) -> str:
        """The title, with the fields ``module``, ``reads``, ``share`` and ``rank``."""
        if self.formats:
            return "Tensors as text: {module} formats {reads} tensor values: {share}{rank}."
        if self.reads:
            return "Scalar loop: {module} reads {reads} tensor values one by one: {share}{rank}."
        return "Python code in {module} takes {share}{rank}."


def python_time(facts: Facts) -> Finding | None:
    """Find a forward, or the training step around it, that computes in Python and not in operators.

    Recovers 50% to 90% of the time outside operators. Where values are read one by one, the time includes the reads and
    the GC pauses of their objects, one collection for 700 of them: recovers 80% to 100%.
    """
    if (worst := facts.heaviest(lambda ledger: _python(ledger).ns)) is None:
        return None
    rank, ledger = worst
    python = _python(ledger)
    called = sum(line.called for line in ledger.of("forward"))
    at = _line(rank, python) if python.is_most else None
    if python.ns < (POLICY.note if python.reads else POLICY.verdict) * ledger.step_ns:
        return None
    if not called or (called < MIN_CALLED and (at is None or at.place is None)):
        return None
    saved = SAVED_READS if python.reads else SAVED_PYTHON
    worth = Recovery(unit="ns", min=python.ns * saved[0], max=python.ns * saved[1], whole=ledger.step_ns)
    return Finding(
        rule="python_time",
        owner=at.function if at else "",
        title=titled(
            python.says,
            module=f"the forward of {python.module}" if python.module else "training_step",
            reads=f"{python.reads:,.0f}",
            share=ledger.share_text(python.ns),
            rank=facts.on_rank(rank),
        ),
        why=(
            f"{format_ns(python.ns)} of {ledger.length_text} are "
            f"{'such reads, each an operator and an object' if python.reads else 'Python outside operators'}"
            f"{has(at, 'this time') if at else ''}."
        ),
        remedies=(
            *((NO_TEXT,) if python.formats else ()),
            *((WHOLE_TENSORS,) if python.reads else ()),
            *((of_spot(at) or (WORK_LESS.filled(owner=at.function),)) if at else ()),
            LOG_AT_ONCE,
            *(() if python.reads else (WHOLE_TENSORS,)),
            RECORD_FUNCTIONS,
        ),
        evidence=facts.pulse_and_trace(rank),
        numbers={
            "rank": rank.rank,
            "module": python.module or None,
            "python_ns": python.ns,
            "reads": python.reads,
            "duration_ns": ledger.step_ns,
        },
        **worth.parts,
    )


def _line(rank: Rank, python: _Python) -> Spot | None:
    """Return the program's longest line, in the training step itself or in the forward of modules."""
    rows = lines(rank, FORWARD["fit"])
    return next(iter(spots([row for row in rows if (MODULE_CALL in row.functions) == bool(python.module)])), None)


def _python(ledger: TimeLedger) -> _Python:
    """Return the module, or the training step, with the most time outside operators."""
    found: dict[str, list[TimeLine]] = defaultdict(list)
    for line in grouped(ledger.of("forward")):
        found[line.module or ""].append(line)
    return max((_in_python(ledger, *of) for of in found.items()), key=lambda found: found.ns, default=NO_PYTHON)


NO_PYTHON: Final = _Python(module="", ns=0.0, reads=0.0)


def _in_python(ledger: TimeLedger, module: str, of_module: Sequence[TimeLine]) -> _Python:
    of_values = [line for line in of_module if line.operator in OF_VALUES]
    reads = sum(line.called for line in of_values if line.operator in READS)
    if reads < MIN_READS:
        # Collectives of the strategy around the forward of the model run outside operators, too.
        waits = 0.0 if module else ledger.communicates("collective")
        ns = max(total(line for line in of_values if not line.operator) - waits, 0.0)
        return _Python(module=module, ns=ns, reads=0.0, is_most=2 * ns >= total(of_module))
    pauses = ledger.of("gc_pauses")
    collections = sum(line.count for line in pauses)
    collected = min(reads / (COLLECTED_AFTER * collections), 1.0) if collections else 0.0
    ns = total(of_values) + total(pauses) * collected
    called = {line.operator for line in of_module if line.called}
    return _Python(module=module, ns=ns, reads=reads, formats=called >= FORMATS)


TRANSFER: Final = ".batch_to_device"
BEFORE_TRANSFER: Final = ".on_before_batch_transfer"
# By the hook, and by the class of a callback.
HOOKS: Final = {
    **dict.fromkeys(
        ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"), GRADIENTS_AT_ONCE
    ),
    **dict.fromkeys(("train_dataloader", "val_dataloader"), BUILD_ONCE),
    "lr_scheduler_step": SCHEDULE_ONCE,
}
PROGRESS_BARS: Final = ("RichProgressBar", "TQDMProgressBar")
# Parts whose modules and operators are those of an action.
LOOKS_INSIDE: Final = frozenset({"callback", "module_hook", "transfer"})
# copy.deepcopy calls set_ for each tensor.
COPIES: Final = frozenset({"aten::copy_", "aten::clone", "aten::set_"})
# Fewer calls of an operator in a hook are not a loop over samples, parameters or values.
OFTEN: Final = 32
# Fewer copies may be of some tensors, not of the model.
LEAST_COPIED: Final = 8
# Fewer collectives in a step are a few values.
MANY_SYNCED: Final = 4


def work_of_action(facts: Facts, fact: Fact) -> Detail:
    """Return what an action does, and the remedies that fit this.

    Recorded operators show a loop over an operator, the forward of a module, and collectives of ``self.log``.
    """
    rank, owner = fact.rank, fact.owner
    place, _, hook = owner.rpartition(".")
    recorded, calls, part = facts.host_ledger(rank), max(fact.count, 1.0), fact.lines[0].part
    lines = [line for line in recorded.lines if line.name == owner] if recorded and owner else []
    synced = sum(line.count for line in lines if line.part == "rank_wait")
    if part == "self_log" and synced >= MANY_SYNCED:
        return Detail(why=f"It has {synced:,.0f} collectives per step.", remedies=(NO_SYNC,))
    known = HOOKS.get(hook) or (REFRESH_LESS_OFTEN if place in PROGRESS_BARS else None)
    special = (known.filled(owner=owner, object=place),) if known is not None else ()
    lines = [line for line in lines if line.part == part in LOOKS_INSIDE]
    reads = max((line.called for line in lines if line.operator in READS), default=0.0) / calls
    if reads >= OFTEN and not rank.facts.is_cpu:
        remedies = (READ_ONE_VALUE.filled(owner=owner), *special)
        return Detail(why=f"It reads {reads:,.0f} values from the GPU, one by one.", remedies=remedies)
    modules = Counter[str]()
    for line in lines:
        modules[(line.module or "").partition(".")[0]] += round(line.ns)
    module, ns = modules.most_common(1)[0] if modules else ("", 0)
    if module and ns >= MOST * max(total(lines), fact.ns) and part != "transfer":
        remedies = (REUSE_OUTPUTS.filled(owner=owner, module=module), *special)
        return Detail(why=f"It runs {module}.", remedies=remedies)
    spot = of_action(rank, owner)
    fit = of_spot(spot) if spot is not None and known is not BUILD_ONCE else ()
    does, remedies = _loop_of(rank, lines, calls, owner, in_transfer=part == "transfer")
    mostly = has(spot, "it", owner).lstrip("; ") if spot is not None and spot.place else ""
    words = "; ".join(filter(None, (does, mostly)))
    return Detail(why=f"{words[:1].upper()}{words[1:]}." if words else "", remedies=_once(*remedies, *fit, *special))


def _loop_of(
    rank: Rank, lines: Sequence[TimeLine], calls: float, owner: str, *, in_transfer: bool
) -> tuple[str, tuple[Remedy, ...]]:
    """Return the operator that an action calls most, or what it copies, and the remedies."""
    loops = [line for line in lines if line.operator and line.operator not in VIEWS and line.called >= OFTEN * calls]
    loop = max(loops, key=lambda line: line.ns, default=None)
    often = f"{loop.operator} {loop.called / calls:,.0f} times" if loop else ""
    if in_transfer:
        # Other hooks need not run for each batch.
        return f"it calls {often}" if loop else "", (WHOLE_BATCH.filled(owner=owner, often=often),) if loop else ()
    makes_copies = loop is not None and loop.operator in COPIES
    copied = _copied(rank, lines, calls) or ("tensors" if makes_copies else "")
    does = " and ".join(filter(None, (f"calls {often}" if loop else "", f"copies {copied}" if copied else "")))
    return f"it {does}" if does else "", (COPY_LESS.filled(owner=owner),) if copied else ()


def _once(*remedies: Remedy) -> tuple[Remedy, ...]:
    return tuple(dict.fromkeys(remedies))


def work_of_transfer(facts: Facts, fact: Fact) -> Detail:
    """Return what the transfer of a batch does: the strategy's own visits each object, a hook is an action."""
    is_cpu = fact.rank.facts.is_cpu
    fields = {"moving": "Converting batches" if is_cpu else "Moving batches to the device"}
    if fact.owner.endswith(TRANSFER):
        remedies = (RETURN_TENSORS,) if is_cpu else (PIN_MEMORY, RETURN_TENSORS)
        return Detail(fields=fields, why="It visits each object of a batch.", remedies=remedies)
    work = work_of_action(facts, fact)
    moved = (ON_GPU.filled(owner=fact.owner),) if fact.owner.endswith(BEFORE_TRANSFER) and not is_cpu else ()
    return replace(work, fields=fields, remedies=(*work.remedies, *moved))


def work_of_checkpoint(facts: Facts, fact: Fact) -> Detail:
    """Return what a checkpoint holds: more buffers than trained tensors, or more than the tensors of the model."""
    ledger = facts.byte_ledgers.get(fact.rank.rank)
    if ledger is None:
        return Detail()
    held, trained = ledger.bytes("buffer"), ledger.bytes("parameter") + ledger.bytes("optimizer_state")
    if held > trained:
        sizes = f"{format_bytes(held)} of buffers, {format_bytes(trained)} of parameters and optimizer state"
        return Detail(why=f"The model has {sizes}.", remedies=(NO_BUFFERS,))
    each_ns = fact.ns / fact.count if fact.count else 0.0
    if each_ns <= POLICY.save_ns + (held + trained) * POLICY.save_byte_ns:
        return Detail()
    return Detail(
        why=f"The tensors of the model, {format_bytes(held + trained)}, do not take as long to write.",
        remedies=(LEAVE_OUT,),
    )


def _copied(rank: Rank, lines: Sequence[TimeLine], calls: float) -> str:
    """Return ``the model`` if lines copy as many tensors as the optimizers update, as ``copy.deepcopy`` does."""
    optimizers = rank.training.optimizers if rank.training else []
    least = max(sum(optimizer.parameters or 0 for optimizer in optimizers), LEAST_COPIED)
    copies = Counter[str]()
    for line in lines:
        copies[line.operator or ""] += round(line.called / calls)
    return "the model" if max(copies["aten::clone"], copies["aten::set_"]) >= least else ""


# In a shorter time a thread may work for once.
MIN_ELAPSED_NS: Final = 300_000_000
# The training thread may sleep for another reason: a disk, a lock of a library.
OF_SLEEP: Final = (0.25, 1.0)
# Parts in which it has no reason to sleep.
AWAKE: Final = (
    "forward", "backward", "optimizer", "callback", "module_hook", "forward_hook", "backward_hook", "self_log",
    "metric", "logging", "transfer", "data_wait", "untracked",
)  # fmt: skip


def busy_thread(facts: Facts) -> list[Finding]:
    """Find another thread of Python that computes while the training thread sleeps: they take turns at Python's lock.

    Recovers a quarter to all of the thread's processor time, at most the sleep of the training thread without its waits
    for workers and for other ranks.
    """
    found = [finding for rank in facts.run.ranks if (finding := _busiest(facts, rank)) is not None]
    return sorted(found, key=lambda finding: -finding.weight)[:1]


def _busiest(facts: Facts, rank: Rank) -> Finding | None:
    ledger = facts.ledgers.get(rank.rank)
    rows = [row for row in rank.read(ProcessRow).rows if row.kind == "thread" and row.elapsed_ns]
    if ledger is None or not rows:
        return None
    elapsed = rows[-1].elapsed_ns or 1
    # With an accelerator the training thread sleeps for that, too.
    if elapsed < MIN_ELAPSED_NS or not rank.facts.is_cpu:
        return None
    row = max((row for row in rows if row.elapsed_ns == elapsed), key=lambda row: row.cpu_ns or 0)
    busy, asleep = (row.cpu_ns or 0) / elapsed, (row.asleep_ns or 0) / elapsed
    workers = any(loader.num_workers for loader in rank.training.dataloaders) if rank.training else False
    asleep -= ledger.share("rank_wait", "data_wait") if workers else ledger.share("rank_wait")
    ns = max(min(min(busy, asleep) * ledger.step_ns, ledger.ns(*AWAKE)), 0.0)
    worth = Recovery(unit="ns", min=ns * OF_SLEEP[0], max=ns * OF_SLEEP[1], whole=ledger.step_ns)
    if busy < POLICY.verdict:
        return None
    return Finding(
        rule="busy_thread",
        owner=row.thread or "",
        title=titled(
            "Busy thread: {owner} uses {busy} of a core; the training thread waits {asleep} of each step{rank}.",
            owner=(row.thread or "").partition(" (")[0],
            busy=percent(busy),
            asleep=percent(asleep),
            rank=facts.on_rank(rank),
        ),
        why=(
            f"{row.thread} ran for {format_ns(row.cpu_ns or 0)} of {format_ns(elapsed)}. One of Python's "
            "threads runs at a time (GIL); waits for workers and ranks are not counted."
        ),
        remedies=(THREAD_LESS.filled(owner=row.thread), THREAD_AS_PROCESS),
        evidence=(facts.pulse(rank),),
        numbers={
            "rank": rank.rank,
            "thread": row.thread,
            "cores": busy,
            "asleep_share": asleep,
            "duration_ns": ledger.step_ns,
        },
        **worth.parts,
    )
